"""Speculative decoding inside transformers' own generate().

    fast = speculative(drafter, cape.cape)
    model.generate(**inputs, custom_generate=fast, max_new_tokens=100)       # fast.last.tau

The arguments of generate() keep their meaning: lengths, sampling, logits processors, stopping
criteria, stop strings, streamers, caches, an encoder's outputs, pipelines.  What cannot be served
raises a UserError, which says what to do.  In float32 greedy decoding gives token for token what
generate() gives without custom_generate; samples follow the same distribution.

Differences from generate():
 1. The model decodes in evaluation mode: dropout is off.  Afterwards each module is in its mode.
 2. The output ends with the model's context, with a warning, where generate() would go on.
 3. Streamers get the tokens of a round one after the other, but at once.

What is served was found in transformers 4.57.6 to 5.24.
"""
import inspect
import sys
from contextlib import contextmanager
from threading import Lock
from warnings import warn

import torch
import torch.nn.functional as F
from transformers import EncoderDecoderCache, GenerationMixin, cache_utils
from transformers.generation import utils

import verify
from runtime.errors import UserError
from runtime.program import first_line
from runtime.targets import AnyTarget, any_target, layers_of, state_of, with_vocabulary

# What generate() prepares for a forward, and `speculative` prepares for itself or compares
PREPARED = {"input_ids", "position_ids", "cache_position", "attention_mask", "decoder_input_ids",
            "decoder_position_ids", "decoder_attention_mask", "encoder_outputs", "past_key_values",
            "cache", "use_cache", "logits_to_keep", "is_first_iteration", "return_dict",
            "output_attentions", "output_hidden_states"}
# The methods by which generate() decodes
STEPS = ("prepare_inputs_for_generation", "_update_model_kwargs_for_generation", "_sample")
# Options of generate() for outputs that `speculative` does not have
NOT_RETURNED = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")
CACHES = {cache_utils.DynamicCache, cache_utils.StaticCache, EncoderDecoderCache}
LAYERS = {cache_utils.DynamicLayer, cache_utils.DynamicSlidingWindowLayer, cache_utils.StaticLayer,
          cache_utils.StaticSlidingWindowLayer}

def refuse(*cases):
    """Raise UserError with the sentence of the first case, a pair (refused, sentence), that is."""
    for refused, sentence in cases:
        if refused:
            raise UserError(sentence)

# ---------------------------------------------------------------- what generate() keeps to itself
def locals_of(method, model=None):
    """The local variables of the innermost running call of a method (on `model`), or None."""
    code = inspect.unwrap(method).__code__                     # below its decorators
    frame = sys._getframe(1)
    while frame:
        if frame.f_code is code and model in (None, frame.f_locals["self"]):
            return frame.f_locals
        frame = frame.f_back

class Signature:
    """speculative's __signature__, which lets stop_strings find the tokenizer.

    generate() takes tokenizer= out of its arguments and forgets it, unless the signature of
    custom_generate names it; but then it looks for it in the arguments.  So it is put back there.
    """
    def __get__(self, fast, owner=None):
        if fast is None:
            raise AttributeError("__signature__")
        found = locals_of(GenerationMixin._extract_generation_mode_kwargs)
        if found and "tokenizer" in found.get("generation_mode_kwargs", ()):
            found["kwargs"]["tokenizer"] = found["generation_mode_kwargs"]["tokenizer"]
        return inspect.signature(fast.__call__)

