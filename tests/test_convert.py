"""Published drafters: what is converted predicts what its published forward predicts.

The published ones are made here of transformers' layers, which have the published names.
"""
import json
from functools import partial

import pytest
import torch
import torch.nn.functional as F
import transformers
from conftest import tiny
from helpers import TEXT, refused, save, tokenizer_of
from safetensors.torch import save_file
from torch import nn
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import verify
from runtime import families, load
from training import convert

VOCAB, WIDTH = 40, 32                                  # of the target

@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """The folder of a target with grouped queries and biases, and its model"""
    model = tiny("qwen2", vocab_size=VOCAB, max_position_embeddings=64)
    for p in model.parameters():
        if p.ndim == 1:
            nn.init.uniform_(p, 0.5, 1.5)                       # norms and biases that matter
    folder = save(tmp_path_factory.mktemp("target"), model, tokenizer_of(TEXT))
    return folder, load.load_target(str(folder), "auto", "cpu")[0]

# ---------------------------------------------------------------- the published drafters
# Each: weights, config.json, and logits(kv, last_hidden, ids, t) after the last of ids, of which t
# are committed.  kv, last_hidden: of the target, for all ids.
def random(module):
    """The module with random weights, float32 numbers in float64; norms are about one."""
    torch.manual_seed(0)
    for name, p in module.named_parameters():
        p.data = (0.2 * torch.randn(p.shape) + ("norm" in name)).double()
    return module.eval()

def weights_of(module, prefix):
    return {prefix + name: w.float().clone() for name, w in module.state_dict().items()}

def eagle(model, bias=True):
    """EAGLE-1: a layer without its first norm.  bias: of fc; not all have it."""
    layer = random(type(model.model.layers[0])(model.config, 0))
    layer.input_layernorm = nn.Identity()
    fc = random(nn.Linear(2 * WIDTH, WIDTH, bias))
    weights = weights_of(layer, "layers.0.") | weights_of(fc, "fc.")
    weights["embed_tokens.weight"] = torch.zeros(VOCAB, WIDTH)         # the target's is taken

    def logits(kv, last_hidden, ids, t):
        """On its own features, step by step"""
        features = last_hidden[:t]
        for i in range(t, len(ids)):
            x = fc(torch.cat((model.model.embed_tokens(ids[1:i + 1]), features), -1))[None]
            rope = model.model.rotary_emb(x, torch.arange(i)[None])
            features = torch.cat((features, layer(x, position_embeddings=rope)[0, -1:]))
        return model.lm_head(features[-1])
    return weights, {}, logits

def glide(model):
    """GLIDE of two layers, in files for target and drafter"""
    settings = {"num_attention_heads": 3, "rms_norm_eps": 1e-3}
    lm = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=24, intermediate_size=20, num_hidden_layers=2, **settings))
    for layer in lm.model.layers:
        layer.cross_attn = nn.ModuleDict({"q_proj": nn.Linear(24, WIDTH, bias=False),
                                          "o_proj": nn.Linear(WIDTH, 24, bias=False)})
    random(lm)

    def logits(kv, last_hidden, ids, t):
        """Committed tokens see the target's keys of blocks of five before"""
        limits = torch.tensor([j // 5 * 5 if j < t else t for j in range(len(ids))])
        x, position = lm.model.embed_tokens(ids)[None], torch.arange(len(ids))[None]
        rope, of_target = lm.model.rotary_emb(x, position), model.model.rotary_emb(x, position)
        for layer, (k, v) in zip(lm.model.layers, kv[-2:]):
            x = x + layer.self_attn(layer.input_layernorm(x), rope, None)[0]
            q = layer.cross_attn["q_proj"](x).unflatten(-1, (4, 8)).transpose(1, 2)
            q, _ = apply_rotary_pos_emb(q, q, *of_target)
            seen = torch.arange(k.shape[2]) < limits[:, None]
            glimpse = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)
            glimpse = glimpse.nan_to_num(0.0).transpose(1, 2).flatten(2)
            x = x + layer.cross_attn["o_proj"](glimpse)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return lm.lm_head(lm.model.norm(x))[0, -1]
    return weights_of(lm, "small_model."), {"small_cfg": settings}, logits

def medusa(model):
    """MEDUSA-1 of eleven heads; config.json says two, as the published ones do."""
    heads = nn.ModuleList()
    for _ in range(11):
        block = nn.ModuleDict({"linear": nn.Linear(WIDTH, WIDTH)})
        heads.append(nn.ModuleList([block, nn.Linear(WIDTH, VOCAB, bias=False)]))
    random(heads)

    def logits(kv, last_hidden, ids, t):
        """By the head of a node's depth, on the last committed feature"""
        f = last_hidden[t - 1]
        block, head = heads[len(ids) - t - 1]
        return head(f + F.silu(block["linear"](f)))
    return weights_of(heads, "medusa_head."), {"medusa_num_heads": 2}, logits

def arguments(folder, source, weights, config, pickled=False):
    """Write files as the hub has them -> the arguments of the command, which saves to out"""
    if pickled:                                    # with what is no weight
        weights["x.rotary_emb.inv_freq"] = torch.ones(4)
        torch.save(weights, source / "pytorch_model.bin")
    else:
        save_file(weights, source / "model.safetensors")
    (source / "config.json").write_text(json.dumps(config))
    return [str(source), "--target", str(folder), "--out", str(source / "out")]

# ---------------------------------------------------------------- equal to the published forwards
@pytest.mark.parametrize("kind, published", [
    ("eagle", eagle), ("eagle", partial(eagle, bias=False)), ("glide", glide), ("medusa", medusa)])
@torch.no_grad()
def test_drafts_are_those_of_the_published_forward(target, tmp_path, kind, published):
    """Along a chain of five, after twelve committed tokens."""
    folder, model = target
    weights, config, logits = published(model)
    argv = arguments(folder, tmp_path, weights, config, pickled=kind == "medusa")
    assert convert.main(argv) == 0
    drafter, about = families.load(tmp_path / "out", model)
    assert about["kind"] == kind
    drafter.reset(lambda logits, temperature: logits)
    ids, t = torch.randint(VOCAB, (20,), generator=torch.Generator().manual_seed(2)), 12
    cache = transformers.DynamicCache()
    out = model(ids[None], past_key_values=cache, output_hidden_states=True)
    kv = [(layer.keys, layer.values) for layer in cache.layers]
    _, view = verify.Target(model).prefill(ids[:t].tolist(), 9, drafter.needs)
    drafter.begin(view, ids[t].item())
    for i in range(t, t + 5):
        [row] = drafter.expand(ids[i:i + 1], [i - t - 1])
        expected = logits(kv, out.hidden_states[-1][0], ids[:i + 1], t)
        # RoPE tables of a model are float32.
        torch.testing.assert_close(row, expected, atol=5e-5, rtol=1e-5)

def test_a_weight_too_much_is_named(target, tmp_path, capsys):
    """The first norm of a layer, which EAGLE-1 does not have."""
    folder, model = target
    weights, config, _ = eagle(model)
    weights["layers.0.input_layernorm.weight"] = torch.ones(WIDTH)
    argv = arguments(folder, tmp_path, weights, config)
    refused(capsys, argv, "layer.input_layernorm.weight", convert.main)
    assert not (tmp_path / "out").exists()
