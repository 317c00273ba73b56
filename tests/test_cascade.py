"""The cascade: Algorithm 1 against a plain recursion, lossless over every tree, true p_draft, roll-back, FLAN-T5's kind of target."""
from functools import partial

import pytest
import torch
from conftest import CONTEXT, VOCAB, plain, tiny
from transformers import T5Config, T5ForConditionalGeneration

import cape
import cascade
import pct
import verify
from maxgram import MaxGram

BIGRAM = [3, 5, 0, 1, 2, 7, 0, 9, 4, 6, 8, 1]


def relative(model, noise, seed):
    """A model of the same class whose choices mostly agree with `model`'s."""
    torch.manual_seed(seed)
    other = type(model)(model.config).to(model.dtype).eval()
    other.load_state_dict({k: v + noise * torch.randn_like(v) * (v.ndim == 2) for k, v in model.state_dict().items()})
    return other


@pytest.fixture(scope="module")
def models():
    """A target, and a larger and a smaller drafter."""
    target = tiny("llama")
    return target, relative(target, 0.03, 1), relative(target, 0.06, 2)


@torch.no_grad()
def forward(model, ids):
    """A plain forward over everything: no cache -> logits (len(ids), V)."""
    return model(torch.tensor([ids]), use_cache=False).logits[0]


# ---------------------------------------------------------------- Algorithm 1 as the paper means it, on lists and plain forwards
def suffix_match(query, text, n):
    """Max-Gram on lists: longest suffix of `query` in `text` with a following token, leftmost; then again; then the bigram."""
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


def algorithm_1(stages, K, prefix, lenience, committed, runs, level=0):
    """CascadeSpeculativeDraftingStep's drafting part -> [(token, who reviewed it last, its logits)] for the reviewer of row 0 of K.

    stages: models, "gram" last.  committed: what Max-Gram may search.
    """
    gen = []
    for i, stage in enumerate(stages):
        added = 0
        while added < K[0][i]:
            text = prefix + [t for t, _, _ in gen]
            runs[level + i] += 1
            if stage == "gram":
                new = [(t, "gram", None) for t in suffix_match(text, committed, K[0][i])]
                gen, added = gen + new, added + len(new)
                break
            draft = algorithm_1(stages[i + 1:], [row[i + 1:] for row in K[i + 1:]], text, lenience, committed, runs, level + i + 1)
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


KS = [(1, False, [[3]]), (1, True, [[3, 4], [0, 5]]), (1, True, [[1, 10], [0, 10]]), (2, False, [[2, 3], [0, 2]]), (2, True, [[3, 2, 4], [0, 1, 6], [0, 0, 5]]),
      (2, True, [[4, 0, 0], [0, 3, 0], [0, 0, 4]]), (0, True, [[6]])]


@pytest.mark.parametrize("neural, gram, K", KS)
@pytest.mark.parametrize("lenience", [1.0, 3.0])
def test_chain_and_runs_against_a_plain_recursion(models, neural, gram, K, lenience):
    """Tokens, who reviewed them, their distributions and the number of runs, over rounds that commit different amounts."""
    drafter = cascade.Cascade(list(models[1:1 + neural]), K, lenience, MaxGram(BIGRAM) if gram else None, vocab=VOCAB)
    stages = [*models[1:1 + neural], *["gram"] * gram]
    text = torch.randint(VOCAB, (30,), generator=torch.Generator().manual_seed(neural)).tolist()
    text[12:18] = text[3:9]                                        # something to match
    at, seen, runs = 5, 0, [0] * len(stages)
    with torch.inference_mode():
        while at < 22:
            drafter.begin(verify.View(torch.tensor(text[seen:at]), at, {}, {}))
            expected = algorithm_1(stages, K, text[:at + 1], lenience, text[:at], runs)
            gen = drafter.write(text[at], 64)
            assert [d.token for d in gen] == [t for t, _, _ in expected]
            for d, (_, who, logits) in zip(gen, expected):
                assert (d.row is None) == (who == "gram")
                if d.row is not None:
                    torch.testing.assert_close(d.row, logits, atol=1e-9, rtol=0)
            assert drafter.runs == runs
            seen, at = at, at + 1 + at % 4


