"""The cascade: Algorithm 1 against a plain recursion, lossless over every tree, true p_draft, limits, T5.

Tests of samples reject at p < ALARM: with ten of them, correct code fails once in 100 000 changes of seeds.
"""
import re
from copy import deepcopy
from functools import partial
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from conftest import CONTEXT, VOCAB, plain, tiny
from transformers import T5Config, T5ForConditionalGeneration

import cape
import cascade
import pct
import verify
from maxgram import MaxGram

ALARM = 1e-6
BIGRAM = [3, 5, 0, 1, 2, 7, 0, 9, 4, 6, 8, 1]


def relative(model, noise, seed):
    """A model of the same class whose choices mostly agree with `model`'s."""
    torch.manual_seed(seed)
    other = type(model)(model.config).to(model.dtype).eval()
    weights = model.state_dict()
    other.load_state_dict({k: v + noise * torch.randn_like(v) * (v.ndim == 2) for k, v in weights.items()})
    return other


@pytest.fixture(scope="module")
def models():
    """A target, and a larger and a smaller drafter, of one layer each: more than one is test_every_class_...'s."""
    target = tiny("llama", num_hidden_layers=1)
    return target, relative(target, 0.03, 1), relative(target, 0.06, 2)


@torch.no_grad()
def forward(model, ids):
    """A plain forward over everything: no cache -> logits (len(ids), V)."""
    return model(torch.tensor([ids]), use_cache=False).logits[0]


def shown(ids, length=None):
    """A View that shows these ids."""
    return verify.View(torch.tensor(ids), length or len(ids), {}, {})


def drafts(drafter, root, most=64):
    """The greedy proposal after root -> (tokens, probs)."""
    first = drafter.write(root, most)
    return drafter.gen.tokens[first:], drafter.gen.probs[first:]


def p_value(counts, p):
    """Pearson's chi-square of counts (k,) against p (k,); cells that expect fewer than 5 are put together."""
    counts = torch.as_tensor(counts, dtype=torch.float64)
    expected = torch.as_tensor(p, dtype=torch.float64) * counts.sum()
    rare = expected < 5
    counts = torch.cat((counts[~rare], counts[rare].sum()[None]))
    expected = torch.cat((expected[~rare], expected[rare].sum()[None]))
    assert counts[-1] == 0 or expected[-1] > 0, "something came out that cannot"
    statistic = ((counts - expected)[expected > 0] ** 2 / expected[expected > 0]).sum()
    freedom = (expected > 0).sum() - 1
    return torch.special.gammaincc(freedom / 2, statistic / 2).item()


# ---------------------------------------------------------------- Algorithm 1 as the paper means it
def suffix_match(query, text, n):
    """Max-Gram on lists: the longest suffix of `query` with a token after it in `text`; the bigram."""
    out = []
    while len(out) < n:
        q = query + out
        for size in range(len(q), 0, -1):
            starts = [i for i in range(len(text) - size) if text[i:i + size] == q[len(q) - size:]]
            if starts:
                out.append(text[starts[0] + size])
                break
        else:
            if not BIGRAM[q[-1]]:
                break
            out.append(BIGRAM[q[-1]])
    return out


def algorithm_1(stages, K, prefix, lenience, committed, runs, level=0, by_sum=False):
    """CascadeSpeculativeDraftingStep's drafting part -> [(token, who reviewed it last, its logits)].

    stages: models, "gram" last.  committed: what Max-Gram may search.  On lists and plain forwards.
    """
    gen = []
    for i, stage in enumerate(stages):
        added = 0
        while len(gen) < sum(K[0][:i + 1]) if by_sum else added < K[0][i]:
            text = prefix + [t for t, _, _ in gen]
            runs[level + i] += 1
            if stage == "gram":
                count = sum(K[0][:i + 1]) - len(gen) if by_sum else K[0][i]
                new = [(t, "gram", None) for t in suffix_match(text, committed, count)]
                gen, added = gen + new, added + len(new)
                break
            inner = [row[i + 1:] for row in K[i + 1:]]
            draft = algorithm_1(stages[i + 1:], inner, text, lenience, committed, runs, level + i + 1, by_sum)
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


KS = [(1, False, [[3]]), (1, True, [[3, 4], [0, 5]]), (1, True, [[1, 10], [0, 10]]),
      (2, False, [[2, 3], [0, 2]]), (2, True, [[3, 2, 4], [0, 1, 6], [0, 0, 5]]),
      (2, True, [[4, 0, 0], [0, 3, 0], [0, 0, 4]]), (0, True, [[6]])]


@pytest.mark.parametrize("neural, gram, K", KS)
@pytest.mark.parametrize("lenience, stop", [(1.0, "own"), (3.0, "own"), (1.0, "sum")])
def test_chain_and_runs_against_a_plain_recursion(models, neural, gram, K, lenience, stop):
    """Tokens, who reviewed them, their rows, the runs, over rounds that commit different amounts."""
    mine = list(models[1:1 + neural])
    drafter = cascade.Cascade(mine, K, lenience, MaxGram(BIGRAM) if gram else None, vocab=VOCAB, stop=stop)
    stages = mine + ["gram"] * gram
    text = torch.randint(VOCAB, (30,), generator=torch.Generator().manual_seed(neural)).tolist()
    text[12:18] = text[3:9]                                        # something to match
    at, seen, runs = 5, 0, [0] * len(stages)
    with torch.inference_mode():
        while at < 22:
            drafter.begin(shown(text[seen:at], at))
            expected = algorithm_1(stages, K, text[:at + 1], lenience, text[:at], runs, by_sum=stop == "sum")
            tokens, probs = drafts(drafter, text[at])
            assert tokens == [t for t, _, _ in expected]
            for prob, (_, who, logits) in zip(probs, expected):
                assert torch.is_tensor(prob) == (who != "gram")
                if who != "gram":
                    torch.testing.assert_close(prob, logits, atol=1e-9, rtol=0)
            assert drafter.runs == runs
            seen, at = at, at + 1 + at % 4


