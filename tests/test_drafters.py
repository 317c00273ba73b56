"""Drafters that are trained: training equals decoding, masks, losses, RoPE, families, loading."""
import copy
import json
import warnings
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
import transformers
from conftest import ROOT, VOCAB, assert_plain, random_draft_model, random_drafter, shared, tiny
from helpers import FAMILIES, lines_to_use, made
from safetensors.torch import load_file, save_file

import cape
import edd
import glide
import pct
import verify
from beyond.shared import frequent_words
from runtime import families
from runtime.load import fingerprint
from runtime.targets import AnyTarget, any_target

LAST = 3                                 # the tiny targets' last hidden states
WORDS = torch.tensor([7, 2, 5, 3])
OTHERS = [token for token in range(VOCAB) if token not in WORDS]
PROMPT = [(5 * i + 3) % VOCAB for i in range(10)]

def text(length, seed=2, vocab=VOCAB):
    return torch.randint(vocab, (length,), generator=torch.Generator().manual_seed(seed))

def words_of(kind):
    return WORDS if kind.endswith("shared") else None

def of_logits(drafter):
    """Make a drafter give logits, in float64, in place of probabilities -> drafter."""
    drafter.reset(lambda logits, temperature: logits)
    return drafter

def batch_of(model, ids):
    """What training reads of the target's forward over ids (B, T), by transformers alone."""
    cache = transformers.DynamicCache()
    with torch.no_grad():
        out = model(ids, past_key_values=cache, use_cache=True, output_hidden_states=True)
    kv = {i: (layer.keys, layer.values) for i, layer in enumerate(cache.layers)}
    hidden = dict(enumerate(out.hidden_states))
    return SimpleNamespace(ids=ids, kv=kv, hidden=hidden, logits=out.logits)

def mean_loss(draft_model, batch, loss_mask=None):
    """The loss of a training step, as train.py makes it of a draft model's terms."""
    if loss_mask is None:
        loss_mask = torch.ones_like(batch.ids, dtype=torch.bool)
        loss_mask[:, -1] = False
    total = 0
    for x, labels, mask in draft_model.terms(batch, 5):
        chosen = loss_mask if mask is None else loss_mask & mask
        total = total + draft_model.loss_of(x[chosen], labels[chosen])
    return total / loss_mask.sum()

def view(batch, since, t):
    """A View of the batch's first text."""
    kv = {m: (k[:, :, :t], v[:, :, :t]) for m, (k, v) in batch.kv.items()}
    hidden = {k: h[0, since:t] for k, h in batch.hidden.items()}
    tokens = batch.ids[0, since:t]
    return SimpleNamespace(tokens=tokens, ids=tokens.tolist(), length=t, kv=kv, hidden=hidden)

