"""Targets of other families: what the proof finds, and what generate() gives with each of them."""
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
import transformers
from conftest import CONTEXT, SIZES, VOCAB, plain, reciting, tiny
from helpers import FAMILIES, HEADS, for_generate

import cape
import pct
import verify
from runtime import targets
from runtime.generation import speculative
from runtime.program import UserError
from runtime.targets import AnyTarget, any_target

PROMPT = [(5 * i + 3) % VOCAB for i in range(10)]
NEW = 14
DECODER = {"d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 48}
ENCODER = {"encoder_layers": 1, "encoder_attention_heads": 4, "encoder_ffn_dim": 48}
VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "patch_size": 4,
          "num_attention_heads": 2, "image_size": 8, "projection_dim": 32}
# These verify trees, too, as those in helpers.
TREES = {
    "PaliGemmaForConditionalGeneration": {                     # positions from 1
        "text_config": {"model_type": "gemma", "num_key_value_heads": 2, **SIZES, **HEADS},
        "vision_config": VISION},
    "Gemma3nForCausalLM": {                                    # shared keys and values
        **HEADS, "num_hidden_layers": 4, "num_kv_shared_layers": 2, "sliding_window": 7,
        "layer_types": ["sliding_attention", "full_attention"] * 2, "altup_num_inputs": 2,
        "activation_sparsity_pattern": [0.0] * 4, "laurel_rank": 8,
        "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB},
    "DeepseekV3ForCausalLM": {                                 # keys and values of two sizes
        "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
        "v_head_dim": 12, "first_k_dense_replace": 3, "num_key_value_heads": 4},
}
# These verify chains only.
CHAINS_ONLY = {
    "BartForCausalLM": DECODER,                                # positions by the cache
    "BloomForCausalLM": {"n_layer": 2, "n_head": 4},           # ALiBi
    "GPTNeoForCausalLM": {                                     # windows that no mask replaces
        "attention_types": [[["global", "local", "global"], 1]], "num_layers": 3, "num_heads": 4,
        "window_size": 6},
    "Llama4ForCausalLM": {
        **HEADS, "attention_chunk_size": 8, "intermediate_size_mlp": 32, "num_local_experts": 2,
        "num_experts_per_tok": 1},
    "T5ForConditionalGeneration": {
        "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4},
    "BartForConditionalGeneration": {**DECODER, **ENCODER, "forced_eos_token_id": None},
    "LEDForConditionalGeneration": {                           # NEW positions beside the encoder's
        **DECODER, **ENCODER, "attention_window": 4, "pad_token_id": 0,
        "max_position_embeddings": None, "max_encoder_position_embeddings": 64,
        "max_decoder_position_embeddings": NEW},
    "WhisperForConditionalGeneration": {                       # hears
        **DECODER, **ENCODER, "pad_token_id": 0, "num_mel_bins": 8, "max_source_positions": 20,
        "max_target_positions": CONTEXT, "suppress_tokens": None, "begin_suppress_tokens": None},
}
REFUSED = {"MambaForCausalLM": {}}                            # a state
OTHERS = {**TREES, **CHAINS_ONLY, **REFUSED}
GIVEN = {"inputs": torch.tensor([PROMPT]), "attention_mask": torch.ones(1, 10).long()}

# ---------------------------------------------------------------- inside generate()
def model_of(name):
    return for_generate(NEW, name, decoder_start_token_id=1, **{**FAMILIES, **OTHERS}[name])

def decoded(model, build, text, **given):
    """What generate() gives with a builder, and the callable."""
    fast = speculative(reciting(text), build)
    return model.generate(custom_generate=fast, **given), fast

@pytest.mark.parametrize("name", [*FAMILIES, *OTHERS])
def test_generates_own_by_chains_and_cape_or_a_sentence(name):
    """Across windows: a family is served with trees, with chains alone, or refused."""
    model, given = model_of(name), GIVEN
    if name.startswith("Whisper"):
        given = {"input_features": torch.ones(1, 8, 40)}
    own = model.generate(**given)
    text = own[0].tolist()
    if name in REFUSED:
        with pytest.raises(UserError, match="does not decode with a KV cache|cache_params"):
            decoded(model, cape.chain, text, **given)
        return
    out, fast = decoded(model, cape.chain, text, **given)
    assert torch.equal(out, own) and fast.last.tau > 1.5
    if name in CHAINS_ONLY:
        with pytest.raises(UserError, match=f"{name} verifies chains only.*by cape.chain,"):
            decoded(model, cape.cape, text, **given)
        return
    assert fast.target.capacity == (36 if name == "Phi3ForCausalLM" else CONTEXT)
    assert torch.equal(decoded(model, cape.cape, text, **given)[0], own)

def test_an_encoder_decoder_reads_what_generate_has_encoded():
    """A padded source, the decoder's own prompt, outputs that were given, processors."""
    model, ids = model_of("T5ForConditionalGeneration"), torch.tensor([PROMPT])
    mask = torch.tensor([[1] * 7 + [0] * 3])
    encoded = model.get_encoder()(torch.flip(ids, [1]), return_dict=True)
    for more in (dict(attention_mask=mask), dict(decoder_input_ids=torch.tensor([[1, 5, 4]])),
                 dict(encoder_outputs=encoded), dict(repetition_penalty=1.3)):
        how = {**GIVEN, **more, "return_dict_in_generate": True}
        own = model.generate(**how)
        text = own.sequences[0].tolist()
        out, fast = decoded(model, cape.chain, text, **how)
        assert out.sequences[0].tolist() == text and fast.target.source == PROMPT
        assert type(out) is type(own) and out.keys() == own.keys()
    filled = transformers.EncoderDecoderCache(*(transformers.DynamicCache() for _ in range(2)))
    model(encoder_outputs=encoded, decoder_input_ids=torch.tensor([[1]]), past_key_values=filled)
    with pytest.raises(UserError, match="(past_key_values|cache): as this is given"):
        decoded(model, cape.chain, text, **GIVEN, past_key_values=filled)

def test_padding_where_positions_are_counted_by_the_cache():
    """Stripped padding would be another text there."""
    given = {**GIVEN, "attention_mask": torch.tensor([[0] * 2 + [1] * 8])}
    with pytest.raises(UserError, match="attention_mask: as this is given"):
        decoded(model_of("BartForCausalLM"), cape.chain, PROMPT, **given)

def test_a_sequence_ends_with_longropes_short_table():
    """Nodes of a tree that would lie beyond do not switch to the long one."""
    model = model_of("Phi3ForCausalLM")
    prompt = [(7 * i + 1) % VOCAB for i in range(30)]
    text = prompt + plain(model, prompt, 7)
    out = verify.generate(AnyTarget(model), reciting(text + [1] * 9), pct.pct, prompt, 30)
    assert prompt + out.tokens == text

# ---------------------------------------------------------------- the proof
def test_the_proof_tries_a_short_window_and_restores_the_configuration(monkeypatch):
    model = tiny("qwen2-mixed", sliding_window=30)
    before = dict(vars(model.config))
    target = AnyTarget(model)
    assert target.verifies_trees and vars(model.config) == before
    assert target.windows == {"full_attention": None, "sliding_attention": 30}
    monkeypatch.setattr(targets, "windows_of", lambda config: (dict.fromkeys(target.windows), ()))
    model = tiny("qwen2-mixed", sliding_window=30)
    assert not AnyTarget(model).verifies_trees, "without windows in our mask only chains are right"
    assert vars(model.config) == before

def test_a_model_is_proven_once(monkeypatch):
    """Also where threads wrap it: each would see the other's short window."""
    model, proofs = tiny("mistral", sliding_window=30), []
    prove = AnyTarget.prove
    monkeypatch.setattr(AnyTarget, "prove", lambda self: proofs.append(self) or prove(self))
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(any_target, [model] * 4))
    assert len(proofs) == 1 and model.config.sliding_window == 30

def test_what_proves_nothing():
    """Half precision is no reason to refuse, and the lowest logit of a dtype none to serve."""
    assert AnyTarget(tiny("mistral").to(torch.bfloat16)).verifies_trees
    model = tiny("llama")

    def lowest(module, given, logits):
        return logits.index_fill(-1, torch.tensor([2, 5]), torch.finfo(logits.dtype).min)
    model.lm_head.register_forward_hook(lowest)
    assert AnyTarget(model).verifies_trees
    AnyTarget.proven.pop(model)
    model.forward = lambda *given, position_ids=None, **how: type(model).forward(
        model, *given, logits_to_keep=how.pop("logits_to_keep", 0), **how)
    assert not AnyTarget(model).verifies_trees, "it ignores positions"

@pytest.mark.parametrize("config, context", [
    (dict(), 2048),
    (dict(max_position_embeddings=64, keep_window_size=12), 12),        # Doge chooses by rounding
    (dict(max_position_embeddings=32, rope_scaling={"type": "yarn", "factor": 4.0}), 128),
    (dict(max_position_embeddings=32, rope_scaling={"type": "yarn", "factor": None}), 32),
    (dict(max_position_embeddings=128, rope_parameters={
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}), 128)])
def test_the_context_by_a_configuration(config, context):
    assert targets.context_of(SimpleNamespace(**config)) == context
