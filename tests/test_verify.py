"""Lossless for every drafter x tree; the tree's logits, the cache, the sampling rules against independent oracles."""
import math
from functools import partial

import pytest
import torch
import transformers
from conftest import CONTEXT, VOCAB, plain, tiny
from test_edd import random_edd
from test_glide import random_drafter

import cape
import edd
import pct
import verify

class Seen(verify.Output):
    """An Output that remembers what it was told: (new, path, parents) of each round."""

    def __init__(self):
        super().__init__()
        self.told = []

    def round(self, new, path, parents, p_target=None, p_draft=None):
        super().round(new, path, parents, p_target, p_draft)
        self.told.append((new, path, parents))


BUILDS = {"chain": cape.chain, "cape": cape.cape, "fixed": partial(cape.fixed, size=2), "beam": partial(cape.beam, width=3),
          "pct": partial(pct.pct, cost=0.05, depth=5), "vct": partial(pct.vct, width=2, depth=5), "eagle2": partial(pct.eagle2, total=15, depth=5, expanded=4)}


class HandMade:
    """A drafter that knows the plain output and is right at each position with probability `rate`."""
    needs = {}

    def __init__(self, text, rate):
        self.text, self.rate = text, rate

    def reset(self):
        pass

    def begin(self, view):
        self.t, self.depth = view.length, []

    def keep(self, path):
        """Its own nodes, root first; none where nobody asked."""
        assert path == sorted(set(path)) and path[:1] == list(range(min(1, len(self.depth))))
        assert all(node < len(self.depth) for node in path)

    def expand(self, tokens, parents):
        rows = torch.full((len(parents), VOCAB), 0.1 / VOCAB, dtype=torch.float64)
        for row, parent in zip(rows, parents):
            self.depth.append(self.depth[parent] + 1 if parent >= 0 else 0)
            at = self.t + self.depth[-1] + 1
            truth = self.text[at] if at < len(self.text) else 0
            right = torch.rand(1, generator=torch.Generator().manual_seed(at)).item() < self.rate
            row[truth if right else (truth + 1) % VOCAB] += 0.9
            if not right:
                row[truth] = 0                       # never right: not even among the extras
        return (rows / rows.sum(1, keepdim=True)).log()


def drafters(model, text):
    yield "glide", random_drafter(model, 1)
    yield "glide, two layers", random_drafter(model, 2)
    yield "vanilla", random_drafter(model, 1, glimpse=False)
    yield "edd", edd.Drafter(random_edd(model))
    yield "vdm", edd.Drafter(random_edd(model, encoding=False))
    yield "eagle", edd.EagleDrafter(random_edd(model, **edd.VARIANTS["eagle"]))
    yield "medusa", edd.MedusaDrafter(random_edd(model, **edd.VARIANTS["medusa"]))
    for name, rate in (("always right", 1.0), ("never right", 0.0), ("half right", 0.5)):
        yield name, HandMade(text, rate)


