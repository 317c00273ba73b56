"""Inside transformers' own generate(): each kind of argument against generate() without it."""
import warnings
from functools import cache, partial
from types import MethodType

import pytest
import torch
import transformers
from conftest import CONTEXT, ROOT, VOCAB, reciting, shared, tiny
from transformers import (
    AutoTokenizer, DynamicCache, GenerationConfig, LlamaForCausalLM, StaticCache, pipeline)

import cape
import verify
from runtime import families
from runtime.errors import UserError
from runtime.generation import speculative
from runtime.targets import any_target

PROMPT = torch.tensor([[3, 1, 4]])
NEW = 16
CACHE = "cache" if transformers.__version__ >= "5.24" else "past_key_values"
PLAIN = speculative(None, verify.root_only)

def made(name="llama", **config):
    """A random model of a key of conftest.CLASSES or of a class of transformers, in float32."""
    model = tiny(name, **config).float()
    model.generation_config = GenerationConfig(max_new_tokens=NEW, decoder_start_token_id=1)
    return model

@pytest.fixture(scope="module")
def model():
    """Nobody changes it."""
    return made()

@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(ROOT / "checkpoints" / "target")

@pytest.fixture(scope="module")
def speaker(tokenizer):
    """A model of the tokenizer's vocabulary."""
    return made(vocab_size=len(tokenizer))

@cache
def own_text(model):
    """What generate() gives, with the prompt."""
    return model.generate(PROMPT)[0].tolist()

def fast_for(model, build=cape.cape, text=None):
    """A callable whose drafter knows most of a text, generate()'s own if none is given."""
    vocab = model.config.get_text_config().vocab_size
    return speculative(reciting(text or own_text(model), vocab), build)

def same(model, ids=PROMPT, builds=(cape.cape,), **how):
    """Assert that generate() gives the same with and without custom_generate -> the callable."""
    how = how if ids is None else {"inputs": ids, **how}
    own = model.generate(**how)
    for build in builds:
        fast = fast_for(model, build, own[0].tolist())
        assert torch.equal(model.generate(custom_generate=fast, **how), own), build
    return fast

def sampled(model, fast, seed, **how):
    torch.manual_seed(seed)
    return model.generate(PROMPT, custom_generate=fast, do_sample=True, **how)[0].tolist()

# ---------------------------------------------------------------- lengths, processors
def allowed(batch, ids):
    return [list(range(VOCAB)), [1, 3, 5, 7]][batch + len(ids) % 2]

HOW = {
    "nothing": {},
    "ends": dict(eos_token_id=[7, 2], max_new_tokens=9, max_time=60.0),
    "length, no cache": dict(max_length=11, use_cache=False),
    "scores alone": dict(
        suppress_tokens=[0, 2, 4, 6, 8, 10], renormalize_logits=True, remove_invalid_values=True),
    "outputs without a dict": dict(output_scores=True, output_hidden_states=True),
    "chunks": dict(prefill_chunk_size=2, cache_implementation="dynamic"),
    "static cache": dict(cache_implementation="static"),
}
PROCESSORS = {
    "prefixes": dict(prefix_allowed_tokens_fn=allowed),
    "guidance": dict(guidance_scale=1.5),
    "several": dict(repetition_penalty=1.2, temperature=0.7, top_k=9, no_repeat_ngram_size=3),
}

@pytest.mark.parametrize("name", [*HOW, *PROCESSORS])
def test_greedy_is_generates_own(model, name):
    fast = same(model, builds=(cape.chain, cape.cape), **{**HOW, **PROCESSORS}[name])
    assert name != "nothing" or fast.last.tau > 1, "drafts are accepted"

WARPERS = dict(temperature=1.3, top_k=9, top_p=0.95, min_p=0.01, typical_p=0.99,
               epsilon_cutoff=1e-4, eta_cutoff=1e-4)

@pytest.mark.parametrize("how", [WARPERS, *PROCESSORS.values()])
def test_sampling_repeats_by_seed_whatever_drafts(model, how):
    """Other seeds give other texts.  That samples follow the target: test_verify.py."""
    texts = [sampled(model, PLAIN, seed, **how) for seed in range(3)]
    assert len({tuple(text) for text in texts}) == 3
    for seed, text in enumerate(texts):
        assert sampled(model, fast_for(model, text=text), seed, **how) == text
    assert sampled(model, PLAIN, 0, top_k=1) == own_text(model), "by generate()'s processors"