def save(folder, draft_model, kind, model, **about):
    """A checkpoint for a target, as train.py writes it, but in full precision."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: weight.contiguous() for name, weight in draft_model.state_dict().items()}
    save_file(weights, folder / "model.safetensors")
    about = {"config": vars(draft_model.config), "kind": kind, "target": fingerprint(model),
             "validation": {}, **about}
    (folder / "training.json").write_text(json.dumps(about))

# ---------------------------------------------------------------- training equals decoding
# Targets that between them have grouped keys, biases, windows, and both kinds of attention
DECODED = [
    ("glide", "qwen2", {}), ("glide", "qwen2-mixed", {"norm": False}),
    ("glide 2", "llama", {}), ("vanilla", "llama", {}),
    ("edd", "qwen2-mixed", {}), ("edd", "llama", {}), ("vdm", "qwen2", {}),
    ("edd", "Gemma3ForCausalLM", {}), ("glide", "CohereForCausalLM", {}),
    # Texts are longer than the window; among the words alone, all other logits are -inf
    ("glide-shared", "llama", {"layer": 1, "window": 3}), ("edd-shared", "llama", {})]

@pytest.mark.parametrize("kind, name, settings", DECODED)
@torch.no_grad()
def test_decoding_trees_equals_training(kind, name, settings):
    """Rounds of random trees: the logits after a node are training's in a text with its path.

    Rounds begin where blocks of training do, at multiples of five, and no path is longer than a
    block, so a node sees the same in both, and nothing of the tokens after it.
    """
    model = made(name) if name in FAMILIES else shared(name)
    torch.manual_seed(4)
    drafter = random_drafter(model, kind, words=words_of(kind), **settings)
    draft_model, ids, since = of_logits(drafter).model, text(30), 0
    for t in (10, 15, 20):
        drafter.begin(view(batch_of(model, ids[None]), since, t), ids[t].item())
        parents, paths = [-1], [[0]]
        while len(paths) < 11:
            # Any node that is not too deep, often the last
            above = [node for node, path in enumerate(paths) if len(path) < 5]
            parents.append(above[int(torch.rand(2).max().item() * len(above))])
            paths.append([*paths[parents[-1]], len(paths)])
        tokens = torch.randint(VOCAB, (11,))
        tokens[0] = ids[t]
        for first, end in ((0, 1), (1, 4), (4, 5), (5, 9), (9, 11)):
            found = drafter.expand(tokens[first:end], parents[first:end])
            for logits, path in zip(found, paths[first:end]):
                n = t + len(path)
                along = torch.cat((ids[:t], tokens[path], ids[n:]))            # and later tokens
                [(x, _, _)] = draft_model.terms(batch_of(model, along[None]), 5)
                expected = draft_model.head(x[0, n - 1])
                atol = 1e-5 if name in FAMILIES else 1e-8
                torch.testing.assert_close(logits, expected, atol=atol, rtol=0)
        # The last node's path is accepted.  What else the text gets was never given to expand.
        drafter.keep(path)
        ids[t:t + len(path)] = tokens[path]
        since = t

@pytest.mark.parametrize("kind", ["glide 2", "edd"])
def test_contexts_that_outgrow_the_capacity(kind):
    """In one go or in steps, in inference mode or not: the same logits."""
    torch.manual_seed(6)
    hidden = torch.randn(1, 1300, 32, dtype=torch.float64)
    kv = {m: torch.randn(2, 1, 4, 1300, 8, dtype=torch.float64) for m in (1, 2)}
    batch = SimpleNamespace(ids=text(1300, 6)[None], hidden={2: hidden}, kv=kv)
    drafter = random_drafter(shared("llama", max_position_embeddings=1300), kind)
    logits = []
    for steps, mode in (((0, 1200), True), ((0, 500, 505, 1200), False)):
        of_logits(drafter)
        for before, t in zip(steps, steps[1:]):
            with torch.inference_mode(mode):
                drafter.begin(view(batch, before, t), batch.ids[0, t].item())
                if t != 505:                                    # a round that expands nothing
                    found = drafter.expand(batch.ids[0, t:t + 1], [-1])
                drafter.keep([])
        logits.append(found)
    torch.testing.assert_close(*logits, atol=1e-9 if kind == "glide 2" else 1e-6, rtol=0)

@pytest.mark.parametrize("module", [glide, edd])
def test_the_docstrings_lines_decode(module, llama, tmp_path, monkeypatch):
    """And expand gives softmax(logits / calibration temperature)."""
    name = module.__name__
    save(tmp_path / f"my-{name}", random_draft_model(llama, name), name, llama,
         validation={"temperature": 0.5})
    monkeypatch.chdir(tmp_path)
    names = {name: module, "verify": verify, "cape": cape, "pct": pct, "model": llama,
             "ids": PROMPT}
    exec(lines_to_use(module).split("\n\n")[0], names)
    assert_plain(llama, PROMPT, names["out"].tokens, 31)
    drafter, found = names["drafter"], []
    for probs in (module.softmax, lambda logits, temperature: (logits / 0.5).softmax(-1)):
        drafter.reset(probs)
        drafter.begin(view(batch_of(llama, text(9)[None]), 0, 8), 3)
        found.append(drafter.expand(torch.tensor([3]), [-1]))
    torch.testing.assert_close(*found, check_dtype=False)

# ---------------------------------------------------------------- what is trained
def test_masks_entry_by_entry():
    """Mask_Block; Eq. 3: hidden states before the block, tokens of the own one up to itself."""
    for T, L in ((1, 5), (7, 1), (12, 4), (13, 5), (6, 9)):
        block, dual = glide.block_mask(T, L), edd.dual_block_mask(T, L)
        assert block.shape == (T, T) and dual.shape == (T, 2 * T)
        for i in range(T):
            start = i // L * L                                  # where the block of t_i begins: jL
            for k in range(T):
                assert block[i, k] == dual[i, k] == (k < start)
                assert dual[i, T + k] == (start <= k <= i)

def test_edds_soft_prompt_is_keys_and_values_alone(llama):
    """As where hidden states go through the layer, each seeing itself."""
    draft_model, batch = random_draft_model(llama, "edd"), batch_of(llama, text(18, 1).view(2, 9))
    ids, hidden = batch.ids, batch.hidden[2]
    found = draft_model(ids, hidden, 4)
    x = torch.cat((hidden, draft_model.embed(ids)), 1)
    mask = torch.eye(18, dtype=torch.bool)
    mask[9:] = edd.dual_block_mask(9, 4)
    position = torch.arange(9).repeat(1, 2)
    x = edd.run_layer(draft_model.layer, draft_model.rotary, x, position, mask)
    torch.testing.assert_close(found, draft_model.norm(x[:, 9:]), atol=1e-8, rtol=0)

@pytest.mark.parametrize("kind", ["glide", "edd"])
@pytest.mark.parametrize("loss", ["ce", "kl"])
def test_losses_are_what_their_names_say(llama, kind, loss):
    """Cross entropy, or EDD's Eq. 4, written out in float64 over the loss mask.

    A token that the target excludes, by a logit of -inf, adds nothing.
    """
    draft_model = random_draft_model(llama, kind, loss=loss)
    batch = batch_of(llama, torch.stack((text(13), text(13, 8))))
    batch.logits[0, 3, 5] = -torch.inf
    loss_mask = torch.ones_like(batch.ids, dtype=torch.bool)
    loss_mask[:, -1] = loss_mask[1, :4] = False
    found = mean_loss(draft_model, batch, loss_mask)
    found.backward()
    assert all(p.grad.abs().sum() > 0 for p in draft_model.parameters())
    with torch.no_grad():
        [(x, _, _)] = draft_model.terms(batch, 5)
        log_p = draft_model.head(x).log_softmax(-1)
        log_t, total = batch.logits.log_softmax(-1), 0
        for b, j in loss_mask.nonzero().tolist():
            if loss == "ce":
                total -= log_p[b, j, batch.ids[b, j + 1]]
            else:
                total += (log_t[b, j].exp() * (log_t[b, j] - log_p[b, j])).nansum()
    assert found.item() == pytest.approx(total.item() / 20, abs=1e-5)

def test_settings_of_the_papers():
    """GLIDE 4.1, 5.1: L = 5, l = N_T - N_D + m, one layer; d_D = 4096, no norm, cross entropy.

    EDD, appendix B: the fourth-to-last of 0 (the embeddings) ... 6, L from 5 to 10; Eq. 4.
    """
    model = tiny("llama", num_hidden_layers=6)
    c = glide.Config.for_target(model, 4096, norm=False, loss="ce")
    assert (c.block, c.layers, c.layers_read, c.width, c.heads) == (5, 1, (5,), 4096, 512)
    assert glide.Config.for_target(model, layers=2).layers_read == (4, 5)
    assert glide.Config.for_target(model, layer=2).layers_read == (2,)
    c = edd.Config.for_target(model)
    assert (c.hidden, c.blocks, c.loss, c.encoding) == (3, (5, 10), "kl", True)

def test_edds_parts():
    """Copies of the embedding and head, which learn apart; a new layer and norm of its classes."""
    model = tiny("qwen2").requires_grad_(False)
    decoder = model.get_decoder()
    decoder.norm.weight.data.fill_(3.0)
    draft_model = edd.EDD(edd.Config.for_target(model, 1), edd.parts_of(model))
    assert type(draft_model.layer) is type(decoder.layers[-1])
    for own, other in ((draft_model.embed, model.get_input_embeddings()),
                       (draft_model.head, model.get_output_embeddings())):
        assert torch.equal(own.weight, other.weight)
        assert own.weight.data_ptr() != other.weight.data_ptr()
    assert all(p.requires_grad for p in draft_model.parameters())
    assert torch.equal(draft_model.norm.weight, torch.ones_like(draft_model.norm.weight))
    with pytest.raises(ValueError, match="serves llama, mistral, qwen2"):
        edd.parts_of(made("Gemma3ForCausalLM"))

# ---------------------------------------------------------------- EAGLE and MEDUSA-1
@torch.no_grad()
@pytest.mark.parametrize("width", [32, 16])
def test_eagle_learns_features(width):
    """SmoothL1, a mean over D, and 0.1 sqrt(4096 / D) of the cross entropy to the target's p."""
    model = tiny("llama", hidden_size=width)
    draft_model, batch = random_draft_model(model, "eagle"), batch_of(model, text(9, 4)[None])
    f = batch.hidden[LAST]
    predicted = draft_model(batch.ids, f)[0]
    d = (predicted - f[0, 1:]).abs()
    distance = torch.where(d < 1, d * d / 2, d - 0.5).mean(-1)
    log_p_draft = model.get_output_embeddings()(predicted).log_softmax(-1)
    cross_entropy = -(batch.logits[0, 1:].softmax(-1) * log_p_draft).sum(-1)
    loss = distance + 0.1 * (4096 / width) ** 0.5 * cross_entropy
    found = mean_loss(draft_model, batch)
    # Of nine tokens the first has no prediction, and the last no label.
    torch.testing.assert_close(found.double(), loss[:-1].sum() / 8, atol=1e-5, rtol=1e-5)