class Toy:
    """Continues a text of letters alphabetically, but for its slips."""
    capacity = 99

    def __init__(self, name, steps, **slips):
        self.name, self.steps, self.slips = name, steps, slips

    def sync(self, tokens, rows):
        """What it says after each of the last tokens, in place of logits."""
        self.steps.append([self.name])
        return [self.slips.get(chr(ord(x) + 1), chr(ord(x) + 1)) for x in tokens[-rows:]]


def test_the_trace_in_the_docstring():
    steps, gen = [], cascade.Gen()
    gen.replace(0, ["a"], [None])

    def review(said, gen, first):
        cascade.keep_chosen(gen, first, said, [None] * len(said))
        steps[-1].append("".join(gen.tokens))
    base, small, target = Toy("base", steps), Toy("small", steps, g="x"), Toy("M_t", steps)
    cascade.cascade_step(target, [base, small], [[2, 2], [0, 3]], gen, 99, review)
    assert "".join(gen.tokens) == "abcdefx", "the first call leaves the review to M_t"
    review(target.sync(gen.tokens, len(gen)), gen, 1)
    trace = cascade.cascade_step.__doc__.split("what happened")[1]
    read = re.findall(r"\bab\w*", trace)
    assert read == [text for _, text in steps] == "ab abc abcd abcde abcdef abcdefx abcdefg".split()
    assert [who for who, _ in steps] == ["small"] * 3 + ["base"] + ["small"] * 2 + ["M_t"]
    assert gen.runs[base] == 1 and gen.runs[small] == 5 and gen.runs[target] == 0


def test_lenience_matters_and_is_never_max_grams(models):
    K = [[4, 4], [0, 4]]

    def chain(lenience, stages, gram):
        drafter = cascade.Cascade(stages, K, lenience, gram, vocab=VOCAB)
        with torch.inference_mode():
            drafter.begin(shown(list(range(6))))
            return drafter.chain(6, 64)
    wild = tiny("llama", seed=9)
    assert chain(1e9, [models[1], wild], None) != chain(1, [models[1], wild], None), "all that it says stays"
    assert chain(1e9, [models[1]], MaxGram(BIGRAM)) == chain(1, [models[1]], MaxGram(BIGRAM))


def test_a_draft_on_the_edge_of_lenience_stays():
    """Section 3.1 keeps x where M_d(x) <= l M_r(x): with equal rows and l = 1 any x, with less none but the choice."""
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    choice = logits[0].argmax().item()
    for x in range(VOCAB):
        for l, stays in ((1.0, True), (1 - 1e-6, x == choice)):
            gen = cascade.Gen()
            gen.replace(0, [0, x], [None, logits[0]])
            cascade.review_lenient(logits, gen, 1, l)
            assert gen.tokens == [0, x, logits[1].argmax().item()] if stays else gen.tokens == [0, choice]


def test_max_grams_bigram_is_used():
    drafter = cascade.Cascade([], [[3]], gram=MaxGram(BIGRAM), vocab=VOCAB)
    drafter.begin(shown([0]))
    assert drafter.chain(1, 64) == ([BIGRAM[1], BIGRAM[BIGRAM[1]], BIGRAM[BIGRAM[BIGRAM[1]]]], None)


# ---------------------------------------------------------------- lossless
TREES = {"own chain": cascade.proposal, "chain": cape.chain, "cape": cape.cape,
         "beam": partial(cape.beam, width=3), "pct": partial(pct.pct, cost=0.05, depth=6),
         "eagle2": partial(pct.eagle2, total=15, depth=5, expanded=4)}


@pytest.mark.parametrize("neural, gram, K", KS)
def test_output_is_plain_decodings_over_every_tree(models, neural, gram, K):
    target = verify.Target(models[0])
    drafter = cascade.Cascade(list(models[1:1 + neural]), K, 2.0 if neural > 1 else 1.0,
                              MaxGram(BIGRAM) if gram else None, vocab=VOCAB)
    for prompt in ([1], list(range(12)) * 2, [5] * (CONTEXT - 3), [4] * CONTEXT):
        expected = plain(models[0], prompt, min(10, CONTEXT - len(prompt) + 1))
        sampled = verify.generate(target, None, verify.no_draft, prompt, 10, temperature=0.8, seed=3)
        for name, build in TREES.items():
            assert verify.generate(target, drafter, build, prompt, 10).tokens == expected, name
            out = verify.generate(target, drafter, build, prompt, 10, temperature=0.8, seed=3)
            assert out.tokens == sampled.tokens, f"{name}: the target's own draws decide"


