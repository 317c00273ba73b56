"""runtime/families.py: draft models beside targets of any family, their tables, and loading."""
import copy
import json

import pytest
import torch
import transformers
from conftest import ROOT, VOCAB, family, plain, shared, tiny, weighty
from test_families import FAMILIES, NEW, PROMPT, made, text_of
from test_glide import batch_of, of_logits, save, text, view

import cape
import glide
import verify
from runtime import families
from runtime.targets import AnyTarget, any_target

KINDS = ["glide", "edd", "eagle", "medusa", "edd-shared", "glide-shared"]
SETTINGS = {"vanilla": {"glimpse": False}, "vdm": {"encoding": False}}

def config_of(kind, model):
    """A small Config of a kind."""
    config_class = families.KINDS[kind][0]
    settings = dict(SETTINGS.get(kind.removesuffix("-shared"), {}))
    if kind in ("glide", "vanilla"):
        settings["width"] = 24
    if kind.startswith(("edd", "vdm")):
        settings["hidden"] = 2
    return config_class.for_target(model, **settings)

def drafter_for(model, kind, words=None):
    """A random drafter of a kind, or ValueError."""
    config = config_of(kind, model)
    draft_model = weighty(families.new(kind, config, model, 64, words))
    return families.KINDS[kind][2](draft_model)

# ---------------------------------------------------------------- each kind beside each family
@pytest.mark.parametrize("name", FAMILIES)
def test_every_kind_of_drafter_decodes_losslessly(name):
    """By a drafter with random weights: what it accepts hardly matters, that it runs does."""
    target, words = AnyTarget(made(name)), torch.tensor([3, 1, 7, 5])
    for kind in KINDS:
        drafter = drafter_for(made(name), kind, words if kind.endswith("shared") else None)
        out = verify.generate(target, drafter, cape.cape, PROMPT, NEW)
        assert out.tokens == text_of(name), kind

def test_an_edd_with_a_layer_of_llamas_class_decodes_as_it_is_trained():
    model, ids = made("Gemma3ForCausalLM"), torch.arange(VOCAB)
    drafter = of_logits(drafter_for(model, "edd"))
    draft_model = drafter.model
    assert type(draft_model.layer).__name__ == "LlamaDecoderLayer"
    batch = batch_of(model, ids[None], {2})
    with torch.no_grad():
        trained = draft_model.head(draft_model(ids[None], batch.hidden[2], 4))[0]
        drafter.begin(view(batch, 0, 8), 8)
        found = drafter.expand(ids[8:], [-1, 0, 1, 2])
    torch.testing.assert_close(found, trained[8:], atol=1e-6, rtol=1e-5)

# ---------------------------------------------------------------- the same as beside Llama
def test_a_new_layer_is_initialised_as_one_of_its_class():
    """Qwen2's has biases: zeros.  The norm starts as ones, whatever the target's is."""
    parts = families.parts_of(shared("qwen2"))
    attention = parts.layer.self_attn
    assert 0.015 < attention.q_proj.weight.std() < 0.025 and (attention.q_proj.bias == 0).all()
    assert (parts.norm.weight == 1).all()

def test_beside_llama_the_parts_are_those_of_edd_and_the_tables_those_of_glide(llama):
    """The same weights by the same names; the same cos and sin."""
    for kind in ("edd", "glide"):
        config = config_of(kind, llama)
        ours = families.new(kind, config, llama, 9)
        if kind == "edd":
            alone = families.edd.EDD(config, families.edd.parts_of(llama))
            x, position = torch.zeros(1, 1, 1), torch.arange(9)[None]
            for found, expected in zip(ours.rotary(x, position), alone.rotary(x, position)):
                torch.testing.assert_close(found, expected)
        else:
            alone = glide.Glide(config, glide.tables_of(llama, config, 9)).double()
            torch.testing.assert_close(ours.table, alone.table)
            torch.testing.assert_close(ours.glimpse_table, alone.glimpse_table)
        assert ours.state_dict().keys() == alone.state_dict().keys()
        ours.load_state_dict(alone.state_dict())

