"""The cascade: Algorithm 1 against its trace and a plain recursion, lenient reviews, limits."""
import re
from functools import partial
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from conftest import VOCAB, plain, relative, tiny
from helpers import brute_force, lines_to_use

import cascade
import maxgram
import verify
from maxgram import MaxGram

BIGRAM = [3, 5, 0, 1, 2, 7, 0, 9, 4, 6, 8, 1]
TEXT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 1]

@pytest.fixture(scope="module")
def models():
    """A target, and a larger and a smaller drafter, of one layer each."""
    target = tiny("llama", num_hidden_layers=1)
    return target, relative(target, 0.03, 1), relative(target, 0.06, 2)

@torch.no_grad()
def forward(model, ids):
    return model(torch.tensor([ids]), use_cache=False).logits[0]

def cascade_of(models, K=None, lenience=1.0, gram=None, capacity=None):
    """A cascade with caches of its own, at the beginning of a sequence."""
    stages = [verify.Target(model, capacity) for model in models]
    drafter = cascade.Cascade(stages, K, lenience, gram, None if models else VOCAB)
    drafter.reset(verify.Rule().probs)
    return drafter

def counted(drafter):
    """From now on: how often each stage of a cascade runs -> list."""
    runs = [0] * len(drafter.draft_list)
    for i, stage in enumerate(drafter.draft_list):
        name = "propose" if isinstance(stage, MaxGram) else "align"

        def call(*args, i=i, own=getattr(stage, name)):
            runs[i] += 1
            return own(*args)
        setattr(stage, name, call)
    return runs

def shown(ids, length=None):
    """A View that shows these ids."""
    return verify.View(torch.tensor(ids), ids, length or len(ids), {}, {})

def drafts(drafter, most=64):
    """The greedy proposal -> (tokens, their entries in gen.probs)."""
    tokens = drafter.draft(most)
    return tokens[1:], drafter.gen.probs[drafter.gen.committed + 1:]

# ---------------------------------------------------------------- Algorithm 1 as printed below it
def alphabet(log, after_f):
    """A model of 26 letters that continues abc...; it writes another letter after f."""
    def align(ids, logits_to_keep):
        log.append("".join(chr(i + ord("a")) for i in ids))
        following = [ord(after_f) - ord("a") if i == 5 else i + 1 for i in ids[-logits_to_keep:]]
        return torch.eye(26)[following], None
    return SimpleNamespace(vocab=26, capacity=99, reset=lambda: None, align=align)

def test_the_trace_of_algorithm_1():
    """The column gen of cascade_step's docstring, after each review."""
    log = []
    drafter = cascade.Cascade([alphabet(log, "g"), alphabet(log, "x")], [[2, 2], [0, 3]])
    drafter.reset(verify.Rule().probs)
    drafter.begin(shown([]), 0)
    tokens = drafter.draft(64)
    column = r"^ +(?:step\(small|base reviews).*?  ([a-x]+)(?:  |$)"
    after = re.findall(column, cascade.cascade_step.__doc__, re.M)
    assert after == ["ab", "abc", "abcd", "abcde", "abcdef", "abcdefx"]
    # What each reviewer read: gen without the token that it added; base accepts all that it reads.
    assert log == [gen[:-1] for gen in after]
    assert [chr(i + ord("a")) for i in tokens] == list(after[-1])

