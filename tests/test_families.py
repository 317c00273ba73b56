"""Targets of other families and drafters beside them: each proven by its own uncached forward; what is not served is refused in a sentence."""
import copy
from functools import lru_cache, partial

import pytest
import torch
from conftest import CONTEXT, VOCAB, family, plain, shared, tiny, weighty
from safetensors.torch import save_file
from test_verify import HandMade, oracle

import cape
import edd
import glide
import pct
import verify
from beyond import eagle, medusa
from runtime import drafters, targets
from runtime.targets import AnyTarget, any_target

ROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "original_max_position_embeddings": 36}
# One class for each kept family.  What a small configuration must say beside conftest's sizes.
FAMILIES = {
    "LlamaForCausalLM": {"num_key_value_heads": 2},
    "MistralForCausalLM": {"num_key_value_heads": 2, "sliding_window": 9},
    "MixtralForCausalLM": {"num_key_value_heads": 2, "num_local_experts": 4},
    "Qwen2ForCausalLM": {"num_key_value_heads": 2, "use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
    "Qwen3ForCausalLM": {"num_key_value_heads": 2, "head_dim": 8},
    "Qwen3MoeForCausalLM": {"num_key_value_heads": 2, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "GemmaForCausalLM": {"num_key_value_heads": 2, "head_dim": 8},
    "Gemma2ForCausalLM": {"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 7, "query_pre_attn_scalar": 8},
    "Gemma3ForCausalLM": {"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 7, "query_pre_attn_scalar": 8,
                          "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    "GptOssForCausalLM": {"num_key_value_heads": 2, "head_dim": 8, "num_local_experts": 4, "sliding_window": 7,
                          "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
                          "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "PhiForCausalLM": {"partial_rotary_factor": 0.5},
    "Phi3ForCausalLM": {"num_key_value_heads": 2, "rope_parameters": ROPE, "original_max_position_embeddings": 36, "max_position_embeddings": 80},
    "GPT2LMHeadModel": {"n_positions": CONTEXT},
    "OPTForCausalLM": {"ffn_dim": 48, "word_embed_proj_dim": 32},
}
made = lru_cache(maxsize=None)(lambda name: family(name, **FAMILIES[name]))
PROMPT = [(5 * i + 3) % VOCAB for i in range(10)]
NEW = 14

@lru_cache(maxsize=None)
def text_of(name):
    return plain(made(name), PROMPT, NEW)

def drafter_for(model, name, **more):
    """A random drafter of a kind, or ValueError."""
    if name in ("glide", "vanilla"):
        config = drafters.glide_config(model, 24, glimpse=name == "glide")
        return glide.Drafter(weighty(lambda: drafters.Glide.for_target(model, config, 64), 1))
    draft_class, _ = drafters.KINDS[name]
    if issubclass(draft_class, glide.Glide):
        config = drafters.config_of(name, model, **more)
        draft_model = weighty(lambda: draft_class.for_target(model, config, 64), 1)
    else:
        config = drafters.config_of(name, model, hidden=2, **more)
        draft_model = weighty(lambda: draft_class(config, model), 1)
    if more:
        draft_model.choose_words(torch.tensor([3, 1, 7, 5]))
    return drafters.drafter_of(draft_model)

@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_is_proven_and_its_output_is_plain_decodings(name):
    """By chains and trees that are half right, across windows; a tree's logits are its paths'."""
    model, expected = made(name), text_of(name)
    target = AnyTarget(model)
    assert target.verifies_trees and target.context == (36 if name == "Phi3ForCausalLM" else CONTEXT)
    for build in (cape.chain, cape.cape, partial(pct.pct, cost=0.05)):
        assert verify.generate(target, HandMade(PROMPT + expected, 0.6), build, PROMPT, NEW).tokens == expected
    target.capture({})
    with torch.inference_mode():
        target.prefill(PROMPT)
        logits = target.forward(torch.tensor([1, 2, 3, 4, 5]), torch.tensor([-1, 0, 0, 1, 2]))
        for path in ([0, 1, 3], [0, 2, 4]):
            alone = model(torch.tensor([PROMPT + [1 + node for node in path]]), use_cache=False).logits[0, -3:]
            torch.testing.assert_close(logits[path], alone, atol=2e-5, rtol=1e-3)

# How many families a kind serves: EDD needs a decoder with `norm`; glide-shared needs heads that are rotated whole.
SERVED = {"glide": 14, "vanilla": 14, "edd": 11, "vdm": 11, "medusa": 14, "eagle": 14, "glide-shared": 11, "edd-shared": 11}

@pytest.mark.parametrize("kind", SERVED)
def test_drafters_beside_each_family(kind):
    """They decode losslessly, or are refused in one sentence."""
    served = 0
    for name in FAMILIES:
        try:
            drafter = drafter_for(made(name), kind)
        except ValueError as why:
            assert "\n" not in str(why) and len(str(why)) < 250
            continue
        out = verify.generate(AnyTarget(made(name)), drafter, cape.cape, PROMPT, NEW)
        assert out.tokens == text_of(name), name
        served += 1
    assert served == SERVED[kind]

# ---------------------------------------------------------------- targets that take chains only, or are refused
CHAINS_ONLY = {
    "BartForCausalLM": {"d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 48},    # positions by the cache
    "BloomForCausalLM": {"n_layer": 2, "n_head": 4},                                                                 # ALiBi
}

@pytest.mark.parametrize("name", CHAINS_ONLY)
def test_a_target_that_honours_no_tree_verifies_chains(name):
    model = family(name, **CHAINS_ONLY[name])
    target, expected = AnyTarget(model), plain(model, PROMPT, NEW)
    assert not target.verifies_trees
    for rate in (0.5, 1.0):
        drafter = HandMade(PROMPT + expected, rate)
        assert verify.generate(target, drafter, cape.chain, PROMPT, NEW).tokens == expected
    with pytest.raises(verify.UserError, match=f"{name} verifies chains only.*--tree chain"):
        verify.generate(target, drafter, cape.cape, PROMPT, NEW)

@pytest.mark.parametrize("name, more, words", [
    ("BertLMHeadModel", {}, "does not decode with a KV cache"),                          # sees what comes later
    ("RwkvForCausalLM", {"attention_hidden_size": 32, "context_length": CONTEXT}, "does not decode with a KV cache"),
    ("GPTNeoForCausalLM", {"num_heads": 4, "attention_types": [[["global", "local", "global"], 1]]}, "layers of kind local"),
    ("Lfm2ForCausalLM", {"layer_types": ["conv", "full_attention", "conv"]}, "layers of kind conv")])
def test_a_target_without_kv_entries_of_its_own_is_refused(name, more, words):
    with pytest.raises(verify.UserError, match=words) as caught:
        AnyTarget(family(name, **more))
    assert "\n" not in str(caught.value)

def test_the_proof_tries_a_short_window_and_restores_the_configuration(monkeypatch):
    model = tiny("qwen2-mixed", sliding_window=30)
    before = dict(vars(model.config))
    target = AnyTarget(model)
    assert target.verifies_trees and vars(model.config) == before and target.windows == {"full_attention": None, "sliding_attention": 30}
    monkeypatch.setattr(targets, "within_window", lambda mask, *_: mask)
    model = tiny("qwen2-mixed", sliding_window=30)
    assert not AnyTarget(model).verifies_trees and vars(model.config) == before, "without windows in our mask only chains are right"

@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_no_reason_to_refuse(dtype):
    for name in ("llama", "mistral"):
        assert AnyTarget(tiny(name).to(dtype)).verifies_trees
    assert not AnyTarget(family("BartForCausalLM", **CHAINS_ONLY["BartForCausalLM"]).to(dtype)).verifies_trees

def test_a_sequence_ends_with_longropes_short_table():
    """Nodes of a tree that would lie beyond do not switch to the long one."""
    model = made("Phi3ForCausalLM")
    prompt = [(7 * i + 1) % VOCAB for i in range(30)]
    expected = plain(model, prompt, 7)
    target = AnyTarget(model)
    for build in (cape.cape, oracle(target, prompt + expected + [1] * 9)):
        assert verify.generate(target, HandMade(prompt + expected, 0.6), build, prompt, 30).tokens == expected

# ---------------------------------------------------------------- drafters beside other families
def test_beside_llama_the_classes_give_what_the_files_alone_give(llama):
    """The same weights under the same names, the same logits."""
    ids, hidden = torch.arange(VOCAB)[None], torch.randn(1, VOCAB, 32, dtype=torch.float64)
    for name, alone in (("edd", edd.EDD), ("medusa", medusa.Medusa), ("eagle", eagle.Eagle)):
        config = drafters.config_of(name, llama, hidden=2)
        ours, theirs = drafters.KINDS[name][0](config, llama), weighty(lambda: alone(config, llama), 1)
        ours.load_state_dict(theirs.state_dict())
        inputs = {"edd": (ids, hidden, 5), "medusa": (hidden,), "eagle": (ids, hidden)}[name]
        for x, y in zip(ours(*inputs), theirs(*inputs)):
            assert torch.equal(x, y)

def test_an_edd_with_a_layer_of_llamas_class_decodes_as_it_is_trained():
    """Training under the mask and decoding give the same logits."""
    model, ids = made("Gemma3ForCausalLM"), torch.arange(VOCAB)
    draft_model = drafter_for(model, "edd").model
    assert type(draft_model.layer).__name__ == "LlamaDecoderLayer"
    with torch.no_grad():
        hidden = model(ids[None], output_hidden_states=True).hidden_states[2]
        trained = draft_model.head(draft_model(ids[None], hidden, 4))[0]
        drafter = edd.Drafter(draft_model)
        drafter.begin(verify.View(ids[:8], 8, {}, {2: hidden[0, :8]}, ids[:8].tolist()))
        torch.testing.assert_close(drafter.expand(ids[8:], [-1, 0, 1, 2]), trained[8:], atol=1e-6, rtol=1e-5)

@pytest.mark.parametrize("name", FAMILIES)
def test_a_glimpses_rope_is_the_layers_own(name):
    """A query that is the target's own, with our RoPE, scores the cached keys as the target's attention did."""
    model = made(name)
    decoder = model.get_decoder()
    layers = getattr(decoder, "layers", None)
    attention = getattr(layers[1], "self_attn", None) if layers is not None else None
    if not hasattr(attention, "q_proj") or hasattr(attention, "q_norm"):
        pytest.skip("its queries are not q_proj's alone")
    seen = {}
    attention.q_proj.register_forward_hook(lambda module, args, out: seen.update(q=out))
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    cache = drafters.DynamicCache()
    with torch.no_grad():
        out = model(torch.tensor([PROMPT[:6]]), past_key_values=cache, output_attentions=True)
        k = cache.layers[1].keys[0]                                                      # (H, T, d)
        q = seen["q"][0].unflatten(-1, (-1, k.shape[-1])).transpose(0, 1)                # (h, T, d)
        q = drafters.apply_partial_rope(q, *drafters.target_angles(model, 6, (1,)))
        k = k.repeat_interleave(len(q) // len(k), 0)
        scores = (q @ k.transpose(1, 2))[:, -1]                                          # (h, T), of the last query
        p = out.attentions[1][0][:, -1]
    model.set_attn_implementation(before)
    scaling = getattr(attention, "scaling", k.shape[-1] ** -0.5)
    cap = getattr(model.config, "attn_logit_softcapping", None)
    scores = scores * scaling if not cap else cap * torch.tanh(scores * scaling / cap)
    expected = p.log() - p.log()[:, :1]                                                  # a sink or a norm falls out
    torch.testing.assert_close(scores - scores[:, :1], expected, atol=1e-4, rtol=1e-3)

def test_between_tables_logits_are_capped_as_the_targets():
    """Gemma 2's, and those of a short list of words; a target whose logits are made otherwise is refused."""
    model = made("Gemma2ForCausalLM")
    draft_model = drafters.EDDShared(drafters.config_of("edd-shared", model, hidden=2, words=4), model)
    draft_model.choose_words(torch.tensor([3, 1, 7, 5]))
    with torch.no_grad():
        out = model(torch.tensor([PROMPT]), output_hidden_states=True)
        logits = draft_model.head(out.hidden_states[-1][0])
        assert logits.isfinite().sum(1).tolist() == [4] * 10
        torch.testing.assert_close(logits[:, [3, 1, 7, 5]], out.logits[0][:, [3, 1, 7, 5]])
    with pytest.raises(ValueError, match="the logits of CohereForCausalLM are not its LM head's alone"):
        drafter_for(family("CohereForCausalLM", num_key_value_heads=2), "edd-shared")

def save(folder, draft_model, kind):
    folder.mkdir()
    save_file(draft_model.state_dict(), folder / "model.safetensors")
    (folder / "training.json").write_text(drafters.json.dumps({"kind": kind, "config": vars(draft_model.config)}))

@pytest.mark.parametrize("kind", drafters.KINDS)
def test_a_checkpoint_loads_by_its_kind(kind, tmp_path):
    """And for another target it is refused."""
    llama = shared("llama")
    made_of = drafter_for(llama, kind, words=4) if kind.endswith("shared") else drafter_for(llama, kind)
    save(tmp_path / "x", made_of.model, f"{kind}-f8")
    drafter, about = drafters.load(tmp_path / "x", llama)
    assert about["kind"] == f"{kind}-f8" and type(drafter) is type(made_of) and type(drafter.model) is type(made_of.model)
    assert all(torch.equal(x, y) for x, y in zip(drafter.model.parameters(), made_of.model.parameters()))
    if kind != "vanilla":
        with pytest.raises(ValueError, match="made for another target"):
            drafters.load(tmp_path / "x", tiny("llama", hidden_size=48, num_attention_heads=6, num_key_value_heads=6))

class Int8(torch.nn.Module):
    """A linear layer, or an embedding, whose weights are integers and a scale for each row."""
    def __init__(self, module):
        super().__init__()
        weight = module.weight.detach()
        self.table, self.bias, self.dtype = isinstance(module, torch.nn.Embedding), getattr(module, "bias", None), weight.dtype
        self.scale = torch.nn.Parameter(weight.abs().amax(1, keepdim=True).float() / 127, requires_grad=False)
        self.weight = torch.nn.Parameter((weight / self.scale).round().char(), requires_grad=False)

    def forward(self, x):
        weight = (self.weight * self.scale).to(self.dtype)
        return weight[x] if self.table else torch.nn.functional.linear(x, weight, self.bias)

def quantised(model, kinds=(torch.nn.Linear, torch.nn.Embedding)):
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, kinds):
                setattr(module, name, Int8(child))
    return model

@pytest.mark.parametrize("kind", ["glide", "edd", "eagle", "medusa", "edd-shared", "glide-shared"])
def test_a_quantised_target(kind):
    """Dtypes are those of what is read; decoding is lossless."""
    model = quantised(copy.deepcopy(shared("qwen2")))
    drafter = drafter_for(model, kind)
    assert {p.dtype for p in drafter.model.parameters()} == {torch.float64}
    out = verify.generate(AnyTarget(model), drafter, cape.cape, PROMPT, NEW)
    assert out.tokens == plain(model, PROMPT, NEW)
    if kind == "edd":
        fresh, ids, x = drafters.EDD(drafter.config, model), torch.arange(VOCAB), torch.randn(3, 32, dtype=torch.float64)
        torch.testing.assert_close(fresh.embed(ids), model.get_input_embeddings()(ids))
        torch.testing.assert_close(fresh.head(x), model.get_output_embeddings()(x))

@pytest.mark.parametrize("kind", ["glide", "edd"])
def test_a_target_that_accelerate_spreads(kind, tmp_path):
    """The head and a layer lie on the disk: the same drafter proposes the same."""
    pytest.importorskip("accelerate")
    whole = tiny("llama").float()
    whole.save_pretrained(tmp_path / "model")
    modules = ["model.embed_tokens", "model.rotary_emb", *(f"model.layers.{i}" for i in range(2))]
    places = dict.fromkeys(modules, "cpu") | dict.fromkeys(["lm_head", "model.norm", "model.layers.2"], "disk")
    spread = type(whole).from_pretrained(tmp_path / "model", device_map=places, offload_folder=tmp_path / "disk")
    save(tmp_path / "drafter", drafter_for(whole, kind).model, kind)
    rounds = []
    for model in (whole, spread):
        drafter, _ = drafters.load(tmp_path / "drafter", model)
        out = verify.generate(any_target(model), drafter, cape.cape, PROMPT, 6)
        assert out.tokens == plain(whole, PROMPT, 6)
        rounds.append([len(step.new) for step in out.rounds])
    assert rounds[0] == rounds[1]
