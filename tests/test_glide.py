"""GLIDE and what it shares with EDD: training equals decoding, losses, checkpoints; masks, RoPE."""
import json
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import transformers
from conftest import ROOT, VOCAB, family, shared, tiny, weighty
from safetensors.torch import save_file

import edd
import glide

EXACT = dict(atol=1e-9, rtol=0)

# ---------------------------------------------------------------- also used by other tests
def text(length, seed=2, vocab=VOCAB):
    return torch.randint(vocab, (length,), generator=torch.Generator().manual_seed(seed))

def new_glide(model, layers=1, length=64, width=24, **more):
    """A random GLIDE for a tiny target, in float64."""
    config = glide.Config.for_target(model, width, layers, **more)
    tables = glide.tables_of(model, config, length)
    return weighty(glide.Glide(config, tables))

def new_edd(model, hidden=2, **more):
    """A random EDD or VDM for a tiny target, in float64."""
    config = edd.Config.for_target(model, hidden, **more)
    return weighty(edd.EDD(config, edd.parts_of(model)))

def of_logits(drafter):
    """Make a drafter give logits, in float64, in place of probabilities -> drafter."""
    drafter.reset(lambda logits, temperature: logits, None)
    return drafter

def batch_of(model, ids, hidden=()):
    """What training reads of the target's forward over ids (B, T), by transformers alone."""
    cache = transformers.DynamicCache()
    with torch.no_grad():
        out = model(ids, past_key_values=cache, use_cache=True, output_hidden_states=True)
    return SimpleNamespace(
        ids=ids,
        kv={i: (layer.keys, layer.values) for i, layer in enumerate(cache.layers)},
        hidden={k: out.hidden_states[k] for k in hidden},
        logits=out.logits)

def all_labels(batch):
    """A loss mask (B, T): all positions but the last have a label."""
    loss_mask = torch.ones_like(batch.ids, dtype=torch.bool)
    loss_mask[:, -1] = False
    return loss_mask

def mean_loss(draft_model, batch, loss_mask, block=5):
    """The loss of a training step, as train.py makes it of a draft model's terms."""
    total = 0
    for x, labels, mask in draft_model.terms(batch, block):
        chosen = loss_mask if mask is None else loss_mask & mask
        total = total + draft_model.loss_of(x[chosen], labels[chosen])
    return total / loss_mask.sum()

def view(batch, since, t):
    """A View of the batch's first text."""
    kv = {m: (k[:, :, :t], v[:, :, :t]) for m, (k, v) in batch.kv.items()}
    hidden = {k: h[0, since:t] for k, h in batch.hidden.items()}
    tokens = batch.ids[0, since:t]
    return SimpleNamespace(tokens=tokens, ids=tokens.tolist(), length=t, kv=kv, hidden=hidden)

