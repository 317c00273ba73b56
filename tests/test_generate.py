"""Inside transformers' own generate(): each kind of argument against generate() without it."""
import warnings
from functools import cache, partial
from types import MethodType

import pytest
import torch
import transformers
from conftest import ROOT, VOCAB, reciting, shared
from transformers import (
    AutoTokenizer, DynamicCache, GenerationConfig, LlamaConfig, LlamaForCausalLM, MistralConfig,
    MistralForCausalLM, StaticCache, pipeline)

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
SIZES = dict(
    hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    max_position_embeddings=64, bos_token_id=None, eos_token_id=None, pad_token_id=None)

def random_llama(vocab=VOCAB, std=0.25, **more):
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=vocab, **{**SIZES, **more})).eval()
    for p in model.parameters():
        if p.ndim == 2:
            torch.nn.init.normal_(p, std=std)
    model.generation_config = GenerationConfig(max_new_tokens=NEW)
    return model

@pytest.fixture(scope="module")
def model():
    """Nobody changes it."""
    return random_llama()

@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(ROOT / "checkpoints" / "target")

@pytest.fixture(scope="module")
def speaker(tokenizer):
    """A model of the tokenizer's vocabulary."""
    return random_llama(len(tokenizer))

@cache
def own_text(model):
    """What generate() gives, with the prompt."""
    return model.generate(PROMPT)[0].tolist()

def fast_for(model, build=cape.cape, text=None):
    """A callable whose drafter knows most of a text, generate()'s own if none is given."""
    return speculative(reciting(text or own_text(model), model.config.vocab_size), build)

def same(model, ids=PROMPT, builds=(cape.cape,), **how):
    """Assert that generate() gives the same with and without custom_generate -> the callable."""
    own = model.generate(ids, **how)
    for build in builds:
        fast = fast_for(model, build, own[0].tolist())
        assert torch.equal(model.generate(ids, custom_generate=fast, **how), own), build
    return fast

def sampled(model, fast, seed, **how):
    torch.manual_seed(seed)
    return model.generate(PROMPT, custom_generate=fast, do_sample=True, **how)[0].tolist()

# ---------------------------------------------------------------- lengths, processors
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

@pytest.mark.parametrize("name", HOW)
def test_greedy_is_generates_own(model, name):
    fast = same(model, **HOW[name])
    assert name != "nothing" or fast.last.tau > 1, "drafts are accepted"

def allowed(batch, ids):
    return [list(range(VOCAB)), [1, 3, 5, 7]][batch + len(ids) % 2]

PROCESSORS = {
    "prefixes": dict(prefix_allowed_tokens_fn=allowed),
    "guidance": dict(guidance_scale=1.5),
    "several": dict(repetition_penalty=1.2, temperature=0.7, top_k=9, no_repeat_ngram_size=3),
}

@pytest.mark.parametrize("name", PROCESSORS)
def test_processors_that_look_at_tokens(model, name):
    """Greedy: generate()'s own.  Sampled: plain sampling's, whatever drafts."""
    assert same(model, builds=(cape.chain, cape.cape), **PROCESSORS[name]).last.rounds
    for seed in range(2):
        text = sampled(model, PLAIN, seed, **PROCESSORS[name])
        fast = fast_for(model, text=text)
        assert sampled(model, fast, seed, **PROCESSORS[name]) == text

def test_sampling_repeats_by_seed_whatever_drafts(model):
    """Other seeds give other texts.  That samples follow the target: test_sampling.py."""
    how = dict(temperature=1.3, top_k=9, top_p=0.95, min_p=0.01, typical_p=0.99,
               epsilon_cutoff=1e-4, eta_cutoff=1e-4)
    texts = [sampled(model, PLAIN, seed, **how) for seed in range(3)]
    assert len({tuple(text) for text in texts}) == 3
    for seed, text in enumerate(texts):
        assert sampled(model, fast_for(model, text=text), seed, **how) == text
    assert sampled(model, PLAIN, 0, top_k=1) == own_text(model), "by generate()'s processors"

# ---------------------------------------------------------------- what generate() has prepared
def empty(model, kind):
    more = {"max_cache_len": 40} if kind is StaticCache else {}
    return kind(config=model.config, **more)

def filled(model, ids):
    cache = empty(model, DynamicCache)
    with torch.no_grad():
        model(ids, **{CACHE: cache})
    return cache

