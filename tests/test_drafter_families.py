"""runtime/families.py: draft models beside targets of any family, their tables, and loading."""
import copy
import json

import pytest
import torch
import transformers
from conftest import (
    ROOT, VOCAB, assert_plain, family, random_draft_model, random_drafter, shared, tiny)
from test_families import NEW, PROMPT, made
from test_glide import save, trees_equal_training

import cape
import glide
import verify
from runtime import families
from runtime.targets import AnyTarget, any_target

WORDS = torch.tensor([3, 1, 7, 5])

def words_of(kind):
    return WORDS if kind.endswith("shared") else None

# ---------------------------------------------------------------- each kind beside families
# Families that differ in what a kind reads: RoPE, the layer's class, biases, a cap on logits
BESIDE = {
    "glide": ("GPT2LMHeadModel", "GPTNeoXForCausalLM", "PhiForCausalLM", "Phi3ForCausalLM",
              "Gemma3ForCausalLM", "GptOssForCausalLM"),
    "glide-shared": ("Qwen3ForCausalLM", "Gemma2ForCausalLM"),
    "edd": ("MistralForCausalLM", "GPT2LMHeadModel", "PhiForCausalLM"),
    "edd-shared": ("MistralForCausalLM", "Gemma3ForCausalLM"),
    "eagle": ("MixtralForCausalLM", "OPTForCausalLM"),
    "medusa": ("PhiForCausalLM",),
}
PAIRS = [(kind, name) for kind, names in BESIDE.items() for name in names]

@pytest.mark.parametrize("kind, name", PAIRS)
def test_a_kind_of_drafter_decodes_losslessly_beside_a_family(kind, name):
    """By a drafter with random weights: what it accepts hardly matters, that it runs does."""
    model = made(name)
    drafter = random_drafter(model, kind, words=words_of(kind))
    out = verify.generate(AnyTarget(model), drafter, cape.cape, PROMPT, NEW)
    assert_plain(model, PROMPT, out.tokens, NEW)

def test_an_edd_with_a_layer_of_llamas_class_decodes_as_it_is_trained():
    model = made("Gemma3ForCausalLM")
    drafter = random_drafter(model, "edd")
    assert type(drafter.model.layer).__name__ == "LlamaDecoderLayer"
    trees_equal_training(drafter, model, atol=1e-5)            # its norms are float32

# ---------------------------------------------------------------- the same as beside Llama
def test_a_new_layer_is_initialised_as_one_of_its_class():
    """Qwen2's has biases: zeros.  The norm starts as ones, whatever the target's is."""
    parts = families.parts_of(shared("qwen2"))
    attention = parts.layer.self_attn
    assert 0.015 < attention.q_proj.weight.std() < 0.025 and (attention.q_proj.bias == 0).all()
    assert (parts.norm.weight == 1).all()

def test_beside_llama_the_parts_are_those_of_edd_and_the_tables_those_of_glide(llama):
    """The same weights by the same names; the same cos and sin."""
    ours = random_draft_model(llama, "edd")
    alone = families.edd.EDD(ours.config, families.edd.parts_of(llama))
    ours.load_state_dict(alone.state_dict())
    x, position = torch.zeros(1, 1, 1), torch.arange(9)[None]
    for found, expected in zip(ours.rotary(x, position), alone.rotary(x, position)):
        torch.testing.assert_close(found, expected)
    ours = random_draft_model(llama, "glide", 9)
    tables = glide.tables_of(llama, ours.config, 9)
    ours.load_state_dict(glide.Glide(ours.config, tables).state_dict())
    torch.testing.assert_close([ours.table, ours.glimpse_table], [x.double() for x in tables])

# ---------------------------------------------------------------- RoPE
@pytest.mark.parametrize("name", [
    "Gemma3ForCausalLM", "GptOssForCausalLM", "PhiForCausalLM", "OPTForCausalLM"])