# ---------------------------------------------------------------- what generate() has prepared
def empty(model, kind):
    more = {"max_cache_len": 40} if kind is StaticCache else {}
    return kind(config=model.config, **more)

@pytest.mark.parametrize("window", [None, 4])
def test_a_filled_cache(window):
    """Served where it holds the first tokens of the prompt; what was decoded is appended to it."""
    model = made("mistral", sliding_window=window)
    ids, how = torch.tensor([[3, 1, 4, 1, 5, 9, 2]]), dict(max_new_tokens=9)
    own = model.generate(ids, **how)
    fast = fast_for(model, text=own[0].tolist())
    for kind in (StaticCache, DynamicCache):
        cache = empty(model, kind)
        model(ids[:, :5], **{CACHE: cache})
        out = model.generate(ids, custom_generate=fast, **{CACHE: cache}, **how)
        assert torch.equal(out, own) and cache.get_seq_length() == own.shape[1] - 1
    more = torch.cat((own, torch.tensor([[7, 8]])), 1)         # the next turn, by generate() itself
    assert torch.equal(model.generate(more, **{CACHE: cache}, **how), model.generate(more, **how))
    for other, mask in ((ids[:, 5:], torch.ones(1, 7)), (ids.flip(1), None)):
        cache = empty(model, DynamicCache)
        model(ids[:, :5], **{CACHE: cache})
        with pytest.raises(UserError, match=f"{CACHE}: as this is given|attention mask"):
            model.generate(other, attention_mask=mask, custom_generate=fast, **{CACHE: cache},
                           **how)

@pytest.mark.parametrize("kind", [None, DynamicCache, StaticCache])
def test_caches_are_returned_and_filled(model, kind):
    """return_dict_in_generate has generate()'s fields, and an empty cache is filled."""
    outs = []
    for how in ({}, dict(custom_generate=fast_for(model))):
        given = {CACHE: empty(model, kind)} if kind else {}
        outs.append(model.generate(PROMPT, return_dict_in_generate=True, **given, **how))
        assert not given or outs[-1][CACHE] is given[CACHE]
    own, ours = outs
    assert type(ours) is type(own) and ours.keys() == own.keys()
    assert torch.equal(ours.sequences, own.sequences)
    for x, y in zip(own[CACHE].layers, ours[CACHE].layers):
        torch.testing.assert_close(x.keys, y.keys)
        torch.testing.assert_close(x.values, y.values)
        assert not y.keys.is_inference()

def test_padding_at_the_left(model):
    """It is hidden from the model; processors see it, called once a token, as in generate()."""
    ids, seen = torch.tensor([[0, 0, 3, 1, 4]]), []

    def look(text, scores):
        seen.append((text.tolist(), scores.is_inference()))
        return scores
    how = dict(attention_mask=torch.tensor([[0, 0, 1, 1, 1]]), logits_processor=[look])
    fast = same(model, ids, **how)
    assert seen[:NEW] == seen[NEW:]
    own, ours = [model.generate(ids, return_dict_in_generate=True, **how, **more)[CACHE].layers[0]
                 for more in ({}, dict(custom_generate=fast))]
    torch.testing.assert_close(own.keys[:, :, 2:], ours.keys[:, :, 2:])
    for wrong in ([[1, 0, 1, 1, 1]], [[1, 1, 1, 1, 0]], [[0, 0, 0, 0, 0]]):
        with pytest.raises(UserError, match="attention mask hides"):
            model.generate(ids, attention_mask=torch.tensor(wrong), custom_generate=fast)

@pytest.mark.parametrize("kind, how", [
    ("LlamaForCausalLM", dict(position_ids=torch.tensor([[0, 5, 9]]))),
    ("GPT2LMHeadModel", dict(token_type_ids=torch.zeros_like(PROMPT))),        # are embedded
    ("BertLMHeadModel", dict(use_cache=False))])               # attends to what follows
def test_what_changes_generates_own_steps_is_refused(kind, how):
    skip_in_4("BERT does not decode in parts" if "Bert" in kind else None)
    model, [name] = made(kind, pad_token_id=0), how
    same(model)
    with pytest.raises(UserError, match=f"{name}: as this is given, generate.. goes on otherwise"):
        model.generate(PROMPT, custom_generate=PLAIN, **how)

