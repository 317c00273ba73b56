"""Inside transformers' own generate(): each kind of argument against generate() without it."""
import copy
from functools import cache, partial
from types import MethodType, SimpleNamespace

import pytest
import torch
import transformers
from conftest import ROOT, VOCAB, reciting, shared
from helpers import for_generate
from transformers import AutoTokenizer, DynamicCache, LlamaForCausalLM, StaticCache

import cape
import verify
from cascade import Cascade
from runtime import generation, load
from runtime.generation import speculative
from runtime.program import UserError
from runtime.targets import any_target

PROMPT = torch.tensor([[3, 1, 4]])
NEW = 16
CACHE = "cache" if transformers.__version__ >= "5.24" else "past_key_values"
PLAIN = speculative(None, verify.root_only)
made = partial(for_generate, NEW)

@pytest.fixture(scope="module")
def model():
    """Nobody changes it."""
    return made()

@cache
def own_text(model):
    """What generate() gives, with the prompt."""
    return model.generate(PROMPT)[0].tolist()

def fast_for(model, build=cape.cape, text=None):
    """A callable whose drafter knows most of a text, generate()'s own if none is given."""
    return speculative(reciting(text or own_text(model), model.config.vocab_size), build)

def same(model, ids=PROMPT, build=cape.cape, **how):
    """Assert that generate() gives the same with and without custom_generate -> the callable."""
    own = model.generate(ids, **how)
    fast = fast_for(model, build, own[0].tolist())
    assert torch.equal(model.generate(ids, custom_generate=fast, **how), own)
    return fast

def sampled(model, fast, seed, **how):
    torch.manual_seed(seed)
    return model.generate(PROMPT, custom_generate=fast, do_sample=True, **how)[0].tolist()

def test_a_sampled_draft_follows_a_repetition_penalty(model, monkeypatch):
    """A drafter with the target's weights: nearly all of its tokens are accepted then."""
    drafter = Cascade([verify.Target(copy.deepcopy(model))], K=[[4]])
    fast, taus = speculative(drafter, drafter.drawn), []
    for for_drafts in (generation.FOR_DRAFTS, generation.SCORE_ONLY):
        monkeypatch.setattr(generation, "FOR_DRAFTS", for_drafts)
        sampled(model, fast, 0, repetition_penalty=2.0, max_new_tokens=38)
        taus.append(fast.last.tau)
    assert taus[0] > 4 > taus[1]

# ---------------------------------------------------------------- lengths, processors
PROCESSORS = [
    dict(guidance_scale=1.5),
    dict(repetition_penalty=1.2, temperature=0.7, top_k=9, no_repeat_ngram_size=3)]

@pytest.mark.parametrize("how", [
    {}, *PROCESSORS,
    dict(eos_token_id=[7, 2], max_new_tokens=9, max_time=60.0),
    dict(max_length=11, use_cache=False),
    dict(suppress_tokens=[0, 2, 4, 6, 8, 10], renormalize_logits=True, remove_invalid_values=True),
    dict(output_scores=True, prefill_chunk_size=2, cache_implementation="dynamic")])
def test_greedy_is_generates_own(model, how):
    fast = same(model, **how)
    assert how or fast.last.tau > 1, "drafts are accepted"

@pytest.mark.parametrize("how", [
    *PROCESSORS, dict(temperature=1.3, top_k=9, top_p=0.95, min_p=0.01, typical_p=0.99,
                      epsilon_cutoff=1e-4, eta_cutoff=1e-4)])
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
        given = dict(attention_mask=mask, **{CACHE: empty(model, DynamicCache)})
        model(ids[:, :5], **{CACHE: given[CACHE]})
        with pytest.raises(UserError, match=f"{CACHE}: as this is given|attention mask"):
            model.generate(other, custom_generate=fast, **given, **how)

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
    pytest.param("BertLMHeadModel", dict(use_cache=False), marks=pytest.mark.skipif(
        transformers.__version__ < "5", reason="BERT does not decode in parts"))])
