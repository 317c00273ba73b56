"""Inside transformers' own generate(): each kind of argument against generate() without it."""
import copy
import pickle
import threading
import warnings
from functools import partial

import pytest
import torch
import transformers
from conftest import ROOT
from transformers import (
    AutoTokenizer, DynamicCache, GenerationConfig, LlamaConfig, LlamaForCausalLM,
    LogitsProcessorList, RepetitionPenaltyLogitsProcessor, StaticCache, StopStringCriteria,
    TemperatureLogitsWarper, pipeline)

import cape
import pct
import verify
from runtime import generation
from runtime.errors import UserError
from runtime.generation import speculative
from runtime.targets import any_target

PROMPT = torch.tensor([[3, 1, 4]])
BUILDS = {"chain": cape.chain, "cape": cape.cape, "pct": pct.pct, "drawn": cape.drawn}
TREES = ("chain", "cape", "pct")
CACHE = "cache" if transformers.__version__ >= "5.24" else "past_key_values"

def random_llama(vocab, std=0.25, **more):
    torch.manual_seed(0)
    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                 max_position_embeddings=64, bos_token_id=None, eos_token_id=None,
                 pad_token_id=None)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=vocab, **{**sizes, **more})).eval()
    for p in model.parameters():
        if p.ndim == 2:
            torch.nn.init.normal_(p, std=std)
    model.generation_config = GenerationConfig(max_new_tokens=16)
    return model

@pytest.fixture
def model():
    return random_llama(12)

@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(ROOT / "checkpoints" / "target")

@pytest.fixture(scope="module")
def speaker(tokenizer):
    """A model of the tokenizer's vocabulary."""
    return random_llama(len(tokenizer))

class Reciting:
    """A drafter that recites a text, and is wrong at each third position."""
    needs = {}

    def __init__(self, text, vocab=12):
        self.text, self.vocab = text, vocab
        self.keep = lambda path: None

    def reset(self, probs, source):
        self.probs = probs

    def begin(self, view, root):
        self.length, self.depth = view.length, []

    def expand(self, tokens, parents):
        p = torch.full((len(parents), self.vocab), 0.1 / self.vocab)
        for node, parent in enumerate(parents):
            self.depth.append(self.depth[parent] + 1 if parent >= 0 else 0)
            at = self.length + self.depth[-1] + 1
            token = self.text[at] if at < len(self.text) else 0
            p[node, (token + (at % 3 == 0)) % self.vocab] += 0.9
        return p

def fast_for(model, tree="cape", ids=PROMPT, text=None, **how):
    """A callable whose drafter knows most of what generate() gives."""
    if text is None:
        text = model.generate(ids, **how)[0].tolist()
    return speculative(Reciting(text, model.config.vocab_size), BUILDS[tree])

def same(model, ids=PROMPT, trees=TREES, **how):
    """generate() with and without custom_generate -> the last callable."""
    own = model.generate(ids, **how)
    for tree in trees:
        fast = fast_for(model, tree, text=own[0].tolist())
        assert torch.equal(model.generate(ids, custom_generate=fast, **how), own), tree
    return fast

# ---------------------------------------------------------------- lengths, processors
HOW = {
    "nothing": {}, "new tokens": dict(max_new_tokens=9), "length": dict(max_length=11),
    "ends": dict(eos_token_id=[7, 2]), "time": dict(max_time=60.0),
    "no cache": dict(use_cache=False),
    "suppressed": dict(suppress_tokens=[0, 2, 4, 6, 8, 10]),
    "scores alone": dict(renormalize_logits=True, remove_invalid_values=True),
    "outputs without a dict": dict(output_scores=True, output_hidden_states=True),
    "chunks": dict(prefill_chunk_size=2, cache_implementation="dynamic"),
    "static cache": dict(cache_implementation="static")}