@pytest.mark.parametrize("length", [1, 11, CONTEXT - 3, CONTEXT])
def test_greedy_output_is_plain_decoding(model, length):
    prompt = torch.randint(VOCAB, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    new = min(14, CONTEXT - length + 1)
    expected = plain(model, prompt, new)
    target = verify.Target(model)
    for build in (verify.no_draft, verify.no_draft_padded):
        out = verify.generate(target, None, build, prompt, 14)
        assert out.tokens == expected and len(out.runs) == new - 1, "the baseline: one token a forward, padded or not"
    for name, drafter in drafters(model, prompt + expected):
        for tree, build in BUILDS.items():
            out = verify.generate(target, drafter, build, prompt, 14, out=Seen())
            assert out.tokens == expected, f"{name} x {tree}"
            assert sum(out.runs) == new - 1 and [len(told[0]) for told in out.told] == out.runs
            if name == "always right":
                assert len(out.runs) == math.ceil((new - 1) / 6)
            if name == "never right":
                assert len(out.runs) == new - 1 and all(path == [0] for _, path, _ in out.told)
    assert target.ids == (prompt + expected)[:len(target.ids)], "the cache holds the output and nothing else"


def random_tree(n, seed):
    g = torch.Generator().manual_seed(seed)
    parents = [-1] + [int(torch.randint(i, (1,), generator=g)) for i in range(1, n)]
    return torch.randint(VOCAB, (n,), generator=g), parents


def path_to(node, parents):
    path = [node]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    return path


def test_ancestor_mask_against_walking_up():
    for seed in range(30):
        _, parents = random_tree(1 + seed, seed)
        mask = verify.ancestor_mask(torch.tensor(parents))
        for i in range(len(parents)):
            assert mask[i].nonzero().flatten().tolist() == sorted(path_to(i, parents))


def test_tree_logits_and_commit_equal_each_path_alone(model):
    """Every node of a random tree sees its own path and nothing else; a committed path leaves the cache of a fresh prefill."""
    prompt = torch.randint(VOCAB, (10,), generator=torch.Generator().manual_seed(1)).tolist()
    for seed in range(6):
        tokens, parents = random_tree(14, seed)
        target = verify.Target(model)
        target.watch({"hidden": [1, 2]})
        with torch.inference_mode():
            target.sync(prompt)
            logits = target.forward(tokens, torch.tensor(parents))
            for node in range(14):
                path = path_to(node, parents)
                alone = model(torch.tensor([prompt + tokens[path].tolist()]), use_cache=False).logits[0, -1]
                torch.testing.assert_close(logits[node], alone, atol=2e-5, rtol=1e-4)
            path = max((path_to(i, parents) for i in range(14)), key=len)
            text = prompt + tokens[path].tolist()
            target.commit(path, tokens[path].tolist())
            fresh = verify.Target(model)
            fresh.sync(text)
            n = len(text)
            assert target.ids == text and target.cache.length == n
            assert len(target.cache.keys) == len(target.cache.values) == 3
            for kept, whole in ((target.cache.keys, fresh.cache.keys), (target.cache.values, fresh.cache.values)):
                for layer, rows in kept.items():
                    torch.testing.assert_close(rows[:, :, :n], whole[layer][:, :, :n], atol=2e-5, rtol=1e-4)
            # hidden states: rows of what was committed, as the library numbers them
            states = model(torch.tensor([text]), use_cache=False, output_hidden_states=True).hidden_states
            view = target.view()
            assert view.tokens.tolist() == text and view.length == n
            for k in (1, 2):
                torch.testing.assert_close(view.hidden[k], states[k][0], atol=2e-5, rtol=1e-4)
            more, upper = random_tree(5, seed + 100)
            torch.testing.assert_close(target.forward(more, torch.tensor(upper)), fresh.forward(more, torch.tensor(upper)), atol=2e-5, rtol=1e-4)


def test_sync_keeps_the_common_prefix(model):
    target, shown = verify.Target(model), []
    with torch.inference_mode():
        for ids in ([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6], [1, 2, 3, 9], [1, 2], [5], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11],
                    [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11] * 3):              # the last is longer than what the cache had room for
            logits = target.sync(ids)
            torch.testing.assert_close(logits, model(torch.tensor([ids]), use_cache=False).logits[0, -1], atol=2e-5, rtol=1e-4)
            assert target.ids == ids and target.cache.length == len(ids)
            view = target.view()                                # what a drafter is shown adds up, rolled back or not
            shown = shown[:view.length - len(view.tokens)] + view.tokens.tolist()
            assert shown == ids and view.length == len(ids)


def test_hidden_states_cost_nothing_unasked(llama):
    target = verify.Target(llama)
    target.watch({"hidden": [2]})
    assert sum(len(m._forward_hooks) for m in llama.modules()) == 1
    verify.generate(target, random_drafter(llama), cape.cape, [1, 2, 3], 5)
    assert sum(len(m._forward_hooks) for m in llama.modules()) == 0