def test_what_changes_generates_own_steps_is_refused(kind, how):
    model, [name] = made(kind, pad_token_id=0), how
    same(model)
    with pytest.raises(UserError, match=f"{name}: as this is given, generate.. goes on otherwise"):
        model.generate(PROMPT, custom_generate=PLAIN, **how)

def test_peft():
    """LoRA is served; a prefix of the cache is not.  From 5.24 on PEFT itself loses it."""
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False)
    prefix = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    tuned = [peft.get_peft_model(made(), config).eval() for config in (lora, prefix)]
    how = dict(input_ids=PROMPT, attention_mask=torch.ones_like(PROMPT), max_new_tokens=9)
    own = tuned[0].generate(**how)
    how["custom_generate"] = speculative(reciting(own[0].tolist()), cape.cape)
    assert torch.equal(tuned[0].generate(**how), own)
    if transformers.__version__ < "5.24":
        with pytest.raises(UserError, match="PEFT"):
            tuned[1].generate(**how)

@pytest.mark.skipif(transformers.__version__ < "5", reason="RoBERTa verifies chains alone, and "
                    "generate() itself fails with the logits of a router and given position_ids")
@pytest.mark.parametrize("kind, config, how", [
    ("RobertaForCausalLM", dict(is_decoder=True, pad_token_id=1),      # positions after padding's
     dict(token_type_ids=torch.zeros_like(PROMPT))),
    ("MixtralForCausalLM", dict(num_key_value_heads=2, num_local_experts=4,
                                output_router_logits=True), {}),
    ("LlamaForCausalLM", {}, dict(position_ids=torch.tensor([[0, 1, 2]])))])
def test_what_generate_prepares_in_a_way_of_its_own_is_served(kind, config, how):
    model = made(kind, **config)
    for build in (cape.chain, cape.cape):
        assert same(model, build=build, **how).last.tau > 1.5

