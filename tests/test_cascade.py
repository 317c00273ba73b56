"""The cascade: Algorithm 1 against a plain recursion, a lenient review against the paper's rule, T5.  (Sampled: test_drawn.py.)"""
import pytest
import torch
from conftest import VOCAB, family, tiny
from test_cape import BEFORE, run_the_docstrings_lines
from test_maxgram import brute_force

import cascade
import verify
from maxgram import MaxGram
from runtime.targets import AnyEncoderDecoder

BIGRAM = [3, 5, 0, 1, 2, 7, 0, 9, 4, 6, 8, 1]
TEXT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 1]

def relative(model, noise, seed):
    """A model of the same class whose choices mostly agree with `model`'s."""
    torch.manual_seed(seed)
    other = type(model)(model.config).to(model.dtype).eval()
    weights = model.state_dict()
    other.load_state_dict({k: v + noise * torch.randn_like(v) * (v.ndim == 2) for k, v in weights.items()})
    return other

@pytest.fixture(scope="module")
def models():
    """A target, and a larger and a smaller drafter, of one layer each."""
    target = tiny("llama", num_hidden_layers=1)
    return target, relative(target, 0.03, 1), relative(target, 0.06, 2)

@torch.no_grad()
def forward(model, ids):
    """A plain forward over everything: no cache -> logits (len(ids), V)."""
    return model(torch.tensor([ids]), use_cache=False).logits[0]

def cascade_of(models, K=None, lenience=1.0, gram=None, kind=verify.Target):
    """A cascade with caches of its own."""
    return cascade.Cascade([kind(model) for model in models], K, lenience, gram, None if models else VOCAB)

def shown(ids, length=None, source=None):
    """A View that shows these ids."""
    return verify.View(torch.tensor(ids), length or len(ids), {}, {}, ids, None, source)

def drafts(drafter, root, most=64):
    """The greedy proposal after root -> (tokens, probs)."""
    first = drafter.draft(root, most)
    return drafter.gen.tokens[first:], drafter.gen.probs[first:]

# ---------------------------------------------------------------- Algorithm 1 as the paper means it
def algorithm_1(stages, K, prefix, lenience, committed, runs, level=0):
    """CascadeSpeculativeDraftingStep's drafting part -> [(token, who reviewed it last, its logits)].

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
            draft = algorithm_1(stages[i + 1:], inner, text, lenience, committed, runs, level + i + 1)
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

KS = [(1, True, [[3, 4], [0, 5]]), (2, False, [[2, 3], [0, 2]]), (2, True, [[3, 2, 4], [0, 1, 6], [0, 0, 5]]), (0, True, [[6]])]

@pytest.mark.parametrize("neural, gram, K", KS)
@pytest.mark.parametrize("lenience", [1.0, 3.0])
def test_chain_and_runs_against_a_plain_recursion(models, neural, gram, K, lenience):
    """Tokens, who reviewed them, their logits, the runs, over rounds that commit different amounts."""
    mine = list(models[1:1 + neural])
    drafter = cascade_of(mine, K, lenience, MaxGram(BIGRAM) if gram else None)
    stages = mine + ["gram"] * gram
    text = torch.randint(VOCAB, (30,), generator=torch.Generator().manual_seed(neural)).tolist()
    text[12:18] = text[3:9]                                        # something to match
    at, seen, runs = 5, 0, [0] * len(stages)
    with torch.inference_mode():
        while at < 20:
            drafter.begin(shown(text[seen:at], at))
            expected = algorithm_1(stages, K, text[:at + 1], lenience, text[:at], runs)
            tokens, probs = drafts(drafter, text[at])
            assert tokens == [t for t, _, _ in expected]
            for prob, (_, who, logits) in zip(probs, expected):
                assert torch.is_tensor(prob) == (who != "gram")
                if who != "gram":
                    torch.testing.assert_close(prob, logits, atol=1e-9, rtol=0)
            assert drafter.runs == runs
            seen, at = at, at + 1 + at % 4
        for most in range(len(tokens) + 2) if lenience == 1 else ():
            assert drafts(drafter, text[seen], most)[0] == tokens[:most], "a shorter proposal is the longer one's beginning"
    drafter.reset()
    assert drafter.runs == [0] * len(stages)

# ---------------------------------------------------------------- over trees
def test_trees_see_the_chains_distributions_and_nothing_off_it(models):
    drafter = cascade_of(models[1:], [[2, 2, 3], [0, 1, 4], [0, 0, 4]], 1.0, MaxGram(BIGRAM))
    with torch.inference_mode():
        drafter.begin(shown(TEXT[:10]))
        tokens, probs = drafts(drafter, 1)
        found = [drafter.expand(torch.tensor([x]), [i - 1])[0] for i, x in enumerate([1, *tokens])]
        other = (tokens[0] + 1) % VOCAB
        off = drafter.expand(torch.tensor([other, tokens[1]]), [0, len(found)])
    assert {type(p) for p in probs} == {torch.Tensor, float} and found[-1].isneginf().all() and off.isneginf().all()
    for logits, token, p in zip(found, tokens, probs):
        if torch.is_tensor(p):
            torch.testing.assert_close(logits, p.float())
            assert logits.argmax() == token, "without lenience the chain is the most probable path"
        else:
            assert logits.isneginf().all(), "Max-Gram has confidences, see adjust()"

@pytest.mark.parametrize("rule", [verify.Greedy(), verify.Sampled(0.5, seed=1), verify.Sampled(2.0, top_k=1, seed=1)])
def test_a_builder_sees_max_grams_confidence_at_every_temperature(models, rule):
    """Max-Gram alone: its token has the confidence, all others share the rest evenly."""
    gram = MaxGram([0] * 4 + [7] * 8, [0.25, 0.6])
    drafter, seen = cascade_of([], None, 1.0, gram), set()

    def build(expand, root):
        tokens, lengths = gram.propose(root, 2)
        nodes = [*root.tolist(), *tokens[:-1]]
        for p, token, length in zip(expand(torch.tensor(nodes), list(range(-1, len(nodes) - 1))), tokens, lengths):
            confidence = 0.6 if length else 0.25
            seen.add(confidence)
            expected = torch.full((VOCAB,), (1 - confidence) / (VOCAB - 1))
            expected[token] = confidence
            torch.testing.assert_close(p, expected)
        return verify.root_only(expand, root)
    verify.generate(verify.Target(models[0]), drafter, build, [8, 5, 8], 20, rule)
    assert 0.6 in seen

# ---------------------------------------------------------------- sampling: a true p_draft
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
    """The distribution of what comes out of one review of x ~ q, added up case by case (section 3.1)."""
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
    """q' is what the paper's rule gives, and what speculative sampling towards q' gives, by enumeration."""
    p, q = pairs_of_all_kinds(vocab, vocab)
    found = cascade.lenient_distribution(p, q, torch.full((len(p), 1), l, dtype=torch.float64))
    torch.testing.assert_close(found.sum(-1), torch.ones(len(p), dtype=torch.float64))
    for one_p, one_q, one in zip(p.tolist(), q.tolist(), found.tolist()):
        assert reviewed_by_the_papers_rule(one_p, one_q, l) == pytest.approx(one, abs=1e-12)
        assert reviewed_by_the_papers_rule(one, one_q, 1.0) == pytest.approx(one, abs=1e-12)
        assert all(x <= l * y + 1e-12 for x, y in zip(one, one_p)), "no token is more than l times as likely"
        assert l > 1 or one == pytest.approx(one_p, abs=1e-12)