def test_positions_in_a_row_are_served(model):
    skip_in_4("generate() repeats the last of position_ids that it is given")
    same(model, position_ids=torch.tensor([[0, 1, 2]]))

def test_peft():
    """LoRA is served; a prefix of the cache is not."""
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False)
    prefix = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    tuned = [peft.get_peft_model(made(), config).eval() for config in (lora, prefix)]
    how = dict(input_ids=PROMPT, attention_mask=torch.ones_like(PROMPT), max_new_tokens=9)
    own = tuned[0].generate(**how)
    how["custom_generate"] = speculative(reciting(own[0].tolist()), cape.cape)
    assert torch.equal(tuned[0].generate(**how), own)
    with pytest.raises(UserError, match="PEFT"):
        tuned[1].generate(**how)

def test_an_offloaded_model():
    accelerate = pytest.importorskip("accelerate")
    model = made()
    own, fast = model.generate(PROMPT), fast_for(model)
    accelerate.cpu_offload(model, torch.device("cpu"))
    assert torch.equal(model.generate(PROMPT, custom_generate=fast), own)

# ---------------------------------------------------------------- kinds of models
LAYERS = ["sliding_attention", "full_attention"] * 2
YARN = {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 32}
ENCODER = dict(
    d_model=32, encoder_layers=1, decoder_layers=2, encoder_attention_heads=4, encoder_ffn_dim=48,
    decoder_attention_heads=4, decoder_ffn_dim=48, pad_token_id=0, eos_token_id=VOCAB - 1,
    bos_token_id=0, decoder_start_token_id=1, max_target_positions=24, max_position_embeddings=None)
LED = dict(ENCODER, max_decoder_position_embeddings=NEW, max_encoder_position_embeddings=64,
           attention_window=4)
# {what is special: (class, configuration, verifies trees, arguments of generate())}
KINDS = {
    "positions from the padding's on, zeros as token types": (
        "RobertaForCausalLM", dict(is_decoder=True, pad_token_id=1), True,
        {"token_type_ids": torch.zeros(1, 3).long()}),
    "positions from 1": ("PaliGemmaForConditionalGeneration", dict(
        text_config=dict(
            model_type="gemma", vocab_size=VOCAB, hidden_size=32, intermediate_size=48, head_dim=8,
            num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=2,
            max_position_embeddings=CONTEXT),
        vision_config=dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, patch_size=4,
                           num_attention_heads=2, image_size=8, projection_dim=32)), True, {}),
    "shared keys and values": ("Gemma3nForCausalLM", dict(
        num_hidden_layers=4, num_kv_shared_layers=2, layer_types=LAYERS, head_dim=8,
        intermediate_size=48, num_key_value_heads=2, sliding_window=7, altup_num_inputs=2,
        activation_sparsity_pattern=[0.0] * 4, laurel_rank=8, hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=VOCAB), True, {}),
    "logits of a router": ("MixtralForCausalLM", dict(
        num_key_value_heads=2, num_local_experts=4, output_router_logits=True), True, {}),
    "keys and values of two sizes": ("DeepseekV3ForCausalLM", dict(
        kv_lora_rank=16, q_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=12,
        first_k_dense_replace=3, num_key_value_heads=4), True, {}),
    "YaRN without a factor": ("LlamaForCausalLM", dict(rope_scaling=YARN), True, {}),
    "sounds": ("WhisperForConditionalGeneration", dict(
        ENCODER, num_mel_bins=8, max_source_positions=20, suppress_tokens=None,
        begin_suppress_tokens=None), False, {"input_features": torch.ones(1, 8, 40)}),
    "a decoder with positions of its own": ("LEDForConditionalGeneration", LED, False, {}),
}

# What transformers 4 itself does otherwise
IN_4 = {
    "positions from the padding's on, zeros as token types": "RoBERTa verifies chains alone",
    "logits of a router": "generate() raises by itself",
    "YaRN without a factor": "the model cannot be made",
}

def skip_in_4(reason):
    if reason and transformers.__version__ < "5":
        pytest.skip(f"transformers {transformers.__version__}: {reason}")

