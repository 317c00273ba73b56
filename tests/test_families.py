"""Decoding with every kind of architecture of transformers: what is served is exact, the rest refused in a sentence."""
import re
from functools import lru_cache, partial

import families
import pytest
import torch
import transformers
from conftest import CONTEXT, ROOT, VOCAB, family, plain, shared, tiny
from test_verify import HandMade, oracle

import cape
import verify
from runtime.attention import fold_queries
from runtime.targets import AnyEncoderDecoder, AnyTarget, StackedCache, any_target

DOCS = ROOT / "docs" / "targets.md"
row = lru_cache(maxsize=None)(targets.row)
# Two kinds of layers, learned positions, chains only, an encoder, a recurrent state, a latent cache ...
SOME = ("GptOssForCausalLM", "GPT2LMHeadModel", "BloomForCausalLM", "BertLMHeadModel", "MambaForCausalLM", "DeepseekV2ForCausalLM", "Gemma4ForCausalLM",
        "WhisperForCausalLM", "XLNetLMHeadModel", "Phi3ForCausalLM (longrope, before its turn)", "FalconForCausalLM (ALiBi)")

def documented():
    """{name: cells} of the table, and the release that it was made with."""
    text = DOCS.read_text(encoding="utf-8")
    head, *lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("| ")]
    return {name: dict(zip(head[1:], rest)) for name, *rest in lines}, re.search(r"transformers ([\d.]+\d)", text).group(1)

@pytest.mark.parametrize("name", [*SOME, *(pytest.param(name, marks=pytest.mark.long) for name in targets.names() if name not in SOME)])
def test_a_family_is_decoded_exactly_or_refused_in_a_sentence(name):
    """As docs/targets.md says, for the release that it was made with."""
    cells, (table, release) = row(name), documented()
    bad = {column: says for column, says in cells.items() if column != "by" and says != "yes" and not says.startswith("refused: ")}
    assert not bad
    assert all("\n" not in says and len(says) < 400 for says in cells.values())
    if release == transformers.__version__:
        assert {column: says if column == "by" else says == "yes" for column, says in cells.items()} == {
            column: says if column == "by" else says == "yes" for column, says in table[name].items()}

def test_the_table_names_every_class_and_no_family_is_lost():
    table, release = documented()
    assert all(re.fullmatch(r"yes|–|no \[\d+\]|Target|AnyTarget", says) for cells in table.values() for says in cells.values())
    assert sum(cells["plain"] == "yes" for cells in table.values()) >= 142
    if release == transformers.__version__:
        assert {name.partition(" ")[0] for name in table} == set(targets.classes())

# ---------------------------------------------------------------- targets that prove themselves
sized = partial(family, num_hidden_layers=2)

CHAINS_ONLY = {
    "BartForCausalLM": dict(d_model=32, decoder_layers=2, decoder_attention_heads=4, decoder_ffn_dim=48),        # positions by the cache
    "BloomForCausalLM": dict(n_layer=2, n_head=4),                                                               # ALiBi
    "MptForCausalLM": dict(d_model=32, n_layers=2, n_heads=4, max_seq_len=CONTEXT),
    "GPTNeoForCausalLM": dict(num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]], window_size=15),   # a window of its own
}

@pytest.mark.parametrize("name", CHAINS_ONLY)
def test_a_target_that_honours_no_tree_takes_chains(name):
    model, prompt = sized(name, **CHAINS_ONLY[name]), [1, 2, 3, 4, 5, 6, 7]
    target, expected = AnyTarget(model), plain(model, prompt, 20)
    assert not target.verifies_trees
    for rate in (0.0, 0.5, 1.0):
        drafter = HandMade(prompt + expected, rate)
        assert verify.generate(target, drafter, cape.chain, prompt, 20).tokens == expected
    with pytest.raises(verify.UserError, match=f"{name} verifies chains only.*--tree chain"):
        verify.generate(target, drafter, cape.cape, prompt, 20)

@pytest.mark.parametrize("name, more", [("BertLMHeadModel", {}), ("RobertaForCausalLM", {}), ("ElectraForCausalLM", {"embedding_size": 32}),
                                        ("RwkvForCausalLM", {"attention_hidden_size": 32, "context_length": CONTEXT})])