def slower(self, *given, **how):
    """Positions grow otherwise after the prompt."""
    found = LlamaForCausalLM._update_model_kwargs_for_generation(self, *given, **how)
    return {**found, "position_ids": found["position_ids"] // 2}

def after(self, *given, **how):
    """What is prepared is other after the prompt."""
    found = LlamaForCausalLM.prepare_inputs_for_generation(self, *given, **how)
    is_step = found["position_ids"].shape[1] == 1
    return {**found, "position_ids": found["position_ids"] + is_step}

@pytest.mark.parametrize("name, step", [
    ("prepare_inputs_for_generation", after), ("_sample", after),
    ("_update_model_kwargs_for_generation", slower)])
def test_a_class_or_an_instance_with_a_step_of_its_own_is_refused(name, step):
    """Where it decodes otherwise by it; also where it was served before."""
    kind = type("Own", (LlamaForCausalLM,), {name: step})
    with pytest.raises(UserError, match="as its generate|of its own"):
        kind(made().config).generate(PROMPT, max_new_tokens=3, custom_generate=PLAIN)
    model = made()
    fast, own = same(model), getattr(model, name)
    setattr(model, name, own)                                  # PEFT leaves it bound there
    same(model)
    setattr(model, name, MethodType(step, model))
    with pytest.raises(UserError, match="as its generate|of its own"):
        model.generate(PROMPT, custom_generate=fast)

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
    """Its dtype, its configuration, another model, inference mode."""
    model = made()
    fast = fast_for(model)

    def check(model):
        assert torch.equal(model.generate(PROMPT, custom_generate=fast), model.generate(PROMPT))
    check(model)
    check(model.double())
    check(made(seed=1))
    with torch.inference_mode():
        check(model.float())
    model.set_attn_implementation("eager")
    check(model)
    model.resize_token_embeddings(15)
    check(model)

def test_a_call_within_another_is_refused(model):
    """And nothing of it is left: the next call decodes."""
    fast = fast_for(model)

    def call(*given):
        return model.generate(PROMPT, custom_generate=fast)
    with pytest.raises(UserError, match="is decoding already"):
        model.generate(PROMPT, custom_generate=fast, stopping_criteria=[call])
    assert call()[0].tolist() == own_text(model)

# ---------------------------------------------------------------- what is called back
class Listener:
    def __init__(self):
        self.heard = []

    def put(self, ids):
        self.heard.append((ids.tolist(), ids.is_inference()))

    def end(self):
        self.heard.append("end")

def test_a_streamer_is_shown_everything_once(model):
    """It is found behind a wrapper that hides the signature, too, and so is an assistant."""
    own, ours, fast = Listener(), Listener(), fast_for(model)
    model.generate(PROMPT, streamer=own)
    model.generate(PROMPT, streamer=ours, custom_generate=lambda *given, **how: fast(*given, **how))
    assert ours.heard == own.heard and ours.heard[-1] == "end"
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

def test_stop_strings():
    """The tokenizer is found, behind a wrapper that shows the signature, too."""
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "checkpoints" / "target")
    model = made(vocab_size=len(tokenizer))
    text = own_text(model)
    how = dict(stop_strings=[tokenizer.decode(text[6]).strip()], tokenizer=tokenizer)
    own, fast = model.generate(PROMPT, **how), fast_for(model)
    assert own.shape[1] < len(text)
    for given in (fast, partial(fast)):
        assert torch.equal(model.generate(PROMPT, custom_generate=given, **how), own)

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
    own = model.generate(ids, max_new_tokens=13)
    fast = fast_for(model, text=own[0].tolist())
    with pytest.warns(UserWarning, match="ends after 13 of 30"):
        out = model.generate(ids, custom_generate=fast, max_new_tokens=30)
    assert torch.equal(out, own)
    with pytest.raises(ValueError, match="at most 32"):
        model.generate(ids.repeat(1, 2), custom_generate=fast)

# ---------------------------------------------------------------- what is refused
@pytest.mark.parametrize("says, how", [
    ("beam_search", dict(num_beams=2)),
    ("output_att", dict(output_attentions=True, return_dict_in_generate=True)),
    ("inputs_embeds", dict(inputs_embeds=torch.zeros(1, 3, 32), input_ids=None)),
    ("MyCache", {CACHE: type("MyCache", (DynamicCache,), {})()})])
def test_what_cannot_be_right_is_refused_in_a_sentence(model, says, how):
    with pytest.raises(UserError, match=says):
        model.generate(custom_generate=PLAIN, **{"input_ids": PROMPT, **how})

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

@pytest.mark.parametrize("more", [{}, {"repetition_penalty": 1.5}, {"eos_token_id": [3, 5]},
                                  {"suppress_tokens": [1, 2, 4]}])
@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_padded_prompts_decode_as_generate_does(name, more):
    """Also with processors that look at the text, and rows that end at different times."""
    model, fast = shared(name), speculative(reciting([1, 2, 3] * 20), cape.cape)
    out = model.generate(**PADDED, custom_generate=fast, **more)
    assert torch.equal(out, model.generate(**PADDED, **more)) and len(fast.last) == 3

def test_num_return_sequences_are_sampled_apart():
    out = made().generate(PROMPT, do_sample=True, num_return_sequences=4, custom_generate=PLAIN)
    assert out.shape == (4, 3 + NEW) and len(set(map(tuple, out.tolist()))) == 4

def test_a_drafter_that_was_trained_for_other_weights_is_named(model):
    fast = fast_for(model)
    fast.drafter.model = SimpleNamespace(made_for=load.fingerprint(made(seed=1)))
    with pytest.warns(UserWarning, match="trained for another model .its weights"):
        model.generate(PROMPT, custom_generate=fast)
