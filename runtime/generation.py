"""Speculative decoding inside transformers' own generate().

    fast = speculative(drafter, cape.cape)
    model.generate(**inputs, custom_generate=fast, max_new_tokens=100)       # fast.last.tau

The arguments of generate() keep their meaning: lengths, sampling, logits processors, stopping
criteria, stop strings, streamers, caches, scores and logits, an encoder's outputs, pipelines, and
several sequences: left-padded prompts, or num_return_sequences (beyond/batch.py).  What cannot be
served raises a UserError, which says what to do.  In float32 greedy decoding gives token for token
what generate() gives without custom_generate; samples follow the same distribution.

Differences from generate():
 1. The model decodes in evaluation mode: dropout is off.  Afterwards each module is in its mode.
 2. The output ends with the model's context, with a warning, where generate() would go on.
 3. Streamers get the tokens of a round one after the other, but at once.

What is served was found in transformers 4.57.6 to 5.24.
"""
import copy
import inspect
import sys
from contextlib import contextmanager
from threading import Lock
from warnings import warn

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence
from transformers import EncoderDecoderCache, GenerationMixin, cache_utils, generation
from transformers.generation import utils

import verify
from beyond import batch
from runtime.errors import UserError
from runtime.load import difference
from runtime.program import first_line
from runtime.targets import any_target, layers_of, state_of, with_vocabulary

# What generate() prepares for a forward, and `speculative` prepares for itself or compares
PREPARED = {"input_ids", "position_ids", "cache_position", "attention_mask", "decoder_input_ids",
            "decoder_position_ids", "decoder_attention_mask", "encoder_outputs", "past_key_values",
            "cache", "use_cache", "logits_to_keep", "is_first_iteration", "return_dict",
            "output_attentions", "output_hidden_states"}
CACHES = {cache_utils.DynamicCache, cache_utils.StaticCache, EncoderDecoderCache}
# DummyLayer, of newer releases: a layer that shares another's keys and values holds nothing.
LAYERS = {getattr(cache_utils, name, None) for name in (
    "DynamicLayer", "DynamicSlidingWindowLayer", "StaticLayer", "StaticSlidingWindowLayer",
    "DummyLayer")}
# Logits processors that depend only on the scores.  All others may look at the tokens before, too,
# and these differ from node to node of a tree.
SCORE_ONLY = {getattr(generation, name, None) for name in """
    TemperatureLogitsWarper TopKLogitsWarper TopPLogitsWarper MinPLogitsWarper TopHLogitsWarper
    TypicalLogitsWarper EpsilonLogitsWarper EtaLogitsWarper SuppressTokensLogitsProcessor
    InfNanRemoveLogitsProcessor LogitNormalization""".split()}