def test_every_class_of_model_as_target_and_stage(model):
    target, prompt = verify.Target(model), [3, 1, 4, 1, 5, 9, 2, 6, 5]
    K = [[3, 2, 4], [0, 1, 5], [0, 0, 5]]
    drafter = cascade.Cascade([relative(model, 0.03, 1), relative(model, 0.06, 2)], K, 2.0, MaxGram())
    expected = plain(model, prompt, 12)
    for build in TREES.values():
        assert verify.generate(target, drafter, build, prompt, 12).tokens == expected


def test_trees_see_the_chains_distributions_and_nothing_off_it(models):
    gram = MaxGram(BIGRAM, [0.1, 0.2, 1.0])
    drafter = cascade.Cascade(list(models[1:]), [[2, 2, 3], [0, 1, 4], [0, 0, 4]], 1.0, gram)
    with torch.inference_mode():
        drafter.begin(shown([3, 1, 4, 1, 5, 9, 2, 6, 5, 3]))
        tokens, probs = drafts(drafter, 1)
        rows = [drafter.expand(torch.tensor([x]), [i - 1])[0] for i, x in enumerate([1] + tokens)]
        assert {type(p) for p in probs} == {torch.Tensor, float}
        for row, token, p in zip(rows, tokens, probs):
            if torch.is_tensor(p):
                torch.testing.assert_close(row, p.float())
                assert row.argmax() == token, "without lenience the chain is the most probable path"
            else:                                # c on its token, the rest of the probability spread evenly
                even = torch.full((VOCAB,), (1 - p) / (VOCAB - 1))
                even[token] = p
                torch.testing.assert_close(row.softmax(-1), even)
                assert p < 1 or row.isinf().sum() == VOCAB - 1
        assert rows[-1].eq(-torch.inf).all(), "after the chain's end there is nothing to say"
        n = len(tokens) + 1
        off = drafter.expand(torch.tensor([(tokens[0] + 1) % VOCAB, tokens[0], tokens[1]]), [0, 0, n])
        assert off[0].isneginf().all() and torch.equal(off[1], rows[1]) and off[2].isneginf().all()


def test_a_certain_max_gram_leaves_nothing_to_the_others():
    drafter = cascade.Cascade([], [[2]], gram=MaxGram([1] * VOCAB, [1.0]), vocab=VOCAB)
    drafter.begin(shown([0]))
    row = drafter.expand(torch.tensor([5]), [-1])[0]
    assert row[1] == 0 and row.isneginf().sum() == VOCAB - 1


def test_each_round_has_a_chain_of_its_own(models):
    """expand() after the next begin() speaks of the new text; the last round's drafts are no part of it."""
    drafter = cascade.Cascade([models[1]], [[3]])
    with torch.inference_mode():
        for new, root in (([3, 1, 4], 1), ([1, 5], 9)):
            drafter.begin(shown(new))
            text = {1: [3, 1, 4, 1], 9: [3, 1, 4, 1, 5, 9]}[root]
            row = drafter.expand(torch.tensor([root]), [-1])[0]
            torch.testing.assert_close(row, forward(models[1], text)[-1].float())
            assert drafter.gen.tokens[:len(text)] == text


# ---------------------------------------------------------------- limits
def watched(drafter):
    """Record the length of every text that a neural stage reads -> {stage: list}, which fills as it runs."""
    lengths = {stage: [] for stage in drafter.stages}
    for stage in drafter.stages:
        def sync(ids, rows=None, stage=stage, original=stage.sync):
            assert ids is drafter.gen.tokens, "the text is not copied for a review"
            lengths[stage].append(len(ids))
            return original(ids, rows)
        stage.sync = sync
    return lengths


@pytest.mark.parametrize("neural, gram, K", KS)
def test_no_draft_is_longer_than_asked(models, neural, gram, K):
    """`most` tokens at most, and inside as well: nobody reviews what cannot be part of them."""
    gram = MaxGram(BIGRAM) if gram else None
    drafter = cascade.Cascade(list(models[1:1 + neural]), K, 1.0, gram, vocab=VOCAB)
    text = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 1]
    lengths = watched(drafter)
    with torch.inference_mode():
        drafter.begin(shown(text))
        whole, _ = drafter.chain(4, 64)
        for most in range(len(whole) + 2):
            before = drafter.runs
            for seen in lengths.values():
                seen.clear()
            assert drafter.chain(4, most)[0] == whole[:most]
            # a reviewer adds a token to what it reads
            assert all(n <= len(text) + most for seen in lengths.values() for n in seen)
            if most == 0:
                assert drafter.runs == before, "nothing is asked of anybody"


def test_a_stage_stops_at_its_context_and_smaller_ones_go_on(models):
    """A stage with room for `capacity` tokens reads that many, not one more, and counts no run beyond."""
    gram = MaxGram([1] * VOCAB)
    for capacity, ahead in product([8, 9, 10, 12, 30], [7, 8, 9]):
        drafter = cascade.Cascade([models[1]], [[3, 4], [0, 4]], 1.0, gram, capacity=capacity)
        lengths = watched(drafter)[drafter.stages[0]]
        text = [3, 1, 4, 1, 5, 9, 2, 6, 5][:ahead - 1]               # `ahead` tokens with the root
        with torch.inference_mode():
            drafter.begin(shown(text))
            tokens, probs = drafts(drafter, 7)
        assert max(lengths, default=0) <= capacity
        assert drafter.runs[0] == len(lengths) and drafter.runs[1] > 0
        reviewed = sum(map(torch.is_tensor, probs))
        if ahead > capacity:
            assert reviewed == 0 and not lengths, "no room for the text: it has not run"
        else:
            # what it can read, and its own token
            room = capacity + 1 - ahead
            assert min(3, room) <= reviewed <= room
        assert len(tokens) == reviewed + 4, "Max-Gram writes its four wherever the model stopped"