def save(folder, draft_model, **about):
    """A checkpoint as train.py writes it, but in full precision."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: weight.contiguous() for name, weight in draft_model.state_dict().items()}
    save_file(weights, folder / "model.safetensors")
    about = {"config": vars(draft_model.config), **about}
    (folder / "training.json").write_text(json.dumps(about))

@torch.no_grad()
def trees_equal_training(drafter, model, atol=1e-9):
    """Rounds of random trees: the logits after a node are training's in a text with its path.

    Rounds begin where blocks of training do, at multiples of five, and no path is longer than a
    block, so a node sees the same in both, and nothing of the tokens after it.
    """
    torch.manual_seed(4)
    draft_model, ids, since = of_logits(drafter).model, text(30), 0
    for t in (10, 15, 20):
        drafter.begin(view(batch_of(model, ids[None], {2}), since, t), ids[t].item())
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
                along = torch.cat((ids[:t], tokens[path], ids[n:]))        # and later tokens
                [(x, _, _)] = draft_model.terms(batch_of(model, along[None], {2}), 5)
                expected = draft_model.head(x[0, n - 1])
                torch.testing.assert_close(logits, expected, atol=atol, rtol=0)
        # The last node's path is accepted.  What else the text gets was never given to expand.
        drafter.keep(path)
        ids[t:t + len(path)] = tokens[path]
        since = t

# ---------------------------------------------------------------- GLIDE and EDD
@pytest.mark.parametrize("module, make", [(glide, new_glide), (edd, new_edd)])
def test_the_docstrings_round(module, make, llama, tmp_path, monkeypatch):
    """Its lines run, and expand gives softmax(logits / calibration temperature)."""
    name = module.__name__
    lines = module.__doc__.split("A round of it:\n\n")[1].split("\n\n")[0]
    lines = "\n".join(line[4:] for line in lines.splitlines())
    save(tmp_path / f"my-{name}", make(llama), validation={"temperature": 0.5})
    monkeypatch.chdir(tmp_path)
    batch = batch_of(llama, text(9)[None], {2})
    names = {name: module, "torch": torch, "model": llama, "root_id": 3, "view": view(batch, 0, 8)}
    exec(lines, names)
    drafter = of_logits(names["drafter"])
    drafter.begin(names["view"], 3)
    drafter.expand(torch.tensor([3]), [-1])
    logits = drafter.expand(names["best"], [0, 0])
    expected = (logits / 0.5).softmax(-1)
    torch.testing.assert_close(names["probs"], expected, check_dtype=False)

CHECKPOINTS = [(glide, new_glide, "edd", "does not hold the weights"),
               (edd, new_edd, "glide", "made for another target")]

@pytest.mark.parametrize("module, make, other, sentence", CHECKPOINTS)
def test_checkpoints(module, make, other, sentence, llama, tmp_path):
    """What save wrote is loaded; settings of older ones are ignored; other folders are refused."""
    draft_model = make(llama)
    save(tmp_path, draft_model, validation={"temperature": 0.7})
    about = (tmp_path / "training.json").read_text()
    (tmp_path / "training.json").write_text(about.replace('"vocab"', '"kind": "old", "vocab"'))
    drafter, about = module.load(tmp_path, llama)
    assert drafter.temperature == 0.7 and about["config"]["kind"] == "old"
    for name, weight in draft_model.state_dict().items():
        assert torch.equal(weight, drafter.model.state_dict()[name])
    for folder in (other, "base", "."):
        with pytest.raises(ValueError, match=f"no drafter that {module.__name__}.py can load"):
            module.load(ROOT / "checkpoints" / folder, llama)
    narrow = tiny("llama", hidden_size=24, num_attention_heads=6, num_key_value_heads=6)
    save(tmp_path, make(narrow), config=vars(draft_model.config))
    with pytest.raises(ValueError, match=sentence):
        module.load(tmp_path, llama)

@pytest.mark.parametrize("make", [partial(new_glide, norm=True), new_edd])
@pytest.mark.parametrize("loss", ["ce", "kl"])
def test_losses_are_what_their_names_say(llama, make, loss):
    """Cross entropy, or EDD's Eq. 4, written out in float64 over the loss mask."""
    draft_model = make(llama, loss=loss)
    batch = batch_of(llama, torch.stack((text(13), text(13, 8))), {2})
    loss_mask = all_labels(batch)
    loss_mask[1, :4] = False
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
                total += (log_t[b, j].exp() * (log_t[b, j] - log_p[b, j])).sum()
    assert found.item() == pytest.approx(total.item() / 20, abs=1e-5)

@pytest.mark.parametrize("name", ["glide", "edd"])
def test_a_long_text_in_pieces_gives_the_logits_of_one_go(llama, name, monkeypatch):
    """A prompt in chunks, contexts that outgrow the capacity, a round that expands nothing."""
    torch.manual_seed(6)
    hidden = torch.randn(1, 1300, 32, dtype=torch.float64)
    kv = {m: torch.randn(2, 1, 4, 1300, 8, dtype=torch.float64) for m in (1, 2)}
    batch = SimpleNamespace(ids=text(1300, 6)[None], hidden={2: hidden}, kv=kv)
    logits = []
    for chunk, steps in ((2000, (1200,)), (400, (500, 505, 1200))):
        monkeypatch.setattr(glide, "CHUNK", chunk)
        if name == "edd":
            drafter = edd.Drafter(new_edd(llama))
        else:
            drafter = glide.Drafter(new_glide(llama, 2, length=1300))
        of_logits(drafter)
        before = 0
        for t in steps:
            drafter.begin(view(batch, before, t), batch.ids[0, t].item())
            if t != 505:
                found = drafter.expand(batch.ids[0, t:t + 1], [-1])
            drafter.keep([])
            before = t
        logits.append(found)
    torch.testing.assert_close(*logits, atol=1e-9 if name == "glide" else 1e-6, rtol=0)