# ---------------------------------------------------------------- RoPE
@pytest.mark.parametrize("name", FAMILIES)
def test_a_glimpses_rope_is_the_layers_own(name):
    """A query of the target's own, with our RoPE, scores the cached keys as its attention did."""
    model = made(name)
    layers = getattr(model.get_decoder(), "layers", None)
    attention = getattr(layers[1], "self_attn", None) if layers is not None else None
    if not hasattr(attention, "q_proj") or hasattr(attention, "q_norm"):
        pytest.skip("its queries are not q_proj's alone")
    seen = {}
    hook = attention.q_proj.register_forward_hook(lambda _, args, out: seen.update(q=out))
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    cache = transformers.DynamicCache()
    with torch.no_grad():
        ids = torch.tensor([PROMPT[:6]])
        out = model(ids, past_key_values=cache, output_attentions=True)
    model.set_attn_implementation(before)
    hook.remove()
    k = cache.layers[1].keys[0]                                                # (H, T, d)
    q = seen["q"][0].unflatten(-1, (-1, k.shape[-1])).transpose(0, 1)          # (h, T, d)
    _, table = families.rope_tables_of(model, glide.Config.for_target(model, layer=1), 6)
    q = glide.apply_rope(q, table)
    k = k.repeat_interleave(len(q) // len(k), 0)
    scaling = getattr(attention, "scaling", k.shape[-1] ** -0.5)
    scores = (q @ k.transpose(1, 2))[:, -1] * scaling                          # (h, T), of the last
    cap = getattr(model.config, "attn_logit_softcapping", None)
    scores = cap * torch.tanh(scores / cap) if cap else scores
    log_p = out.attentions[1][0][:, -1].log()
    # Differences of scores: a sink, or the sum of a softmax, falls out.
    torch.testing.assert_close(scores - scores[:, :1], log_p - log_p[:, :1], atol=1e-4, rtol=1e-3)

def test_the_drafter_has_positions_where_the_target_has_no_rope():
    model = made("GPT2LMHeadModel")
    table, glimpse_table = families.rope_tables_of(model, config_of("glide", model), 6)
    assert glimpse_table.shape == (2, 6, 0) and table.shape == (2, 6, 8)
    assert (table[:, 1:] != table[:, :1]).any()

# ---------------------------------------------------------------- the target's own tables
def test_logits_are_capped_as_the_targets():
    """Gemma 2's, also of a list of words; a target that makes its logits otherwise is refused."""
    model, words = made("Gemma2ForCausalLM"), torch.tensor([3, 1, 7, 5])
    for chosen in (None, words):
        tables = families.tables_of(model, chosen)
        with torch.no_grad():
            out = model(torch.tensor([PROMPT]), output_hidden_states=True)
            found = tables.head(out.hidden_states[-1])
        expected = out.logits if chosen is None else out.logits[..., words]
        torch.testing.assert_close(found, expected)
    with pytest.raises(ValueError, match="the logits of CohereForCausalLM are not its LM head's"):
        drafter_for(family("CohereForCausalLM", num_key_value_heads=2), "edd-shared")

# ---------------------------------------------------------------- loading
@pytest.mark.parametrize("kind", families.KINDS)
def test_a_checkpoint_loads_by_its_kind(kind, tmp_path):
    """And for another target it is refused."""
    llama = shared("llama")
    words = torch.tensor([3, 1, 7, 5]) if kind.endswith("shared") else None
    made_of = drafter_for(llama, kind, words)
    save(tmp_path, made_of.model, kind=kind, validation={"temperature": 0.7})
    drafter, about = families.load(tmp_path, llama)
    assert about["kind"] == kind and drafter.temperature == 0.7
    assert type(drafter) is type(made_of) and type(drafter.model) is type(made_of.model)
    for x, y in zip(drafter.model.state_dict().values(), made_of.model.state_dict().values()):
        assert torch.equal(x, y)
    if kind != "vanilla":                                  # it reads nothing of the target
        other = tiny("llama", hidden_size=48, num_attention_heads=6, num_key_value_heads=6)
        with pytest.raises(ValueError, match="made for another target"):
            families.load(tmp_path, other)
    for wrong in ({"kind": kind, "config": {}}, {"kind": "base", "config": {}}):
        (tmp_path / "training.json").write_text(json.dumps(wrong))
        with pytest.raises(ValueError, match="holds no drafter"):
            families.load(tmp_path, llama)

@pytest.mark.parametrize("name, layers, intermediate_size", [
    ("eagle", 0, 0), ("medusa", 0, 0), ("smollm2/glide-shared", 19, 64),
    ("smollm2/edd-shared", 4, 1536)])
def test_shipped_checkpoints_load(name, layers, intermediate_size):
    """The others: test_glide.py.  Beside random Llamas, with those sizes that are read alone."""
    if name.startswith("smollm2"):
        config = transformers.LlamaConfig(
            vocab_size=49152, hidden_size=576, intermediate_size=intermediate_size,
            num_hidden_layers=layers, num_attention_heads=9, num_key_value_heads=3,
            tie_word_embeddings=True)
    else:
        config = transformers.LlamaConfig.from_pretrained(ROOT / "checkpoints/target")
    model = transformers.LlamaForCausalLM(config)
    drafter, about = families.load(ROOT / "checkpoints" / name, model, 64)
    assert drafter.temperature == about["validation"]["temperature"] != 1
    if name.startswith("smollm2"):
        assert len(drafter.model.between.words) == 8192

# ---------------------------------------------------------------- weights that cannot be read
class Int8(torch.nn.Module):
    """A linear layer, or an embedding, of integers and a scale for each row."""
    def __init__(self, module):
        super().__init__()
        weight = module.weight.detach()
        self.is_table = isinstance(module, torch.nn.Embedding)
        self.bias, self.dtype = getattr(module, "bias", None), weight.dtype
        scale = weight.abs().amax(1, keepdim=True).float() / 127
        self.scale = torch.nn.Parameter(scale, requires_grad=False)
        integers = (weight / self.scale).round().char()
        self.weight = torch.nn.Parameter(integers, requires_grad=False)

    def forward(self, x):
        weight = (self.weight * self.scale).to(self.dtype)
        return weight[x] if self.is_table else torch.nn.functional.linear(x, weight, self.bias)

def quantised(model):
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, (torch.nn.Linear, torch.nn.Embedding)):
                setattr(module, name, Int8(child))
    return model