def test_no_inner_draft_reaches_beyond_its_reviewers_context(models):
    """The smaller stage has room, the larger one, which reviews, has not."""
    larger = deepcopy(models[1])
    larger.config.max_position_embeddings = 10
    drafter = cascade.Cascade([larger, models[2]], [[2, 3], [0, 5]])
    lengths = watched(drafter)
    with torch.inference_mode():
        drafter.begin(shown([3, 1, 4, 1, 5, 9]))
        first = drafter.write(2, 64)
    assert max(lengths[drafter.stages[0]]) <= 10 and len(drafter.gen) - first >= 5
    assert drafter.runs == [len(x) for x in lengths.values()]


def test_chains_end_where_the_output_must(models):
    """No drafted token stands where the length limit or the context leaves no room for it."""
    target, deepest = verify.Target(models[0]), []
    drafter = cascade.Cascade([models[1]], [[6, 10], [0, 8]], 1.0, MaxGram(BIGRAM))

    def recorded(expand, root):
        tree = cascade.proposal(expand, root)
        deepest.append(target.cache.length + len(tree.tokens))         # the bonus token's position at most
        return tree
    for length, new in ((8, 5), (CONTEXT - 6, 20)):
        deepest.clear()
        out = verify.generate(target, drafter, recorded, [3] * length, new)
        assert len(out.tokens) == min(new, CONTEXT - length + 1)
        assert max(deepest) <= length + len(out.tokens) - 1


# ---------------------------------------------------------------- sampling: a true p_draft
class Table:
    """A stage whose distribution depends on the last token alone: table (V, V)."""
    capacity = 1000

    def __init__(self, table):
        self.logits = table.log()
        self.config = SimpleNamespace(vocab_size=len(table), is_encoder_decoder=False)

    def reset(self):
        pass

    def sync(self, ids, rows):
        return self.logits[torch.tensor(ids[-rows:])]


def tables(count, vocab, seed, sharpness=1.5):
    generator = torch.Generator().manual_seed(seed)
    logits = sharpness * torch.randn(count, vocab, vocab, generator=generator, dtype=torch.float64)
    return [Table(table) for table in logits.softmax(-1)]


@pytest.fixture
def cascade_of(monkeypatch):
    monkeypatch.setattr(cascade, "Target", lambda stage, capacity, vocab: stage)
    return cascade.Cascade


def rows_of_all_kinds(vocab, seed):
    """Pairs of distributions: at random, equal, with zeros, apart from each other, one certain."""
    generator = torch.Generator().manual_seed(seed)
    p, q = torch.rand(2, 40, vocab, generator=generator, dtype=torch.float64)
    p, q = p ** 3, q ** 3
    p[5:15] *= torch.rand(10, vocab, generator=generator) < 0.6
    q[10:20] *= torch.rand(10, vocab, generator=generator) < 0.6
    p[20], q[20] = torch.eye(vocab)[0], torch.eye(vocab)[1]
    p[:, 0] += 1e-3
    q[:, -1] += 1e-3
    p, q = p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True)
    q[21] = p[21]
    return p, q


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


@pytest.mark.parametrize("vocab", [2, 3, 5])
@pytest.mark.parametrize("l", [1.0, 1.3, 3.0, 1e6])
def test_one_lenient_review_exactly(vocab, l):
    """q' is what the paper's rule gives, and what speculative sampling towards q' gives, by enumeration."""
    p, q = rows_of_all_kinds(vocab, vocab)
    found = cascade.lenient_distribution(p, q, torch.full((len(p), 1), l, dtype=torch.float64))
    torch.testing.assert_close(found.sum(-1), torch.ones(len(p), dtype=torch.float64))
    for one_p, one_q, one in zip(p.tolist(), q.tolist(), found.tolist()):
        assert reviewed_by_the_papers_rule(one_p, one_q, l) == pytest.approx(one, abs=1e-12)
        assert reviewed_by_the_papers_rule(one, one_q, 1.0) == pytest.approx(one, abs=1e-12)
        assert all(x <= l * y + 1e-12 for x, y in zip(one, one_p)), "no token is more than l times as likely"
        if l == 1:
            assert one == pytest.approx(one_p, abs=1e-12)