# ---------------------------------------------------------------- Algorithm 1 as the paper means it
def algorithm_1(stages, K, prefix, lenience, committed, runs, level=0):
    """CascadeSpeculativeDraftingStep without M_t's review -> [(token, its last reviewer, logits)].

    stages: models, "gram" last.  committed: what Max-Gram may search.  On lists and plain forwards.
    """
    gen = []
    for i, stage in enumerate(stages):
        added = 0
        while added < K[0][i]:
            text = prefix + [t for t, _, _ in gen]
            runs[level + i] += 1
            if stage == "gram":
                chain, _ = brute_force(committed, text[len(committed):], K[0][i], (), BIGRAM)
                gen += [(t, "gram", None) for t in chain]
                break
            inner = [row[i + 1:] for row in K[i + 1:]]
            below = level + i + 1
            draft = algorithm_1(stages[i + 1:], inner, text, lenience, committed, runs, below)
            logits = forward(stage, text + [t for t, _, _ in draft])[len(text) - 1:]
            new = []
            for row, d in zip(logits, draft):
                kept = d[0] == row.argmax().item()
                if not kept and lenience > 1 and d[1] != "gram":
                    kept = d[2].softmax(-1)[d[0]] <= lenience * row.softmax(-1)[d[0]]
                new.append((d[0] if kept else row.argmax().item(), stage, row))
                if not kept:
                    break
            else:
                new.append((logits[-1].argmax().item(), stage, logits[-1]))
            gen, added = gen + new, added + len(new)
    return gen

KS = [(1, True, [[3, 4], [0, 5]]), (2, False, [[2, 3], [0, 2]]),
      (2, True, [[3, 2, 4], [0, 1, 6], [0, 0, 5]]), (0, True, [[6]])]

@pytest.mark.parametrize("neural, gram, K", KS)
@pytest.mark.parametrize("lenience", [1.0, 3.0])
def test_chain_and_runs_against_a_plain_recursion(models, neural, gram, K, lenience):
    """Tokens, who reviewed them, their logits, the runs, over rounds of different lengths."""
    mine = list(models[1:1 + neural])
    drafter = cascade_of(mine, K, lenience, MaxGram(BIGRAM) if gram else None)
    stages = mine + ["gram"] * gram
    found_runs = counted(drafter)
    text = torch.randint(VOCAB, (30,), generator=torch.Generator().manual_seed(neural)).tolist()
    text[12:18] = text[3:9]                                        # something to match
    at, seen, runs = 5, 0, [0] * len(stages)
    with torch.inference_mode():
        while at < 20:
            drafter.begin(shown(text[seen:at], at), text[at])
            expected = algorithm_1(stages, K, text[:at + 1], lenience, text[:at], runs)
            tokens, probs = drafts(drafter)
            assert tokens == [t for t, _, _ in expected]
            for prob, (_, who, logits) in zip(probs, expected):
                assert torch.is_tensor(prob) == (who != "gram")
                if who != "gram":
                    torch.testing.assert_close(prob, logits, atol=1e-9, rtol=0)
            assert found_runs == runs
            seen, at = at, at + 1 + at % 4

# ---------------------------------------------------------------- what builders see
def test_trees_see_the_chains_distributions_and_nothing_off_it(models):
    """The models' by the rule; Max-Gram's confidence as it is, and all others share the rest."""
    drafter = cascade_of(models[1:], [[2, 2, 3], [0, 1, 4], [0, 0, 4]], 1.0, MaxGram(BIGRAM))
    rule = verify.Rule(2.0, top_k=3)
    drafter.reset(rule.probs)
    with torch.inference_mode():
        drafter.begin(shown(TEXT[:10]), 1)
        tokens, entries = drafts(drafter)
        found = []
        for i, x in enumerate([1, *tokens]):
            found.append(drafter.expand(torch.tensor([x]), [i - 1])[0])
        other = (tokens[0] + 1) % VOCAB
        off = drafter.expand(torch.tensor([other, tokens[1]]), [0, len(found)])
    assert {type(entry) for entry in entries} == {torch.Tensor, float}
    assert not found[-1].any() and not off.any()
    for probs, token, entry in zip(found, tokens, entries):
        if torch.is_tensor(entry):
            expected = rule.probs(entry[None])[0]
            assert probs.argmax() == token, "without lenience the chain is the most probable path"
        else:
            expected = torch.full((VOCAB,), (1 - entry) / (VOCAB - 1))
            expected[token] = entry
        torch.testing.assert_close(probs, expected)