def test_eos_and_the_length_limit_inside_an_accepted_path(llama):
    prompt = [3, 1, 4]
    expected = plain(llama, prompt, 24)
    drafter = HandMade(prompt + expected, 1.0)
    target = verify.Target(llama)
    for eos in set(expected):
        end = expected.index(eos) + 1
        for build in (cape.chain, cape.cape, cape.beam):
            assert verify.generate(target, drafter, build, prompt, 24, eos_token_id=eos).tokens == expected[:end]
    for limit in range(1, 16):
        out = verify.generate(target, drafter, cape.chain, prompt, limit, out=Seen())
        assert out.tokens == expected[:limit]
        # No node is verified that the limit forbids: a tree is never deeper than what may still follow its root.
        at = 1
        for new, _, parents in out.told:
            assert len(parents) - 1 <= max(0, limit - at - 1)
            at += len(new)


def test_a_builder_that_asks_nobody_is_cut_at_the_limit(llama):
    """The demo's oracle: what is true goes on beyond the limit, and the output does not."""
    prompt = [3, 1, 4]
    expected = plain(llama, prompt, 24)
    target = verify.Target(llama)

    def oracle(expand, root):
        at = target.cache.length - len(prompt) + 1
        return verify.Tree(torch.cat((root, torch.tensor(expected[at:at + 5]))), torch.arange(-1, 5))
    for limit in range(1, 14):
        out = verify.generate(target, None, oracle, prompt, limit)
        assert out.tokens == expected[:limit] and sum(out.runs) == limit - 1


def test_what_a_builder_sees_at_the_limit_and_in_sampling(llama):
    """Rows of nodes as deep as there is room are zeros, also beside shallower ones; sampled rows are the warped ones."""
    seen = []

    def build(expand, root):
        tokens = torch.cat((root, torch.tensor([1, 2, 3])))
        seen.append((expand.room, expand(tokens, [-1, 0, 1, 0])))
        return verify.Tree(root, torch.tensor([-1]))
    target, drafter = verify.Target(llama), random_drafter(llama)
    verify.generate(target, drafter, build, [1, 2], 5)
    for room, rows in seen:
        assert rows.sum(1).round(decimals=5).tolist() == [float(depth < room) for depth in (0, 1, 2, 1)]
    assert [room for room, _ in seen] == [3, 2, 1, 0]
    del seen[:]
    verify.generate(target, drafter, build, [1, 2], 4, temperature=0.7, top_k=3)
    assert (seen[0][1][0] > 0).sum() == 3


def test_the_warper_is_temperature_then_top_k_then_top_p():
    """Written out: logits / T, the k largest, then the fewest that hold the share top_p, normalised at each step."""
    logits = torch.randn(5, 9, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    for temperature, k, share in ((0.6, None, None), (1.0, 4, None), (0.5, None, 0.7), (1.7, 5, 0.8), (0.3, 2, 0.95)):
        for row, warped in zip(logits, verify.warper(temperature, k, share)(logits)):
            p = dict(enumerate((row / temperature).softmax(-1).tolist()))
            best = sorted(p, key=p.get, reverse=True)[:k]
            total = sum(p[token] for token in best)
            if share:
                held = [sum(p[token] for token in best[:n]) / total for n in range(len(best))]
                best = [token for token, before in zip(best, held) if before < share]
                total = sum(p[token] for token in best)
            expected = torch.tensor([p[token] / total if token in best else 0.0 for token in range(9)], dtype=torch.float64)
            torch.testing.assert_close(warped, expected)


def test_a_zero_row_is_never_followed(llama):
    """A padded or dead cell becomes token 0 elsewhere and is accepted (Medusa): here plain decoding must come out."""
    class Dead(HandMade):
        def expand(self, tokens, parents):
            return super().expand(tokens, parents) - float("inf")
    expected = plain(llama, [0, 0, 0], 12)
    for build in BUILDS.values():
        out = verify.generate(verify.Target(llama), Dead([], 0.0), build, [0, 0, 0], 12, out=Seen())
        assert out.tokens == expected and all(parents == [-1] for _, _, parents in out.told)


# ---------------------------------------------------------------- sampling
@pytest.mark.parametrize("how", [{"temperature": 0.5}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 4},
                                 {"temperature": 0.5, "top_p": 0.8}, {"temperature": 1.3, "top_k": 6, "top_p": 0.9}])