@pytest.mark.parametrize("by_max_gram", [False, True])
def test_a_review_is_lenient_with_models_and_strict_with_max_gram(by_max_gram, monkeypatch):
    """One drawn review of one draft, over all tokens that it can be: q' for a model's, p for Max-Gram's."""
    vocab, l = 4, 2.5
    p, q = rows_of_all_kinds(vocab, 7)
    asked = []
    monkeypatch.setattr(cascade, "accept_drawn", lambda *a: (asked.append(a), ([0], [0], [-1], [0]))[1])
    for one_p, one_q in zip(p, q):
        if by_max_gram:
            one_q = torch.eye(vocab, dtype=torch.float64)[int(one_q.argmax())]
        out = torch.zeros(vocab, dtype=torch.float64)
        for x in one_q.nonzero()[:, 0].tolist():
            gen = cascade.Gen()
            gen.replace(0, [0, x], [None, 0.5 if by_max_gram else one_q])
            logits = torch.stack((one_p, one_p)).log()
            cascade.review_drawn(logits, gen, 1, partial(torch.softmax, dim=-1), l, None)
            tree, rows, _ = asked[-1]
            assert tree.tokens.tolist() == [0, x] and tree.parents.tolist() == [-1, 0]
            torch.testing.assert_close(tree.p_draft[0].double(), one_q, atol=1e-6, rtol=0)
            torch.testing.assert_close(rows[1].double(), one_p, atol=1e-6, rtol=0)
            # the standard rule towards rows[0], given x
            accept = min(1.0, (rows[0, x] / tree.p_draft[0, x]).item())
            left = (rows[0] - tree.p_draft[0]).clamp(min=0).double()
            out[x] += one_q[x] * accept
            out += one_q[x] * (1 - accept) * left / left.sum().clamp(min=1e-30)
        expected = reviewed_by_the_papers_rule(one_p.tolist(), one_q.tolist(), 1.0 if by_max_gram else l)
        assert out.tolist() == pytest.approx(expected, abs=2e-6)
        if by_max_gram:
            assert out.tolist() == pytest.approx(one_p.tolist(), abs=2e-6)


DRAWN = [(1, False, [[3]], 1.0), (2, False, [[2, 2], [0, 2]], 1.0), (1, True, [[2, 3], [0, 3]], 4.0),
         (2, False, [[3, 1], [0, 2]], 2.0), (2, True, [[2, 1, 2], [0, 1, 2], [0, 0, 2]], 3.0)]


@pytest.mark.parametrize("neural, gram, K, lenience", DRAWN)
def test_drawn_tokens_follow_their_rows_and_the_target_stays_exact(cascade_of, neural, gram, K, lenience):
    """400 chains on a vocabulary of three: tokens against their p_draft, and the target's output."""
    target, *stages = tables(1 + neural, 3, 5)
    drafter = cascade_of(stages, K, lenience, MaxGram([1, 2, 1]) if gram else None, vocab=3)
    warp, generator = verify.warper(), verify.stream(1, "draft", "cpu")
    accepting = verify.stream(1, "accept", "cpu")
    drafter.begin(shown([0, 1, 2, 0, 2]))
    surprise, variance, counts, kept = torch.zeros(20, 3), torch.zeros(20, 3), torch.zeros(3, 3), 0
    for _ in range(400):
        tokens, p_draft = drafter.chain(1, 8, warp, generator)
        n = len(tokens)
        assert p_draft.shape == (n, 3)
        torch.testing.assert_close(p_draft.sum(-1), torch.ones(n))
        surprise[:n] += torch.eye(3)[tokens] - p_draft
        variance[:n] += p_draft * (1 - p_draft)
        # two tokens by M_t's own review, the second one drawn plainly where the first was refused
        chain = torch.tensor([1, *tokens])
        p_target = target.sync(chain.tolist(), n + 1).softmax(-1).float()
        _, new, *_ = verify.accept_drawn(verify.Tree(chain, torch.arange(-1, n), p_draft), p_target, accepting)
        kept += len(new) > 1
        if len(new) == 1:
            row = target.sync(new, 1).softmax(-1)
            new += torch.multinomial(row[0], 1, generator=accepting).tolist()
        counts[new[0], new[1]] += 1
    # sum of (token is x) - p_draft(x): mean 0, this variance; 60 normal variables, two-sided
    worst = (surprise.abs() / variance.clamp(min=1e-9).sqrt())[variance > 10].max()
    assert worst < 6, "false alarm: 60 times 2e-9"
    assert surprise[variance <= 1e-6].abs().max() < 1e-3
    table = target.logits.exp()
    assert p_value(counts.flatten(), (table[1][:, None] * table).flatten()) > ALARM
    assert kept > 100


@pytest.mark.parametrize("lenience", [1.0, 3.0])
def test_a_reviewed_token_follows_the_distribution_of_its_review(cascade_of, lenience):
    """The first token of (d1, d2) in 400 chains follows q', and not what another lenience would give."""
    d1, d2 = tables(2, 3, 14, sharpness=2.0)
    drafter = cascade_of([d1, d2], [[1, 0], [0, 1]], lenience, vocab=3)
    drafter.begin(shown([0, 1]))
    generator, counts = torch.Generator().manual_seed(0), torch.zeros(3)
    for _ in range(400):
        tokens, p_draft = drafter.chain(2, 2, verify.warper(), generator)
        counts[tokens[0]] += 1
    p, q = d1.logits.exp()[2].tolist(), d2.logits.exp()[2].tolist()
    right = reviewed_by_the_papers_rule(p, q, lenience)
    assert p_draft[0].tolist() == pytest.approx(right, abs=1e-6)
    assert p_value(counts, right) > ALARM
    assert p_value(counts, reviewed_by_the_papers_rule(p, q, 4.0 - lenience)) < ALARM


@pytest.mark.parametrize("neural, gram, K, lenience", [(1, False, [[2]], 1.0),
                                                       (2, True, [[1, 1, 2], [0, 1, 2], [0, 0, 2]], 3.0)])