@torch.no_grad()
def test_medusas_heads_are_shifted_as_the_docstring_says(llama):
    """head_k(f + SiLU(W_k f + b_k)) of f_i predicts t_{i+2+k}; depth d comes from head d - 1."""
    config_class, _, drafter_class = families.KINDS["medusa"]
    batch = batch_of(llama, text(40, 1).view(2, 20))
    ids, f = batch.ids, batch.hidden[LAST]
    untrained = families.new("medusa", config_class.for_target(llama), llama)
    for k, head in enumerate(untrained.heads):
        torch.testing.assert_close(head(untrained(f)[:, :, k]), batch.logits)
    draft_model = random_draft_model(llama, "medusa")
    logits, loss = [], 0
    for k, (head, w) in enumerate(zip(draft_model.heads, draft_model.w)):
        z = f @ w.weight.T + w.bias.normal_()
        logits.append((f + z * z.sigmoid()) @ head.weight.T)
        log_p = logits[k].log_softmax(-1)
        for b in range(2):
            for i in range(20 - 2 - k):
                loss -= 0.8 ** k * log_p[b, i, ids[b, i + 2 + k]]
    # 19 positions of each text have a label.
    found = mean_loss(draft_model, batch)
    torch.testing.assert_close(found.double(), loss / 38, atol=1e-5, rtol=1e-5)
    drafter = of_logits(drafter_class(draft_model))
    drafter.begin(view(batch, 0, 8), 1)
    found = drafter.expand(torch.arange(7), [-1, 0, 0, 2, 3, 4, 5])      # depths 0, 1, 1, 2 ... 5
    for row, k in enumerate((0, 1, 1, 2, 3, 4)):
        torch.testing.assert_close(found[row], logits[k][0, 7])
    assert (found[6] == float("-inf")).all(), "nothing beyond the last head"