PENALTY = generation.RepetitionPenaltyLogitsProcessor

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
    last: the Output of the last call, or a list of one for each of several sequences.
    """
    __signature__ = Signature()

    def __init__(self, drafter, build):
        self.drafter, self.build = drafter, build
        self.target = self.state = self.last = None

    def __call__(self, model, input_ids, logits_processor, stopping_criteria, generation_config,
                 tokenizer=None, **model_kwargs):
        # generate() keeps streamer, assistant_model and synced_gpus to itself.
        caller, config = locals_of(GenerationMixin.generate, model), generation_config
        refuse((caller is None, "a speculative callable works inside generate() alone, in its "
                "thread: call model.generate(..., custom_generate=...)"))
        check_supported(model, input_ids, config, caller, model_kwargs)
        B, limit = len(input_ids), config.max_length - input_ids.shape[1]
        prompts, rules, heard, over = [], [], [], set()
        with alone(model, self, self.drafter):
            for b in range(B):
                ids = input_ids[b:b + 1]
                of_row = {name: part_of(x, b, B) for name, x in model_kwargs.items()}
                padding = padding_of(model, ids, config, of_row)
                prompts.append(ids[0, padding:].tolist())
                target = self.target_for(model, prompts[b], padding, caller, of_row)
                check_prepared(target, ids, padding, of_row)
                processors = processors_of(logits_processor, b, B)
                rules.append(Rule(processors, config.do_sample, ids[:, :padding]))
                heard.append(Heard(ids, stopping_criteria, caller["streamer"], config))
            # A sequence that is alone has a cache to return.
            cache = cache_of(target, prompts[0], padding, model_kwargs) if B == 1 else None
            outputs = hear_all(self.rounds(target, prompts, limit, rules, over), heard, rules, over)
            self.last = outputs if B > 1 else outputs[0]
            # The user finds in a given cache what was decoded.
            is_given = any(value is cache for value in caller["kwargs"].values())
            if cache is not None and (config.return_dict_in_generate or is_given):
                fill(cache, target, len(prompts[0] + outputs[0].tokens) - 1, padding)
        for of_row, out in zip(heard, outputs):
            if len(out.tokens) < limit and not of_row.met:
                warn(f"the output ends after {len(out.tokens)} of {limit} new tokens, with the "
                     f"context of {target.capacity}; decode without custom_generate to go on")
        sequences = pad_sequence([of_row.sequences[0] for of_row in heard], batch_first=True,
                                 padding_value=config.pad_token_id or 0)
        if not config.return_dict_in_generate:
            return sequences
        kind = utils.GenerateDecoderOnlyOutput
        if target.encoder_decoder:
            kind = utils.GenerateEncoderDecoderOutput
        name = "cache" if "cache" in kind.__dataclass_fields__ else "past_key_values"
        return kind(sequences=sequences, scores=heard[0].scores, logits=heard[0].logits,
                    **{name: cache})

    def rounds(self, target, prompts, limit, rules, over):
        """As batch.rounds: yield {number of a row: Round}, until all rows are in `over`."""
        if len(prompts) == 1:
            drafter = None if self.drafter is None else Fitted(self.drafter, target, rules[0])
            for one in verify.rounds(
                    target, drafter, guarded(self.build), prompts[0], limit, rules[0]):
                yield {0: one}
            return
        pairs = batch.copies([self.drafter, self.build], len(prompts))
        drafters = [drafter and Fitted(drafter, target, rule)
                    for (drafter, _), rule in zip(pairs, rules)]
        builds = [guarded(build) for _, build in pairs]
        try:
            yield from batch.rounds(target, drafters, builds, prompts, limit, rules, over=over)
        except ValueError as why:                              # windows, layers of several kinds
            raise UserError(first_line(why)) from why

    def target_for(self, model, ids, padding, caller, model_kwargs):
        """The Target of the model in its present state, for this prompt."""
        state, encoded = state_of(model), None
        if model.config.is_encoder_decoder:
            encoded = model_kwargs["encoder_outputs"], model_kwargs.get("attention_mask")
        if self.target is None or self.target.model is not model or self.state != state:
            self.target, self.state = any_target(model, encoded=encoded), state
            made_for = getattr(getattr(self.drafter, "model", None), "made_for", None)
            differs = made_for and difference(made_for, model)
            if differs:
                warn(f"the drafter was trained for another model ({differs}): few drafts will be "
                     "accepted")
        target = self.target
        if target.encoder_decoder:
            target.given, source = encoded, caller["inputs_tensor"]
            is_text = not source.is_floating_point() and source.min() >= 0
            target.source = source[0].tolist() if is_text else None
        refuse(
            (padding and not target.verifies_trees, "this model counts positions by its cache, "
             "padding included: give a prompt without padding"),
            (model_kwargs.get("use_cache") is False and target.needs_cache(), "this model decodes "
             "otherwise without a cache: leave use_cache out"),
            (target.remaining(ids) < 1, f"a prompt of {len(ids)} tokens exceeds the context of "
             f"{target.capacity}: give a shorter one"))
        return target

def part_of(x, b, B):
    """Of a tensor with an entry for each of B rows that of row b; anything else as it is."""
    return x[b:b + 1] if torch.is_tensor(x) and x.ndim and len(x) == B else x

def processors_of(processors, b, B):
    """The processors of row b: copies, as they may remember what they saw, with its tensors."""
    if B == 1:
        return processors
    of_row = [copy.copy(processor) for processor in processors]
    for processor in of_row:
        vars(processor).update({name: part_of(x, b, B) for name, x in vars(processor).items()})
    return of_row

lock, busy = Lock(), set()       # busy: the ids of what decodes

@contextmanager
def alone(model, *parts):
    """Nobody else may decode with these parts meanwhile; the model is in evaluation mode."""
    parts = {id(part) for part in parts if part is not None}
    with lock:
        refuse((parts & busy, "this callable or its drafter is decoding already, "
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
    asked = ["output_attentions", "output_hidden_states"]
    if len(input_ids) > 1:
        asked += ["output_scores", "output_logits"]
    asked = [name for name in asked if getattr(config, name, None)]
    refuse(
        (mode not in ("greedy_search", "sample"), f"{mode.value} is not served: leave its "
         "arguments out, and choose greedy decoding or sampling"),
        (embeds or not input_ids.numel(), "inputs_embeds is not served: give input_ids"),
        (caller["synced_gpus"] or synced, "synced_gpus is not served, as ranks decode in rounds of "
         "their own: leave it out, and give each rank the whole model"),
        (getattr(model._sample, "__func__", None) is not GenerationMixin._sample,
         f"{kind.__name__} decodes in a way of its own: decode without custom_generate"),
        (config.return_dict_in_generate and asked, f"{asked} is not served: leave it out"))
    if len(input_ids) > 1:
        cache = model_kwargs.get("past_key_values")
        refuse(
            (model.config.is_encoder_decoder, "an encoder-decoder decodes one sequence: give one"),
            (caller["streamer"] is not None, "a streamer hears one sequence: give one, or none"),
            (cache is not None and int(cache.get_seq_length()), "a filled cache of several "
             "sequences is not served: give none"))

def padding_of(model, input_ids, config, model_kwargs):
    """The number of padding tokens at the left; UserError where the mask hides other tokens."""
    n, mask = input_ids.shape[1], model_kwargs.get("attention_mask")
    if model.config.is_encoder_decoder:
        mask = torch.ones_like(input_ids)                      # the given one is the encoder's
    elif mask is None:                                         # generate() has noted its length
        mask = input_ids.new_ones(1, getattr(config, "_mask_length", n))
    padding = int(mask[0].ne(0).long().argmax())
    refuse((mask.shape[1] != n or not mask[0, padding:].all(), "the attention mask hides tokens, "
            "or is not that of input_ids: give the whole text, padded at its left if at all, and "
            "its attention_mask"))
    return padding

def check_prepared(target, input_ids, padding, model_kwargs):
    """Raise UserError where generate() would forward more than ids, at positions in a row."""
    model, n = target.model, input_ids.shape[1]
    position = torch.arange(n - padding, device=target.device) + (target.first or 0)
    given = {"cache_position": torch.arange(n, device=input_ids.device), **model_kwargs}
    given = {name: value for name, value in given.items() if not isinstance(value, utils.Cache)}
    try:
        prepared = model.prepare_inputs_for_generation(input_ids, is_first_iteration=True, **given)
    except Exception as why:                                   # a model's own code may fail anyhow
        raise UserError(f"{type(model).__name__}.prepare_inputs_for_generation fails without a "
                        f"cache ({first_line(why)}): decode without custom_generate") from why
    for name, value in prepared.items():
        if name.endswith("input_ids"):
            served = value is not None and torch.equal(value.to(input_ids.device), input_ids)
        elif value is None or value is False or isinstance(value, (dict, list)) and not value:
            served = True
        elif name.endswith("position_ids"):
            served = (value[..., padding:].to(target.device) == position).all()
        elif name.endswith("token_type_ids"):
            served = not value.any() and is_neutral(target, name)
        else:
            served = name in PREPARED and (name != "decoder_attention_mask" or value.all())
        refuse((not served, f"{name} is not served as it is given or as the model prepares it: "
                "leave it out, or decode without custom_generate"))

def is_neutral(target, name):
    """Whether zeros as an argument `name` of the model change nothing (GPT-2 embeds them)."""
    ids = torch.ones(1, 2, dtype=torch.long, device=target.device)
    own = [target.model(ids, **how).logits for how in ({}, {name: torch.zeros_like(ids)})]
    return torch.equal(*own)

# ---------------------------------------------------------------- caches
def cache_of(target, ids, padding, model_kwargs):
    """The cache that generate() has prepared or was given, or None; UserError for what is wrong."""
    cache = model_kwargs.get("cache", model_kwargs.get("past_key_values"))
    if cache is None and model_kwargs.get("use_cache") is not False:
        cache = cache_utils.DynamicCache(config=target.config)     # the model would make its own
        if target.encoder_decoder:
            cache = EncoderDecoderCache(cache, cache_utils.DynamicCache())
    if cache is None:
        return None
    paired = isinstance(cache, EncoderDecoderCache)
    parts = [cache.self_attention_cache, cache.cross_attention_cache] if paired else [cache]
    layers = {type(layer) for part in parts for layer in part.layers}
    refuse((type(cache) not in CACHES or layers - LAYERS, f"a {type(cache).__name__} may decode "
            "otherwise than the model: give a DynamicCache or a StaticCache, and no "
            "cache_implementation"))
    filled = int(cache.get_seq_length())
    served = not paired and not padding and filled < len(ids)
    served = not filled or served and holds(cache, target, ids[:filled])
    refuse((not served, f"the given cache holds {filled} tokens that are not the first ones of "
            "input_ids: give input_ids and attention_mask of the whole text"))
    return cache

@torch.inference_mode()
def holds(cache, target, ids):
    """Whether a filled cache holds the keys and values that the model computes for these ids."""
    target.prefill(ids)
    for layer, pair in target.cache.kv.items():
        for held, own in zip((cache.layers[layer].keys, cache.layers[layer].values), pair):
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
class Rule(verify.Rule):
    """generate()'s logits processors, then the argmax or a sample.

    padding (1, p): hidden from the model, not from processors.  scores, logits (n, V): of the last
    tree.  text (1, t): what stands before the next token of a drafter, where it is known.
    """
    def __init__(self, processors, do_sample, padding):
        seed = torch.randint(2 ** 31, (1,)).item() if do_sample else 0   # torch.manual_seed's
        super().__init__(temperature=1.0 if do_sample else 0.0, seed=seed)
        self.processors, self.padding = list(processors), padding
        self.score_only = {type(processor) for processor in self.processors} <= SCORE_ONLY
        self.text = None

    def probs(self, logits, temperature=1.0):
        """As verify.Rule.probs; in sampling by processors of scores, and a known text's penalty."""
        if self.greedy:
            return super().probs(logits, temperature)
        scores, text = logits.float(), self.text
        for processor in self.processors:
            sees_text = text is not None and len(logits) == 1 and type(processor) is PENALTY
            if sees_text:
                scores = processor(text.clamp(max=logits.shape[1] - 1), scores)
            elif type(processor) in SCORE_ONLY:
                scores = processor(None, scores)
        return scores.softmax(-1).nan_to_num(0.0)

    def choose(self, tree, logits, ids):
        """As verify.Rule.choose; -1 where there is nothing to sample from, or nothing was asked."""
        self.logits = logits.float()
        if not self.score_only:
            return self.walk(tree, ids)
        self.scores = self.process(None, self.logits)
        return self.choose_by(tree, self.scores, ids)

    def process(self, ids, logits):
        """logits (k, V) after the processors, which see the ids with their padding."""
        # As in generate(), they get ordinary tensors, on the device of input_ids.
        with torch.inference_mode(False), torch.no_grad():
            text, scores = None, logits.to(self.padding.device).clone()
            if ids is not None:
                text = torch.cat((self.padding, self.padding.new_tensor([ids])), 1)
            for processor in self.processors:
                scores = processor(text, scores)
        return scores.to(logits.device)

    def choose_by(self, tree, scores, ids):
        """Processed scores (n, V) -> the token after each node (n,)."""
        choice = super().choose(tree, scores, ids)
        if self.greedy:
            return choice
        return choice.masked_fill(scores.softmax(-1).isnan().any(-1), -1)

    def walk(self, tree, ids):
        """Choose by processors that look at the text, and may remember what they saw.

        As in plain decoding they are called for one text, once for each new token, in order: so
        this walks down the accepted path, with a device-to-host sync at each node.  choose_by gets
        the node as a tree of its own; in a sampled chain with the next node, to accept or reject.
        """
        child = verify.children(tree.tokens.tolist(), tree.parents.tolist())
        choice = torch.full_like(tree.tokens, -1)
        self.scores = torch.zeros_like(self.logits)
        text, node = list(ids), 0
        while node is not None:
            tokens, p_draft = tree.tokens[node:node + 1], None
            if tree.p_draft is not None:
                tokens, p_draft = tree.tokens[node:node + 2], tree.p_draft[node:node + 1]
            parents = torch.arange(len(tokens), device=tokens.device) - 1
            chain = verify.Tree(tokens, parents, None, p_draft)
            scores = self.process(text, self.logits[node:node + 1])                    # (1, V)
            self.scores[node] = scores[0]
            # The choice after the next node is not used, so it gets the scores of this one.
            scores = scores.expand(len(tokens), -1)
            choice[node] = self.choose_by(chain, scores, text)[0]
            token = choice[node].item()
            text.append(token)
            node = child.get((node, token))
        return choice

