"""Targets of other families: what the proof finds, and what generate() gives with each of them."""
import threading
from functools import lru_cache

import pytest
import torch
import transformers
from conftest import CONTEXT, VOCAB, family, plain, tiny
from test_generate import Reciting

import cape
import pct
import verify
from runtime import targets
from runtime.errors import UserError
from runtime.generation import speculative
from runtime.targets import AnyTarget, any_target

GROUPED = {"num_key_value_heads": 2}
HEADS = {**GROUPED, "head_dim": 8}
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
LONGROPE = {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
# What a small configuration of each class says beside conftest's sizes.  All verify trees.
FAMILIES = {
    "LlamaForCausalLM": GROUPED,
    "MistralForCausalLM": {**GROUPED, "sliding_window": 9},
    "MixtralForCausalLM": {**GROUPED, "num_local_experts": 4},
    "Qwen2ForCausalLM": {
        **GROUPED, "use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
    "Qwen3ForCausalLM": HEADS,
    "Qwen3MoeForCausalLM": {
        **HEADS, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "GemmaForCausalLM": HEADS,
    "Gemma2ForCausalLM": {**HEADS, "sliding_window": 7, "query_pre_attn_scalar": 8},
    "Gemma3ForCausalLM": {
        **HEADS, "sliding_window": 7, "query_pre_attn_scalar": 8, "layer_types": MIXED},
    "GptOssForCausalLM": {
        **HEADS, "num_local_experts": 4, "sliding_window": 7, "layer_types": MIXED,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "rope_scaling": None},
    "PhiForCausalLM": {"partial_rotary_factor": 0.5},
    "Phi3ForCausalLM": {
        **GROUPED, "rope_scaling": LONGROPE, "original_max_position_embeddings": 36,
        "max_position_embeddings": 80},
    "GPT2LMHeadModel": {"n_positions": CONTEXT},
    "GPTNeoXForCausalLM": {},
    "OPTForCausalLM": {"ffn_dim": 48, "word_embed_proj_dim": 32},
}
DECODER = {"d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 48}
ENCODER = {"encoder_layers": 1, "encoder_attention_heads": 4, "encoder_ffn_dim": 48}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
LOCAL = {"attention_types": [[["global", "local", "global"], 1]], "num_layers": 3, "num_heads": 4}
# These verify chains only.
CHAINS_ONLY = {
    "BartForCausalLM": DECODER,                                # positions by the cache
    "BloomForCausalLM": {"n_layer": 2, "n_head": 4},           # ALiBi
    "MptForCausalLM": {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": CONTEXT},
    "FalconForCausalLM": {"alibi": True},
    "GPTNeoForCausalLM": {**LOCAL, "window_size": 6},          # windows that no mask replaces
    "Llama4ForCausalLM": {
        **HEADS, "attention_chunk_size": 8, "intermediate_size_mlp": 32, "num_local_experts": 2,
        "num_experts_per_tok": 1},
    "T5ForConditionalGeneration": T5,
    "MT5ForConditionalGeneration": T5,
    "BartForConditionalGeneration": {**DECODER, **ENCODER, "forced_eos_token_id": None},
    "MarianMTModel": {**DECODER, **ENCODER, "forced_eos_token_id": None},
}
# A recurrent state, attention to what comes later: these are refused.
REFUSED = {
    "RwkvForCausalLM": {"attention_hidden_size": 32, "context_length": CONTEXT},
    "MambaForCausalLM": {}, "BertLMHeadModel": {},
}
made = lru_cache(maxsize=None)(lambda name: family(name, **FAMILIES[name]))
PROMPT = [(5 * i + 3) % VOCAB for i in range(10)]
NEW = 14

@lru_cache(maxsize=None)
def text_of(name):
    return plain(made(name), PROMPT, NEW)

# ---------------------------------------------------------------- inside generate()
def model_of(name):
    """A model for generate(): alone it makes NEW tokens of PROMPT."""
    more = {**FAMILIES, **CHAINS_ONLY, **REFUSED}[name]
    if name in FAMILIES:
        model = made(name)
    else:                                                      # not all of these know float64
        model = family(name, decoder_start_token_id=1, **more).float()
    model.generation_config = transformers.GenerationConfig(
        max_new_tokens=NEW, decoder_start_token_id=1)
    return model

def decoded(model, build, text, **how):
    """What generate() gives with a builder, and the callable."""
    ids = torch.tensor([PROMPT])
    fast = speculative(Reciting(text, VOCAB), build)
    how = {"attention_mask": torch.ones_like(ids), **how}
    return model.generate(ids, custom_generate=fast, **how), fast

@pytest.mark.parametrize("name", [*FAMILIES, *CHAINS_ONLY, *REFUSED])
def test_generates_own_by_chains_and_cape_or_a_sentence(name):
    """Across windows: a family is served with trees, with chains alone, or refused."""
    model, ids = model_of(name), torch.tensor([PROMPT])
    own = model.generate(ids, attention_mask=torch.ones_like(ids))
    text = own[0].tolist()
    if name in REFUSED:
        with pytest.raises(UserError, match="does not decode with a KV cache|cache_params") as why:
            decoded(model, cape.chain, text)
        assert "decode with" in str(why.value) and "\n" not in str(why.value)
        return
    out, fast = decoded(model, cape.chain, text)
    assert torch.equal(out, own) and fast.last.tau > 2
    if name in FAMILIES:
        assert torch.equal(decoded(model, cape.cape, text)[0], own)
        assert text[len(PROMPT):] == text_of(name), "and generate() is right"
        return
    with pytest.raises(UserError, match=f"{name} verifies chains only.*by cape.chain,") as why:
        decoded(model, cape.cape, text)
    assert "\n" not in str(why.value)

@pytest.mark.parametrize("name", ["T5ForConditionalGeneration", "BartForConditionalGeneration"])
def test_an_encoder_decoder_reads_what_generate_has_encoded(name):
    """A padded source, the decoder's own prompt, outputs that were given, a dict, sampling."""
    model, ids = model_of(name), torch.tensor([PROMPT])
    mask = torch.tensor([[1] * 7 + [0] * 3])
    encoded = model.get_encoder()(torch.flip(ids, [1]), return_dict=True)
    for how in ({}, dict(attention_mask=mask), dict(decoder_input_ids=torch.tensor([[1, 5, 4]])),
                dict(encoder_outputs=encoded), dict(repetition_penalty=1.3)):
        text = model.generate(ids, **how)[0].tolist()
        for tree in (cape.chain, verify.root_only):
            out, fast = decoded(model, tree, text, return_dict_in_generate=True, **how)
            assert out.sequences[0].tolist() == text
            assert fast.target.source == PROMPT
    own = model.generate(ids, return_dict_in_generate=True)
    out, _ = decoded(model, cape.chain, own.sequences[0].tolist(), return_dict_in_generate=True)
    assert type(out) is type(own) and out.keys() == own.keys()
    for field in ("past_key_values", "cache"):
        if field in own:
            x, y = own[field], out[field]
            for part in ("self_attention_cache", "cross_attention_cache"):
                written = [layer for layer in getattr(x, part).layers if layer.is_initialized]
                for layer, ours in zip(written, getattr(y, part).layers):
                    torch.testing.assert_close(layer.keys, ours.keys, atol=1e-5, rtol=1e-4)
    texts = set()
    for tree in (cape.chain, verify.root_only):
        torch.manual_seed(3)
        texts.add(tuple(decoded(model, tree, text, do_sample=True)[0][0].tolist()))
    assert len(texts) == 1
    with pytest.raises(UserError, match="cache holds 1 tokens"):
        filled = transformers.EncoderDecoderCache(*(transformers.DynamicCache() for _ in range(2)))
        model(encoder_outputs=encoded, decoder_input_ids=torch.tensor([[1]]),
              past_key_values=filled)
        decoded(model, cape.chain, text, past_key_values=filled)

def test_padding_where_positions_are_counted_by_the_cache():
    """Stripped padding would be another text there."""
    model = model_of("BartForCausalLM")
    mask = torch.tensor([[0] * 2 + [1] * 8])
    with pytest.raises(UserError, match="prompt without padding"):
        decoded(model, cape.chain, PROMPT, attention_mask=mask)

def test_a_class_that_ignores_positions_verifies_chains():
    class Deaf(transformers.LlamaForCausalLM):
        def forward(self, *given, position_ids=None, **how):
            return super().forward(*given, **how)
    model = tiny("llama")
    model.__class__ = Deaf
    text = PROMPT + plain(model, PROMPT, NEW)
    out, _ = decoded(model, cape.chain, text, max_new_tokens=NEW)
    assert out[0].tolist() == text
    with pytest.raises(UserError, match="by cape.chain"):
        decoded(model, cape.cape, text, max_new_tokens=NEW)

def test_a_window_longer_than_the_context():
    model = tiny("mistral", sliding_window=4096)
    text = PROMPT + plain(model, PROMPT, NEW)
    for build in (cape.chain, cape.cape):
        out, _ = decoded(model, build, text, max_new_tokens=NEW)
        assert out[0].tolist() == text

# ---------------------------------------------------------------- the proof
@pytest.mark.parametrize("name", FAMILIES)
def test_a_trees_logits_are_those_of_its_paths(name):
    model = made(name)
    target = AnyTarget(model)
    context = 36 if name == "Phi3ForCausalLM" else CONTEXT
    assert target.verifies_trees and target.context == context
    with torch.inference_mode():
        target.prefill(PROMPT)
        tokens, parents = torch.tensor([1, 2, 3, 4, 5]), torch.tensor([-1, 0, 0, 1, 2])
        logits, _ = target.forward(tokens, parents)
        for path in ([0, 1, 3], [0, 2, 4]):
            ids = torch.tensor([PROMPT + [1 + node for node in path]])
            alone = model(ids, use_cache=False).logits[0, -3:]
            torch.testing.assert_close(logits[path], alone, atol=2e-5, rtol=1e-3)

def test_the_proof_tries_a_short_window_and_restores_the_configuration(monkeypatch):
    model = tiny("qwen2-mixed", sliding_window=30)
    before = dict(vars(model.config))
    target = AnyTarget(model)
    assert target.verifies_trees and vars(model.config) == before
    assert target.windows == {"full_attention": None, "sliding_attention": 30}
    monkeypatch.setattr(targets, "within_window", lambda mask, *_: mask)
    model = tiny("qwen2-mixed", sliding_window=30)
    assert not AnyTarget(model).verifies_trees, "without windows in our mask only chains are right"
    assert vars(model.config) == before

def test_a_model_is_proven_once_in_each_state(monkeypatch):
    """Also where two threads wrap it: each would see the other's short window."""
    model, proofs = tiny("mistral", sliding_window=30), []
    prove = AnyTarget.prove

    def counted(self):
        proofs.append(self.model)
        return prove(self)
    monkeypatch.setattr(AnyTarget, "prove", counted)
    threads = [threading.Thread(target=any_target, args=(model,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(proofs) == 1 and model.config.sliding_window == 30
    any_target(model.float())
    model.set_attn_implementation("eager")
    any_target(model)
    any_target(model)
    assert len(proofs) == 3

@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_no_reason_to_refuse(dtype):
    for name in ("llama", "mistral"):
        assert AnyTarget(tiny(name).to(dtype)).verifies_trees
    bart = family("BartForCausalLM", **CHAINS_ONLY["BartForCausalLM"])
    assert not AnyTarget(bart.to(dtype)).verifies_trees

def test_tokens_without_logits_prove_nothing():
    """A model that gives a token the lowest logit of its dtype is not proven by that logit."""
    model = tiny("llama")

    def lowest(module, given, logits):
        return logits.index_fill(-1, torch.tensor([2, 5]), torch.finfo(logits.dtype).min)
    model.lm_head.register_forward_hook(lowest)
    assert AnyTarget(model).verifies_trees
    model.forward = lambda *given, position_ids=None, **how: type(model).forward(
        model, *given, logits_to_keep=how.pop("logits_to_keep", 0), **how)
    AnyTarget.proven.pop(model)
    assert not AnyTarget(model).verifies_trees, "it ignores positions"

def test_a_sequence_ends_with_longropes_short_table():
    """Nodes of a tree that would lie beyond do not switch to the long one."""
    model = made("Phi3ForCausalLM")
    prompt = [(7 * i + 1) % VOCAB for i in range(30)]
    expected = plain(model, prompt, 7)
    drafter = Reciting(prompt + expected + [1] * 9, VOCAB)
    beyond = dict.fromkeys(("gamma", "max_nodes"), 9)

    def deep(expand, root):
        expand.remaining = 9                                   # a builder that looks too far
        return cape.cape(expand, root, **beyond)
    for build in (cape.cape, pct.pct, deep):
        out = verify.generate(AnyTarget(model), drafter, build, prompt, 30)
        assert out.tokens == expected

@pytest.mark.parametrize("config, context", [
    (dict(max_position_embeddings=32), 32), (dict(), targets.UNSTATED), (dict(max_seq_len=77), 77),
    (dict(max_position_embeddings=32, rope_scaling={"type": "yarn", "factor": 4.0}), 128),
    (dict(max_position_embeddings=128, rope_parameters={
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}), 128),
    (dict(max_position_embeddings=80, original_max_position_embeddings=36,
          rope_scaling={"type": "longrope"}), 36),
    (dict(max_position_embeddings=64, rope_scaling={"rope_type": "dynamic", "factor": 2.0}), 64)])
def test_the_context_by_a_configuration(config, context):
    from types import SimpleNamespace
    assert targets.context_of(SimpleNamespace(**config)) == context