# ---------------------------------------------------------------- encoder and decoder
def t5():
    return family("T5ForConditionalGeneration", 0.4, d_model=16, d_kv=4, d_ff=32, num_layers=2, num_decoder_layers=3, num_heads=4,
                  pad_token_id=0, eos_token_id=1, decoder_start_token_id=0, feed_forward_proj="gated-gelu", tie_word_embeddings=False)

@torch.no_grad()
def plain_t5(model, prompt, new):
    """Greedy decoding by whole forwards, without a cache -> tokens."""
    ids, prompt = [0], torch.tensor([prompt])
    for _ in range(new):
        logits = model(input_ids=prompt, decoder_input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
        ids.append(logits.argmax().item())
    return ids[1:]

def test_encoder_decoder_chains_are_plain_decodings():
    """By Max-Gram and by a cascade, greedy and sampled; the encoder runs once a prompt and model."""
    model = t5()
    base, small = relative(model, 0.05, 1), relative(model, 0.1, 2)
    target, encoded = AnyEncoderDecoder(model), []
    for m in (model, base, small):
        m.get_encoder().register_forward_pre_hook(lambda *_, m=m: encoded.append(m))
    K, rule = [[3, 2, 4], [0, 1, 5], [0, 0, 5]], verify.Sampled(seed=5)
    drafters = [cascade_of([], None, 1.0, MaxGram()), cascade_of([base, small], K, 2.0, MaxGram(), kind=AnyEncoderDecoder)]
    for prompt in ([5, 6, 7, 8, 5, 6, 9, 1], [3, 1]):
        text, sampled = plain_t5(model, prompt, 6), verify.generate(target, None, verify.root_only, prompt, 6, rule).tokens
        for models, drafter in zip(([model], [model, base, small]), drafters):
            encoded.clear()
            assert verify.generate(target, drafter, cascade.proposal, prompt, 6).tokens == text
            assert encoded == models
            assert verify.generate(target, drafter, cascade.proposal, prompt, 6, rule).tokens == sampled
    drafters[0].reset()
    drafters[0].begin(shown([0], source=[5, 6, 7, 8, 9, 10]))
    assert drafters[0].chain(6, 3) == ([7, 8, 9], None), "Max-Gram copies from the prompt"
    # The encoder's input takes no position from the output.
    assert verify.generate(AnyEncoderDecoder(model, 10), None, verify.root_only, [5, 6, 7] * 9, 99).tokens == plain_t5(model, [5, 6, 7] * 9, 10)

# ---------------------------------------------------------------- K
def test_table_2s_k_is_algorithm_1s_matrix(models):
    assert cascade.table2([8, 13, 1], 2, True) == [[8, 5, 10], [0, 1, 10], [0, 0, 10]]
    assert cascade.table2([10], 1, True) == [[10, 10], [0, 10]] and cascade.table2([12], 1, False) == [[12]]
    assert cascade.table2([3, 5, 6, 2, 4, 1], 3, False) == [[3, 2, 1], [0, 2, 2], [0, 0, 1]] and cascade.table2([], 0, True) == [[10]]
    # by default all of them are 1
    assert cascade_of(models[1:], gram=MaxGram()).K == [[1, 0, 10], [0, 1, 10], [0, 0, 10]] and cascade_of(models[1:2]).K == [[1]]

def test_a_stranger_uses_it_alone(tmp_path):
    before = BEFORE + "large, base = target, drafter\n"
    run_the_docstrings_lines(tmp_path, cascade, ["cascade.py", "verify.py", "maxgram.py"], before)