@pytest.mark.parametrize("name", HOW)
def test_greedy_is_generates_own(model, name):
    fast = same(model, **HOW[name])
    assert name != "nothing" or fast.last.tau > 1, "drafts are accepted"
    target = fast.target
    model.generate(PROMPT, custom_generate=fast, **HOW[name])
    assert fast.target is target, "the model is wrapped once"

class FourthCall:
    """A processor of a user's own, for one text at a time, that remembers."""
    def __init__(self):
        self.calls = 0

    def __call__(self, ids, scores):
        self.calls += 1
        assert len(ids) == len(scores) == 1 and not scores.is_inference()
        scores[0, (int(ids[0, -1]) + self.calls) % 12] = 9.0 if self.calls % 4 == 0 else -9.0
        return scores

def allowed(batch, ids):
    return [list(range(12)), [1, 3, 5, 7]][batch + len(ids) % 2]

PROCESSORS = {
    "repetition": dict(repetition_penalty=1.3),
    "n-grams": dict(no_repeat_ngram_size=2),
    "bad words": dict(bad_words_ids=[[3], [4, 11], [11, 8, 9]]),
    "minimum": dict(min_new_tokens=7, eos_token_id=[7, 2, 11]),
    "minimum length": dict(min_length=9, eos_token_id=[7, 2, 11]),
    "forced end": dict(forced_eos_token_id=5, eos_token_id=2),
    "suppressed beginning": dict(begin_suppress_tokens=[0, 4, 11]),
    "sequence bias": dict(sequence_bias={(3,): -5.0, (11, 8): 4.0}),
    "length penalty": dict(exponential_decay_length_penalty=(2, 1.5), eos_token_id=2),
    "encoder's": dict(encoder_repetition_penalty=1.5, encoder_no_repeat_ngram_size=2),
    "prefixes": dict(prefix_allowed_tokens_fn=allowed),
    "guidance": dict(guidance_scale=1.5),
    "several": dict(repetition_penalty=1.2, temperature=0.7, top_k=9, no_repeat_ngram_size=3)}

@pytest.mark.parametrize("name", PROCESSORS)
def test_processors_that_look_at_tokens(model, name):
    """Greedy: generate()'s own.  Sampled: plain sampling's, whatever drafts."""
    assert same(model, **PROCESSORS[name]).last.rounds
    plain = speculative(None, verify.root_only)
    texts = {}
    for tree in ("plain", *TREES):
        fast = plain if tree == "plain" else fast_for(model, tree, text=texts["plain"][0])
        texts[tree] = []
        for seed in range(3):
            torch.manual_seed(seed)
            how = dict(do_sample=True, custom_generate=fast, **PROCESSORS[name])
            texts[tree].append(model.generate(PROMPT, **how)[0].tolist())
    assert texts["chain"] == texts["cape"] == texts["pct"] == texts["plain"]

def test_a_processor_is_called_as_generate_calls_it(model):
    """One text, once for each new token, in order: so it may remember."""
    texts = []
    for how in ({}, *(dict(custom_generate=fast_for(model, tree)) for tree in TREES)):
        mine = FourthCall()
        texts.append(model.generate(PROMPT, logits_processor=[mine], **how))
        assert mine.calls == 16 and torch.equal(texts[-1], texts[0])