def test_sampling_over_any_tree_is_plain_sampling_with_the_same_seed(model, how):
    target = verify.Target(model)
    drafter = random_drafter(model)
    differ = set()
    for seed in range(3):
        expected = verify.generate(target, None, verify.no_draft, [1, 2, 3], 10, seed=seed, **how).tokens
        differ.add(tuple(expected))
        for tree in ("chain", "cape", "pct"):                  # test_random.py draws all others
            out = verify.generate(target, drafter, BUILDS[tree], [1, 2, 3], 10, seed=seed, **how)
            assert out.tokens == expected, tree
    assert len(differ) > 1, "the seed matters"


def chi_square_p(counts, expected):
    """Upper tail of Pearson's statistic; cells that expect under 5 are pooled."""
    small = expected < 5
    counts = torch.cat((counts[~small], counts[small].sum()[None]))
    expected = torch.cat((expected[~small], expected[small].sum()[None]))
    counts, expected = counts[expected > 0], expected[expected > 0]
    x = ((counts - expected) ** 2 / expected).sum()
    return torch.special.gammaincc(torch.tensor((len(counts) - 1) / 2, dtype=torch.float64), x / 2).item()


def test_sampled_text_follows_the_target():
    """Three sampled tokens over a vocabulary of 5 against all 125 probabilities.  False-alarm odds: one in a million.

    (Plain sampling, which trees equal token for token; what follows from drawn chains is in test_drawn.py.)
    """
    model = tiny("llama", vocab_size=5, num_hidden_layers=1)
    prompt, n, warp = [1, 2], 1500, verify.warper(0.8, top_k=4)
    exact = {}
    with torch.no_grad():
        for a in range(5):
            for b in range(5):
                rows = warp(model(torch.tensor([prompt + [a, b]]), use_cache=False).logits[0, 1:])
                for c in range(5):
                    exact[a, b, c] = (rows[0, a] * rows[1, b] * rows[2, c]).item()
    assert abs(sum(exact.values()) - 1) < 1e-6
    target, counts = verify.Target(model), dict.fromkeys(exact, 0)
    for seed in range(n):
        out = verify.generate(target, None, verify.no_draft, prompt, 3, temperature=0.8, top_k=4, seed=seed)
        counts[tuple(out.tokens)] += 1
    p = chi_square_p(torch.tensor([float(v) for v in counts.values()]), torch.tensor(list(exact.values())) * n)
    assert p > 1e-6, p


def test_twins_and_absent_nodes():
    """Of twins the first counts; a node with parent -1 is not there, wherever it lies in the tree."""
    assert verify.accept([7, 3, 3, 5], [-1, 0, 0, 1], [3, 5, 9, 4]) == ([0, 1, 3], [3, 5, 4])
    tree = verify.without_absent(verify.Tree(torch.tensor([7, 1, 2, 3]), torch.tensor([-1, -1, 0, 2])))
    assert (tree.tokens.tolist(), tree.parents.tolist()) == ([7, 2, 3], [-1, 0, 1])
    sure = torch.eye(4)[[1, 1, 1]]                              # target and drafter are certain of token 1
    tree = verify.Tree(torch.tensor([0, 1, 1]), torch.tensor([-1, 0, -1]), sure[:2])
    assert verify.accept_drawn(tree, sure, torch.Generator().manual_seed(0))[:2] == ([0, 1], [1, 1])


def test_a_drafter_keeps_all_that_was_accepted(llama):
    kept = []
    drafter = HandMade([3, 1, 4] + plain(llama, [3, 1, 4], 24), 1.0)
    drafter.keep = kept.append
    verify.generate(verify.Target(llama), drafter, cape.chain, [3, 1, 4], 19)
    assert kept == [[0, 1, 2, 3, 4]] * 3, "five nodes were asked for their children, root first"