def test_drawn_output_follows_the_targets_distribution(neural, gram, K, lenience):
    """Two tokens after the prefill's, end to end, against the exact joint distribution of plain sampling."""
    target = tiny("llama", num_hidden_layers=1)
    for p in target.parameters():
        p.data *= 0.8                                               # flatter
    stages = [relative(target, 0.2, 1), relative(target, 0.3, 2)][:neural]
    drafter = cascade.Cascade(stages, K, lenience, MaxGram(BIGRAM) if gram else None)
    wrapped, prompt, warp = verify.Target(target), [3, 1, 4, 1], verify.warper(1.0, 3)
    counts = {}

    def build(expand, root):
        tree = cascade.proposal(expand, root, drawn=True)
        assert (tree.p_draft is None) == (expand.room == 0), "drawn, and not the target's keyed noise over a greedy chain"
        return tree
    for seed in range(250):
        out = verify.generate(wrapped, drafter, build, prompt, 3, temperature=1.0, top_k=3, seed=seed)
        counts[tuple(out.tokens)] = counts.get(tuple(out.tokens), 0) + 1
    joint = {}
    for a, p in enumerate(warp(forward(target, prompt)[-1:])[0].tolist()):
        for b, q in enumerate(warp(forward(target, prompt + [a])[-1:])[0].tolist() if p else ()):
            for c, r in enumerate(warp(forward(target, prompt + [a, b])[-1:])[0].tolist() if q else ()):
                if r:
                    joint[a, b, c] = p * q * r
    assert set(counts) <= set(joint)
    assert p_value([counts.get(k, 0) for k in joint], list(joint.values())) > ALARM


def test_rows_of_a_drawn_chain_of_models(models):
    """Rows of drawn chains of real models, from plain forwards over their own tokens; Max-Gram is certain."""
    stages, warp = list(models[1:]), verify.warper(1.5, 8)
    drafter = cascade.Cascade(stages, [[2, 2, 3], [0, 1, 3], [0, 0, 3]], 1.0, MaxGram(BIGRAM))
    text, generator, seen = [3, 1, 4, 1, 5, 9, 2, 6], torch.Generator().manual_seed(0), set()
    with torch.inference_mode():
        drafter.begin(shown(text))
        for _ in range(20):
            tokens, p_draft = drafter.chain(5, 64, warp, generator)
            rows = [warp(forward(m, text + [5] + tokens)[8:-1]) for m in stages]
            rows.append(torch.eye(VOCAB, dtype=torch.float64)[tokens])
            for i, row in enumerate(p_draft.double()):
                same = [torch.allclose(row, r[i], atol=1e-6) for r in rows]
                assert any(same)
                seen.add(same.index(True))
    assert seen == {0, 1, 2}


def test_drawn_is_drawn_and_greedy_is_not(models):
    drafter = cascade.Cascade([models[1]], [[4]])
    with torch.inference_mode():
        drafter.begin(shown([3, 1, 4]))
        warp, streams = verify.warper(2.0), [torch.Generator().manual_seed(seed) for seed in range(8)]
        drawn = [drafter.chain(1, 64, warp, generator) for generator in streams]
        greedy = [drafter.chain(1, 64, warp) for _ in range(8)]
    assert len({tuple(tokens) for tokens, _ in drawn}) > 3 and all(p is not None for _, p in drawn)
    assert all(chain == greedy[0] and chain[1] is None for chain in greedy)


def test_p_draft_is_where_the_target_is():
    """Whatever is made without naming a device lands on the meta device here, and mixing the two raises."""
    drafter = cascade.Cascade([], [[4]], 1.0, MaxGram(BIGRAM), vocab=VOCAB)
    view, generator = shown([3, 1, 4, 3]), torch.Generator().manual_seed(0)
    with torch.device("meta"):
        drafter.begin(view)
        tokens, p_draft = drafter.chain(1, 4, verify.warper(), generator)
        rows = drafter.expand(torch.tensor([1], device="cpu"), [-1])
    assert p_draft.device.type == rows.device.type == "cpu"
    assert p_draft.tolist() == torch.eye(VOCAB)[tokens].tolist()


# ---------------------------------------------------------------- work
def test_stages_forward_only_what_is_new(models):
    """Each run forwards what the stage's cache lacks behind the common prefix, and rows that are asked."""
    drafter = cascade.Cascade(list(models[1:]), [[2, 2, 4], [0, 1, 5], [0, 0, 5]], 1.0, MaxGram(BIGRAM))
    asked, passed = {m: [] for m in models[1:]}, {m: [] for m in models[1:]}
    for stage in drafter.stages:
        def sync(ids, rows, stage=stage, original=stage.sync):
            before = asked[stage.model][-1] if asked[stage.model] else []
            differ = [i for i, (a, b) in enumerate(zip(before, ids)) if a != b]
            same = differ[0] if differ else min(len(before), len(ids))
            asked[stage.model].append(list(ids))
            logits = original(ids, rows)
            assert passed[stage.model][-1] == len(ids) - min(same, len(ids) - rows)
            assert logits.shape == (rows, VOCAB)
            torch.testing.assert_close(logits, forward(stage.model, ids)[-rows:], atol=1e-9, rtol=0)
            return logits
        stage.sync = sync

    def note(module, args, kwargs, m):
        passed[m].append(kwargs["input_ids"].shape[1])
    hooks = [m.get_decoder().register_forward_pre_hook(partial(note, m=m), with_kwargs=True)
             for m in models[1:]]
    verify.generate(verify.Target(models[0]), drafter, cascade.proposal, [3, 1, 4, 1, 5, 9, 2, 6], 24)
    for hook in hooks:
        hook.remove()
    # the oracle's own forwards are noted too, one after each run
    assert [len(asked[m]) for m in models[1:]] == drafter.runs[:2] and all(len(v) > 5 for v in asked.values())