@torch.no_grad()
def test_a_glimpses_rope_is_the_layers_own(name):
    """A query of the target's own, with our RoPE, scores the cached keys as its attention did.

    Of two kinds of layers, by angles that are listed once, of a part of each head, without RoPE.
    """
    model, seen = made(name), {}
    attention = model.get_decoder().layers[1].self_attn
    hook = attention.q_proj.register_forward_hook(lambda _, args, out: seen.update(q=out))
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    cache = transformers.DynamicCache()
    out = model(torch.tensor([PROMPT[:6]]), past_key_values=cache, output_attentions=True)
    model.set_attn_implementation(before)
    hook.remove()
    k = cache.layers[1].keys[0]                                                # (H, T, d)
    q = seen["q"].view(6, -1, k.shape[-1]).transpose(0, 1)                     # (h, T, d)
    if hasattr(attention, "q_norm"):
        q = attention.q_norm(q)
    _, table = families.rope_tables_of(model, glide.Config.for_target(model, layer=1), 6)
    q = glide.apply_rope(q, table)
    k = k.repeat_interleave(len(q) // len(k), 0)
    scores = (q @ k.transpose(1, 2))[:, -1] * attention.scaling                # (h, T), of the last
    log_p = out.attentions[1][0][:, -1].log()
    # Differences of scores: a sink, or the sum of a softmax, falls out.
    torch.testing.assert_close(scores - scores[:, :1], log_p - log_p[:, :1], atol=1e-4, rtol=1e-3)

def test_the_drafter_has_positions_where_the_target_has_no_rope():
    draft_model = random_draft_model(made("GPT2LMHeadModel"), "glide", 6)
    table = draft_model.table
    assert draft_model.glimpse_table.shape == (2, 6, 0) and table.shape == (2, 6, 8)
    assert (table[:, 1:] != table[:, :1]).any()

# ---------------------------------------------------------------- the target's own tables
def test_logits_are_capped_as_the_targets():
    """Gemma 2's, also of a list of words; a target that makes its logits otherwise is refused."""
    model = made("Gemma2ForCausalLM")
    with torch.no_grad():
        out = model(torch.tensor([PROMPT]), output_hidden_states=True)
        for words in (None, WORDS):
            found = families.tables_of(model, words).head(out.hidden_states[-1])
            expected = out.logits if words is None else out.logits[..., words]
            torch.testing.assert_close(found, expected)
    with pytest.raises(ValueError, match="the logits of CohereForCausalLM are not its LM head's"):
        families.tables_of(family("CohereForCausalLM", num_key_value_heads=2))

# ---------------------------------------------------------------- loading
@pytest.mark.parametrize("kind", families.KINDS)
def test_a_checkpoint_loads_by_its_kind(kind, tmp_path, llama):
    """And for another target it is refused."""
    draft_model = random_draft_model(llama, kind, words=words_of(kind))
    save(tmp_path, draft_model, kind=kind, validation={"temperature": 0.7})
    drafter, about = families.load(tmp_path, llama)
    assert about["kind"] == kind and drafter.temperature == 0.7
    assert type(drafter) is families.KINDS[kind][2] and type(drafter.model) is type(draft_model)
    for x, y in zip(drafter.model.state_dict().values(), draft_model.state_dict().values()):
        assert torch.equal(x, y)
    if kind != "vanilla":                                      # it reads nothing of the target
        other = tiny("llama", hidden_size=48, num_attention_heads=6, num_key_value_heads=6)
        with pytest.raises(ValueError, match="made for another target"):
            families.load(tmp_path, other)

@pytest.mark.parametrize("about", [{"config": {}}, {"kind": "base", "config": {}}])
def test_what_is_no_drafter(about, tmp_path, llama):
    (tmp_path / "training.json").write_text(json.dumps(about))
    with pytest.raises(ValueError, match="holds no drafter"):
        families.load(tmp_path, llama)

@pytest.mark.parametrize("name, layers, intermediate_size", [
    ("glide-shared", 19, 64), ("edd-shared", 4, 1536)])
def test_checkpoints_for_smollm2_load(name, layers, intermediate_size):
    """Beside random Llamas, with those sizes that are read alone.  Others: test_lossless.py."""
    config = transformers.LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=intermediate_size,
        num_hidden_layers=layers, num_attention_heads=9, num_key_value_heads=3,
        tie_word_embeddings=True)
    model = transformers.LlamaForCausalLM(config)
    drafter, about = families.load(ROOT / "checkpoints/smollm2" / name, model, 64)
    assert drafter.temperature == about["validation"]["temperature"] != 1
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

def test_a_quantised_target():
    """Copies are what it computes, in the dtype of its hidden states; decoding is lossless."""
    model = copy.deepcopy(shared("qwen2"))
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, (torch.nn.Linear, torch.nn.Embedding)):
                setattr(module, name, Int8(child))
    for kind in ("glide", "edd", "edd-shared"):
        drafter = random_drafter(model, kind, words=words_of(kind))
        assert {p.dtype for p in drafter.model.parameters()} == {torch.float64}
        out = verify.generate(AnyTarget(model), drafter, cape.cape, PROMPT, NEW)
        assert_plain(model, PROMPT, out.tokens, NEW)
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
    save(tmp_path / "drafter", random_draft_model(whole, kind), kind=kind)
    rounds = []
    for model in (whole, spread):
        drafter, _ = families.load(tmp_path / "drafter", model)
        out = verify.generate(any_target(model), drafter, cape.cape, PROMPT, 6)
        assert_plain(whole, PROMPT, out.tokens, 6)
        rounds.append([len(step.new) for step in out.rounds])
    assert rounds[0] == rounds[1]
