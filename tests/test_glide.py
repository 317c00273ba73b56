"""GLIDE: masks, training equals decoding, no KV entry is stale, losses, checkpoints."""
import json
from types import SimpleNamespace

import pytest
import torch
import transformers
from conftest import ROOT, VOCAB, shared, tiny, weighty
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

def random_parents(known, m):
    """Parents of m new nodes after `known` others: any earlier node, often the last one."""
    parents = []
    for node in range(known, known + m):
        earlier = torch.randint(node, (2,)).max().item() if node else -1
        parents.append(earlier)
    return parents

def path_to(parents, node):
    """The nodes from the root to a node, itself included."""
    path = []
    while node >= 0:
        path.insert(0, node)
        node = parents[node]
    return path

def trees_against(drafter, batch, recompute):
    """Rounds of random trees: the logits after each node are those that recompute() gives.

    recompute(t, path tokens (n,)) -> logits (V,) after the last of them, by no cache.
    """
    torch.manual_seed(4)
    of_logits(drafter)
    since, t = 0, 6
    for _ in range(6):
        drafter.begin(view(batch, since, t), batch.ids[0, t].item())
        parents, tokens = [], batch.ids[0, t:t + 1]
        for m in (1, 3, 1, 4):
            parents += random_parents(len(parents), m)
            tokens = torch.cat((tokens, torch.randint(VOCAB, (m,))))[:len(parents)]
            found = drafter.expand(tokens[-m:], parents[-m:])
            for logits, node in zip(found, range(len(parents) - m, len(parents))):
                path = path_to(parents, node)
                torch.testing.assert_close(logits, recompute(t, tokens[path]), **EXACT)
        # A random path is accepted: it continues the text, in which it stood before.
        path = path_to(parents, torch.randint(len(parents), ()).item())
        drafter.keep(path)
        since, t = t, t + len(path) + torch.randint(2, ()).item()
        batch.ids[0, since:since + len(path)] = tokens[path]

# ---------------------------------------------------------------- in a project of one's own
@pytest.mark.parametrize("module, make", [(glide, new_glide), (edd, new_edd)])
def test_the_docstrings_round(module, make, llama, tmp_path, monkeypatch):
    """Its lines run, and what expand gives are probabilities."""
    name = module.__name__
    lines = module.__doc__.split("A round of it:\n\n")[1].split("\n\n")[0]
    lines = "\n".join(line[4:] for line in lines.splitlines())
    save(tmp_path / f"my-{name}", make(llama))
    monkeypatch.chdir(tmp_path)
    names = {name: module, "torch": torch, "model": llama, "root": 3,
             "view": view(batch_of(llama, text(9)[None], {2}), 0, 8)}
    exec(lines, names)
    assert names["probs"].shape == (2, VOCAB)
    torch.testing.assert_close(names["probs"].sum(1), torch.ones(2))

@pytest.mark.parametrize("name", ["glide", "glide-top", "vanilla", "edd", "vdm"])
def test_shipped_checkpoints_load(name):
    """With the keys that older ones have in their "config", and with their temperature."""
    target = transformers.LlamaConfig.from_pretrained(ROOT / "checkpoints/target")
    model = transformers.LlamaForCausalLM(target)
    module = edd if name in ("edd", "vdm") else glide
    drafter, about = module.load(ROOT / "checkpoints" / name, model)
    assert about["kind"] == name.removesuffix("-top")
    assert drafter.temperature == about["validation"]["temperature"] != 1
    assert drafter.config.loss == "kl" and not drafter.store.requires_grad

@pytest.mark.parametrize("module, other", [(glide, "edd"), (edd, "glide"), (glide, "base"),
                                           (edd, ".")])
def test_another_folder_is_a_valueerror(module, other, llama):
    with pytest.raises(ValueError, match=f"no drafter that {module.__name__}.py can load"):
        module.load(ROOT / "checkpoints" / other, llama)

def test_other_weights_are_a_valueerror(llama, tmp_path):
    save(tmp_path, new_glide(llama))
    about = json.loads((tmp_path / "training.json").read_text())
    about["config"]["norm"] = True
    (tmp_path / "training.json").write_text(json.dumps(about))
    with pytest.raises(ValueError, match="does not hold the weights"):
        glide.load(tmp_path, llama, 40)

def test_an_expanded_token_has_the_rules_probabilities(llama):
    """probs of reset gets the logits and the calibration temperature."""
    drafter = glide.Drafter(new_glide(llama), temperature=0.5)
    batch, given = batch_of(llama, text(9)[None]), []
    found = []
    for probs in (glide.softmax, lambda *args: given.append(args) or torch.ones(1, VOCAB)):
        drafter.reset(probs, None)
        drafter.begin(view(batch, 0, 8), 1)
        found.append(drafter.expand(torch.tensor([1]), [-1]))
    [(logits, temperature)] = given
    assert temperature == 0.5 and (found[1] == 1).all()
    assert found[0].dtype == torch.float32
    torch.testing.assert_close(found[0], (2 * logits).softmax(-1).float())