@pytest.mark.parametrize("tree", ["cape", "drawn"])
@pytest.mark.parametrize("looks", [False, True])
def test_sampled_tokens_are_distributed_as_generates_own(tree, looks):
    """The first two tokens of 1500 samples, by a chi-square test."""
    torch.manual_seed(2)
    table, q = 1.5 * torch.randn(4, 4), torch.tensor([0.1, 0.2, 0.3, 0.4])    # logits, p_draft
    processors = LogitsProcessorList([TemperatureLogitsWarper(1.2)])
    if looks:
        processors.insert(0, RepetitionPenaltyLogitsProcessor(1.8))
    text, none, found = torch.tensor([[2, 1]]), torch.zeros(1, 0, dtype=torch.long), {}

    def sampled(seed):
        rule = generation.Rule(processors, seed, none)
        drafted = torch.arange(4)
        parents, p_draft = torch.tensor([-1, 0, 0, 0, 0]), None
        if tree == "drawn":
            drafted = cape.sample(q[None], verify.generator_for(seed, "draft 2"))
            parents, p_draft = torch.tensor([-1, 0]), q[None]
        tokens = torch.cat((text[0, -1:], drafted))
        nodes = verify.Tree(tokens, parents, None, p_draft)
        choice = rule.choose(nodes, table[tokens], text)
        _, new = verify.accept(tokens.tolist(), parents.tolist(), choice.tolist())
        if len(new) < 2:
            longer = torch.tensor([[2, 1, new[0]]])
            root = verify.root_only(None, longer[0, -1:])
            new += rule.choose(root, table[new], longer).tolist()
        return tuple(new[:2])
    for seed in range(1500):
        pair = sampled(seed)
        found[pair] = found.get(pair, 0) + 1
    chi2 = 0.0
    p = processors(text, table[1:2].clone()).softmax(-1)[0]
    for x in range(4):
        p_after = processors(torch.tensor([[2, 1, x]]), table[x:x + 1].clone()).softmax(-1)[0]
        for y in range(4):
            expected = 1500 * (p[x] * p_after[y]).item()
            chi2 += (found.get((x, y), 0) - expected) ** 2 / expected
    assert chi2 < 45, "15 degrees of freedom: p > 1e-4"

def test_sampling_repeats_by_seed_whatever_drafts(model):
    """And ends as generate() does; other seeds give other texts."""
    how = dict(do_sample=True, temperature=1.3, top_k=9, top_p=0.95, min_p=0.01, typical_p=0.99,
               epsilon_cutoff=1e-4, eta_cutoff=1e-4)

    def sampled(fast, seed, how=how):
        torch.manual_seed(seed)
        return model.generate(PROMPT, custom_generate=fast, **how)[0].tolist()
    plain = speculative(None, verify.root_only)
    expected = [sampled(plain, seed) for seed in range(4)]
    assert len({tuple(text) for text in expected}) == 4
    for tree in TREES:
        assert [sampled(fast_for(model, tree), seed) for seed in range(4)] == expected
    own = model.generate(PROMPT)[0].tolist()
    assert sampled(plain, 0, dict(do_sample=True, top_k=1)) == own, "by generate()'s processors"

# ---------------------------------------------------------------- what generate() has prepared
def filled(model, ids, kind=DynamicCache):
    cache = kind(config=model.config, **({"max_cache_len": 40} if kind is StaticCache else {}))
    with torch.no_grad():
        model(ids, **{CACHE: cache})
    return cache

@pytest.mark.parametrize("window", [None, 4])
def test_a_filled_cache(window):
    """Served where it holds the first tokens of the prompt; what was decoded is appended to it."""
    if window:
        model = transformers.MistralForCausalLM(transformers.MistralConfig(
            vocab_size=12, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, sliding_window=window,
            max_position_embeddings=64, eos_token_id=None, bos_token_id=None)).eval()
    else:
        model = random_llama(12)
    ids, how = torch.tensor([[3, 1, 4, 1, 5, 9, 2]]), dict(max_new_tokens=9)
    own = model.generate(ids, **{CACHE: filled(model, ids[:, :5])}, **how)
    fast = fast_for(model, text=own[0].tolist())
    cache = filled(model, ids[:, :5])
    assert torch.equal(model.generate(ids, custom_generate=fast, **{CACHE: cache}, **how), own)
    assert cache.get_seq_length() == own.shape[1] - 1
    more = torch.cat((own, torch.tensor([[7, 8]])), 1)         # the next turn, by generate() itself
    assert torch.equal(model.generate(more, **{CACHE: cache}, **how), model.generate(more, **how))
    for other, mask in ((ids[:, 5:], torch.ones(1, 7)), (ids.flip(1), None), (ids[:, :5], None)):
        with pytest.raises(UserError, match="cache holds 5 tokens|attention mask"):
            model.generate(other, attention_mask=mask, custom_generate=fast,
                           **{CACHE: filled(model, ids[:, :5])}, **how)

