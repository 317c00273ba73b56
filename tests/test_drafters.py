"""Drafters that are trained: training equals decoding, losses, RoPE, families, loading."""
import copy
import warnings
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
import transformers
from conftest import ROOT, VOCAB, plain, random_draft_model, random_drafter, shared, tiny
from helpers import FAMILIES, batch_of, lines_to_use, made, mean_loss, save_drafter
from safetensors.torch import load_file

import cape
import edd
import glide
import pct
import verify
from beyond.shared import frequent_words
from runtime import families

LAST = 3                                 # the tiny targets' last hidden states
WORDS = torch.tensor([7, 2, 5, 3])
PROMPT = [(5 * i + 3) % VOCAB for i in range(10)]

def text(length, seed=2, vocab=VOCAB):
    return torch.randint(vocab, (length,), generator=torch.Generator().manual_seed(seed))

def words_of(kind):
    return WORDS if kind.endswith("shared") else None

def raw(logits, temperature):
    """What makes a drafter give logits, in float64, in place of probabilities."""
    return logits

def view(batch, since, t):
    """A View of the batch's first text."""
    kv = {m: (k[:, :, :t], v[:, :, :t]) for m, (k, v) in batch.kv.items()}
    hidden = {k: h[0, since:t] for k, h in batch.hidden.items()}
    tokens = batch.ids[0, since:t]
    return SimpleNamespace(tokens=tokens, ids=tokens.tolist(), length=t, kv=kv, hidden=hidden)

def drafts(drafter, model, probs=raw):
    """What a drafter predicts after a root and after its two children, behind nine tokens."""
    drafter.reset(probs)
    drafter.begin(view(batch_of(model, text(12)[None]), 0, 9), 3)
    return drafter.expand(torch.tensor([3, 1, 2]), [-1, 0, 0])

# ---------------------------------------------------------------- training equals decoding
# Targets that differ in what a kind reads: grouped keys, biases, windows, RoPE, the layer's class
DECODED = [
    ("glide", "qwen2", {}), ("glide", "qwen2-mixed", {"norm": False}),
    ("glide 2", "llama", {}), ("vanilla", "llama", {}), ("glide", "CohereForCausalLM", {}),
    ("glide", "GPT2LMHeadModel", {}), ("glide", "PhiForCausalLM", {}),
    ("glide", "GptOssForCausalLM", {}), ("edd", "qwen2-mixed", {}), ("edd", "llama", {}),
    ("vdm", "qwen2", {}), ("edd", "Gemma3ForCausalLM", {}), ("edd", "GPT2LMHeadModel", {}),
    # Texts are longer than the window; among the words alone, all other logits are -inf
    ("glide-shared", "llama", {"layer": 1, "window": 3}), ("glide-shared", "Gemma2ForCausalLM", {}),
    ("edd-shared", "llama", {})]

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
    drafter.reset(raw)
    draft_model, ids, since = drafter.model, text(32), 0
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
        drafter.reset(raw)
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
    draft_model = random_draft_model(llama, name)
    save_drafter(tmp_path / f"my-{name}", name, draft_model, llama, temperature=0.5)
    monkeypatch.chdir(tmp_path)
    names = {name: module, "verify": verify, "cape": cape, "pct": pct, "model": llama,
             "ids": PROMPT}
    exec(lines_to_use(module).split("\n\n")[0], names)
    assert names["out"].tokens == plain(llama, PROMPT, 31)
    expected = (drafts(names["drafter"], llama) / 0.5).softmax(-1)
    found = drafts(names["drafter"], llama, verify.Rule().probs)
    torch.testing.assert_close(found, expected, check_dtype=False)

# ---------------------------------------------------------------- what is trained
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
    c = edd.Config.for_target(model)
    assert (c.hidden, c.blocks, c.loss, c.encoding) == (3, (5, 10), "kl", True)

def test_edds_parts():
    """Copies of the embedding and head, which learn apart; a new norm."""
    model = tiny("qwen2").requires_grad_(False)
    model.get_decoder().norm.weight.data.fill_(3.0)
    draft_model = edd.EDD(edd.Config.for_target(model, 1), edd.parts_of(model))
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
@pytest.mark.parametrize("name, width", [
    ("llama", 16), ("MixtralForCausalLM", 32), ("OPTForCausalLM", 32)])