# ---------------------------------------------------------------- the callable
class speculative:
    """A callable for model.generate(..., custom_generate=speculative(drafter, build)).

    drafter, build: see the contract in verify.py; None and verify.root_only are plain decoding.
    target: what verifies, if it is not to be runtime.targets.any_target(model), which proves the
    model once.  last: the Output of the last call; last.tau is the average acceptance length.
    """
    __signature__ = Signature()

    def __init__(self, drafter, build, target=None):
        refuse((not isinstance(target, AnyTarget | None), "this target proves nothing: give "
                "runtime.targets.any_target(model), or none"))
        self.drafter, self.build, self.target = drafter, build, target
        self.state = None if target is None else state_of(target.model)
        self.last = None

    def __call__(self, model, input_ids, logits_processor, stopping_criteria, generation_config,
                 tokenizer=None, **model_kwargs):
        # generate() keeps streamer, assistant_model and synced_gpus to itself.
        caller = locals_of(GenerationMixin.generate, model)
        refuse((caller is None, "a speculative callable works inside generate() alone, in its "
                "thread: call model.generate(..., custom_generate=...)"))
        check_supported(model, input_ids, generation_config, caller, model_kwargs)
        padding = padding_of(model, input_ids, generation_config, model_kwargs)
        hidden, ids = input_ids[:, :padding], input_ids[0, padding:].tolist()
        limit = generation_config.max_length - input_ids.shape[1]
        seed = None
        if generation_config.do_sample:
            seed = torch.randint(2 ** 31, (1,)).item()         # torch.manual_seed() decides it
        rule, stops = Rule(logits_processor, seed, hidden), Stops(stopping_criteria, hidden)
        streamer = None if caller["streamer"] is None else AfterPrompt(caller["streamer"])
        with alone(model, self, self.drafter, self.target):
            target = self.target_for(model, ids, padding, caller, model_kwargs)
            cache = cache_of(target, ids, padding, model_kwargs)
            drafter = None if self.drafter is None else Fitted(self.drafter, target)
            self.last = verify.generate(target, drafter, guarded(self.build), ids, limit, rule,
                                        [stops], streamer)
            # The user finds in a given cache what was decoded.
            is_given = any(value is cache for value in caller["kwargs"].values())
            if cache is not None and (generation_config.return_dict_in_generate or is_given):
                fill(cache, target, len(ids) + len(self.last.tokens) - 1, padding)
        if len(self.last.tokens) < limit and not stops.met:
            warn(f"the output ends after {len(self.last.tokens)} of {limit} new tokens, with the "
                 f"context of {target.capacity}; decode without custom_generate to go on")
        new = torch.tensor([self.last.tokens], device=input_ids.device)
        sequences = torch.cat((input_ids, new), dim=1)
        if not generation_config.return_dict_in_generate:
            return sequences
        kind = utils.GenerateDecoderOnlyOutput
        if target.encoder_decoder:
            kind = utils.GenerateEncoderDecoderOutput
        name = "cache" if "cache" in kind.__dataclass_fields__ else "past_key_values"
        return kind(sequences=sequences, **{name: cache})

    def target_for(self, model, ids, padding, caller, model_kwargs):
        """The Target of the model in its present state, for this prompt."""
        state = state_of(model)
        if self.target is None or self.target.model is not model or self.state != state:
            self.target, self.state = any_target(model), state
        target = self.target
        if target.encoder_decoder:
            target.given = model_kwargs["encoder_outputs"], model_kwargs.get("attention_mask")
            source = caller["inputs_tensor"]
            is_text = not source.is_floating_point() and source.min() >= 0
            target.source = source[0].tolist() if is_text else None
        refuse(
            (padding and not target.verifies_trees, "this model counts positions by its cache, "
             "padding included: give a prompt without padding"),
            (target.remaining(ids) < 1, f"a prompt of {len(ids)} tokens exceeds the context of "
             f"{target.capacity}: give a shorter one"))
        return target

lock, busy = Lock(), set()       # busy: the ids of what decodes

@contextmanager
def alone(model, *parts):
    """Nobody else may decode with these parts meanwhile; the model is in evaluation mode.

    Afterwards each module is in its own mode again.
    """
    parts = {id(part) for part in parts if part is not None}
    with lock:
        refuse((parts & busy, "this callable, its drafter or its target is decoding already, "
                "around this call or in another thread: give each a speculative(...) with a "
                "drafter of its own, or wait"))
        busy.update(parts)
    training = [module for module in model.modules() if module.training]
    try:
        model.eval()
        yield
    finally:
        for module in training:
            module.training = True
        busy.difference_update(parts)

# ---------------------------------------------------------------- what is refused
def check_supported(model, input_ids, config, caller, model_kwargs):
    """Raise UserError for arguments of generate() that cannot be served."""
    mode, kind = config.get_generation_mode(caller["assistant_model"]), type(model)
    embeds = model_kwargs.get("inputs_embeds") is not None
    synced = utils.is_deepspeed_zero3_enabled() or utils.is_fsdp_managed_module(model)
    replaced = [step for step in STEPS
                if getattr(model, step) != getattr(kind, step).__get__(model)]
    asked = [name for name in NOT_RETURNED if getattr(config, name, None)]
    refuse(
        (mode not in ("greedy_search", "sample"), f"{mode.value} is not served: leave its "
         "arguments out, and choose greedy decoding or sampling"),
        (len(input_ids) != 1, f"{len(input_ids)} sequences: give one, with num_return_sequences=1"),
        (embeds or not input_ids.numel(), "inputs_embeds is not served: give input_ids"),
        (caller["synced_gpus"] or synced, "synced_gpus is not served, as ranks decode in rounds of "
         "their own: leave it out, and give each rank the whole model"),
        (replaced, f"{replaced} of this model is replaced, as by PEFT's prompt and prefix tuning, "
         "and would be passed over: decode without custom_generate (LoRA is served)"),
        (kind._sample is not GenerationMixin._sample, f"{kind.__name__} decodes in a way of its "
         "own: decode without custom_generate"),
        (config.return_dict_in_generate and asked, f"{asked} is not served: leave it out"))