def test_caches_are_as_long_as_the_text(models):
    roomy = [deepcopy(m) for m in models[1:]]
    for m in roomy:
        m.config.max_position_embeddings = 10 ** 6
    drafter = cascade.Cascade(roomy, [[2, 2], [0, 2]])
    verify.generate(verify.Target(models[0]), drafter, cascade.proposal, [3, 1, 4, 1], CONTEXT - 6)
    assert all(rows.shape[-2] < 2 * CONTEXT for stage in drafter.stages for rows in stage.cache.keys.values())


def test_swi_from_the_runs_of_a_real_run(models):
    """Counts by hooks on the models themselves, and the definition worked out."""
    counts = dict.fromkeys(models, 0)

    def count(module, args, kwargs, m):
        counts[m] += 1
    hooks = [m.get_decoder().register_forward_pre_hook(partial(count, m=m), with_kwargs=True) for m in models]
    drafter, calls, out = cascade.Cascade(list(models[1:]), None, 1.0, MaxGram(BIGRAM)), [], verify.Output()
    out.tell = lambda new, drafted: calls.append(new)
    verify.generate(verify.Target(models[0]), drafter, cascade.proposal, [3, 1, 4, 1, 5, 9, 2, 6], 24, out=out)
    for hook in hooks:
        hook.remove()
    # every telling follows a run of the target
    assert [len(calls), *drafter.runs[:2]] == [counts[m] for m in models]
    expected = 24 / (counts[models[0]] + 0.2 * counts[models[1]] + 0.1 * counts[models[2]])
    assert cascade.swi(24, [len(calls), *drafter.runs], [1, 0.2, 0.1, 0]) == pytest.approx(expected)
    drafter.reset()
    assert drafter.runs == [0, 0, 0]


# ---------------------------------------------------------------- encoder and decoder
def t5(seed=0):
    torch.manual_seed(seed)
    config = T5Config(vocab_size=16, d_model=16, d_kv=4, d_ff=32, num_layers=2, num_decoder_layers=3,
                      num_heads=4, pad_token_id=0, eos_token_id=1, decoder_start_token_id=0,
                      feed_forward_proj="gated-gelu", tie_word_embeddings=False)
    model = T5ForConditionalGeneration(config).double().eval()
    for p in model.parameters():
        if p.ndim == 2:
            torch.nn.init.normal_(p, std=0.4)
    return model


@torch.no_grad()
def plain_t5(model, prompt, new):
    """Greedy decoding by whole forwards, without a cache."""
    ids, prompt = [0], torch.tensor([prompt])
    for _ in range(new):
        out = model(input_ids=prompt, decoder_input_ids=torch.tensor([ids]), use_cache=False)
        ids.append(out.logits[0, -1].argmax().item())
    return ids[1:]


def test_encoder_decoder_chains_are_plain_decodings():
    model = t5()
    base, small = relative(model, 0.05, 1), relative(model, 0.1, 2)
    target, encoded = cascade.EncoderDecoder(model), dict.fromkeys((model, base, small), 0)

    def count(module, args, kwargs, m):
        encoded[m] += 1
    hooks = [m.get_encoder().register_forward_pre_hook(partial(count, m=m), with_kwargs=True)
             for m in encoded]
    prompts = ([5, 6, 7, 8, 5, 6, 9, 1], [3, 1])
    K = [[3, 2, 4], [0, 1, 5], [0, 0, 5]]
    drafters = [(0, cascade.Cascade([], None, 1.0, MaxGram(), vocab=16)), (1, cascade.Cascade([base], [[3]])),
                (2, cascade.Cascade([base, small], K, 2.0, MaxGram()))]
    expected = [plain_t5(model, prompt, 9) for prompt in prompts]
    for used, drafter in drafters:
        for prompt, text in zip(prompts, expected):
            encoded.update(dict.fromkeys(encoded, 0))
            assert verify.generate(target, drafter, cascade.proposal, prompt, 9).tokens == text
            once = [1] + [1] * used + [0] * (2 - used)
            assert list(encoded.values()) == once, "the encoder runs once a prompt and model"
            sampled = verify.generate(target, None, verify.no_draft, prompt, 9, temperature=1.0, seed=5)
            out = verify.generate(target, drafter, cascade.proposal, prompt, 9, temperature=1.0, seed=5)
            assert out.tokens == sampled.tokens
            assert verify.generate(target, drafter, cape.chain, prompt, 9).tokens == text
    for hook in hooks:
        hook.remove()
    with pytest.raises(verify.UserError, match="chains only"):
        verify.generate(target, drafters[1][1], partial(cape.cape, gamma=2), prompts[0], 10)
    assert target.encoder_decoder and not target.verifies_trees