def test_drawn_chain_acceptance_follows_the_target():
    """accept_drawn on fixed random tables, 8000 times: first token, and the token after an accepted one.  Odds as above."""
    g = torch.Generator().manual_seed(7)
    p_target = torch.rand(3, 6, generator=g, dtype=torch.float64) ** 3
    p_draft = torch.rand(2, 6, generator=g, dtype=torch.float64) ** 3
    p_target, p_draft = p_target / p_target.sum(1, keepdim=True), p_draft / p_draft.sum(1, keepdim=True)
    n, first, accepted = 8000, torch.zeros(6), 0
    for _ in range(n):
        drawn = torch.multinomial(p_draft, 1, generator=g)[:, 0]
        tree = verify.Tree(torch.cat((torch.tensor([0]), drawn)), torch.arange(-1, 2), p_draft)
        path, new, *_ = verify.accept_drawn(tree, p_target, g)
        assert new[:-1] == drawn[:len(path) - 1].tolist() and path == list(range(len(new)))
        first[new[0]] += 1
        accepted += len(path) > 1
    assert chi_square_p(first, p_target[0] * n) > 1e-6
    alpha = torch.minimum(p_target[0], p_draft[0]).sum().item()        # sum_x min(p_T, p_D)
    assert abs(accepted / n - alpha) < 5 * math.sqrt(alpha * (1 - alpha) / n)


def test_the_threshold_and_the_residual_of_a_drawn_token_to_rounding(monkeypatch):
    """min(1, p_target / p_draft) by draws on either side of it; what is drawn after a rejection by its weights, no statistics."""
    p_target, p_draft = torch.rand(2, 40, 6, generator=torch.Generator().manual_seed(8), dtype=torch.float64) ** 3
    p_target, p_draft = p_target / p_target.sum(1, keepdim=True), p_draft / p_draft.sum(1, keepdim=True)
    after, weights, sides = torch.full((1, 6), 1 / 6, dtype=torch.float64), [], 0

    def multinomial(row, count, generator):
        weights.append(row)
        return torch.tensor([0])
    monkeypatch.setattr(torch, "multinomial", multinomial)
    for p, q in zip(p_target, p_draft):
        for x in range(6):
            tree = verify.Tree(torch.tensor([0, x]), torch.tensor([-1, 0]), q[None])
            ratio = (p[x] / q[x]).item()
            for u in (ratio - 1e-9, ratio + 1e-9, 1 - 1e-9):
                if not 0 <= u < 1:
                    continue
                monkeypatch.setattr(torch, "rand", lambda shape, u=u, **_: torch.full(shape, u, dtype=torch.float64))
                path, _, *_ = verify.accept_drawn(tree, torch.cat((p[None], after)), None)
                assert path == ([0, 1] if u < ratio else [0]), (u, ratio)
                expected = after[0] if u < ratio else (p - q).clamp(min=0)
                torch.testing.assert_close(weights[-1] / weights[-1].sum(), expected / expected.sum())
                sides += 1
    assert sides > 300


# ---------------------------------------------------------------- targets that prove themselves
def sized(name, **more):
    """A tiny model of a class of transformers', by the sizes that its configuration knows, in float64."""
    config = getattr(transformers, name).config_class
    sizes = dict(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
                 max_position_embeddings=CONTEXT, bos_token_id=None, eos_token_id=None, pad_token_id=None)
    torch.manual_seed(0)
    model = getattr(transformers, name)(config(**{**sizes, **more})).double().eval()
    for p in model.parameters():
        if p.ndim == 2:
            torch.nn.init.normal_(p, std=0.25)
    return model


CHAINS_ONLY = {
    "BartForCausalLM": dict(d_model=32, decoder_layers=2, decoder_attention_heads=4, decoder_ffn_dim=48),        # positions by the cache
    "BloomForCausalLM": dict(n_layer=2, n_head=4),                                                               # ALiBi
    "MptForCausalLM": dict(d_model=32, n_layers=2, n_heads=4, max_seq_len=CONTEXT),
    "GPTNeoForCausalLM": dict(num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]], window_size=9),   # a window of its own
}