@pytest.mark.parametrize("window", [None, 4])
def test_a_filled_cache(model, window):
    """Served where it holds the first tokens of the prompt; what was decoded is appended to it."""
    if window:
        model = MistralForCausalLM(MistralConfig(
            vocab_size=VOCAB, num_key_value_heads=2, sliding_window=window, **SIZES)).eval()
    ids, how = torch.tensor([[3, 1, 4, 1, 5, 9, 2]]), dict(max_new_tokens=9)
    own = model.generate(ids, **{CACHE: filled(model, ids[:, :5])}, **how)
    fast = fast_for(model, text=own[0].tolist())
    static = empty(model, StaticCache)
    model(ids[:, :5], **{CACHE: static})
    assert torch.equal(model.generate(ids, custom_generate=fast, **{CACHE: static}, **how), own)
    cache = filled(model, ids[:, :5])
    assert torch.equal(model.generate(ids, custom_generate=fast, **{CACHE: cache}, **how), own)
    assert cache.get_seq_length() == own.shape[1] - 1
    more = torch.cat((own, torch.tensor([[7, 8]])), 1)         # the next turn, by generate() itself
    assert torch.equal(model.generate(more, **{CACHE: cache}, **how), model.generate(more, **how))
    for other, mask in ((ids[:, 5:], torch.ones(1, 7)), (ids.flip(1), None), (ids[:, :5], None)):
        with pytest.raises(UserError, match="cache holds 5 tokens|attention mask"):
            model.generate(other, attention_mask=mask, custom_generate=fast,
                           **{CACHE: filled(model, ids[:, :5])}, **how)

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
    ids, mask = torch.tensor([[0, 0, 3, 1, 4]]), torch.tensor([[0, 0, 1, 1, 1]])
    how = dict(attention_mask=mask, max_length=15)
    fast, outs, texts = fast_for(model), [], []
    for more in ({}, dict(custom_generate=fast)):
        seen = []

        def look(text, scores, seen=seen):
            seen.append((text.tolist(), scores.is_inference()))
            return scores
        outs.append(model.generate(ids, logits_processor=[look], return_dict_in_generate=True,
                                   **how, **more))
        texts.append(seen)
    assert torch.equal(outs[0].sequences, outs[1].sequences) and texts[0] == texts[1]
    own, ours = [out[CACHE].layers[0].keys for out in outs]
    torch.testing.assert_close(own[:, :, 2:], ours[:, :, 2:])
    for wrong in ([[1, 0, 1, 1, 1]], [[1, 1, 1, 1, 0]], [[0, 0, 0, 0, 0]]):
        with pytest.raises(UserError, match="attention mask hides"):
            model.generate(ids, attention_mask=torch.tensor(wrong), custom_generate=fast)

def test_positions(model):
    fast = same(model, position_ids=torch.tensor([[0, 1, 2]]))
    with pytest.raises(UserError, match="position_ids"):
        model.generate(PROMPT, position_ids=torch.tensor([[0, 5, 9]]), custom_generate=fast)

def test_what_prepares_inputs_is_asked():
    """By a class of the user's own, or replaced on the instance, as PEFT does."""
    class Prompted(LlamaForCausalLM):
        def prepare_inputs_for_generation(self, input_ids, **kwargs):
            inputs = super().prepare_inputs_for_generation(input_ids, **kwargs)
            embeds = self.get_input_embeddings()(inputs.pop("input_ids"))
            return {**inputs, "inputs_embeds": embeds, "input_ids": None}
    model = random_llama()
    fast, own = fast_for(model), model.prepare_inputs_for_generation
    with pytest.raises(UserError, match="leave it out, or decode without custom_generate"):
        Prompted(model.config).generate(PROMPT, max_new_tokens=3, custom_generate=fast)
    model.prepare_inputs_for_generation = own                  # PEFT leaves it bound there
    same(model)
    model.prepare_inputs_for_generation = lambda *given, **how: own(*given, **how)
    same(model)

def test_peft():
    """LoRA is served; a prefix of the cache is not."""
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False)
    prefix = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    tuned = [peft.get_peft_model(random_llama(), config).eval() for config in (lora, prefix)]
    how = dict(input_ids=PROMPT, attention_mask=torch.ones_like(PROMPT), max_new_tokens=9)
    own = tuned[0].generate(**how)
    how["custom_generate"] = speculative(reciting(own[0].tolist()), cape.cape)
    assert torch.equal(tuned[0].generate(**how), own)
    with pytest.raises(UserError, match="PEFT"):
        tuned[1].generate(**how)