@pytest.mark.parametrize("kind", KINDS)
def test_a_quantised_target(kind):
    """Copies are what it computes, in the dtype of its hidden states; decoding is lossless."""
    model = quantised(copy.deepcopy(shared("qwen2")))
    drafter = drafter_for(model, kind)
    assert {p.dtype for p in drafter.model.parameters()} == {torch.float64}
    out = verify.generate(AnyTarget(model), drafter, cape.cape, PROMPT, NEW)
    assert out.tokens == plain(model, PROMPT, NEW)
    if kind == "edd":
        parts = families.parts_of(model)
        ids, x = torch.arange(VOCAB), torch.randn(3, 32, dtype=torch.float64)
        torch.testing.assert_close(parts.embed(ids), model.get_input_embeddings()(ids))
        torch.testing.assert_close(parts.head(x), model.get_output_embeddings()(x))

@pytest.mark.parametrize("kind", ["glide", "edd", "edd-shared"])
def test_a_target_that_accelerate_spreads(kind, tmp_path):
    """The head and a layer lie on the disk: the same drafter proposes the same."""
    pytest.importorskip("accelerate")
    whole = tiny("llama").float()
    whole.save_pretrained(tmp_path / "model")
    in_memory = ["model.embed_tokens", "model.rotary_emb", "model.layers.0", "model.layers.1"]
    on_disk = ["lm_head", "model.norm", "model.layers.2"]
    places = dict.fromkeys(in_memory, "cpu") | dict.fromkeys(on_disk, "disk")
    spread = type(whole).from_pretrained(tmp_path / "model", device_map=places,
                                         offload_folder=tmp_path / "disk")
    save(tmp_path / "drafter", drafter_for(whole, kind).model, kind=kind)
    expected, rounds = plain(whole, PROMPT, 6), []
    for model in (whole, spread):
        drafter, _ = families.load(tmp_path / "drafter", model)
        out = verify.generate(any_target(model), drafter, cape.cape, PROMPT, 6)
        assert out.tokens == expected
        rounds.append([len(step.new) for step in out.rounds])
    assert rounds[0] == rounds[1]