@pytest.mark.parametrize("name", KINDS)
def test_kinds_of_models_decode_as_generate_does(name):
    """By a chain; by a tree, where it is verified.  The cache that is returned is generate()'s."""
    skip_in_4(IN_4.get(name))
    kind, config, verifies_trees, how = KINDS[name]
    model = made(kind, **config)
    ids = None if "input_features" in how else PROMPT
    fast = same(model, ids, [cape.chain, cape.cape][:verifies_trees + 1], **how)
    assert fast.last.tau > 1.5 and fast.target.verifies_trees == verifies_trees
    if verifies_trees:                                         # generate() itself may go on
        caches = [model.generate(ids, return_dict_in_generate=True, **how, **more)[CACHE]
                  for more in ({}, dict(custom_generate=fast))]
        for x, y in zip(*(cache.layers for cache in caches)):
            if getattr(x, "keys", None) is not None:
                torch.testing.assert_close(y.keys, x.keys, atol=1e-4, rtol=1e-3)

def slow(self, *given, **how):
    """Positions grow otherwise after the prompt."""
    found = LlamaForCausalLM._update_model_kwargs_for_generation(self, *given, **how)
    return {**found, "position_ids": found["position_ids"] // 2}

def after(self, *given, **how):
    """What is prepared is other after the prompt."""
    found = LlamaForCausalLM.prepare_inputs_for_generation(self, *given, **how)
    is_step = found["position_ids"].shape[1] == 1
    return {**found, "position_ids": found["position_ids"] + is_step}

@pytest.mark.parametrize("name, step", [
    ("_update_model_kwargs_for_generation", slow), ("prepare_inputs_for_generation", after)])
def test_a_class_or_an_instance_with_a_step_of_its_own_is_refused(name, step):
    """Where it decodes otherwise by it; also where it was served before."""
    kind = type("Own", (LlamaForCausalLM,), {name: step})
    with pytest.raises(UserError, match="as its generate"):
        kind(made().config).generate(PROMPT, max_new_tokens=3, custom_generate=PLAIN)
    model = made()
    fast, own = same(model), getattr(model, name)
    setattr(model, name, own)                                  # PEFT leaves it bound there
    same(model)
    setattr(model, name, MethodType(step, model))
    with pytest.raises(UserError, match="as its generate"):
        model.generate(PROMPT, custom_generate=fast)

def test_attention_without_masks_is_refused_before_a_forward():
    model = made(attn_implementation="flex_attention")
    model.forward = None
    with pytest.raises(UserError, match='load the target with attn_implementation="sdpa"'):
        any_target(model)

def test_a_stage_takes_ids_that_it_does_not_know(model):
    """As its last one, beside a target with a larger vocabulary."""
    stage = any_target(model, vocab=VOCAB + 3)
    logits, _ = stage.prefill([3, VOCAB + 2, 4])
    expected, _ = stage.prefill([3, VOCAB - 1, 4])
    assert torch.equal(logits, expected) and logits[VOCAB:].tolist() == [-torch.inf] * 3

@pytest.mark.parametrize("more", [{}, dict(repetition_penalty=1.3), dict(do_sample=True, top_k=1)])
def test_scores_and_logits_are_returned(model, more):
    how = dict(output_scores=True, output_logits=True, return_dict_in_generate=True, **more)
    own, fast = model.generate(PROMPT, **how), fast_for(model)
    ours = model.generate(PROMPT, custom_generate=fast, **how)
    for name in ("scores", "logits"):
        assert len(ours[name]) == NEW
        torch.testing.assert_close(ours[name], own[name])

# ---------------------------------------------------------------- state
def test_modes_of_modules_are_restored(model):
    expected, model = own_text(model), made()
    fast = fast_for(model, text=expected)
    model.train()
    model.model.layers[0].eval()
    before = [module.training for module in model.modules()]
    for _ in range(2):
        assert model.generate(PROMPT, custom_generate=fast)[0].tolist() == expected
        assert [module.training for module in model.modules()] == before
        model.gradient_checkpointing_enable()                  # generate() itself recomputes then

def test_a_changed_model_is_noticed():
    """Its dtype, autocast, its configuration, another model, inference mode."""
    model, other = made(), made(seed=1)
    fast = fast_for(model)

    def check(model=model, exact=True):
        own, ours = model.generate(PROMPT), model.generate(PROMPT, custom_generate=fast)
        assert torch.equal(ours, own) or not exact and ours.shape == own.shape
    check()
    check(model.double())
    check(model.to(torch.bfloat16), exact=False)
    with torch.autocast("cpu", torch.bfloat16):
        check(model.float(), exact=False)
    check(other)
    with torch.inference_mode():
        check()
    model.set_attn_implementation("eager")
    check()
    model.resize_token_embeddings(15)
    check()

def test_a_call_within_another_is_refused(model):
    fast, refused = fast_for(model), []

    def call(*given):
        with pytest.raises(UserError, match="is decoding already"):
            model.generate(PROMPT, custom_generate=fast)
        refused.append(1)
        return torch.tensor([False])
    out = model.generate(PROMPT, custom_generate=fast, stopping_criteria=[call])
    assert out[0].tolist() == own_text(model) and len(refused) == NEW

# ---------------------------------------------------------------- what is called back
class Listener:
    """A streamer; it counts as False."""
    def __init__(self):
        self.ids, self.ended, self.kinds = [], 0, set()

    def __len__(self):
        return 0

    def put(self, ids):
        self.ids += ids.flatten().tolist()
        self.kinds.add((ids.shape if ids.ndim == 1 else "prompt", ids.is_inference()))

    def end(self):
        self.ended += 1

def test_a_streamer_is_shown_everything_once(model):
    """It is found behind a wrapper that hides the signature, too, and so is an assistant."""
    own, ours, fast = Listener(), Listener(), fast_for(model)
    model.generate(PROMPT, streamer=own)
    model.generate(PROMPT, streamer=ours, custom_generate=lambda *given, **how: fast(*given, **how))
    assert vars(ours) == vars(own) and ours.ended == 1
    with pytest.raises(UserError, match="assisted_generation"):
        model.generate(PROMPT, assistant_model=model, custom_generate=fast)

@pytest.mark.parametrize("end", [4, 9, 19])
def test_criteria_see_every_token(model, end):
    """The last one included, as ordinary tensors; a criterion may end the text anywhere."""
    def seen_by(**how):
        seen = []

        def criterion(ids, scores):
            seen.append((ids.tolist(), scores, ids.is_inference(), ids.device))
            return torch.full((1,), ids.shape[1] >= end)
        return model.generate(PROMPT, stopping_criteria=[criterion], **how).tolist(), seen
    assert seen_by(custom_generate=fast_for(model)) == seen_by()

def test_stop_strings(speaker, tokenizer):
    """The tokenizer is found, behind a wrapper that shows the signature, too."""
    text = own_text(speaker)
    word = tokenizer.decode(text[6]).strip()
    how = dict(stop_strings=[word], tokenizer=tokenizer)
    own, fast = speaker.generate(PROMPT, **how), fast_for(speaker)
    assert own.shape[1] < len(text)
    for given in (fast, partial(fast)):
        assert torch.equal(speaker.generate(PROMPT, custom_generate=given, **how), own)

def test_a_pipeline(speaker, tokenizer):
    writer = pipeline("text-generation", model=speaker, tokenizer=tokenizer)
    how = dict(max_new_tokens=12, do_sample=False)
    assert writer("One day", custom_generate=PLAIN, **how) == writer("One day", **how)
    assert len(PLAIN.last.tokens) == 12

# ---------------------------------------------------------------- ends that are no secret
@pytest.mark.parametrize("build", [cape.cape, cape.drawn])
def test_what_is_no_distribution_raises(build):
    """As in generate(): where the logits are NaN, or nothing is allowed, and only there."""
    model = made()
    fast = fast_for(model, build)
    sampled(model, fast, 0)

    def raises(**how):
        for more in ({}, dict(custom_generate=fast)):
            with pytest.raises(RuntimeError, match="probability tensor contains"):
                model.generate(PROMPT, do_sample=True, **how, **more)
    raises(logits_processor=[lambda ids, scores: scores - (torch.inf if ids.shape[1] > 6 else 0)])
    model.lm_head.weight.data.fill_(torch.nan)                 # after it was proven
    raises()

def test_the_end_of_the_context():
    """The output ends there with a warning; a prompt beyond it is refused."""
    model, ids = made(max_position_embeddings=32), torch.arange(20)[None] % VOCAB
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*ends after")
        fast = same(model, ids, max_new_tokens=13)
    with pytest.warns(UserWarning, match="ends after 13 of 30 new tokens"):
        out = model.generate(ids, custom_generate=fast, max_new_tokens=30)
    assert torch.equal(out, model.generate(ids, max_new_tokens=13))
    with pytest.raises(ValueError, match="at most 32"):
        model.generate(ids.repeat(1, 2), custom_generate=fast)

def test_a_decoder_s_context_ends_with_its_own_prompt():
    """Beside an encoder's prompt of any length."""
    model = made("LEDForConditionalGeneration", **LED)
    how = dict(inputs=PROMPT.repeat(1, 9), decoder_input_ids=torch.tensor([[1, 5, 4]]))
    own = model.generate(max_new_tokens=NEW - 2, **how)
    with pytest.warns(UserWarning, match=f"ends after {NEW - 2} of 30"):
        out = model.generate(custom_generate=PLAIN, max_new_tokens=30, **how)
    assert torch.equal(out, own) and any_target(model).remaining([0] * 40) == NEW

# ---------------------------------------------------------------- what is refused
class MyCache(DynamicCache):
    pass

@pytest.mark.parametrize("says, how", [
    ("beam_search", dict(num_beams=2)),
    ("synced_gpus", dict(synced_gpus=True)),
    ("output_att", dict(output_attentions=True, return_dict_in_generate=True)),
    ("inputs_embeds", dict(inputs_embeds=torch.zeros(1, 3, 32), input_ids=None)),
    ("MyCache", {CACHE: MyCache()})])
def test_what_cannot_be_right_is_refused_in_a_sentence(model, says, how):
    with pytest.raises(UserError, match=says) as caught:
        model.generate(custom_generate=PLAIN, **{"input_ids": PROMPT, **how})
    assert "\n" not in str(caught.value)

def test_a_way_of_decoding_of_the_users_own_is_refused(model):
    own = type("Own", (LlamaForCausalLM,), {"_sample": lambda self, *given, **how: given[0]})
    with pytest.raises(UserError, match="a way of its own"):
        own(model.config).generate(PROMPT, max_new_tokens=4, custom_generate=PLAIN)

@pytest.mark.parametrize("build", [cape.cape, cape.drawn])
def test_tokens_that_the_target_does_not_have_are_never_accepted(model, build):
    text = own_text(model)
    fast = speculative(reciting([*text[:5], 13, *text[6:]], vocab=15), build)
    assert model.generate(PROMPT, custom_generate=fast)[0].tolist() == text
    sampled(model, fast, 0)

# ---------------------------------------------------------------- several sequences
PADDED = dict(
    input_ids=torch.tensor([[1, 2, 3, 1, 2], [0, 0, 0, 0, 4], [0, 0, 7, 8, 7]]), pad_token_id=0,
    attention_mask=torch.tensor([[1, 1, 1, 1, 1], [0, 0, 0, 0, 1], [0, 0, 1, 1, 1]]),
    max_new_tokens=12)

@pytest.mark.parametrize("more", [{}, {"repetition_penalty": 1.5}, {"eos_token_id": [3, 5]}])
@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_padded_prompts_decode_as_generate_does(name, more):
    """Also with processors that look at the text, and rows that end at different times."""
    model, fast = shared(name), speculative(reciting([1, 2, 3] * 20), cape.cape)
    out = model.generate(**PADDED, custom_generate=fast, **more)
    assert torch.equal(out, model.generate(**PADDED, **more)) and len(fast.last) == 3

def test_num_return_sequences_are_sampled_apart():
    out = made().generate(PROMPT, do_sample=True, num_return_sequences=4, custom_generate=PLAIN)
    assert out.shape == (4, 3 + NEW) and len(set(map(tuple, out.tolist()))) == 4

def test_what_a_batch_cannot_have_is_a_sentence():
    with pytest.raises(ValueError, match="windows"):
        shared("mistral").generate(**PADDED, custom_generate=PLAIN)

def test_a_drafter_that_was_trained_for_other_weights_is_named(small):
    """By a warning."""
    model = transformers.AutoModelForCausalLM.from_pretrained(small / "model")
    other = made(vocab_size=300, max_position_embeddings=64, seed=1)
    drafter, _ = families.load(small / "drafters" / "glide", model)
    how = dict(custom_generate=speculative(drafter, cape.chain), max_new_tokens=5)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*trained for another model")
        model.generate(PROMPT, **how)
    with pytest.warns(UserWarning, match="trained for another model .its weights"):
        other.generate(PROMPT, **how)