def test_caches_are_returned_and_filled(model):
    """return_dict_in_generate has generate()'s fields, and an empty cache is filled."""
    fast = fast_for(model)
    for kind in (None, DynamicCache, StaticCache):
        outs = []
        for how in ({}, dict(custom_generate=fast)):
            given = {}
            if kind:
                given[CACHE] = kind(config=model.config, **(
                    {"max_cache_len": 40} if kind is StaticCache else {}))
            outs.append(model.generate(PROMPT, return_dict_in_generate=True, **given, **how))
            assert not given or outs[-1][CACHE] is given[CACHE]
        own, ours = outs
        assert type(ours) is type(own) and ours.keys() == own.keys()
        assert torch.equal(ours.sequences, own.sequences)
        for x, y in zip(own[CACHE].layers, ours[CACHE].layers):
            torch.testing.assert_close(x.keys, y.keys)
            torch.testing.assert_close(x.values, y.values)
            assert not y.keys.is_inference()

@pytest.mark.parametrize("tree", TREES)
def test_padding_at_the_left(model, tree):
    """It is hidden from the model, and processors and criteria see it, as in generate()."""
    ids, mask = torch.tensor([[0, 0, 3, 1, 4]]), torch.tensor([[0, 0, 1, 1, 1]])
    how = dict(attention_mask=mask, repetition_penalty=1.3, max_length=15)
    same(model, ids, [tree], **how)
    outs = [model.generate(ids, return_dict_in_generate=True, **how, **more)
            for more in ({}, dict(custom_generate=fast_for(model, tree, ids, **how)))]
    own, ours = [out[CACHE].layers[0].keys for out in outs]
    torch.testing.assert_close(own[:, :, 2:], ours[:, :, 2:])
    for wrong in ([[1, 0, 1, 1, 1]], [[1, 1, 1, 1, 0]], [[0, 0, 0, 0, 0]]):
        with pytest.raises(UserError, match="attention mask hides"):
            model.generate(ids, attention_mask=torch.tensor(wrong),
                           custom_generate=fast_for(model, tree))

def test_positions(model):
    fast = fast_for(model)
    right, wrong = torch.tensor([[0, 1, 2]]), torch.tensor([[0, 5, 9]])
    assert torch.equal(model.generate(PROMPT, position_ids=right, custom_generate=fast),
                       model.generate(PROMPT))
    with pytest.raises(UserError, match="position_ids"):
        model.generate(PROMPT, position_ids=wrong, custom_generate=fast)

def test_what_prepares_inputs_is_asked(model):
    """By a class of the user's own, or replaced on the instance, as PEFT does."""
    class Prompted(LlamaForCausalLM):
        def prepare_inputs_for_generation(self, input_ids, **kwargs):
            inputs = super().prepare_inputs_for_generation(input_ids, **kwargs)
            embeds = self.get_input_embeddings()(inputs.pop("input_ids"))
            return {**inputs, "inputs_embeds": embeds, "input_ids": None}
    fast, own = fast_for(model), model.prepare_inputs_for_generation
    with pytest.raises(UserError, match="leave it out, or decode without custom_generate"):
        Prompted(model.config).generate(PROMPT, max_new_tokens=3, custom_generate=fast)
    expected = model.generate(PROMPT)
    model.prepare_inputs_for_generation = own                  # PEFT leaves it bound there
    assert torch.equal(model.generate(PROMPT, custom_generate=fast), expected)
    model.prepare_inputs_for_generation = lambda *given, **how: own(*given, **how)
    with pytest.raises(UserError, match="PEFT.*LoRA is served"):
        model.generate(PROMPT, custom_generate=fast)