def test_lenience_matters_and_is_never_max_grams(models):
    K = [[4, 4], [0, 4]]
    text = list(range(6))

    def chain(lenience, stages, gram):
        drafter = cascade.Cascade(stages, K, lenience, gram, vocab=VOCAB)
        with torch.inference_mode():
            drafter.begin(verify.View(torch.tensor(text), 6, {}, {}))
            return [d.token for d in drafter.write(6, 64)]
    wild = tiny("llama", seed=9)
    assert chain(1e9, [models[1], wild], None) != chain(1, [models[1], wild], None), "everything that the small one says is kept"
    assert chain(1e9, [models[1]], MaxGram(BIGRAM)) == chain(1, [models[1]], MaxGram(BIGRAM))


# ---------------------------------------------------------------- lossless
TREES = {"own chain": verify.proposal, "chain": cape.chain, "cape": cape.cape, "beam": partial(cape.beam, width=3), "pct": partial(pct.pct, cost=0.05, depth=6),
         "eagle2": partial(pct.eagle2, total=15, depth=5, expanded=4)}


@pytest.mark.parametrize("neural, gram, K", KS)
def test_output_is_plain_decodings_over_every_tree(models, neural, gram, K):
    target = verify.Target(models[0])
    drafter = cascade.Cascade(list(models[1:1 + neural]), K, 2.0 if neural > 1 else 1.0, MaxGram(BIGRAM) if gram else None, vocab=VOCAB)
    for prompt in ([1], [2, 7, 1, 8], list(range(12)) * 2, [5] * (CONTEXT - 3), [4] * CONTEXT):
        new = min(20, CONTEXT - len(prompt) + 1)
        expected = plain(models[0], prompt, new)
        for name, build in TREES.items():
            out = verify.generate(target, drafter, build, prompt, 20)
            assert out.tokens == expected, name
            assert out.stage_runs == drafter.runs and not out.drawn
        sampled = verify.generate(target, None, verify.no_draft, prompt, 20, temperature=0.8, seed=3)
        for name, build in TREES.items():
            out = verify.generate(target, drafter, build, prompt, 20, temperature=0.8, seed=3)
            assert out.tokens == sampled.tokens, f"{name}: the target's own draws decide"


def test_chains_end_where_the_output_must(models):
    """No drafted token stands where the length limit or the context leaves no room for it."""
    target, drafter, deepest = verify.Target(models[0]), cascade.Cascade([models[1]], [[6, 10], [0, 8]], 1.0, MaxGram(BIGRAM)), []

    def watched(expand, root):
        tree = verify.proposal(expand, root)
        deepest.append(target.cache.length + len(tree.tokens))         # the bonus token's position at most
        return tree
    for length, new in ((8, 5), (CONTEXT - 6, 20)):
        deepest.clear()
        out = verify.generate(target, drafter, watched, list(range(length % VOCAB)) * 1 + [3] * (length - length % VOCAB), new)
        assert len(out.tokens) == min(new, CONTEXT - length + 1) and max(deepest) <= length + len(out.tokens) - 1


def test_every_class_of_model_as_target_and_stage(model):
    target, prompt = verify.Target(model), [3, 1, 4, 1, 5, 9, 2, 6, 5]
    drafter = cascade.Cascade([relative(model, 0.03, 1), relative(model, 0.06, 2)], [[3, 2, 4], [0, 1, 5], [0, 0, 5]], 2.0, MaxGram())
    for build in TREES.values():
        assert verify.generate(target, drafter, build, prompt, 24).tokens == plain(model, prompt, 24)


def test_trees_see_the_chains_distributions_and_nothing_off_it(models):
    drafter = cascade.Cascade(list(models[1:]), [[2, 2, 3], [0, 1, 4], [0, 0, 4]], 1.0, MaxGram(BIGRAM, [0.1, 0.2, 0.3]))
    text = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]
    with torch.inference_mode():
        drafter.begin(verify.View(torch.tensor(text), 10, {}, {}))
        gen = drafter.write(1, 64)
        tokens = [d.token for d in gen]
        drafter.path = None
        rows = [drafter.expand(torch.tensor([x]), [i - 1])[0] for i, x in enumerate([1] + tokens)]
        for row, d in zip(rows, gen):
            if d.row is None:
                one = torch.zeros(VOCAB)
                one[d.token] = drafter.gram.confidence_of(d.match)
                assert torch.equal(row, one) and row.sum() > 0
            else:
                torch.testing.assert_close(row, d.row.float().softmax(-1))
                assert row.argmax() == d.token, "without lenience the chain is the most probable path"
        assert not rows[-1].any(), "after the chain's end there is nothing to say"
        n = len(tokens) + 1
        off = drafter.expand(torch.tensor([(tokens[0] + 1) % VOCAB, tokens[0], tokens[1]]), [0, 0, n])
        assert not off[0].any() and torch.equal(off[1], rows[1]) and not off[2].any()