class Heard:
    """What streamer, stopping criteria and caller hear of a decoding, token by token.

    sequences (1, t); scores, logits: tuples of (1, V), or None; met: whether a criterion is met.
    """
    def __init__(self, input_ids, criteria, streamer, config):
        self.sequences, self.criteria, self.streamer = input_ids, criteria, streamer
        returns = config.return_dict_in_generate
        self.scores = () if returns and config.output_scores else None
        self.logits = () if returns and config.output_logits else None
        self.met = False

    def hear(self, one, rule):
        """Hear a Round's tokens, up to one that meets a criterion -> the Round of these."""
        new = torch.tensor([one.new], device=self.sequences.device)
        before, heard = self.sequences, 0
        for node in (one.path or [0])[:len(one.new)]:          # the prefill's round has no path
            if one.new[heard] < 0:                             # torch.multinomial's own words
                raise RuntimeError("probability tensor contains either `inf`, `nan` or element < 0")
            if self.scores is not None:
                self.scores += (rule.scores[node:node + 1].clone(),)
            if self.logits is not None:
                self.logits += (rule.logits[node:node + 1].clone(),)
            heard += 1
            self.sequences = torch.cat((before, new[:, :heard]), 1)
            # All criteria are asked, as they may remember what they saw.
            self.met = bool(self.criteria(self.sequences, self.scores).all())
            if self.streamer is not None:
                self.streamer.put(new[0, heard - 1:heard].cpu())
            if self.met:
                break
        return one._replace(new=one.new[:heard])