def test_an_offloaded_model():
    accelerate = pytest.importorskip("accelerate")
    model = random_llama()
    own, fast = model.generate(PROMPT), fast_for(model)
    accelerate.cpu_offload(model, torch.device("cpu"))
    assert torch.equal(model.generate(PROMPT, custom_generate=fast), own)

# ---------------------------------------------------------------- kinds of models
LAYERS = ["sliding_attention", "full_attention"] * 2
ROBERTA = dict(is_decoder=True, pad_token_id=1)
YARN = {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 32}
PALIGEMMA = dict(
    text_config={**SIZES, "model_type": "gemma", "vocab_size": VOCAB, "head_dim": 8,
                 "num_key_value_heads": 2, "num_hidden_layers": 2},
    vision_config=dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, patch_size=4,
                       num_attention_heads=2, image_size=8, projection_dim=32))
ENCODER = dict(
    d_model=32, encoder_layers=1, decoder_layers=2, encoder_attention_heads=4, encoder_ffn_dim=48,
    decoder_attention_heads=4, decoder_ffn_dim=48, pad_token_id=0, eos_token_id=VOCAB - 1,
    bos_token_id=0, decoder_start_token_id=1, max_target_positions=24, max_position_embeddings=None)
# {what is special: (class, configuration, verifies trees, arguments of generate())}
KINDS = {
    "positions from the padding's on": ("RobertaForCausalLM", ROBERTA, True, {}),
    "positions from 1": ("PaliGemmaForConditionalGeneration", PALIGEMMA, True, {}),
    "zeros as token types": (
        "RobertaForCausalLM", ROBERTA, True, {"token_type_ids": torch.zeros(1, 3).long()}),
    "shared keys and values": ("Gemma3nForCausalLM", dict(
        num_hidden_layers=4, num_kv_shared_layers=2, layer_types=LAYERS, head_dim=8,
        intermediate_size=48, num_key_value_heads=2, sliding_window=7, altup_num_inputs=2,
        activation_sparsity_pattern=[0.0] * 4, laurel_rank=8, hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=VOCAB), True, {}),
    "logits of a router": ("MixtralForCausalLM", dict(
        num_key_value_heads=2, num_local_experts=4, output_router_logits=True), True, {}),
    "keys and values of two sizes": ("DeepseekV3ForCausalLM", dict(
        kv_lora_rank=16, q_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=12,
        first_k_dense_replace=2), True, {}),
    "YaRN without a factor": ("LlamaForCausalLM", dict(rope_scaling=YARN), True, {}),
    "sounds": ("WhisperForConditionalGeneration", dict(
        ENCODER, num_mel_bins=8, max_source_positions=20, suppress_tokens=None,
        begin_suppress_tokens=None), False, {"input_features": torch.ones(1, 8, 40)}),
    "a decoder with positions of its own": ("LEDForConditionalGeneration", dict(
        ENCODER, max_decoder_position_embeddings=NEW, max_encoder_position_embeddings=64,
        attention_window=4), False, {"inputs": PROMPT}),
}

def knowing(text, wide):
    """A builder that knows the text: its next two tokens, and before them a wrong one if wide."""
    def build(expand, root):
        first = len(text) - expand.remaining - 1
        tokens = text[first:first + 2]
        parents = [-1, 0, 1][:len(tokens) + 1]
        if wide:
            tokens = [(tokens[0] + 1) % VOCAB, *tokens]
            parents = [-1, 0, 0, 2][:len(tokens) + 1]
        tokens, parents = torch.tensor([root.item(), *tokens]), torch.tensor(parents)
        return verify.Tree(tokens, parents, torch.full_like(parents, -1))
    return build

def made(kind, config):
    """A random model of a class of transformers, or of one that is made of it."""
    kind = getattr(transformers, kind) if isinstance(kind, str) else kind
    sizes = {**SIZES, "vocab_size": VOCAB, **config}
    config = kind.config_class(**({} if "text_config" in config else sizes) or config)
    config._experts_implementation = "eager"
    torch.manual_seed(0)
    model = kind(config).eval()
    for p in model.parameters():
        if p.ndim >= 2:
            torch.nn.init.normal_(p, std=0.25)
    model.generation_config = GenerationConfig(max_new_tokens=NEW, decoder_start_token_id=1)
    return model