def padding_of(model, input_ids, config, model_kwargs):
    """The number of padding tokens at the left of the prompt.

    Raises UserError where the model's own generate() would not decode the other ids alone, at the
    positions 0, 1, 2, ...
    """
    n, mask = input_ids.shape[1], model_kwargs.get("attention_mask")
    if model.config.is_encoder_decoder:
        mask = torch.ones_like(input_ids)                      # the given one is the encoder's
    elif mask is None:                                         # generate() has noted its length
        mask = input_ids.new_ones(1, getattr(config, "_mask_length", n))
    padding = int(mask[0].ne(0).long().argmax())
    refuse((mask.shape[1] != n or not mask[0, padding:].all(), "the attention mask hides tokens, "
            "or is not that of input_ids: give the whole text, padded at its left if at all, and "
            "its attention_mask"))
    position = torch.arange(n, device=input_ids.device)
    given = {"cache_position": position, **model_kwargs, "is_first_iteration": True}
    given = {name: value for name, value in given.items() if not isinstance(value, utils.Cache)}
    try:
        prepared = model.prepare_inputs_for_generation(input_ids, **given)
    except Exception as why:                                   # a model's own code may fail anyhow
        raise UserError(f"{type(model).__name__}.prepare_inputs_for_generation fails without a "
                        f"cache ({first_line(why)}): decode without custom_generate") from why
    for name, value in prepared.items():
        if name.endswith("input_ids"):
            served = value is not None and torch.equal(value.to(input_ids.device), input_ids)
        elif value is None or value is False or isinstance(value, (dict, list)) and not value:
            served = True
        elif name.endswith("position_ids"):
            served = (value[..., padding:] == position[:n - padding].to(value.device)).all()
        else:
            served = name in PREPARED and (name != "decoder_attention_mask" or value.all())
        refuse((not served, f"{name} is not served as it is given or as the model prepares it: "
                "leave it out, or decode without custom_generate"))
    return padding

# ---------------------------------------------------------------- caches
def cache_of(target, ids, padding, model_kwargs):
    """The cache that generate() has prepared or was given, or None.

    Raises UserError where its entries are not those of the prompt's first tokens.
    """
    cache = model_kwargs.get("cache", model_kwargs.get("past_key_values"))
    if cache is None and model_kwargs.get("use_cache") is not False:
        cache = cache_utils.DynamicCache(config=target.config)     # the model would make its own
        if target.encoder_decoder:
            cache = EncoderDecoderCache(cache, cache_utils.DynamicCache())
    if cache is None:
        return None
    parts = [cache]
    if isinstance(cache, EncoderDecoderCache):
        parts = [cache.self_attention_cache, cache.cross_attention_cache]
    layers = {type(layer) for part in parts for layer in part.layers}
    refuse((type(cache) not in CACHES or layers - LAYERS, f"a {type(cache).__name__} may decode "
            "otherwise than the model: give a DynamicCache or a StaticCache, and no "
            "cache_implementation"))
    filled = int(cache.get_seq_length())
    served = not filled or not padding and filled < len(ids) and holds(cache, target, ids[:filled])
    refuse((not served, f"the given cache holds {filled} tokens that are not the first ones of "
            "input_ids: give input_ids and attention_mask of the whole text"))
    return cache

@torch.inference_mode()
def holds(cache, target, ids):
    """Whether a filled cache holds the keys and values that the model computes for these ids."""
    layers = getattr(cache, "layers", [])
    if not layers or cache_utils.StaticSlidingWindowLayer in {type(layer) for layer in layers}:
        return False                                           # the latter's order is its own
    target.configure({})
    target.align(ids)
    for layer, pair in target.cache.kv.items():
        for held, own in zip((layers[layer].keys, layers[layer].values), pair):
            held = held[:, :, :len(ids)]
            own = own[:, :, len(ids) - held.shape[2]:len(ids)]     # of a window, the last ones
            error = (held - own).float().norm() / own.float().norm()
            if not error < (1e-3 if torch.finfo(own.dtype).bits > 16 else 0.1):
                return False
    return True