@pytest.mark.parametrize("kind", ["LORA", "PROMPT_TUNING", "PREFIX_TUNING", "P_TUNING"])
def test_peft(model, kind):
    peft = pytest.importorskip("peft")
    if kind == "LORA":
        config = peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False)
    else:
        name = {"PROMPT_TUNING": "PromptTuningConfig", "PREFIX_TUNING": "PrefixTuningConfig",
                "P_TUNING": "PromptEncoderConfig"}[kind]
        config = getattr(peft, name)(task_type="CAUSAL_LM", num_virtual_tokens=3)
    tuned = peft.get_peft_model(model, config).eval()
    how = dict(input_ids=PROMPT, attention_mask=torch.ones_like(PROMPT), max_new_tokens=9)
    own = tuned.generate(**how)
    fast = speculative(Reciting(own[0].tolist()), cape.cape)
    if kind == "LORA":
        assert torch.equal(tuned.generate(custom_generate=fast, **how), own)
        return
    with pytest.raises(UserError, match="PEFT"):
        tuned.generate(custom_generate=fast, **how)

def test_an_offloaded_model(tmp_path, model):
    accelerate = pytest.importorskip("accelerate")
    own = model.generate(PROMPT)
    fast = fast_for(model)
    accelerate.cpu_offload(model, torch.device("cpu"))
    assert torch.equal(model.generate(PROMPT, custom_generate=fast), own)

# ---------------------------------------------------------------- state
def test_modes_of_modules_are_restored(model):
    model.train()
    model.model.layers[0].eval()
    before = [module.training for module in model.modules()]
    expected = random_llama(12).generate(PROMPT)
    fast = fast_for(model, text=expected[0].tolist())
    for _ in range(2):
        assert torch.equal(model.generate(PROMPT, custom_generate=fast), expected)
        assert [module.training for module in model.modules()] == before
        model.gradient_checkpointing_enable()                  # generate() itself recomputes then
    with pytest.raises(UserError):
        model.generate(PROMPT, num_beams=2, custom_generate=fast)
    assert [module.training for module in model.modules()] == before

def test_a_changed_model_is_noticed(model):
    """Its dtype, autocast, its configuration, another model, inference mode."""
    fast = fast_for(model)
    other = random_llama(12, std=0.3)

    def check(model=model, exact=True):
        own, ours = model.generate(PROMPT), model.generate(PROMPT, custom_generate=fast)
        assert torch.equal(ours, own) or not exact and ours.shape == own.shape
    check()
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
    ready = any_target(other, 32)
    fast = speculative(fast.drafter, cape.cape, ready)
    check(other)
    assert fast.target is ready
    check(other.double())
    assert fast.target is not ready

def test_a_call_within_or_beside_another_is_refused(model):
    fast, own = fast_for(model), model.generate(PROMPT)
    refused = []

    def call(*given, fast=fast):
        try:
            model.generate(PROMPT, custom_generate=fast)
        except UserError as why:
            refused.append(str(why))
        return torch.tensor([False])

    def in_a_thread(*given, fast=fast):
        thread = threading.Thread(target=partial(call, fast=fast))
        thread.start()
        thread.join()
        return torch.tensor([False])
    alike = speculative(fast.drafter, cape.chain)              # with the same drafter
    for criterion in (call, in_a_thread, partial(call, fast=alike)):
        out = model.generate(PROMPT, custom_generate=fast, stopping_criteria=[criterion])
        assert torch.equal(out, own)
    assert len(refused) == 3 * 16 and all("is decoding already" in why for why in refused)
    model.generate(PROMPT, custom_generate=fast)
    twins = pickle.loads(pickle.dumps(fast.drafter.text)), copy.deepcopy(fast)
    assert torch.equal(model.generate(PROMPT, custom_generate=twins[1]), own)
    assert pickle.loads(pickle.dumps(speculative(None, cape.chain))).build is cape.chain

class Listener:
    def __len__(self):
        return 0                                               # it counts as False

    def __init__(self):
        self.ids, self.ended, self.kinds = [], 0, set()

    def put(self, ids):
        self.ids += ids.flatten().tolist()
        self.kinds.add((ids.shape if ids.ndim == 1 else "prompt", ids.is_inference()))

    def end(self):
        self.ended += 1