@pytest.mark.parametrize("name", KINDS)
def test_kinds_of_models_decode_as_generate_does(name):
    """A chain; in a tree, where it is verified, the accepted token has a sibling before it."""
    kind, config, verifies_trees, how = KINDS[name]
    model = made(kind, config)
    how = how if {"inputs", "input_features"} & how.keys() else {"inputs": PROMPT, **how}
    own = model.generate(**how)
    text = own[0].tolist()
    for wide in [False, True][:verifies_trees + 1]:
        fast = speculative(None, knowing(text, wide))
        assert torch.equal(model.generate(custom_generate=fast, **how), own)
        assert fast.last.tau > 2 and fast.target.verifies_trees == verifies_trees
    if verifies_trees:                                         # generate() itself may go on
        caches = [model.generate(return_dict_in_generate=True, **how, **more)[CACHE]
                  for more in ({}, dict(custom_generate=fast))]
        for x, y in zip(*(cache.layers for cache in caches)):
            if getattr(x, "keys", None) is not None:
                torch.testing.assert_close(y.keys, x.keys, atol=1e-4, rtol=1e-3)

def slow(self, *given, **how):
    """Positions grow otherwise after the prompt."""
    found = LlamaForCausalLM._update_model_kwargs_for_generation(self, *given, **how)
    return {**found, "position_ids": found["position_ids"] // 2}

def after(self, ids, is_first_iteration=False, **kwargs):
    """What is prepared is other after the prompt."""
    found = LlamaForCausalLM.prepare_inputs_for_generation(
        self, ids, is_first_iteration=is_first_iteration, **kwargs)
    return {**found, "position_ids": found["position_ids"] + (not is_first_iteration)}

@pytest.mark.parametrize("name, step", [
    ("_update_model_kwargs_for_generation", slow), ("prepare_inputs_for_generation", after)])
def test_a_class_or_an_instance_with_a_step_of_its_own_is_refused(name, step):
    """Where it decodes otherwise by it; also where it was served before."""
    kind = type("Own", (LlamaForCausalLM,), {name: step})
    with pytest.raises(UserError, match="as its generate"):
        made(kind, {}).generate(PROMPT, custom_generate=PLAIN)
    model = random_llama()
    fast = same(model)
    setattr(model, name, MethodType(step, model))
    with pytest.raises(UserError, match="as its generate"):
        model.generate(PROMPT, custom_generate=fast)

def test_attention_without_masks_is_refused_before_a_forward():
    model = random_llama(attn_implementation="flex_attention")
    model.forward = None
    with pytest.raises(UserError, match='load the target with attn_implementation="sdpa"'):
        any_target(model)

def test_a_bidirectional_model_needs_its_cache():
    """generate() itself decodes otherwise without one."""
    model = made("BertLMHeadModel", {"pad_token_id": 0})
    same(model)
    with pytest.raises(UserError, match="otherwise without a cache"):
        model.generate(PROMPT, custom_generate=PLAIN, use_cache=False)

def test_zeros_as_token_types_that_are_embedded_are_refused():
    model = made("GPT2LMHeadModel", dict(n_positions=64))
    with pytest.raises(UserError, match="token_type_ids is not served"):
        model.generate(PROMPT, token_type_ids=torch.zeros_like(PROMPT), custom_generate=PLAIN)

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

def test_a_sampled_chain_knows_the_repetition_penalty(model):
    """A drafter with the target's own logits: with the penalty hardly a token is rejected."""
    class Perfect:
        needs = {}

        def reset(self, probs):
            self.probs, self.ids = probs, []

        def begin(self, view, root_id):
            self.ids += view.ids
            self.chain = []

        def expand(self, tokens, parents):
            self.chain += tokens.tolist()
            logits = model(torch.tensor([self.ids + self.chain])).logits[0, -1:]
            return self.probs(logits)

        def keep(self, path):
            pass
    fast = speculative(Perfect(), cape.drawn)
    sampled(model, fast, 0, repetition_penalty=1.8, max_new_tokens=40)
    assert fast.last.tau > 5

# ---------------------------------------------------------------- state
def test_modes_of_modules_are_restored(model):
    expected, model = own_text(model), random_llama()
    model.train()
    model.model.layers[0].eval()
    before = [module.training for module in model.modules()]
    fast = fast_for(model, text=expected)
    for _ in range(2):
        assert model.generate(PROMPT, custom_generate=fast)[0].tolist() == expected
        assert [module.training for module in model.modules()] == before
        model.gradient_checkpointing_enable()                  # generate() itself recomputes then

def test_a_changed_model_is_noticed():
    """Its dtype, autocast, its configuration, another model, inference mode."""
    model, other = random_llama(), random_llama(std=0.3)
    fast = fast_for(model)

    def check(model=model, exact=True):
        own, ours = model.generate(PROMPT), model.generate(PROMPT, custom_generate=fast)
        assert torch.equal(ours, own) or not exact and ours.shape == own.shape
        return fast.target
    assert check() is check(), "it is wrapped once"
    check(model.double())
    check(model.to(torch.bfloat16), exact=False)
    with torch.autocast("cpu", torch.bfloat16):
        check(model.float(), exact=False)
    check()
    check(other)
    with torch.inference_mode():
        check()
    check()
    model.set_attn_implementation("eager")
    check()
    model.resize_token_embeddings(15)
    check()

def test_a_call_within_another_is_refused(model):
    fast, own = fast_for(model), own_text(model)
    refused = []

    def call(*given, fast=fast):
        try:
            model.generate(PROMPT, custom_generate=fast)
        except UserError as why:
            refused.append(str(why))
        return torch.tensor([False])
    alike = speculative(fast.drafter, cape.chain)              # with the same drafter
    for criterion in (call, partial(call, fast=alike)):
        out = model.generate(PROMPT, custom_generate=fast, stopping_criteria=[criterion])
        assert out[0].tolist() == own
    assert len(refused) == 2 * NEW and all("is decoding already" in why for why in refused)

# ---------------------------------------------------------------- what is called back
def hidden(fast):
    """A wrapper that does not show its signature."""
    return lambda *given, **how: fast(*given, **how)

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

@pytest.mark.parametrize("wrapper", [lambda fast: fast, hidden])
def test_a_streamer_is_shown_everything_once(model, wrapper):
    """It is found behind a wrapper, too, and so is an assistant."""
    own, ours, fast = Listener(), Listener(), wrapper(fast_for(model))
    model.generate(PROMPT, streamer=own)
    model.generate(PROMPT, streamer=ours, custom_generate=fast)
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
    word = tokenizer.decode(text[8]).strip()
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
    model = random_llama()
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
    model, ids = random_llama(max_position_embeddings=32), torch.arange(20)[None] % VOCAB
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*ends after")
        fast = same(model, ids, max_new_tokens=13)
    with pytest.warns(UserWarning, match="ends after 13 of 30 new tokens"):
        out = model.generate(ids, custom_generate=fast, max_new_tokens=30)
    assert torch.equal(out, model.generate(ids, max_new_tokens=13))
    with pytest.raises(UserError, match="context of 32"):
        model.generate(ids.repeat(1, 2), custom_generate=fast)

def test_a_text_ends_with_the_keys_that_a_model_keeps():
    """Doge chooses among more of them, by rounding."""
    model = made("DogeForCausalLM", dict(keep_window_size=12, num_key_value_heads=2))
    same(model, max_new_tokens=10)
    with pytest.warns(UserWarning, match="ends after 10 of 16"):
        model.generate(PROMPT, custom_generate=PLAIN)

def test_a_decoder_s_context_ends_with_its_own_prompt():
    """Beside an encoder's prompt of any length."""
    model = made(*KINDS["a decoder with positions of its own"][:2])
    how = dict(inputs=PROMPT.repeat(1, 9), decoder_input_ids=torch.tensor([[1, 5, 4]]))
    own = model.generate(max_new_tokens=NEW - 2, **how)
    with pytest.warns(UserWarning, match=f"ends after {NEW - 2} of 30"):
        out = model.generate(custom_generate=PLAIN, max_new_tokens=30, **how)
    assert torch.equal(out, own) and any_target(model).remaining([0] * 40) == NEW

# ---------------------------------------------------------------- what is refused
@pytest.mark.parametrize("says, ids, how", [
    ("beam_search", PROMPT, dict(num_beams=2)),
    ("synced_gpus", PROMPT, dict(synced_gpus=True)),
    ("output_att", PROMPT, dict(output_attentions=True, return_dict_in_generate=True)),
    ("inputs_embeds", None, dict(inputs_embeds=torch.zeros(1, 3, 32)))])
def test_what_cannot_be_right_is_refused_in_a_sentence(model, says, ids, how):
    with pytest.raises(UserError, match=says) as caught:
        model.generate(ids, custom_generate=PLAIN, **how)
    assert "\n" not in str(caught.value)

def test_ways_of_the_users_own_are_refused(model):
    """Of decoding, and of caching."""
    class Own(LlamaForCausalLM):
        def _sample(self, *given, **how):
            return super()._sample(*given, **how)

    class MyCache(DynamicCache):
        pass
    with pytest.raises(UserError, match="a way of its own"):
        Own(model.config).generate(PROMPT, max_new_tokens=4, custom_generate=PLAIN)
    with pytest.raises(UserError, match="MyCache"):
        model.generate(PROMPT, custom_generate=PLAIN, **{CACHE: MyCache(config=model.config)})

def test_a_drafter_of_another_model_is_refused_in_a_sentence(model):
    """Layers that the target lacks, other shapes; more tokens than the target has are harmless."""
    text = own_text(model)
    wide = reciting([*text[:5], 13, *text[6:]], vocab=15)
    for build in (cape.cape, cape.drawn):
        fast = speculative(wide, build)
        assert model.generate(PROMPT, custom_generate=fast)[0].tolist() == text
        sampled(model, fast, 0)

    def refused(drafter):
        with pytest.raises(UserError, match="drafter made for this target"):
            model.generate(PROMPT, custom_generate=speculative(drafter, cape.cape))
    mistakes = reciting(text)
    for needs in ({"kv": [13]}, {"hidden": [5]}):
        mistakes.needs = needs
        refused(mistakes)
    mistakes.needs = {"hidden": [1]}
    mistakes.begin = lambda view, root: view.hidden[1] @ torch.zeros(7, 7)
    refused(mistakes)

# ---------------------------------------------------------------- several sequences
def padded_prompts(rows):
    """Prompts padded at the left -> the arguments of generate()."""
    longest = max(map(len, rows))
    ids = [[0] * (longest - len(row)) + row for row in rows]
    mask = [[0] * (longest - len(row)) + [1] * len(row) for row in rows]
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask), "pad_token_id": 0}