@pytest.mark.parametrize("name", CHAINS_ONLY)
def test_a_target_that_honours_no_tree_takes_chains(name):
    model = sized(name, **CHAINS_ONLY[name])
    target, prompt = verify.Target(model), [1, 2, 3, 4, 5, 6, 7]
    expected = plain(model, prompt, 20)
    assert not target.verifies_trees
    for rate in (0.0, 0.5, 1.0):
        drafter = HandMade(prompt + expected, rate)
        assert verify.generate(target, drafter, cape.chain, prompt, 20).tokens == expected
    with pytest.raises(verify.UserError, match=f"{name} verifies chains only.*--tree chain"):
        verify.generate(target, drafter, cape.cape, prompt, 20)


@pytest.mark.parametrize("name, more", [("BertLMHeadModel", {}), ("RobertaForCausalLM", {}), ("ElectraForCausalLM", {"embedding_size": 32}),
                                        ("RwkvForCausalLM", {"attention_hidden_size": 32, "context_length": CONTEXT})])
def test_a_target_that_decodes_otherwise_with_a_cache_is_refused(name, more):
    """Encoders with a language model's head see what comes later; a recurrent state is no key and no value."""
    with pytest.raises(verify.UserError, match=f"{name} does not decode with a KV cache") as caught:
        verify.Target(sized(name, **more))
    assert "\n" not in str(caught.value)


def test_an_encoder_that_was_made_a_decoder_is_served():
    assert verify.Target(sized("BertLMHeadModel", is_decoder=True)).verifies_trees


@pytest.mark.parametrize("name, more, places", [
    ("RobertaForCausalLM", {"is_decoder": True, "pad_token_id": 1}, CONTEXT - 2),          # RoBERTa numbers from the padding token's id + 1
    ("MptForCausalLM", {**CHAINS_ONLY["MptForCausalLM"], "max_seq_len": 33, "max_position_embeddings": None}, 33), ("LlamaForCausalLM", {}, CONTEXT)])
def test_the_context_is_as_long_as_the_model_can_read(name, more, places):
    model = sized(name, **more)
    target, prompt = verify.Target(model), [5] * (places - 3)
    assert target.context == places
    out = verify.generate(target, None, verify.no_draft, prompt, 20)
    assert out.tokens == plain(model, prompt, 4), "the last token need not be read"
    with pytest.raises(verify.UserError, match=f"context holds {places}"):
        verify.generate(target, None, verify.no_draft, [5] * (places + 1), 1)


def test_the_proof_looks_beyond_the_window_of_each_kind_of_layer_and_leaves_no_trace(monkeypatch):
    model = tiny("qwen2-mixed", sliding_window=30)
    before = {name: value for name, value in vars(model.config).items()}
    assert verify.Target(model).verifies_trees and vars(model.config) == before and verify.Target(model).windows["sliding_attention"] == 30
    right = verify.tree_mask
    monkeypatch.setattr(verify, "tree_mask", lambda seen, cached, window=None, dtype=None: right(seen, cached, None, dtype))
    model = tiny("qwen2-mixed", sliding_window=30)
    # A mask without windows: only chains by the model's own mask are right.
    assert not verify.Target(model).verifies_trees
    assert vars(model.config) == before


def test_a_target_is_proven_once(llama):
    verify.Target(llama)
    calls = []
    hook = llama.register_forward_hook(lambda *_: calls.append(1))
    verify.Target(llama, capacity=7)
    hook.remove()
    assert not calls


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_half_precision_is_no_reason_to_refuse(name, dtype):
    assert verify.Target(tiny(name).to(dtype)).verifies_trees
    wrong = sized("BartForCausalLM", **CHAINS_ONLY["BartForCausalLM"]).to(dtype)
    assert not verify.Target(wrong).verifies_trees


@pytest.fixture(scope="module")
def phi3():
    """Phi-3's longrope: beyond 16 positions all of a text is turned by another table."""
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4, "long_factor": [1.5, 3.0, 5.0, 9.0],
            "original_max_position_embeddings": 16}
    return sized("Phi3ForCausalLM", num_key_value_heads=2, rope_parameters=rope, original_max_position_embeddings=16, max_position_embeddings=64)