# ---------------------------------------------------------------- a true p_draft
def chi_square_ok(counts, p):
    """Pearson's statistic within 5 sigma of its mean (degrees of freedom k - 1)."""
    counts, n = torch.tensor(counts, dtype=torch.float64), sum(counts)
    keep = p * n > 5
    stat = ((counts - n * p)[keep] ** 2 / (n * p)[keep]).sum() + 0
    k = int(keep.sum()) - 1
    return stat < k + 5 * (2 * k) ** 0.5


@pytest.mark.parametrize("neural, gram, K", [(1, False, [[3]]), (2, False, [[2, 2], [0, 2]]), (1, True, [[2, 3], [0, 3]])])
def test_a_drawn_chain_keeps_its_true_distribution(neural, gram, K):
    """Each token's p_draft is its last reviewer's distribution, and the tokens follow it; Max-Gram is certain of its own."""
    target = tiny("llama", num_hidden_layers=1)
    stages = [relative(target, 0.1, 1), relative(target, 0.3, 2)][:neural]
    drafter = cascade.Cascade(stages, K, 1.0, MaxGram(BIGRAM) if gram else None)
    text, root, warp = [3, 1, 4, 1, 5, 9, 2, 6], 5, verify.warper(1.5, 8)
    generator, first, second = torch.Generator().manual_seed(0), [0] * VOCAB, {}
    with torch.inference_mode():
        drafter.begin(verify.View(torch.tensor(text), 8, {}, {}))
        p_first = warp(forward(stages[0], text + [root])[-1:])[0]
        for _ in range(1500):
            tokens, p_draft = drafter.chain(root, 64, warp, generator)
            assert p_draft.shape == (len(tokens), VOCAB)
            torch.testing.assert_close(p_draft[0].double(), p_first, atol=1e-6, rtol=0)
            first[tokens[0]] += 1
            second.setdefault(tokens[0], [0] * VOCAB)[tokens[1]] += 1
        assert chi_square_ok(first, p_first)
        likely = max(second, key=lambda x: sum(second[x]))
        assert chi_square_ok(second[likely], warp(forward(stages[0], text + [root, likely])[-1:])[0])
        # all rows of one chain, from plain forwards over its own tokens
        rows = [warp(forward(m, text + [root] + tokens)[8:-1]) for m in stages]
        for i, row in enumerate(p_draft.double()):
            own = torch.nn.functional.one_hot(torch.tensor(tokens[i]), VOCAB).double()
            assert any(torch.allclose(row, x, atol=1e-6) for x in [r[i] for r in rows] + [own] * gram)


@pytest.mark.parametrize("neural, gram, K", [(1, False, [[2]]), (2, True, [[1, 1, 2], [0, 1, 2], [0, 0, 2]])])
def test_drawn_output_follows_the_targets_distribution(neural, gram, K):
    """Two new tokens after the prefill's, against the exact joint distribution of plain sampling."""
    target = tiny("llama", num_hidden_layers=1)
    for p in target.parameters():
        p.data *= 0.8                                               # flatter
    drafter = cascade.Cascade([relative(target, 0.2, 1), relative(target, 0.3, 2)][:neural], K, 1.0, MaxGram(BIGRAM) if gram else None)
    wrapped, prompt, warp = verify.Target(target), [3, 1, 4, 1], verify.warper(1.0, 3)
    counts, n = {}, 2000
    for seed in range(n):
        build = partial(verify.proposal, generator=torch.Generator().manual_seed(seed))
        out = verify.generate(wrapped, drafter, build, prompt, 3, temperature=1.0, top_k=3, seed=seed)
        assert out.drawn or len(out.tokens) == 3
        counts[tuple(out.tokens)] = counts.get(tuple(out.tokens), 0) + 1
    joint = {}
    for a, p in enumerate(warp(forward(target, prompt)[-1:])[0].tolist()):
        for b, q in enumerate(warp(forward(target, prompt + [a])[-1:])[0].tolist() if p else ()):
            for c, r in enumerate(warp(forward(target, prompt + [a, b])[-1:])[0].tolist() if q else ()):
                if r:
                    joint[a, b, c] = p * q * r
    assert set(counts) <= set(joint)
    assert chi_square_ok([counts.get(k, 0) for k in joint], torch.tensor(list(joint.values()), dtype=torch.float64))