# ---------------------------------------------------------------- limits
@pytest.mark.parametrize("neural, gram, K", KS)
def test_no_draft_is_longer_than_asked(models, neural, gram, K):
    """And what is asked for does not change the tokens; nothing runs for none."""
    drafter = cascade_of(models[1:1 + neural], K, 1.0, MaxGram(BIGRAM) if gram else None)
    root, runs = torch.tensor([4]), counted(drafter)[:neural]
    with torch.inference_mode():
        drafter.begin(shown(TEXT), 4)
        assert drafter.draft(0) == [4] and not any(runs)
        whole = drafter.draft(64)
        for most in range(1, len(whole) + 2):
            # Without a generator the two are the same.
            for build in (drafter.chain, drafter.drawn):
                tree = build(SimpleNamespace(remaining=most), root)
                n = len(tree.tokens)
                assert tree.tokens.tolist() == whole[:1 + most] and tree.p_draft is None
                assert tree.parents.tolist() == list(range(-1, n - 1))
                assert tree.expand_index.tolist() == [-1] * n, "it was drafted without expand"

def test_a_stage_stops_at_its_context_and_the_next_ones_go_on(models):
    """It reads `capacity` tokens, not one more; forwards that do not happen are not counted."""
    for capacity, ahead in product([8, 9, 10, 12, 30], [7, 8, 9]):
        gram = MaxGram([1] * VOCAB)
        drafter = cascade_of([models[1]], [[3, 4], [0, 4]], 1.0, gram, capacity)
        runs = counted(drafter)
        with torch.inference_mode():
            drafter.begin(shown(TEXT[:ahead - 1]), 7)              # `ahead` tokens with the root
            tokens, probs = drafts(drafter)
        reviewed = sum(map(torch.is_tensor, probs))
        # what it can read, and its own token; none where the text fills its context
        most = max(0, capacity + 1 - ahead)
        assert len(drafter.models[0].ids) <= capacity and min(3, most) <= reviewed <= most
        assert (runs[0] > 0) == (most > 0)
        assert len(tokens) == reviewed + 4, "Max-Gram adds its four"

# ---------------------------------------------------------------- sampled reviews
def pairs_of_all_kinds(vocab, seed):
    """Pairs of distributions: at random, with zeros, apart from each other, equal."""
    generator = torch.Generator().manual_seed(seed)
    p, q = torch.rand(2, 20, vocab, generator=generator, dtype=torch.float64) ** 3
    p[5:15] *= torch.rand(10, vocab, generator=generator) < 0.6
    q[10:] *= torch.rand(10, vocab, generator=generator) < 0.6
    p[:, 0] += 1e-3
    q[:, -1] += 1e-3
    p[0], q[0] = torch.eye(vocab)[0], torch.eye(vocab)[1]
    q[1] = p[1]
    return p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True)

def reviewed_by_the_papers_rule(p, q, l):
    """The distribution of what comes out of one review of x ~ q, case by case (section 3.1)."""
    out = [0.0] * len(p)
    positive = [max(0.0, a - b) for a, b in zip(p, q)]
    for x in range(len(p)):
        if q[x] > 0:
            accept = 1.0 if q[x] <= l * p[x] else l * p[x] / q[x]
            out[x] += q[x] * accept
            if accept < 1:
                for y in range(len(p)):
                    out[y] += q[x] * (1 - accept) * positive[y] / sum(positive)
    return out

@pytest.mark.parametrize("vocab, l", [(2, 1.0), (3, 1.3), (5, 3.0), (4, 1e6)])
def test_one_lenient_review_exactly(vocab, l):
    """q' is what the paper's rule gives, and what speculative sampling towards q' gives."""
    p, q = pairs_of_all_kinds(vocab, vocab)
    every_l = torch.full((len(p), 1), l, dtype=torch.float64)
    found = cascade.lenient_distribution(p, q, every_l)
    for one_p, one_q, one in zip(p.tolist(), q.tolist(), found.tolist()):
        assert reviewed_by_the_papers_rule(one_p, one_q, l) == pytest.approx(one, abs=1e-12)
        assert reviewed_by_the_papers_rule(one, one_q, 1.0) == pytest.approx(one, abs=1e-12)