def test_every_stage_reads_the_whole_input():
    """A stage's chain is what the stage itself would write, given the prompt in its own encoder."""
    base, prompt = t5(1), [5, 6, 7, 8, 5, 6, 9, 1]
    drafter, wanted = cascade.Cascade([base], [[6]]), plain_t5(base, prompt, 7)
    with torch.inference_mode():
        drafter.source(prompt)
        drafter.begin(shown([0]))
        assert drafter.chain(wanted[0], 6) == (wanted[1:], None)
    assert wanted != plain_t5(base, prompt[:1], 7)


def test_absent_nodes_behind_a_chain_are_no_tree():
    target = cascade.EncoderDecoder(t5())
    with torch.inference_mode():
        target.prefill([5, 6, 7, 1])
        alone = target.forward(torch.tensor([3, 4]), torch.tensor([-1, 0]))
        padded = target.forward(torch.tensor([3, 4, 9, 9]), torch.tensor([-1, 0, -1, -1]))
        torch.testing.assert_close(padded[:2], alone)
        assert target.depth.tolist() == [0, 1, 0, 0]
        for parents in ([-1, 0, 0], [-1, 0, 1, 1], [-1, 0, -1, 1]):
            with pytest.raises(verify.UserError, match="chains only"):
                target.forward(torch.tensor([3] * len(parents)), torch.tensor(parents))


def test_a_long_encoder_input_takes_no_room_from_the_output():
    model = t5()
    target = cascade.EncoderDecoder(model, capacity=10)
    prompt = [5, 6, 7, 8, 9] * 8 + [1]
    assert verify.generate(target, None, verify.no_draft, prompt, 8).tokens == plain_t5(model, prompt, 8)
    assert len(verify.generate(target, None, verify.no_draft, prompt, 99).tokens) == 10


def test_another_encoder_input_empties_the_decoders_cache():
    model = t5()
    target = cascade.EncoderDecoder(model)
    with torch.inference_mode():
        for prompt in ([5, 6, 7, 1], [9, 2, 1], [9, 2, 1]):
            target.encode(prompt)
            for ids in ([0, 3, 4, 5], [0, 3, 8]):
                texts = dict(input_ids=torch.tensor([prompt]), decoder_input_ids=torch.tensor([ids]))
                alone = model(**texts, use_cache=False).logits[0, -1]
                torch.testing.assert_close(target.sync(ids), alone, atol=1e-9, rtol=0)


def test_max_gram_reads_the_encoders_input():
    """A target that copies its input: chains come from the source, though the generation has no match."""
    drafter = cascade.Cascade([], None, 1.0, MaxGram(), vocab=16)
    drafter.source([5, 6, 7, 8, 9, 10])
    drafter.begin(shown([0]))
    assert drafter.chain(6, 3) == ([7, 8, 9], None)


# ---------------------------------------------------------------- K, and mistakes
def test_table_2s_form_is_algorithm_1s_matrix():
    assert cascade.table2([8, 13, 1], 2, True) == [[8, 5, 10], [0, 1, 10], [0, 0, 10]]
    assert cascade.table2((5, 19, 1), 2, True) == [[5, 14, 10], [0, 1, 10], [0, 0, 10]]
    assert cascade.table2([10], 1, True) == [[10, 10], [0, 10]] and cascade.table2([12], 1, False) == [[12]]
    assert cascade.table2([3, 5, 6, 2, 4, 1], 3, False) == [[3, 2, 1], [0, 2, 2], [0, 0, 1]]
    assert cascade.table2([], 0, True) == [[10]]


def test_the_default_is_table_2s_smallest_tuned_row(llama):
    assert cascade.table2(None, 2, True) == cascade.table2([5, 9, 1], 2, True)
    assert cascade.table2(None, 1, False) == [[5]] and cascade.table2(None, 0, True) == [[10]]
    assert cascade.table2(None, 3, False) == cascade.table2([5, 9, 13, 1, 2, 1], 3, False)
    assert cascade.Cascade([llama, llama], gram=MaxGram()).K == [[5, 4, 10], [0, 1, 10], [0, 0, 10]]
    assert cascade.Cascade([llama]).K == [[5]]


@pytest.mark.parametrize("call, words", [
    (lambda m: cascade.table2([8, 13], 2, True), "take 3 number"),
    (lambda m: cascade.table2([8], 0, True), "take 0 number"),
    (lambda m: cascade.table2([8, 5, 1], 2, True), "never falls"),
    (lambda m: cascade.Cascade([m], [[3, 1], [1, 1]], 1.0, MaxGram()), "not upper triangular"),
    (lambda m: cascade.Cascade([m], [[3, 1], [0, 1]]), "take a matrix of 1 x 1"),
    (lambda m: cascade.Cascade([m], [[0]]), "must be given something"),
    (lambda m: cascade.Cascade([m], [[3]], 0.5), "at least 1"),
    (lambda m: cascade.Cascade([m], [[3]], float("nan")), "at least 1"),
    (lambda m: cascade.Cascade([]), "without any stage"),
])
def test_a_mistake_is_one_sentence(llama, call, words):
    with pytest.raises(verify.UserError, match=words) as caught:
        call(llama)
    assert "\n" not in str(caught.value)


def test_the_demo_shows_both_cascades(capsys):
    """(Alone in an empty folder it runs in test_house.py.)"""
    cascade.main()
    assert capsys.readouterr().out.count("SWI") == 2