# ---------------------------------------------------------------- section 4.1
def test_block_mask_entry_by_entry():
    for T, L in ((1, 5), (12, 4), (13, 5), (6, 9)):
        mask = glide.block_mask(T, L)
        assert mask.shape == (T, T)
        for j in range(T):
            for k in range(T):
                assert mask[j, k] == (j // L > k // L)

def rms_norm(x, norm):
    return norm.weight * x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()

def one_head(q, k, v, seen):
    """SoftMax(Q K^T / sqrt(d)) V, where query i sees the first seen[i] keys; zero for none."""
    hd = torch.zeros_like(q)
    for i, n in enumerate(seen):
        if n > 0:
            scores = k[:n] @ q[i] / q.shape[1] ** 0.5
            hd[i] = scores.softmax(0) @ v[:n]
    return hd

@torch.no_grad()
def test_a_layer_head_by_head():
    """Figure 2, and Concat(hd_1, ..., hd_h) W^O under Mask_Block."""
    model, T = shared("llama-eager"), 12                           # 2 KV heads for 4 queries
    draft_model = new_glide(model, norm=True)
    batch, layer = batch_of(model, text(12)[None]), draft_model.layers[0]
    for norm in (layer.norm1, layer.glimpse_norm, layer.norm2):
        norm.weight.uniform_(0.5, 2)
    x = torch.randn(T, 24, dtype=torch.float64)
    rope, glimpse_rope = ropes = draft_model.ropes(torch.arange(T))
    causal, delayed = torch.ones(T, T, dtype=torch.bool).tril(), glide.block_mask(T, 5)
    found = layer(x[None], ropes, causal, batch.kv, delayed)[0]        # (T, d_D)
    # Self-attention, with three heads of size 8
    q, k, v = (rms_norm(x, layer.norm1) @ layer.qkv.weight.T).view(T, 3, 3, 8).permute(1, 2, 0, 3)
    q, k = glide.apply_rope(q, rope), glide.apply_rope(k, rope)
    heads = [one_head(*of_head, range(1, T + 1)) for of_head in zip(q, k, v)]
    x = x + torch.cat(heads, 1) @ layer.o.weight.T
    # The glimpse
    q = (rms_norm(x, layer.glimpse_norm) @ layer.glimpse_q.weight.T).view(T, 4, 8).transpose(0, 1)
    q = glide.apply_rope(q, glimpse_rope)
    k, v = [of_target[0].repeat_interleave(4 // of_target.shape[1], 0)
            for of_target in batch.kv[layer.target_layer]]
    heads = [one_head(*of_head, [i // 5 * 5 for i in range(T)]) for of_head in zip(q, k, v)]
    x = x + torch.cat(heads, 1) @ layer.glimpse_o.weight.T
    gate, up = (rms_norm(x, layer.norm2) @ layer.up.weight.T).chunk(2, 1)
    expected = x + (gate * gate.sigmoid() * up) @ layer.down.weight.T
    torch.testing.assert_close(found, expected, **EXACT)

def test_queries_have_the_rope_of_the_targets_keys(llama):
    """Difference 1: the target's key at position 5 is its key at position 0, rotated by ours."""
    keys, ids = [], torch.arange(4)[:, None]
    for position in (0, 5):
        cache = transformers.DynamicCache()
        at = torch.full_like(ids, position)
        with torch.no_grad():
            llama(ids, position_ids=at, past_key_values=cache, use_cache=True)
        keys.append(cache.layers[0].keys)
    config = glide.Config.for_target(llama)
    _, glimpse_table = glide.tables_of(llama, config, 6)
    rotated = glide.apply_rope(keys[0], glimpse_table[:, 5])
    torch.testing.assert_close(rotated, keys[1], atol=1e-6, rtol=0)

@pytest.mark.parametrize("width, d", [(24, 8), (20, 4)])
def test_rope_of_the_drafters_own_heads(llama, width, d):
    """Entries i and i + d/2 are a point that turns by position * theta^(-2 i / d).

    Entries from d on, which some families of targets have, do not turn.
    """
    config = glide.Config.for_target(llama, width)
    table, _ = glide.tables_of(llama, config, 9)
    x = torch.randn(9, 8)
    theta = llama.config.rope_parameters["rope_theta"]
    angle = torch.arange(9)[:, None] * theta ** (-2 * torch.arange(d // 2) / d)    # (9, d/2)
    point = torch.complex(x[:, :d // 2], x[:, d // 2:d])
    turned = point * torch.polar(torch.ones_like(angle), angle)
    expected = torch.cat((turned.real, turned.imag, x[:, d:]), 1)
    torch.testing.assert_close(glide.apply_rope(x, table), expected, atol=1e-5, rtol=0,
                               check_dtype=False)

@pytest.mark.parametrize("name, rope", [
    ("LlamaForCausalLM", dict(rope_type="dynamic", rope_theta=1e4, factor=4.0)),
    ("PhiForCausalLM", dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5))])
def test_another_rope_than_llamas_is_a_valueerror(name, rope):
    model = family(name, rope_parameters=rope)
    with pytest.raises(ValueError, match="is not Llama's"):
        glide.tables_of(model, glide.Config.for_target(model), 40)

@pytest.mark.parametrize("name, settings", [
    ("llama-eager", {}), ("llama", {"glimpse": False}), ("qwen2-mixed", {"norm": True}),
    ("llama", {"layers": 2, "norm": True})])
def test_decoding_trees_equals_training(name, settings):
    """With the delayed cache under the block mask, and with the drafter's own one."""
    model = shared(name)
    trees_equal_training(glide.Drafter(new_glide(model, **settings)), model)

@torch.no_grad()
def test_no_entry_is_staler_than_in_training(llama):
    """Difference 5: blocks start at rounds' roots, and a whole block after a root."""
    draft_model, batch = new_glide(llama, 2), batch_of(llama, text(30)[None])
    ids = batch.ids[0]
    drafter, t, starts = glide.Drafter(draft_model), 7, [0, 5]
    for accepted in (5, 5, 2, 5):                               # with the root one more
        drafter.begin(view(batch, drafter.encoded, t), ids[t].item())
        drafter.expand(ids[t:t + 5], [-1, 0, 1, 2, 3])
        drafter.keep(list(range(min(accepted + 1, 5))))
        # The fifth token after the root, a leaf that was not expanded, begins a block.
        starts += [t] + [t + 5] * (accepted == 5)
        t += accepted + 1
    drafter.begin(view(batch, drafter.encoded, t), ids[t].item())
    # Keys of the second layer, where a token glimpses what lies before its block
    block_start = torch.tensor([max(s for s in starts if s <= j) for j in range(t)])
    ropes = draft_model.ropes(torch.arange(t))
    causal = torch.ones(t, t, dtype=torch.bool).tril()
    delayed = torch.arange(t) < block_start[:, None]
    x = draft_model.embed(ids[:t])[None]
    x = draft_model.layers[0](x, ropes, causal, view(batch, 0, t).kv, delayed)
    _, expected, _ = draft_model.layers[1].project(x, ropes[0])
    torch.testing.assert_close(drafter.store[1, 0, :, :, :t], expected, **EXACT)

# ---------------------------------------------------------------- settings
def test_the_papers_settings_are_the_defaults():
    """Section 4.1: L = 5, l = N_T - N_D + m; 5.1: one layer; no norm before the glimpse."""
    model = tiny("llama", num_hidden_layers=6)
    c = glide.Config.for_target(model, 16)
    assert (c.block, c.layers, c.norm, c.loss, c.layers_read) == (5, 1, False, "ce", (5,))
    assert glide.Config.for_target(model, 16, 2).layers_read == (4, 5)
    assert glide.Config.for_target(model, 16, layer=2).layers_read == (2,)
    assert glide.Config.for_target(model, glimpse=False).layers_read == ()
    for wrong in (dict(layers=2, layer=0), dict(layer=6)):
        with pytest.raises(ValueError, match="cannot be read"):
            glide.Config.for_target(model, 16, **wrong)