def test_lenience_leaves_nothing_to_draw_from(models):
    drafter = cascade.Cascade(list(models[1:]), None, 3.0)
    with torch.inference_mode(), pytest.raises(verify.UserError, match="no true distribution"):
        drafter.begin(verify.View(torch.tensor([1, 2]), 2, {}, {}))
        drafter.chain(3, 5, verify.warper(), torch.Generator())


# ---------------------------------------------------------------- work
def test_stages_forward_only_what_is_new(models):
    """Each run of a stage forwards what its cache lacks: behind the common prefix with what it forwarded last, and what is read of it."""
    drafter = cascade.Cascade(list(models[1:]), [[2, 2, 4], [0, 1, 5], [0, 0, 5]], 1.0, MaxGram(BIGRAM))
    asked, passed = {m: [] for m in models[1:]}, {m: [] for m in models[1:]}
    for stage in drafter.stages:
        def sync(ids, rows, stage=stage, original=stage.sync):
            before = asked[stage.model][-1] if asked[stage.model] else []
            same = next((i for i, (a, b) in enumerate(zip(before, ids)) if a != b), min(len(before), len(ids)))
            asked[stage.model].append(list(ids))
            logits = original(ids, rows)
            assert passed[stage.model][-1] == len(ids) - min(same, len(ids) - rows)
            assert logits.shape == (rows, VOCAB)
            torch.testing.assert_close(logits, forward(stage.model, ids)[-rows:], atol=1e-9, rtol=0)
            return logits
        stage.sync = sync
    hooks = [m.get_decoder().register_forward_pre_hook(lambda module, args, kwargs, m=m: passed[m].append(kwargs["input_ids"].shape[1]), with_kwargs=True)
             for m in models[1:]]
    out = verify.generate(verify.Target(models[0]), drafter, verify.proposal, [3, 1, 4, 1, 5, 9, 2, 6], 24)
    for hook in hooks:
        hook.remove()
    # the oracle's own forwards are counted too, one after each run
    assert [len(asked[m]) for m in models[1:]] == out.stage_runs[:2] and all(len(v) > 5 for v in asked.values())


def test_swi_from_the_runs_of_a_real_run(models):
    """Counts by hooks on the models themselves, and the definition worked out."""
    counts = dict.fromkeys(models, 0)

    def count(module, args, kwargs, m):
        counts[m] += 1
    hooks = [m.get_decoder().register_forward_pre_hook(partial(count, m=m), with_kwargs=True) for m in models]
    drafter = cascade.Cascade(list(models[1:]), [[2, 2, 4], [0, 1, 5], [0, 0, 5]], 1.0, MaxGram(BIGRAM))
    out = verify.generate(verify.Target(models[0]), drafter, verify.proposal, [3, 1, 4, 1, 5, 9, 2, 6], 24)
    for hook in hooks:
        hook.remove()
    assert [out.rounds + 1, *out.stage_runs[:2]] == [counts[m] for m in models]
    expected = 24 / (counts[models[0]] + 0.2 * counts[models[1]] + 0.1 * counts[models[2]])
    assert cascade.swi(24, [out.rounds + 1, *out.stage_runs], [1, 0.2, 0.1, 0]) == pytest.approx(expected)
    plainly = verify.generate(verify.Target(models[0]), None, verify.no_draft, [3, 1, 4], 24)
    assert cascade.swi(24, [plainly.rounds + 1], [1]) == 1


# ---------------------------------------------------------------- encoder and decoder
def t5(seed=0):
    torch.manual_seed(seed)
    model = T5ForConditionalGeneration(T5Config(vocab_size=16, d_model=16, d_kv=4, d_ff=32, num_layers=2, num_decoder_layers=3, num_heads=4, pad_token_id=0,
                                                eos_token_id=1, decoder_start_token_id=0, feed_forward_proj="gated-gelu", tie_word_embeddings=False))
    model = model.double().eval()
    for p in model.parameters():
        if p.ndim == 2:
            torch.nn.init.normal_(p, std=0.4)
    return model