def test_a_target_that_decodes_otherwise_with_a_cache_is_refused(name, more):
    """Encoders with a language model's head see what comes later; a recurrent state is no key and no value."""
    with pytest.raises(verify.UserError, match=f"{name} does not decode with a KV cache") as caught:
        AnyTarget(sized(name, **more))
    assert "\n" not in str(caught.value)

def test_what_takes_no_mask_is_refused_and_an_encoder_that_was_made_a_decoder_is_served():
    assert AnyTarget(sized("BertLMHeadModel", is_decoder=True)).verifies_trees
    model = tiny("llama")
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(verify.UserError, match="flash_attention_2 takes no tree mask.*sdpa"):
        AnyTarget(model)

@pytest.mark.parametrize("name, more, places", [
    ("RobertaForCausalLM", {"is_decoder": True, "pad_token_id": 1}, CONTEXT - 2),          # RoBERTa numbers from the padding token's id + 1
    ("MptForCausalLM", {**CHAINS_ONLY["MptForCausalLM"], "max_seq_len": 33, "max_position_embeddings": None}, 33), ("LlamaForCausalLM", {}, CONTEXT)])
def test_the_context_is_as_long_as_the_model_can_read(name, more, places):
    model = sized(name, **more)
    target, prompt = AnyTarget(model), [5] * (places - 3)
    assert target.context == places
    assert verify.generate(target, None, verify.root_only, prompt, 20).tokens == plain(model, prompt, 4), "the last token need not be read"
    if target.verifies_trees:
        assert verify.generate(target, None, oracle(target, [5] * 99), prompt, 20).tokens == plain(model, prompt, 4), "nodes beyond the context"
    with pytest.raises(verify.UserError, match=f"context of {places}"):
        verify.generate(target, None, verify.root_only, [5] * (places + 1), 1)

def test_the_proof_looks_beyond_the_window_of_each_kind_of_layer_and_leaves_no_trace(monkeypatch):
    model = fold_queries(tiny("qwen2-mixed", sliding_window=30))
    before = dict(vars(model.config))
    target = AnyTarget(model)
    assert target.verifies_trees and vars(model.config) == before and target.windows == {"full_attention": None, "sliding_attention": 30}

    monkeypatch.setattr("runtime.targets.within_window", lambda mask, *_: mask)
    model = fold_queries(tiny("qwen2-mixed", sliding_window=30))
    # A mask without windows: only chains by the model's own mask are right.
    assert not AnyTarget(model).verifies_trees and vars(model.config) == before

@pytest.mark.parametrize("name", ["qwen2", "mistral", "qwen2-mixed"])
def test_grouped_queries_are_folded_and_no_key_is_copied(name, monkeypatch):
    """Logits of a tree are those of repeated keys; SDPA reads the cache itself, by the cache's own strides."""
    own, folded = AnyTarget(tiny(name)), AnyTarget(tiny(name))
    own.model.set_attn_implementation("sdpa")
    shapes, sdpa = [], torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention",
                        lambda q, k, v, attn_mask=None, **how: shapes.append((q.shape[1:3], k.shape[1], attn_mask)) or sdpa(q, k, v, attn_mask=attn_mask, **how))
    logits = []
    for target in (folded, own):
        target.capture({})
        target.prefill([1, 2, 3, 4, 5, 6, 7])
        shapes.clear()
        logits.append(target.forward(torch.tensor([1, 2, 3, 4, 5]), torch.tensor([-1, 0, 0, 1, 2])))
        assert all(heads[0] == held == (2 if target is folded else 4) for heads, held, _ in shapes)
        assert all(heads[1] == mask.shape[2] and mask.stride(2) % 8 == 0 for heads, _, mask in shapes)
    torch.testing.assert_close(*logits, atol=1e-9, rtol=0)

@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_half_precision_is_no_reason_to_refuse(name, dtype):
    assert AnyTarget(tiny(name).to(dtype)).verifies_trees
    wrong = sized("BartForCausalLM", **CHAINS_ONLY["BartForCausalLM"]).to(dtype)
    assert not AnyTarget(wrong).verifies_trees