@pytest.mark.parametrize("more", [{}, {"repetition_penalty": 1.5}, {"eos_token_id": [3, 5]}])
@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_padded_prompts_decode_as_generate_does(name, more):
    """Also with processors that look at the text, and rows that end at different times."""
    model = shared(name)
    inputs = padded_prompts([[1, 2, 3, 1, 2], [4], [7, 8, 7]])
    own = model.generate(**inputs, max_new_tokens=12, **more)
    fast = speculative(reciting([1, 2, 3] * 20), cape.cape)
    out = model.generate(**inputs, max_new_tokens=12, custom_generate=fast, **more)
    assert torch.equal(out, own) and len(fast.last) == 3

def test_num_return_sequences_are_sampled_apart():
    model = shared("llama")
    out = model.generate(torch.tensor([[1, 2, 3]]), do_sample=True, num_return_sequences=4,
                         max_new_tokens=20, custom_generate=PLAIN)
    assert out.shape == (4, 23) and len(set(map(tuple, out.tolist()))) == 4

def test_what_a_batch_cannot_have_is_a_sentence():
    inputs = padded_prompts([[1, 2], [3]])
    with pytest.raises(UserError, match="windows"):
        shared("mistral").generate(**inputs, max_new_tokens=3, custom_generate=PLAIN)

def test_a_drafter_that_was_trained_for_other_weights_is_named(small):
    """By a warning, where it drafts for another model than the one that it was loaded for."""
    load = transformers.AutoModelForCausalLM.from_pretrained
    model, other = load(small / "model"), load(small / "model")
    for p in other.parameters():
        torch.nn.init.normal_(p, std=0.25)
    drafter, _ = families.load(small / "drafters" / "glide", model)
    how = dict(custom_generate=speculative(drafter, cape.chain), max_new_tokens=5)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*trained for another model")
        model.generate(PROMPT, **how)
    with pytest.warns(UserWarning, match="trained for another model .its weights differ by"):
        other.generate(PROMPT, **how)