def test_a_sampled_review_is_lenient_with_models_and_strict_with_max_gram(monkeypatch):
    """What the tokens follow: q' for a model's draft, p for Max-Gram's and for the next token."""
    calls = []
    monkeypatch.setattr(cascade, "accept_sampled", lambda *a: (calls.append(a), a[0].tokens)[1])
    softmax = partial(torch.softmax, dim=-1)
    p, q = pairs_of_all_kinds(4, 7)
    for one_p, one_q in zip(p, q):
        gen = cascade.Gen()
        gen.replace(0, [0, 1, 1], [None, one_q, 0.5])
        cascade.review_sampled(one_p.log().repeat(3, 1), gen, 1, softmax, 2.5, None)
        tree, p_new, _ = calls[-1]
        lenient = reviewed_by_the_papers_rule(one_p.tolist(), one_q.tolist(), 2.5)
        expected = torch.stack((torch.tensor(lenient, dtype=torch.float64), one_p, one_p))
        torch.testing.assert_close(p_new, expected, atol=2e-6, rtol=0)
        torch.testing.assert_close(tree.p_draft, torch.stack((one_q, torch.eye(4)[1])).float())
        # The "choice" after the root is 0, and the draft is 1: it is rejected.
        assert gen.tokens == [0, 0] and torch.equal(gen.probs[1], p_new[0])

# ---------------------------------------------------------------- the source, K, and mistakes
def test_each_model_encodes_the_source_and_max_gram_searches_it():
    """As with T5.  That the output is plain decoding's is asserted in test_lossless.py."""
    encoded = []
    stage = SimpleNamespace(vocab=VOCAB, capacity=0, reset=lambda: 0, encode=encoded.append)
    drafter = cascade.Cascade([stage], gram=MaxGram())
    source = [5, 6, 7, 8, 9, 10]
    drafter.reset(verify.Rule().probs)
    drafter.encode(source)
    drafter.begin(shown([0]), 6)
    assert encoded == [source] and drafter.draft(3) == [6, 7, 8, 9]

def test_k_by_default(models):
    """Table 2's k are all 1, and Max-Gram proposes ten tokens."""
    assert cascade_of(models[1:], gram=MaxGram()).K == [[1, 0, 10], [0, 1, 10], [0, 0, 10]]
    assert cascade_of(models[1:2]).K == [[1]] and cascade_of([], gram=MaxGram()).K == [[10]]

MISTAKES = [({"K": [[3, 1], [1, 1]]}, "upper triangular"), ({"K": [[3]]}, "matrix of 2 x 2"),
            ({"lenience": 0.5}, "at least 1"),
            ({"vocab": VOCAB + 1}, f"{VOCAB} tokens, not of {VOCAB + 1}"),
            ({"gram": MaxGram([0, VOCAB])}, f"beyond the vocabulary of {VOCAB}")]

@pytest.mark.parametrize("settings, words", MISTAKES)
def test_a_mistake_is_one_sentence(models, settings, words):
    with pytest.raises(ValueError, match=words):
        cascade.Cascade([verify.Target(models[1])], **{"gram": MaxGram(), **settings})

def test_the_target_is_no_stage_of_its_own_cascade(models):
    """It would lose its cache to the drafts.  Another Target of the same model is fine."""
    target = verify.Target(models[0])
    drafter = cascade.Cascade([target])
    with pytest.raises(ValueError, match="a Target of its own"):
        verify.generate(target, drafter, drafter.chain, TEXT, 9)
    drafter = cascade.Cascade([verify.Target(models[0])])
    out = verify.generate(target, drafter, drafter.chain, TEXT, 9)
    assert out.tokens == plain(models[0], TEXT, 9)

def test_the_docstrings_lines(models):
    large, base, small = models
    given = dict(verify=verify, cascade=cascade, maxgram=maxgram, large=large, base=base,
                 small=small, text=list(TEXT))
    exec(lines_to_use(cascade).replace("new_tokens=40", "new_tokens=20"), given)
    assert given["text"] == TEXT + plain(large, TEXT, 20)