def test_eagle_learns_features(name, width):
    """SmoothL1, a mean over D, and 0.1 sqrt(4096 / D) of the cross entropy to the target's p."""
    model = tiny(name, **{**FAMILIES.get(name, {}), "hidden_size": width})
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
    config_class, drafter_class = families.KINDS["medusa"]
    batch = batch_of(llama, text(40, 1).view(2, 20))
    ids, f = batch.ids, batch.hidden[LAST]
    untrained = families.new(config_class.for_target(llama), llama)
    for k, head in enumerate(untrained.heads):
        torch.testing.assert_close(head(untrained(f)[:, :, k]), batch.logits)
    draft_model = random_draft_model(llama, "medusa")
    logits, loss = [], 0
    for k, (head, w) in enumerate(zip(draft_model.heads, draft_model.w)):
        z = f @ w.weight.T + w.bias.normal_()
        logits.append((f + z * z.sigmoid()) @ head.weight.T)
        log_p = logits[k].log_softmax(-1)
        loss -= 0.8 ** k * log_p[:, :18 - k].gather(-1, ids[:, 2 + k:, None]).sum()
    # 19 positions of each text have a label.
    found = mean_loss(draft_model, batch)
    torch.testing.assert_close(found.double(), loss / 38, atol=1e-5, rtol=1e-5)
    drafter = drafter_class(draft_model)
    drafter.reset(raw)
    drafter.begin(view(batch, 0, 8), 1)
    found = drafter.expand(torch.arange(7), [-1, 0, 0, 2, 3, 4, 5])      # depths 0, 1, 1, 2 ... 5
    for row, k in enumerate((0, 1, 1, 2, 3, 4)):
        torch.testing.assert_close(found[row], logits[k][0, 7])
    assert (found[6] == float("-inf")).all(), "nothing beyond the last head"

# ---------------------------------------------------------------- between the target's tables
def test_the_most_frequent_words():
    """By a Counter; the end of a text is one of them; of equally frequent ones the lower."""
    for seed in range(20):
        tokens = text(seed, seed, 9)
        count = Counter(tokens.tolist())
        ranked = sorted(range(9), key=lambda token: (-count[token], token))
        assert frequent_words(tokens, 5, 9).tolist() == sorted(ranked[:5])
        ranked.remove(8)
        assert frequent_words(tokens, 5, 9, eos=8).tolist() == sorted([8, *ranked[:4]])

@pytest.mark.parametrize("kind", ["glide-shared", "edd-shared"])
def test_the_layer_learns_among_the_words_alone(kind):
    """KL of softmaxes over the words' logits; every weight learns.

    No other token is drafted.
    """
    model = tiny("llama", tie_word_embeddings=kind == "edd-shared").requires_grad_(False)
    norm = model.get_decoder().norm.weight
    norm.data.uniform_(0.5, 2)
    draft_model = random_draft_model(model, kind, words=WORDS)
    torch.testing.assert_close(draft_model.norm.weight, norm, rtol=1e-5, atol=0, check_dtype=False)
    config = draft_model.config
    assert config.projected == (kind == "edd-shared")
    if config.projected:
        matrix = families.new(config, model).between.projection.weight
        torch.testing.assert_close(matrix @ matrix.T, torch.eye(32).double(), rtol=0, atol=1e-6)
    batch = batch_of(model, text(13)[None])
    found = mean_loss(draft_model, batch)
    found.backward()
    assert all(p.grad.abs().sum() > 0 for p in draft_model.parameters())
    with torch.no_grad():
        [(x, _, _)] = draft_model.terms(batch, 5)
        log_d = (x @ model.get_output_embeddings().weight[WORDS].T).log_softmax(-1)[0, :-1]
        logits = draft_model.head(x)[0, :-1]
        log_t = batch.logits[0, :-1][:, WORDS].log_softmax(-1)
        divergence = (log_t.exp() * (log_t - log_d)).sum(-1)
    torch.testing.assert_close(logits[:, WORDS].log_softmax(-1), log_d)
    assert (logits.isneginf().sum(-1) == VOCAB - len(WORDS)).all()
    assert found.item() == pytest.approx(divergence.mean().item(), abs=1e-5)

