"""A drafter beside Max-Gram, against the mixture in Python floats and plain decoding; how far its predictions are trusted."""
import math
import random
from types import SimpleNamespace

import pytest
import torch
from conftest import plain, random_drafter, shared, target_of
from test_maxgram import brute_force

import cape
import pct
import verify
from beyond import graft, priced, running
from beyond.graft import Beside
from maxgram import MaxGram
from runtime import grams, stage

class Paths:
    """A drafter with logits of its own after each path; some rows are -inf, and all are asked for once."""
    needs, temperature, vocab = {"hidden": (1,)}, 0.7, 5

    def reset(self):
        self.kept = []

    def begin(self, view):
        self.paths = []

    def keep(self, path):
        self.kept = path

    def expand(self, tokens, parents):
        for token, parent in zip(tokens.tolist(), parents):
            self.paths.append((self.paths[parent] if parent >= 0 else ()) + (token,))
        return torch.stack([self.row(path) for path in self.paths[-len(parents):]])

    def row(self, path):
        rng = random.Random(hash(path))
        row = [-math.inf if rng.random() < 0.2 else rng.gauss(0, 2) for _ in range(self.vocab)]
        return torch.tensor([-math.inf] * 5 if rng.random() < 0.2 else row, dtype=torch.float64)

def by_hand(row, heard, confidence, agreement):
    """The row of probabilities with Max-Gram's word mixed in, on Python floats.  heard: (tokens, lengths) of one proposal."""
    row = [math.exp(x / Paths.temperature) for x in row.tolist()]
    if not heard[0] or heard[1][0] < 2:
        return [x / max(sum(row), 1e-300) for x in row]
    (word, *_), (length, *_) = heard
    w, agreement = confidence[min(length, len(confidence) - 1)], agreement if sum(row) else None
    row = [x / sum(row) for x in row] if sum(row) else [0.2] * 5
    if agreement:
        p, (a, b, c) = min(max(row[word], 1e-6), 1 - 1e-6), agreement
        rho = 1 / (1 + math.exp(-(a + b * min(length, 8) + c * math.log(p / (1 - p)))))
        w = max(0, (rho - p) / (1 - p))
    return [(1 - w) * x + w * (i == word) for i, x in enumerate(row)]

def test_rows_are_mixtures_and_suggestions_are_proposals_of_one():
    """Whatever tree is asked about, in whatever steps; where the drafter cannot go on, the rest is uniform."""
    rng, mixed = random.Random(0), 0
    for _ in range(150):
        text, confidence = [rng.randrange(5) for _ in range(rng.randint(1, 40))] * rng.choice([1, 2]), [rng.choice([0, rng.random(), 1]) for _ in range(4)]
        agreement = rng.choice([None, (rng.uniform(-2, 2), rng.random(), rng.random())])
        both = Beside(Paths(), MaxGram([1] * 5, confidence), agreement)
        both.begin(SimpleNamespace(tokens=torch.tensor(text)))
        assert both.needs == Paths.needs and both.temperature == 0.7
        paths = []
        for _ in range(rng.randint(1, 4)):
            tokens = [rng.randrange(5) for _ in range(rng.randint(1, 4))]
            parents = [rng.randint(-1, len(paths) - 1 + i) if paths or i else -1 for i in range(len(tokens))]
            for token, parent in zip(tokens, parents):
                paths.append((paths[parent] if parent >= 0 else ()) + (token,))
            p = verify.Greedy().probs(both.expand(torch.tensor(tokens), parents), both.temperature).nan_to_num(0)
            for row, path in zip(p, paths[-len(tokens):]):
                heard = brute_force(text, path, 1, bigram=[1] * 5)
                expected = by_hand(both.drafter.row(path), heard, confidence, agreement)
                assert row.tolist() == pytest.approx(expected, abs=1e-9)
                mixed += heard[1][:1] >= [2]
        assert both.drafter.paths == paths, "the drafter reads each node once"
        one = [brute_force(text, path, 1, bigram=[1] * 5) for path in paths]
        assert both.predicted == [tokens[0] if tokens and lengths[0] >= 2 else None for tokens, lengths in one]
        # Behind a token below the committed text, or below a node
        parent, most, match, chain, sure = rng.randint(-1, len(paths) - 1), rng.randint(0, 12), rng.randint(0, 3), [], []
        start = [*(paths[parent] if parent >= 0 else ()), 3]
        while len(chain) < most and (said := brute_force(text, start + chain, 1, bigram=[1] * 5))[1][:1] >= [match]:
            chain += said[0]
            sure.append(confidence[min(said[1][0], len(confidence) - 1)])
        assert both.suggest(3, parent, most, match) == (chain, sure)
        both.keep([0])
        assert both.drafter.kept == [0]
    assert mixed > 300