# ---------------------------------------------------------------- between the target's tables
SHARED = {"glide-shared": {"layer": 1, "window": 3}, "edd-shared": {}}

def test_the_most_frequent_words():
    """By a Counter; the end of a text is one of them; of equally frequent ones the lower."""
    for seed in range(20):
        tokens = text(seed, seed, 9)
        count = Counter(tokens.tolist())
        ranked = sorted(range(9), key=lambda token: (-count[token], token))
        assert frequent_words(tokens, 5, 9).tolist() == sorted(ranked[:5])
        ranked.remove(8)
        assert frequent_words(tokens, 5, 9, eos=8).tolist() == sorted([8, *ranked[:4]])

@pytest.mark.parametrize("kind", SHARED)
def test_the_layer_learns_among_the_words_alone(kind):
    """KL, or the acceptance rate, of softmaxes over the words' logits; every weight learns."""
    model = tiny("llama", tie_word_embeddings=kind == "edd-shared").requires_grad_(False)
    norm = model.get_decoder().norm.weight
    norm.data.uniform_(0.5, 2)
    draft_model = random_draft_model(model, kind, words=WORDS, **SHARED[kind])
    torch.testing.assert_close(draft_model.norm.weight, norm, rtol=1e-5, atol=0, check_dtype=False)
    config = draft_model.config
    assert config.projected == (kind == "edd-shared")
    if config.projected:
        matrix = families.new(kind, config, model).between.projection.weight
        torch.testing.assert_close(matrix @ matrix.T, torch.eye(32).double(), rtol=0, atol=1e-6)
    batch = batch_of(model, text(13)[None])
    found = mean_loss(draft_model, batch)
    found.backward()
    assert all(p.grad.abs().sum() > 0 for p in draft_model.parameters())
    with torch.no_grad():
        [(x, _, _)] = draft_model.terms(batch, 5)
        log_d = (x @ model.get_output_embeddings().weight[WORDS].T).log_softmax(-1)[0, :-1]
        log_t = batch.logits[0, :-1][:, WORDS].log_softmax(-1)
        divergence = (log_t.exp() * (log_t - log_d)).sum(-1)
        rate = torch.minimum(log_t.exp(), log_d.exp()).sum(-1)
    assert found.item() == pytest.approx(divergence.mean().item(), abs=1e-5)
    config.loss = "lk"
    found = mean_loss(draft_model, batch)
    assert found.item() == pytest.approx(-rate.log().mean().item(), abs=1e-5)