def test_the_window_holds_a_query_and_three_entries_before_it(llama):
    batch, outputs = batch_of(llama, text(20)[None]), []
    for window in (3, 99):
        draft_model = random_draft_model(llama, "glide-shared", layer=1, window=window)
        outputs.append(draft_model.terms(batch, 5)[0][0][0])
    differ = (outputs[0] - outputs[1]).abs().amax(-1)
    assert differ[:4].max() < 1e-9 < 1e-3 < differ[4:].min()

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

def test_what_rotates_in_an_unknown_way_is_refused():
    """GPT-J has a table in each layer; a drafter that reads no keys serves it."""
    dynamic = tiny("llama", rope_scaling=dict(rope_type="dynamic", factor=4.0))
    for model in (dynamic, made("GPT2LMHeadModel"), made("CohereForCausalLM")):
        with pytest.raises(ValueError, match="glide.py serves llama, .*see runtime.families.py"):
            glide.rope_of(model)
    model = tiny("GPTJForCausalLM", n_embd=32, n_layer=2, n_head=4, n_positions=40, rotary_dim=4)
    with pytest.raises(ValueError, match="GPTJForCausalLM rotates its keys in a way that is unk"):
        random_draft_model(model, "glide")
    random_draft_model(model, "vanilla")

# ---------------------------------------------------------------- loading
LOADERS = [(families, kind) for kind in families.KINDS]
LOADERS += [(glide, "glide"), (glide, "vanilla"), (edd, "edd"), (edd, "vdm")]

@pytest.mark.parametrize("module, kind", LOADERS)
def test_a_checkpoint_loads_by_its_kind(module, kind, tmp_path, llama):
    """Beside its target, a copy of which much cannot be read, and another model: a warning."""
    draft_model = random_draft_model(llama, kind, words=words_of(kind))
    expected = drafts(families.KINDS[kind][1](draft_model), llama)
    save_drafter(tmp_path, kind, draft_model, llama, temperature=0.7)
    quantised = copy.deepcopy(llama)
    for layer in quantised.model.layers:
        weight = layer.mlp.up_proj.weight
        weight.data = weight.data.to(torch.float8_e4m3fn)
    quantised.forward = llama.forward
    for model in (llama, quantised):
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            drafter, _ = module.load(tmp_path, model)
        assert drafter.temperature == 0.7
        torch.testing.assert_close(drafts(drafter, llama), expected, atol=1e-5, rtol=0)
    with pytest.warns(UserWarning, match="trained for a model with other weights"):
        module.load(tmp_path, tiny("llama", seed=5))
    if kind.endswith("shared"):
        saved = load_file(tmp_path / "model.safetensors").values()
        assert not any(len(weight) == VOCAB for weight in saved), "the tables are the target's"
    save_drafter(tmp_path, "bush", draft_model, llama)
    with pytest.raises(ValueError, match="holds no drafter"):
        module.load(tmp_path, llama)

def test_a_head_without_a_table_is_copied_by_what_it_computes():
    """Quantised or on a disk, its weights cannot be read."""
    model = tiny("PhiForCausalLM")
    lm_head = model.get_output_embeddings()
    lm_head.bias.data.normal_()
    lm_head.__class__ = type("Packed", (torch.nn.Linear,), {})
    for words in (slice(None), WORDS):
        head = families.head_of(model, words)
        torch.testing.assert_close(head.weight, lm_head.weight[words])
        torch.testing.assert_close(head.bias, lm_head.bias[words])

def test_checkpoints_for_smollm2_load():
    """Whose names are older, beside a random Llama.  Other checkpoints: test_lossless.py."""
    config = transformers.LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=19,
        num_attention_heads=9, num_key_value_heads=3, tie_word_embeddings=True)
    model = transformers.LlamaForCausalLM(config)
    for folder in (ROOT / "checkpoints/smollm2").glob("*-shared"):
        with pytest.warns(UserWarning, match="other weights"):
            drafter, about = families.load(folder, model)
        assert drafter.temperature == about["validation"]["temperature"] != 1
        assert len(drafter.model.between.words) == 8192