# ---------------------------------------------------------------- masks and RoPE
def test_block_mask_entry_by_entry():
    for T, L in ((1, 5), (12, 4), (13, 5), (6, 9)):
        mask = glide.block_mask(T, L)
        assert mask.shape == (T, T)
        for j in range(T):
            for k in range(T):
                assert mask[j, k] == (j // L > k // L)

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
def test_the_drafters_own_table(llama, width, d):
    """cos and sin of position * theta^(-2 i / d), the target's theta, also for smaller heads."""
    config = glide.Config.for_target(llama, width)
    assert width // config.heads == d
    table, glimpse_table = glide.tables_of(llama, config, 9)
    theta = llama.config.rope_parameters["rope_theta"]
    for position in range(9):
        for i in range(d):
            angle = torch.tensor(position * theta ** (-2 * (i % (d // 2)) / d))
            expected = torch.stack((angle.cos(), angle.sin()))
            torch.testing.assert_close(table[:, position, i], expected, atol=1e-5, rtol=0,
                                       check_dtype=False)
    assert glimpse_table.shape == (2, 9, 8)

@pytest.mark.parametrize("r", [0, 4, 8])
def test_rope_of_a_part_of_a_head(r):
    """Entries i and i + r/2 are a point that is turned by the angle i; from r on nothing is."""
    x, angle = torch.randn(3, 8), torch.randn(3, r // 2)
    rope = torch.stack((angle.cos(), angle.sin())).repeat(1, 1, 2)
    found = glide.apply_rope(x, rope)
    expected = x.clone()
    for i in range(r // 2):
        point = torch.complex(x[:, i], x[:, i + r // 2])
        turned = point * torch.polar(torch.ones(3), angle[:, i])
        expected[:, i], expected[:, i + r // 2] = turned.real, turned.imag
    torch.testing.assert_close(found, expected)

def test_another_rope_than_llamas_is_a_valueerror():
    dynamic = dict(rope_type="dynamic", rope_theta=1e4, factor=4.0)
    model = tiny("llama", rope_parameters=dynamic)
    with pytest.raises(ValueError, match="is not Llama's"):
        glide.tables_of(model, glide.Config.for_target(model), 40)

@pytest.mark.parametrize("name", ["llama", "llama-eager"])      # 4 and 2 KV heads for 4 queries
@torch.no_grad()
def test_the_glimpse_head_by_head(name):
    """Concat(hd_1, ..., hd_h) W^O, hd_j = SoftMax(Q K^T / sqrt(d_k)) V under Mask_Block (4.1)."""
    draft_model, T, d_k = new_glide(shared(name), norm=True), 12, 8
    batch, layer = batch_of(shared(name), text(12)[None]), draft_model.layers[0]
    x = torch.randn(1, T, 24, dtype=torch.float64)
    rope, mask = draft_model.glimpse_table[:, :T], glide.block_mask(T, 5)
    found = layer.glimpse(x, batch.kv, rope, mask)[0]                  # (T, d_D)
    k, v = batch.kv[layer.target_layer]
    normed = x[0] * (x[0].square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    expected = torch.zeros(T, 4 * d_k, dtype=torch.float64)
    for j in range(4):
        own = slice(j * d_k, (j + 1) * d_k)
        q = glide.apply_rope(normed @ layer.glimpse_q.weight[own].T, rope)
        shared_kv = j * k.shape[1] // 4
        for i in range(5, T):                                       # the first block sees no key
            seen = i // 5 * 5
            scores = k[0, shared_kv, :seen] @ q[i] / d_k ** 0.5
            expected[i, own] = scores.softmax(0) @ v[0, shared_kv, :seen]
    torch.testing.assert_close(found, expected @ layer.glimpse_o.weight.T, **EXACT)

# ---------------------------------------------------------------- training equals decoding
@pytest.mark.parametrize("name, layers, glimpse, norm", [
    ("llama-eager", 2, True, True), ("qwen2-mixed", 1, True, False), ("llama", 2, False, False)])
def test_training_equals_decoding_with_the_delayed_cache(name, layers, glimpse, norm):
    """Where less than a block is drafted, the rest of it is encoded in the next round."""
    L, T, model = 5, 20, shared(name)
    draft_model = new_glide(model, layers, glimpse=glimpse, norm=norm)
    batch = batch_of(model, text(T)[None])
    ids = batch.ids[0]
    with torch.no_grad():
        trained = draft_model.head(draft_model(batch.ids, batch.kv))[0]
    for drafted in (5, 2):
        drafter = of_logits(glide.Drafter(draft_model))
        for t in range(L, T, L):                                # rounds start where blocks do
            drafter.begin(view(batch, 0 if t == L else t - L, t), ids[t].item())
            for i in range(drafted):
                logits = drafter.expand(ids[t + i:t + i + 1], [i - 1])
                torch.testing.assert_close(logits[0], trained[t + i], **EXACT)
            drafter.keep(list(range(drafted)))

@pytest.mark.parametrize("name, glimpse", [("llama-eager", True), ("llama", False)])
@torch.no_grad()
def test_trees_against_recomputation(name, glimpse):
    """A node sees the committed tokens and its path, and glimpses the committed tokens alone."""
    model = shared(name)
    draft_model, batch = new_glide(model, glimpse=glimpse), batch_of(model, text(64)[None])

    def recompute(t, path):
        ids = torch.cat((batch.ids[0, :t], path))
        n = len(ids)
        causal = torch.ones(n, n, dtype=torch.bool).tril()
        kv = {m: (k[:, :, :t], v[:, :, :t]) for m, (k, v) in batch.kv.items()}
        ropes = draft_model.ropes(torch.arange(n))
        x = draft_model.layers[0](draft_model.embed(ids)[None], ropes, causal, kv)
        return draft_model.head(draft_model.norm(x))[0, -1]

    trees_against(glide.Drafter(draft_model), batch, recompute)

def test_no_entry_is_staler_than_in_training(llama):
    """Of a chain of five that is all accepted, the last token begins a block of its own."""
    draft_model, batch = new_glide(llama, 2), batch_of(llama, text(30)[None])
    ids = batch.ids[0]

    def second_keys(starts):
        """Keys of the second layer, where a token glimpses what lies before its block."""
        block_start = torch.tensor([max(s for s in starts if s <= j) for j in range(30)])
        ropes = draft_model.ropes(torch.arange(30))
        causal = torch.ones(30, 30, dtype=torch.bool).tril()
        delayed = torch.arange(30) < block_start[:, None]
        x = draft_model.embed(batch.ids)
        x = draft_model.layers[0](x, ropes, causal, batch.kv, delayed)
        return draft_model.layers[1].project(x, ropes[0])[1][0]        # (heads, T, d)

    drafter, t, starts = glide.Drafter(draft_model), 7, [0, 5]
    with torch.no_grad():
        for accepted in (5, 5, 2, 5):                           # with the root one more
            drafter.begin(view(batch, drafter.encoded, t), ids[t].item())
            drafter.expand(ids[t:t + 5], [-1, 0, 1, 2, 3])
            drafter.keep(list(range(min(accepted + 1, 5))))
            starts += [t] + [t + 5] * (accepted == 5)
            t += accepted + 1
        drafter.begin(view(batch, drafter.encoded, t), ids[t].item())
        found = drafter.store[1, 0, 0, :, :t]
        torch.testing.assert_close(found, second_keys(starts)[:, :t], **EXACT)
        others = second_keys([s for s in starts if s != 12])
        assert (second_keys(starts) - others)[:, 12].abs().max() > 0.01, "the block matters"

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

# ---------------------------------------------------------------- losses and settings
@pytest.mark.parametrize("loss", ["ce", "kl"])
def test_losses_are_what_their_names_say(llama, loss):
    """Over the loss mask, written out in float64; the target gets no gradient."""
    draft_model = new_glide(llama, loss=loss, norm=True)
    batch = batch_of(llama, torch.stack((text(13), text(13, 8))))
    loss_mask = all_labels(batch)
    loss_mask[1, :4] = False
    llama.zero_grad()
    found = mean_loss(draft_model, batch, loss_mask)
    found.backward()
    assert all(p.grad is None and p.requires_grad for p in llama.parameters())
    assert all(p.grad.abs().sum() > 0 for p in draft_model.parameters())
    with torch.no_grad():
        log_p = draft_model.head(draft_model(batch.ids, batch.kv)).log_softmax(-1)
        log_t, total = batch.logits.log_softmax(-1), 0
        for b, j in loss_mask.nonzero().tolist():
            if loss == "ce":
                total -= log_p[b, j, batch.ids[b, j + 1]]
            else:
                total += (log_t[b, j].exp() * (log_t[b, j] - log_p[b, j])).sum()
    assert found.item() == pytest.approx(total.item() / 20, abs=1e-5)

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

@pytest.mark.parametrize("width", [32, 24])
def test_it_starts_from_the_targets_embedding_and_head(llama, width):
    """Difference 6: copies, where the widths agree."""
    draft_model = new_glide(llama, width=width)
    embed, head = llama.get_input_embeddings(), llama.get_output_embeddings()
    before = draft_model.head.weight.clone()
    draft_model.start_from(embed, head)
    if width == 24:
        assert torch.equal(draft_model.head.weight, before)
        return
    assert torch.equal(draft_model.embed.weight, embed.weight)
    assert torch.equal(draft_model.head.weight, head.weight)
    assert draft_model.head.weight.data_ptr() != head.weight.data_ptr()