WRAPPERS = {
    "none": lambda fast: fast, "lambda": lambda fast: lambda *a, **k: fast(*a, **k),
    "two": lambda fast: lambda *a, **k: (lambda: fast(*a, **k))(),
    "partial": partial(partial)}

@pytest.mark.parametrize("name", WRAPPERS)
def test_a_streamer_is_shown_everything_once(model, name):
    own, ours = Listener(), Listener()
    model.generate(PROMPT, streamer=own)
    model.generate(PROMPT, streamer=ours, custom_generate=WRAPPERS[name](fast_for(model)))
    assert vars(ours) == vars(own) and ours.ended == 1
    with pytest.raises(UserError, match="assisted_generation"):
        model.generate(PROMPT, assistant_model=model,
                       custom_generate=WRAPPERS[name](fast_for(model)))

def test_a_callable_in_another_thread_is_refused(model):
    """There the streamer cannot be found."""
    fast, caught = fast_for(model), []

    def elsewhere(*given, **how):
        def call():
            with pytest.raises(UserError, match="inside generate.. alone, in its thread"):
                fast(*given, **how)
            caught.append(True)
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
    model.generate(PROMPT, custom_generate=elsewhere)
    assert caught

def test_criteria_see_every_token(model):
    """The last one included, as ordinary tensors; a criterion may end the text anywhere."""
    def seen_by(end=99, **how):
        seen = []

        def criterion(ids, scores):
            seen.append((ids.tolist(), scores, ids.is_inference(), ids.device))
            return torch.full((1,), ids.shape[1] >= end)
        return model.generate(PROMPT, stopping_criteria=[criterion], **how).tolist(), seen
    for end in (4, 7, 8, 9, 12, 19):
        for tree in TREES:
            assert seen_by(end, custom_generate=fast_for(model, tree)) == seen_by(end)

def test_stop_strings(speaker, tokenizer):
    """The tokenizer is found, behind a wrapper that shows the signature, too."""
    expected = speaker.generate(PROMPT)[0].tolist()
    word = tokenizer.decode(expected[8]).strip()
    how = dict(stop_strings=[word], tokenizer=tokenizer)
    own = speaker.generate(PROMPT, **how)
    fast = fast_for(speaker, text=expected)
    assert own.shape[1] < 3 + 16
    for given in (fast, partial(fast)):
        assert torch.equal(speaker.generate(PROMPT, custom_generate=given, **how), own)
    how = dict(stopping_criteria=[StopStringCriteria(tokenizer, [word])])
    hidden = WRAPPERS["lambda"](fast)
    assert torch.equal(speaker.generate(PROMPT, custom_generate=hidden, **how), own)

def test_a_pipeline(speaker, tokenizer):
    writer = pipeline("text-generation", model=speaker, tokenizer=tokenizer)
    fast = speculative(None, verify.root_only)
    how = dict(max_new_tokens=12, do_sample=False)
    assert writer("One day", custom_generate=fast, **how) == writer("One day", **how)
    assert len(fast.last.tokens) == 12

@pytest.mark.parametrize("tree", ["chain", "cape", "drawn"])
def test_what_is_no_distribution_raises(model, tree):
    """As in generate(): where the logits are NaN, or nothing is allowed, and only there."""
    bad = [lambda ids, scores: scores * (torch.nan if ids.shape[1] > 6 else 1)]
    none = [lambda ids, scores: scores - (torch.inf if ids.shape[1] > 6 else 0)]
    for how in (dict(logits_processor=bad), dict(logits_processor=none), {}):
        fast = fast_for(model, tree)
        model.generate(PROMPT, custom_generate=fast, do_sample=True)
        if not how:
            model.lm_head.weight.data.fill_(torch.nan)         # after it was proven
        for more in ({}, dict(custom_generate=fast)):
            with pytest.raises(RuntimeError, match="probability tensor contains"):
                model.generate(PROMPT, do_sample=True, **how, **more)