def test_rows_of_two_rotary_tables_never_meet_in_a_cache(phi3, monkeypatch):
    """A text that begins below the turning point ends there; one that begins beyond it is read at once, in slices it would differ."""
    target = verify.Target(phi3)
    assert target.turn == 16
    for length in (5, 15, 16):
        prompt = (list(range(1, 6)) * 4)[:length]
        expected = plain(phi3, prompt, 17 - length)
        out = verify.generate(target, HandMade(prompt + expected, 0.6), cape.cape, prompt, 30)
        assert out.tokens == expected, "as many as the first table holds"
    prompt = torch.randint(VOCAB, (40,), generator=torch.Generator().manual_seed(3)).tolist()
    monkeypatch.setattr(verify, "SLICE", 8)
    expected = plain(phi3, prompt, 20)
    assert verify.generate(target, HandMade(prompt + expected, 0.6), cape.cape, prompt, 20).tokens == expected
    target.turn = None
    with torch.inference_mode():
        exact = phi3(torch.tensor([prompt]), use_cache=False).logits[0, -1]
        target.prefill(prompt[:8])
        assert (target.sync(prompt) - exact).abs().max() > 1e-3, "slices would have mixed two tables"


# ---------------------------------------------------------------- mistakes
def test_mistakes_are_named(llama):
    target = verify.Target(llama)
    for prompt, words in (([], "the prompt is empty"), ([1] * (CONTEXT + 1), f"has {CONTEXT + 1} tokens")):
        with pytest.raises(verify.UserError, match=words):
            verify.generate(target, None, verify.no_draft, prompt, 4)
    with pytest.raises(verify.UserError, match="at least 1"):
        verify.generate(target, None, verify.no_draft, [1], 0)
    with pytest.raises(verify.UserError, match="temperature above 0"):
        verify.generate(target, random_drafter(llama), cape.drawn, [1], 4)
    for batch in (torch.ones(2, 3, dtype=torch.long), torch.ones(1, 2, 3, dtype=torch.long)):
        with pytest.raises(verify.UserError, match="one sequence"):
            verify.generate(target, None, verify.no_draft, batch, 4)


def test_builders_see_calibrated_confidence_in_greedy_decoding_alone(llama):
    """At the drafter's temperature: p^(1/T), normalised; rows of zeros stay; sampling is left alone."""
    seen = []

    def build(expand, root):
        seen.append(expand(root, [-1]))
        return verify.Tree(root, torch.tensor([-1]))
    drafter = HandMade([0] * 40, 1.0)
    drafter.temperature = 0.5
    verify.generate(verify.Target(llama), drafter, build, [1, 2], 3)
    drafter.begin(verify.View(None, 2, {}, {}))
    p = drafter.expand(torch.tensor([0]), [-1]).exp().float()
    torch.testing.assert_close(seen[0], p ** 2 / (p ** 2).sum())
    assert not seen[-1].any(), "at the length limit there is still no child"
    verify.generate(verify.Target(llama), drafter, build, [1, 2], 3, temperature=1.0)
    torch.testing.assert_close(seen[2], p)
    drafter.expand, drafter.keep = lambda tokens, parents: torch.full((1, VOCAB), float("-inf")), lambda path: None
    verify.generate(verify.Target(llama), drafter, build, [1, 2], 3)
    assert not seen[-2].any()


def test_drafting_and_accepting_do_not_share_a_random_stream(llama):
    """What draws a draft must not decide its acceptance, whatever the seed; nor does another seed of the other purpose."""
    seeds = {(purpose, seed): verify.stream(seed, purpose).initial_seed() for seed in range(2000) for purpose in ("draft", "accept", 7)}
    assert len(set(seeds.values())) == len(seeds)
    drew = []

    def build(expand, root):
        drew.append((expand.generator.initial_seed(), expand.generator is build.before))
        build.before = expand.generator
        return cape.drawn(expand, root)
    build.before = None
    verify.generate(verify.Target(llama), random_drafter(llama), build, [1, 2], 12, temperature=1.0, seed=5)
    assert {seed for seed, _ in drew} == {seeds["draft", 5]} and all(same for _, same in drew[1:]), "one stream goes on through the rounds"