def fill(cache, target, length, padding):
    """Append the target's entries up to `length` to the cache, which holds the first of them."""
    if isinstance(cache, EncoderDecoderCache):
        cache.cross_attention_cache = target.caches.cross_attention_cache
        cache.is_updated = target.caches.is_updated
        cache = cache.self_attention_cache
    first = int(cache.get_seq_length())
    for layer, pair in sorted(target.cache.kv.items()):
        # No query sees the entries of padding.
        k, v = [F.pad(x[:, :, first:length], (0, 0, padding, 0)) for x in pair]
        slots = torch.arange(first, first + k.shape[2], device=k.device)
        cache.update(k, v, layer, {"cache_position": slots})

# ---------------------------------------------------------------- what is called back
def ordinary(callback, *given):
    """Call with ordinary tensors, as generate() does; those of inference mode are not."""
    with torch.inference_mode(False), torch.no_grad():
        return callback(*(x.clone() if isinstance(x, torch.Tensor) else x for x in given))

class Rule(verify.Rule):
    """verify.Rule by generate()'s processors, which see the padding, too, on the model's device."""
    def __init__(self, processors, seed, padding):
        """padding (1, p): what stands before a text and is hidden from the model."""
        super().__init__(processors, seed)
        self.padding = padding

    def process(self, text, logits):
        if text is not None:
            text = torch.cat((self.padding, text.to(self.padding.device)), 1)
        process = super().process
        scores = ordinary(process, text, logits.to(self.padding.device))
        return scores.to(logits.device)

    def choose_by_scores(self, tree, scores, first):
        """As verify.Rule's; -1 where there is nothing to sample from."""
        choice = super().choose_by_scores(tree, scores, first)
        if self.seed is None:
            return choice
        return choice.masked_fill(scores.softmax(-1).isnan().any(-1), -1)

class Stops:
    """generate()'s stopping criteria, as one.  They see every token, on the model's device."""
    def __init__(self, criteria, padding):
        self.criteria, self.padding, self.met = criteria, padding, False

    def __call__(self, ids, scores):
        if ids[0, -1] < 0:                                     # torch.multinomial's own words
            raise RuntimeError("probability tensor contains either `inf`, `nan` or element < 0")
        ids = torch.cat((self.padding, ids.to(self.padding.device)), 1)
        self.met = bool(ordinary(self.criteria, ids, scores).all())
        return self.met

class AfterPrompt:
    """Passes on to a streamer all but the prompt, which transformers has shown it already."""
    def __init__(self, streamer):
        self.streamer, self.end, self.prompt_seen = streamer, streamer.end, False

    def put(self, ids):
        if self.prompt_seen:
            for token in ids:
                ordinary(self.streamer.put, token[None])
        self.prompt_seen = True

class Fitted:
    """A drafter beside a target.  What does not fit raises a UserError."""
    def __init__(self, drafter, target):
        self.needs, self.vocab = drafter.needs, target.vocab
        self.reset, self.keep = drafter.reset, drafter.keep
        self.begin, self.own = guarded(drafter.begin), guarded(drafter.expand)
        layers = layers_of(target.config)
        read = [*self.needs.get("kv", ()), *(i - 1 for i in self.needs.get("hidden", ()))]
        refuse((max(read, default=0) >= layers or read and target.encoder_decoder, "the drafter "
                f"reads layers that the target, of {layers} layers, does not have or show: take a "
                "drafter made for this target"))

    def expand(self, tokens, parents):
        """As the drafter's.  Tokens that the target does not have are never accepted."""
        return with_vocabulary(self.own(tokens, parents), self.vocab, 0.0)

def guarded(function):
    """A function whose errors that come of a wrong drafter or setting are UserErrors."""
    def call(*given):
        try:
            return function(*given)
        except torch.OutOfMemoryError:
            raise
        except (AssertionError, LookupError, RuntimeError) as why:
            raise UserError("the drafter and the builder do not fit this target, or each other "
                            f"({first_line(why)}): take a drafter made for this target, and "
                            "settings that the builder allows") from why
    return call