def test_the_window_holds_a_query_and_three_entries_before_it(llama):
    batch, outputs = batch_of(llama, text(20)[None]), []
    for window in (3, 99):
        draft_model = random_draft_model(llama, "glide-shared", layer=1, window=window)
        outputs.append(draft_model.terms(batch, 5)[0][0][0])
    differ = (outputs[0] - outputs[1]).abs().amax(-1)
    assert differ[:4].max() < 1e-9 < 1e-3 < differ[4:].min()

@pytest.mark.parametrize("kind", SHARED)
def test_the_words_lie_in_the_checkpoint_and_the_tables_do_not(kind, tmp_path):
    """Saved, loaded: the words' logits are those of the whole head, and no other is drafted."""
    tied = tiny("llama", tie_word_embeddings=True)
    draft_model = random_draft_model(tied, kind, words=WORDS, **SHARED[kind])
    save(tmp_path / "short", draft_model, kind, tied)
    saved = load_file(tmp_path / "short" / "model.safetensors")
    assert torch.equal(saved["between.words"], WORDS)
    assert not any(weight.shape[0] == VOCAB for weight in saved.values())
    whole = random_draft_model(tied, kind, **SHARED[kind])
    whole.load_state_dict({name: saved[name] for name in whole.state_dict()})
    save(tmp_path / "whole", whole, kind, tied)
    batch, found = batch_of(tied, text(12)[None]), []
    for folder in ("short", "whole"):
        drafter, _ = families.load(tmp_path / folder, tied)
        of_logits(drafter).begin(view(batch, 0, 9), 3)
        found.append(drafter.expand(torch.tensor([3, 1, 2]), [-1, 0, 0]))
    short, full = found
    torch.testing.assert_close(short[:, WORDS], full[:, WORDS], atol=1e-9, rtol=0)
    assert short[:, OTHERS].isneginf().all() and full.isfinite().all()