def test_half_precision_and_large_steps_stay_finite():
    """A word that the drafter all but excludes; a match that is always right."""
    for dtype in (torch.bfloat16, torch.float32):
        drafter = SimpleNamespace(needs={}, reset=int, begin=int, expand=lambda tokens, parents: torch.tensor([[0, sure, -sure, 0]], dtype=dtype))  # noqa: B023
        for sure, agreement, confidence, low, high in ((300.0, None, [0.5], 0.49, 0.51), (300, None, [1], 1, 1), (300, None, [0], 0, 0),
                                                       (300, (0, 1, 0.1), [0], 0.6, 0.7), (-300, (0, 1, 0.1), [0], 1, 1)):
            both = Beside(drafter, MaxGram(confidence=confidence), agreement)
            both.gram.commit([0, 1, 2, 0])
            p = (row := both.expand(torch.tensor([1]), [-1])).float().softmax(-1)[0]
            assert row.dtype == dtype and low <= p[2] <= high and p.sum().item() == pytest.approx(1)

@torch.inference_mode()
@pytest.mark.parametrize("name", ["glide", "vanilla", "edd", "vdm", "medusa", "eagle", "a language model"])
def test_a_drafter_that_was_not_asked_reads_what_it_missed_at_once(name):
    """Three rounds of four draft nothing: the predictions are those of a drafter that reads every round."""
    model, found = shared("llama"), []
    for wrap in (lambda drafter: Beside(drafter, MaxGram(confidence=[0])), lambda drafter: drafter):
        inner = stage.Stage(target_of(model)) if name == "a language model" else random_drafter(model, name)
        rows, begun, rounds = [], [], iter(range(99))
        begin, expand = inner.begin, inner.expand
        inner.begin = lambda view: begun.append(view) or begin(view)                                       # noqa: B023
        inner.expand = lambda *given: rows.append(expand(*given)) or rows[-1]                              # noqa: B023
        build = lambda *given: (verify.root_only if next(rounds) % 4 else cape.chain)(*given)              # noqa: B023, E731
        out = verify.generate(target_of(model), wrap(inner), build, [3, 1, 4, 1, 5], 25)
        assert out.tokens == plain(model, [3, 1, 4, 1, 5], 25)
        found.append((torch.cat(rows), len(begun)))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-4, atol=1e-5)
    assert found[0][1] < found[1][1] / 2

@torch.inference_mode()
def test_tokens_are_read_before_the_forward_and_announced_ones_not_at_all(monkeypatch):
    """Afterwards the host would wait for the device.  What a view has as a list is not read either."""
    model, events, ints = shared("llama"), [], graft.ints
    target, prompt = target_of(model), [3, 1, 4, 1, 5, 3, 1, 4, 1]
    both = Beside(random_drafter(model, "edd"), MaxGram(confidence=[0.2, 0.3, 0.9]))
    own = both.drafter.expand
    both.drafter.expand = lambda tokens, parents: events.append("forward") or own(tokens, parents)
    monkeypatch.setattr(graft, "ints", lambda tokens: events.append("read") or ints(tokens))
    monkeypatch.setattr(both.gram, "commit", lambda ids, commit=both.gram.commit: commit(ids) if isinstance(ids, list) else pytest.fail("read"))
    for build, reads in ((pct.pct, True), (priced.pct_cost, False), (graft.graft, False)):
        events.clear()
        verify.generate(target, both, build, prompt, 12)
        assert len(events) > 5 and events[-1] == "forward" and ("read" in events) == reads, build.__name__
    events.clear()
    both.begin(target.view(3)._replace(ids=[]))
    both.expand(torch.tensor([3]), [-1])
    both.expand(both.announce([3], [0], "cpu"), [0])
    both.expand(torch.tensor([3]), [1])
    assert events == ["forward", "forward", "read", "forward"], "announced once, for one forward"