@torch.no_grad()
def plain_t5(model, prompt, new):
    """Greedy decoding by whole forwards, without a cache."""
    ids = [0]
    for _ in range(new):
        ids.append(model(input_ids=torch.tensor([prompt]), decoder_input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax().item())
    return ids[1:]


@pytest.mark.parametrize("seed", range(3))
def test_encoder_decoder_chains_are_plain_decodings(seed):
    model = t5(seed)
    base, small = relative(model, 0.05, 1), relative(model, 0.1, 2)
    target, encoded = verify.Target(model), dict.fromkeys((model, base, small), 0)

    def count(module, args, kwargs, m):
        encoded[m] += 1
    hooks = [m.get_encoder().register_forward_pre_hook(partial(count, m=m), with_kwargs=True) for m in encoded]
    prompts = ([5, 6, 7, 8, 5, 6, 9, 1], [3, 1], list(range(2, 16)) + [1])
    drafters = [(0, cascade.Cascade([], None, 1.0, MaxGram(), vocab=16)), (1, cascade.Cascade([base], [[3]])),
                (2, cascade.Cascade([base, small], [[3, 2, 4], [0, 1, 5], [0, 0, 5]], 2.0, MaxGram()))]
    expected = [plain_t5(model, prompt, 30) for prompt in prompts]
    for used, drafter in drafters:
        for prompt, text in zip(prompts, expected):
            encoded.update(dict.fromkeys(encoded, 0))
            out = verify.generate(target, drafter, verify.proposal, prompt, 30)
            assert out.tokens == text
            assert [encoded[m] for m in (model, base, small)] == [1] + [1] * used + [0] * (2 - used), "the encoder runs once a prompt and model"
            sampled = verify.generate(target, None, verify.no_draft, prompt, 30, temperature=1.0, seed=5)
            assert verify.generate(target, drafter, verify.proposal, prompt, 30, temperature=1.0, seed=5).tokens == sampled.tokens
    for hook in hooks:
        hook.remove()
    with pytest.raises(verify.UserError, match="chains only"):
        verify.generate(target, drafters[1][1], partial(cape.cape, gamma=2), prompts[0], 10)


def test_another_encoder_input_empties_the_decoders_cache():
    model = t5()
    target = verify.Target(model)
    with torch.inference_mode():
        for prompt in ([5, 6, 7, 1], [9, 2, 1], [9, 2, 1]):
            target.encode(prompt)
            for ids in ([0, 3, 4, 5], [0, 3, 8]):
                alone = model(input_ids=torch.tensor([prompt]), decoder_input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
                torch.testing.assert_close(target.sync(ids), alone, atol=1e-9, rtol=0)


def test_max_gram_reads_the_encoders_input():
    """A target that copies its input: every chain comes from the source, though the generation has nothing to match."""
    drafter = cascade.Cascade([], None, 1.0, MaxGram(), vocab=16)
    drafter.source([5, 6, 7, 8, 9, 10])
    drafter.begin(verify.View(torch.tensor([0]), 1, {}, {}))
    assert drafter.chain(6, 3) == ([7, 8, 9], None)


# ---------------------------------------------------------------- mistakes
def test_table_2s_form_is_algorithm_1s_matrix():
    assert cascade.table2([8, 13, 1], 2, True) == [[8, 5, 10], [0, 1, 10], [0, 0, 10]]
    assert cascade.table2([5, 19, 1], 2, True) == [[5, 14, 10], [0, 1, 10], [0, 0, 10]]
    assert cascade.table2([10], 1, True) == [[10, 10], [0, 10]] and cascade.table2([12], 1, False) == [[12]]
    assert cascade.table2([3, 5, 6, 2, 4, 1], 3, False) == [[3, 2, 1], [0, 2, 2], [0, 0, 1]]
    assert cascade.table2([], 0, True) == [[10]]
    assert cascade.checked(cascade.table2(cascade.default_k(3), 3, True), 4)


@pytest.mark.parametrize("call, words", [
    (lambda m: cascade.table2([8, 13], 2, True), "take 3 number"),
    (lambda m: cascade.table2([8, 5, 1], 2, True), "never falls"),
    (lambda m: cascade.Cascade([m], [[3, 1], [1, 1]], 1.0, MaxGram()), "not upper triangular"),
    (lambda m: cascade.Cascade([m], [[3, 1], [0, 1]]), "take a matrix of 1 x 1"),
    (lambda m: cascade.Cascade([m], [[0]]), "must be given something"),
    (lambda m: cascade.Cascade([m], [[3]], 0.5), "at least 1"),
    (lambda m: cascade.Cascade([m], [[3]], float("nan")), "at least 1"),
    (lambda m: cascade.Cascade([]), "without any stage"),
])
def test_a_mistake_is_one_sentence(llama, call, words):
    with pytest.raises(verify.UserError, match=words):
        call(llama)