# ---------------------------------------------------------------- RoPE
@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_a_score_depends_on_the_distance_alone(name):
    """A query's with one key three positions before it, at three positions, in each layer.

    Rotated by halves or by neighbours, wholly or in part, by two tables, in some layers or none.
    """
    model = made(name)
    if name in ("GPT2LMHeadModel", "OPTForCausalLM"):          # their positions are in the tokens
        q, position = torch.randn(1, 8), torch.tensor([3])
        rope, glimpse_rope = families.ropes_of(model, glide.Config.for_target(model))
        assert torch.equal(glimpse_rope(q, position)(q), q)
        assert not torch.isclose(rope(q, position)(q), q).any(), "the drafter has positions"
        return
    keys = {}
    for position in (2, 12, 32):
        at = torch.tensor([[position]])
        cache = transformers.DynamicCache()
        model(torch.tensor([[4]]), position_ids=at, past_key_values=cache, use_cache=True)
        keys[position] = [layer.keys[0, 0, 0] for layer in cache.layers]       # (d_k,) each
    for layer in range(len(keys[2])):
        config = glide.Config.for_target(model, layer=layer)
        _, rope = families.ropes_of(model, config)
        ropes = [rope]
        if model.config.model_type in glide.FAMILIES:
            ropes.append(glide.rope_of(model))
        q = torch.randn(1, config.target_head_size)
        for rope in ropes:
            scores = [rope(q, torch.tensor([p + 3]))(q)[0].double() @ keys[p][layer] for p in keys]
            assert max(scores) - min(scores) < 1e-5, layer

def test_another_rope_than_llamas_is_a_valueerror_of_glide():
    dynamic = tiny("llama", rope_scaling=dict(rope_type="dynamic", factor=4.0))
    for model in (dynamic, made("GPT2LMHeadModel"), made("CohereForCausalLM")):
        with pytest.raises(ValueError, match="glide.py serves llama, .*families.py serves others"):
            glide.rope_of(model)

def test_keys_that_rotate_in_an_unknown_way_are_refused():
    """GPT-J's, by a table in each layer; a drafter that reads no keys serves."""
    model = tiny("GPTJForCausalLM", n_embd=32, n_layer=2, n_head=4, n_positions=40, rotary_dim=4)
    with pytest.raises(ValueError, match="GPTJForCausalLM rotates its keys in a way that is unk"):
        random_draft_model(model, "glide")
    with pytest.raises(ValueError, match="layer 7 of GPTJForCausalLM does not cache"):
        random_draft_model(model, "glide", layer=7)
    random_draft_model(model, "vanilla")

# ---------------------------------------------------------------- beside families
# Families that differ in what a kind reads: RoPE, the layer's class, biases, a cap on logits
BESIDE = {
    "glide": ("GPT2LMHeadModel", "PhiForCausalLM", "Gemma3ForCausalLM", "GptOssForCausalLM"),
    "glide-shared": ("Gemma2ForCausalLM", "HeliumForCausalLM"),
    "edd": ("MistralForCausalLM", "GPT2LMHeadModel"),
    "edd-shared": ("Gemma3ForCausalLM",), "eagle": ("MixtralForCausalLM", "OPTForCausalLM"),
    "medusa": ("PhiForCausalLM",),
}
PAIRS = [(kind, name) for kind, names in BESIDE.items() for name in names]

def assert_lossless(target, drafter, plain_model, new=14):
    """CAPE's output is plain decoding's -> the number of new tokens of each round."""
    out = verify.generate(target, drafter, cape.cape, PROMPT, new)
    assert_plain(plain_model, PROMPT, out.tokens, new)
    return [len(one.new) for one in out.rounds]