def test_the_end_of_the_context_is_no_secret(model):
    """The output ends there with a warning; a prompt beyond it is refused."""
    model, ids = random_llama(12, max_position_embeddings=32), torch.arange(20)[None] % 12
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        out = model.generate(ids, custom_generate=fast_for(model, ids=ids, max_new_tokens=30),
                             max_new_tokens=30)
    assert any("ends after 13 of 30 new tokens" in str(each.message) for each in caught)
    assert torch.equal(out, model.generate(ids, max_new_tokens=13))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        same(model, ids, max_new_tokens=13)
    assert not any("ends after" in str(each.message) for each in caught)
    with pytest.raises(UserError, match="context of 32"):
        model.generate(ids.repeat(1, 2), custom_generate=fast_for(model, text=[0]))

def test_yarn_lengthens_the_context():
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    model = random_llama(12, max_position_embeddings=32, rope_scaling=scaling)
    same(model, torch.arange(40)[None] % 12)

# ---------------------------------------------------------------- what is refused
def test_what_cannot_be_right_is_refused_in_a_sentence(model):
    fast = fast_for(model)
    for ids, how, says in (
            (PROMPT.repeat(2, 1), {}, "2 sequences"),
            (PROMPT, dict(num_return_sequences=2, do_sample=True), "2 sequences"),
            (PROMPT, dict(num_beams=2), "beam_search"),
            (PROMPT, dict(prompt_lookup_num_tokens=2), "assisted_generation"),
            (PROMPT, dict(synced_gpus=True), "synced_gpus"),
            (PROMPT, dict(output_scores=True, return_dict_in_generate=True), "output_scores"),
            (PROMPT, dict(output_attentions=True, return_dict_in_generate=True), "output_att"),
            (None, dict(inputs_embeds=torch.zeros(1, 3, 32)), "inputs_embeds")):
        with pytest.raises(UserError, match=says) as caught:
            model.generate(ids, custom_generate=fast, **how)
        assert "\n" not in str(caught.value)
    class Own(LlamaForCausalLM):
        def _sample(self, *given, **how):
            return super()._sample(*given, **how)
    with pytest.raises(UserError, match="a way of its own"):
        Own(model.config).generate(PROMPT, max_new_tokens=4, custom_generate=fast)
    with pytest.raises(UserError, match="any_target"):
        speculative(None, cape.cape, verify.Target(model))
    class MyCache(DynamicCache):
        pass
    with pytest.raises(UserError, match="MyCache"):
        model.generate(PROMPT, custom_generate=fast, **{CACHE: MyCache(config=model.config)})

def test_a_drafter_of_another_model_is_refused_in_a_sentence(model):
    """Layers that the target lacks, other shapes; more tokens than the target has are harmless."""
    own, mistakes = model.generate(PROMPT), Reciting([])
    wide = speculative(Reciting([1, 13, *own[0].tolist()], vocab=15), cape.cape)
    for tree in ("cape", "drawn"):
        wide.build = BUILDS[tree]
        assert torch.equal(model.generate(PROMPT, custom_generate=wide), own)
        model.generate(PROMPT, custom_generate=wide, do_sample=True)
    for needs in ({"kv": [13]}, {"hidden": [5]}):
        mistakes.needs = needs
        with pytest.raises(UserError, match="drafter made for this target"):
            model.generate(PROMPT, custom_generate=speculative(mistakes, cape.cape))
    mistakes.needs = {"hidden": [1]}
    mistakes.begin = lambda view, root: view.hidden[1] @ torch.zeros(7, 7)
    with pytest.raises(UserError, match="drafter made for this target"):
        model.generate(PROMPT, custom_generate=speculative(mistakes, cape.cape))
    fast = speculative(Reciting([]), partial(cape.chain, gamma=0))
    with pytest.raises(UserError, match="gamma is 0: draft at least one token"):
        model.generate(PROMPT, custom_generate=fast)