# ---------------------------------------------------------------- how far the words can be trusted
def test_judged_words_by_a_replay_of_the_text():
    """Each word along the target's text as long as those before it in its round were right; p by a fresh drafter."""
    model = shared("llama")
    target, prompts, expected = target_of(model), [[3, 1, 4, 1, 5, 3, 1, 4], [2, 7, 2, 7, 2, 7, 2]], []
    drafter, fresh = random_drafter(model, "vanilla"), random_drafter(model, "vanilla")
    drafter.temperature = 1.5
    judged = grams.judged_words(target, drafter, MaxGram(), prompts, 25)
    for prompt in prompts:
        text, at = prompt + plain(model, prompt, 25), len(prompt)        # text[at]: the root
        while at + 1 < len(text):
            start, right = at, True
            while right and at - start < 11 and at + 1 < len(text):
                said, lengths = brute_force(text[:start], text[start:at + 1], 1)
                at += 1
                if not said or lengths[0] < 2:
                    break
                right = said[0] == text[at]
                fresh.reset()
                fresh.begin(verify.View(torch.tensor(text[:start]), start, {}, {}))
                row = fresh.expand(torch.tensor(text[start:at]), list(range(-1, at - start - 1)))[-1]
                expected.append((lengths[0], (row / 1.5).softmax(-1)[said[0]].item(), right))
    assert [(length, right) for length, _, right in judged] == [(length, right) for length, _, right in expected]
    assert [p for _, p, _ in judged] == pytest.approx([p for _, p, _ in expected], rel=1e-4)
    assert len(judged) > 5 and {right for *_, right in judged} == {True, False}

# ---------------------------------------------------------------- a temperature that follows the text
def newton(rounds, t):
    """The docstring's table on Python floats: [(rows, the target's token after each)] of each round -> log T after all."""
    information, log_t = running.PRIOR, math.log(t)
    for rows, following in rounds:
        step = 0.0
        for row, token in zip(rows, following):
            z = [x / math.exp(log_t) for x in row if x > -math.inf]
            if not z:
                continue
            p = [math.exp(x) / sum(map(math.exp, z)) for x in z]
            c = max(p)
            y = float(row.index(max(row)) == token)
            slope = c * (sum(a * b for a, b in zip(p, z)) - max(z))
            information += slope ** 2 / max(c * (1 - c), 1e-4)
            step += slope * (y - c) / max(c * (1 - c), 1e-4)
        log_t = min(max(log_t + step / information, math.log(0.3)), math.log(3))
    return math.exp(log_t)

def test_the_running_temperature_is_newtons_of_the_accepted_nodes():
    """Decoding by trees: each accepted node is judged by the target's token after it, the last one by the next root."""
    model = shared("llama")
    for name, build in (("edd", pct.pct), ("medusa", graft.graft), ("vanilla", cape.chain)):
        target, prompt, inner, rounds = target_of(model), [3, 1, 4, 1, 5], random_drafter(model, name), []
        inner.temperature = 0.8
        drafter, given = running.Running(inner), []
        own, keep = inner.expand, inner.keep
        inner.expand = lambda tokens, parents: given.append(own(tokens, parents)) or given[-1]             # noqa: B023
        inner.keep = lambda path: rounds.append(torch.cat(given)[path].tolist() if path else []) or given.clear() or keep(path)  # noqa: B023
        out = verify.generate(target, drafter, build, prompt, 20)
        assert out.tokens == plain(model, prompt, 20)
        # A round is judged when the next one shows its root to the drafter; the last round never is.
        judged = [(rows, one.new) for rows, one, after in zip(rounds, out.rounds, rounds[1:]) if after]
        assert float(drafter.temperature) == pytest.approx(newton(judged, 0.8), rel=1e-4)
        assert drafter.temperature != 0.8 and drafter.needs is inner.needs
        drafter.reset()
        assert drafter.temperature == 0.8

def test_agreement_finds_the_logistic_that_made_the_words():
    rng, judged = random.Random(0), []
    for _ in range(20000):
        length, p = rng.randint(2, 12), rng.random()
        judged.append((length, p, rng.random() < 1 / (1 + math.exp(1 - 0.4 * min(length, 8) - 0.5 * math.log(p / (1 - p))))))
    found = grams.fit_agreement(judged, lambda length: 0.3)
    assert found["weights"] == pytest.approx([-1, 0.4, 0.5], abs=0.1) and found["words"] == 20000
    assert found["log_loss"] < found["plain"]["log_loss"] and found["ece"] < 0.05 < found["plain"]["ece"]
    # at 0.9 one of two was right, at 0.25 none of one: (2 |0.9 - 0.5| + |0.25 - 0|) / 3
    p, y = torch.tensor([[0.9, 0.9, 0.25], [1, 0, 0]], dtype=torch.float64)
    loss = -(math.log(0.9) + math.log(0.1) + math.log(0.75)) / 3
    assert grams.scores(p, y) == pytest.approx({"ece": 0.35, "log_loss": loss}, abs=1e-4)