@pytest.mark.parametrize("kind, name", PAIRS)
def test_a_kind_of_drafter_decodes_losslessly_beside_a_family(kind, name):
    """By a drafter with random weights: what it accepts hardly matters, that it runs does."""
    model = made(name)
    assert_lossless(AnyTarget(model), random_drafter(model, kind, words=words_of(kind)), model)

@pytest.mark.parametrize("kind", ["glide", "edd", "edd-shared"])
def test_a_target_that_accelerate_spreads(kind, tmp_path):
    """The head and a layer lie on the disk: copies are what they compute, and drafts the same."""
    pytest.importorskip("accelerate")
    whole = tiny("llama").float()
    whole.save_pretrained(tmp_path / "model")
    in_memory = ["model.embed_tokens", "model.rotary_emb", "model.layers.0", "model.layers.1"]
    on_disk = ["lm_head", "model.norm", "model.layers.2"]
    places = dict.fromkeys(in_memory, "cpu") | dict.fromkeys(on_disk, "disk")
    spread = type(whole).from_pretrained(tmp_path / "model", device_map=places,
                                         offload_folder=tmp_path / "disk")
    torch.testing.assert_close(families.head_of(spread).weight, whole.lm_head.weight)
    save(tmp_path / "drafter", random_draft_model(whole, kind), kind, whole)
    rounds = []
    for model in (whole, spread):
        drafter, _ = families.load(tmp_path / "drafter", model)
        rounds.append(assert_lossless(any_target(model), drafter, whole, 6))
    assert rounds[0] == rounds[1]

# ---------------------------------------------------------------- loading
LOADERS = [(families, kind) for kind in families.KINDS]
LOADERS += [(glide, "glide"), (glide, "vanilla"), (edd, "edd"), (edd, "vdm")]

@pytest.mark.parametrize("module, kind", LOADERS)
def test_a_checkpoint_loads_by_its_kind(module, kind, tmp_path, llama):
    """Beside its target, a copy of which much cannot be read, and another model: a warning."""
    draft_model = random_draft_model(llama, kind, words=words_of(kind))
    save(tmp_path, draft_model, kind, llama, validation={"temperature": 0.7})
    quantised = copy.deepcopy(llama)
    for layer in quantised.model.layers:
        weight = layer.mlp.up_proj.weight.data.to(torch.float8_e4m3fn)
        layer.mlp.up_proj.weight = torch.nn.Parameter(weight, requires_grad=False)
    quantised.forward = llama.forward
    for model in (llama, quantised):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            drafter, _ = module.load(tmp_path, model)
    assert drafter.temperature == 0.7
    assert type(drafter) is families.KINDS[kind][2] and type(drafter.model) is type(draft_model)
    for name, weight in draft_model.state_dict().items():
        assert torch.equal(weight, drafter.model.state_dict()[name])
    assert not any(p.is_meta for p in (*drafter.model.parameters(), *drafter.model.buffers()))
    with pytest.warns(UserWarning, match="trained for a model with other weights"):
        module.load(tmp_path, tiny("llama", seed=5))
    save(tmp_path, draft_model, "bush", llama)
    with pytest.raises(ValueError, match="holds no drafter of these kinds: "):
        module.load(tmp_path, llama)

@pytest.mark.parametrize("name, layers, intermediate_size", [
    ("glide-shared", 19, 64), ("edd-shared", 4, 1536)])
def test_checkpoints_for_smollm2_load(name, layers, intermediate_size, tmp_path):
    """Whose names are older, beside random Llamas.  Other checkpoints: test_lossless.py."""
    config = transformers.LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=intermediate_size,
        num_hidden_layers=layers, num_attention_heads=9, num_key_value_heads=3,
        tie_word_embeddings=True)
    model = transformers.LlamaForCausalLM(config)
    folder = ROOT / "checkpoints/smollm2" / name
    about = json.loads((folder / "training.json").read_text())
    about["target"] = fingerprint(model)
    (tmp_path / "training.json").write_text(json.dumps(about))
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    drafter, about = families.load(tmp_path, model)
    assert drafter.temperature == about["validation"]["temperature"] != 1
    assert len(drafter.model.between.words) == 8192