def hear_all(rounds, heard, rules, over):
    """Hear all Rounds of each row, or until a criterion is met: it is `over` -> Outputs."""
    found = [[] for _ in heard]
    for done in rounds:
        for b, one in done.items():
            found[b].append(heard[b].hear(one, rules[b]))
            if heard[b].met:
                over.add(b)
        if len(over) == len(heard):
            break
    if heard[0].streamer is not None:
        heard[0].streamer.end()
    return [verify.output_of(of_row) for of_row in found]

class Fitted:
    """A drafter beside a target, or a UserError.  It tells the rule the text of a sampled chain."""
    def __init__(self, drafter, target, rule):
        self.drafter, self.target, self.rule = drafter, target, rule
        self.needs, self.keep = drafter.needs, drafter.keep
        self.own_begin, self.own_expand = guarded(drafter.begin), guarded(drafter.expand)
        layers = layers_of(target.config)
        read = [*self.needs.get("kv", ()), *(i - 1 for i in self.needs.get("hidden", ()))]
        refuse((max(read, default=0) >= layers or read and target.encoder_decoder, "the drafter "
                f"reads layers that the target, of {layers} layers, does not have or show: take a "
                "drafter made for this target"))
        self.has_penalty = PENALTY in {type(processor) for processor in rule.processors}
        self.ids = []

    def reset(self, probs):
        self.drafter.reset(probs)
        if self.target.source is not None and hasattr(self.drafter, "encode"):
            self.drafter.encode(self.target.source)

    def begin(self, view, root_id):
        self.ids += view.ids
        self.chain = [torch.tensor(self.ids, device=view.tokens.device)]
        self.own_begin(view, root_id)

    def expand(self, tokens, parents):
        """As the drafter's.  Tokens that the target does not have are never accepted."""
        # A node that comes alone, after the last one: a chain.
        if self.has_penalty and parents == [len(self.chain) - 2]:
            self.chain.append(tokens)
            self.rule.text = torch.cat(self.chain)[None]
        p = self.own_expand(tokens, parents)
        self.rule.text = None
        return with_vocabulary(p, self.target.vocab, 0.0)

def guarded(function):
    """A function whose errors are UserErrors: they come of a wrong drafter or setting."""
    def call(*given):
        try:
            return function(*given)
        except (torch.OutOfMemoryError, UserError):
            raise
        except (AssertionError, LookupError, RuntimeError, ValueError) as why:
            raise UserError("the drafter and the builder do not fit this target, or each other "
                            f"({first_line(why)}): take a drafter made for this target, and "
                            "settings that the builder allows") from why
    return call