# ---------------------------------------------------------------- longrope, vocabularies, hidden states, encoders
@pytest.fixture(scope="module")
def phi3():
    """Phi-3's longrope: beyond 16 positions all of a text is turned by another table."""
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4, "long_factor": [1.5, 3.0, 5.0, 9.0],
            "original_max_position_embeddings": 16}
    return sized("Phi3ForCausalLM", num_key_value_heads=2, rope_parameters=rope, original_max_position_embeddings=16, max_position_embeddings=64)

def test_rows_of_two_rotary_tables_never_meet_in_a_cache(phi3, monkeypatch):
    """A text that begins below the turning point ends there; one that begins beyond it is read at once, in slices it would differ."""
    target = AnyTarget(phi3)
    assert target.short == 16
    for length in (5, 15, 16):
        prompt = (list(range(1, 6)) * 4)[:length]
        expected = plain(phi3, prompt, 17 - length)
        for build in (cape.cape, oracle(target, prompt + expected + [1] * 9)):
            out = verify.generate(target, HandMade(prompt + expected, 0.6), build, prompt, 30)
            assert out.tokens == expected, "as many as the first table holds, also of a tree that goes beyond"
    prompt, target.chunk_size = torch.randint(VOCAB, (40,), generator=torch.Generator().manual_seed(3)).tolist(), 8
    for ids in (prompt[:3], prompt):
        with phi3.register_forward_pre_hook(lambda *_: 1 / 0), pytest.raises(ZeroDivisionError):
            target.prefill(ids)
    assert (target.capacity, target.chunk_size) == (64, 8), "as before it was interrupted"
    expected = plain(phi3, prompt, 20)
    assert verify.generate(target, HandMade(prompt + expected, 0.6), cape.cape, prompt, 20).tokens == expected
    with torch.inference_mode():
        # A stage of a cascade is taken over the turning point, and back.
        for length in (10, 16, 17, 30, 16, 12, 40):
            exact = phi3(torch.tensor([prompt[:length]]), use_cache=False).logits[0, -2:]
            torch.testing.assert_close(target.sync(prompt[:length], 2), exact, atol=2e-5, rtol=1e-4)
        target.short = None
        target.prefill(prompt[:8])
        assert (target.sync(prompt)[-1] - exact[-1]).abs().max() > 1e-3, "slices would have mixed two tables"

def test_a_vocabulary_is_padded_or_cut_to_anothers():
    """Logits of so many ids; an id that the model does not know is any other, and never drafted."""
    llama = shared("llama")
    with torch.inference_mode():
        own = AnyTarget(llama).prefill([1, 2, VOCAB - 1])
        longer, shorter = AnyTarget(llama, vocab=VOCAB + 3).prefill([1, 2, VOCAB + 2]), AnyTarget(llama, vocab=VOCAB - 2).prefill([1, 2, VOCAB - 1])
    assert torch.equal(longer[:VOCAB], own) and longer[VOCAB:].isneginf().all() and torch.equal(shorter, own[:-2])

def test_a_model_spread_over_devices():
    """(Here over one that has two names.)"""
    model = tiny("llama")
    model.hf_device_map = {"model.embed_tokens": "cpu", "model.layers": 0}
    target, expected = AnyTarget(model), plain(model, [1, 2, 3], 14)
    assert type(target.cache) is StackedCache
    for rate in (0.5, 1.0):
        assert verify.generate(target, HandMade([1, 2, 3] + expected, rate), cape.beam, [1, 2, 3], 14).tokens == expected

def test_any_target_picks_the_class():
    assert type(any_target(shared("llama"), 7, VOCAB + 1)) is AnyTarget
    model = family("T5ForConditionalGeneration", d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0)
    target, prompt = any_target(model, capacity=CONTEXT), [3, 1, 4]
    assert type(target) is AnyEncoderDecoder and not target.verifies_trees
    drafter = HandMade([0] * 20, 0.6)
    with pytest.raises(verify.UserError, match="verifies chains only"):
        verify.generate(target, drafter, cape.cape, prompt, 12)
