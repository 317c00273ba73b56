"""Speculative decoding inside transformers' own generate().

    fast = speculative(drafter, cape.cape)
    model.generate(**inputs, custom_generate=fast, max_new_tokens=100)       # fast.last.tau

The arguments of generate() keep their meaning: lengths, sampling, logits processors, stopping
criteria, stop strings, streamers, caches, scores and logits, an encoder's outputs, pipelines, and
several sequences: left-padded prompts, or num_return_sequences (beyond/batch.py).  What cannot be
served is a UserError.  In float32 greedy decoding gives token for token what generate() gives
without custom_generate; samples follow the same distribution.

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
from warnings import warn

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence
from transformers import EncoderDecoderCache, GenerationMixin, cache_utils, generation
from transformers.generation import utils

import verify
from beyond import batch
from runtime.attention import changed
from runtime.load import difference
from runtime.program import UserError
from runtime.targets import any_target, forced, with_source, with_vocabulary

CACHES = {cache_utils.DynamicCache, cache_utils.StaticCache, EncoderDecoderCache, type(None)}
# Logits processors that depend only on the scores.  All others may look at the tokens before, too,
# and these differ from node to node of a tree.
SCORE_ONLY = {getattr(generation, name, None) for name in """
    TemperatureLogitsWarper TopKLogitsWarper TopPLogitsWarper MinPLogitsWarper TopHLogitsWarper
    TypicalLogitsWarper EpsilonLogitsWarper EtaLogitsWarper SuppressTokensLogitsProcessor
    InfNanRemoveLogitsProcessor LogitNormalization""".split()}
# Those that a sampled draft follows.  Its few tokens hardly change what the text repeats.
FOR_DRAFTS = SCORE_ONLY | {generation.RepetitionPenaltyLogitsProcessor}

def refuse(*cases):
    """Raise UserError with the sentence of the first case, a pair (refused, sentence), that is."""
    for refused, sentence in cases:
        if refused:
            raise UserError(sentence)

# ---------------------------------------------------------------- what generate() keeps to itself
def locals_of(method):
    """The local variables of the innermost running call of a method, or None."""
    code = inspect.unwrap(method).__code__                     # below its decorators
    frame = sys._getframe(1)
    while frame and frame.f_code is not code:
        frame = frame.f_back
    return frame and frame.f_locals

class Signature:
    """speculative's __signature__, which lets stop_strings find the tokenizer.

    generate() takes tokenizer= out of its arguments and forgets it, unless the signature of
    custom_generate names it; but then it looks for it in the arguments.  So it is put back there.
    """
    def __get__(self, fast, owner=None):
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
        self.target = self.last = None
        self.busy = False

    def __call__(self, model, input_ids, logits_processor, stopping_criteria, generation_config,
                 tokenizer=None, **model_kwargs):
        # generate() keeps streamer, assistant_model and synced_gpus to itself.
        caller, config = locals_of(GenerationMixin.generate), generation_config
        refuse((caller is None, "give it to generate(): model.generate(..., custom_generate=...)"))
        check_supported(model, input_ids, config, caller)
        B, limit = len(input_ids), config.max_length - input_ids.shape[1]
        rows, over = [], set()
        with self.alone(model):
            self.target = target = self.target_for(model, caller, model_kwargs)
            for b in range(B):
                of_row = parts_of(model_kwargs, b, B)
                row = Row(input_ids[b:b + 1], padding_of(model, config, of_row, input_ids),
                          processors_of(logits_processor, b, B), stopping_criteria,
                          caller["streamer"], config, target.vocab)
                check_given(target, row, config, caller, of_row)
                rows.append(row)
            # A sequence that is alone returns the cache that generate() has prepared or was given.
            cache = model_kwargs.get("cache", model_kwargs.get("past_key_values"))
            cache = cache if B == 1 else None
            refuse((type(cache) not in CACHES, f"a {type(cache).__name__} may decode otherwise: "
                    "give a DynamicCache or a StaticCache"))
            for done in self.rounds(target, rows, limit, over):
                for b, one in done.items():
                    rows[b].hear(one)
                over.update(b for b, row in enumerate(rows) if row.met)
                if len(over) == B:
                    break
            if caller["streamer"] is not None:
                caller["streamer"].end()
            outputs = [verify.output_of(row.rounds) for row in rows]
            self.last = outputs if B > 1 else outputs[0]
            # The user finds in a given cache what was decoded.
            is_given = any(value is cache for value in caller["kwargs"].values())
            if cache is not None and (config.return_dict_in_generate or is_given):
                fill(cache, target, rows[0])
        for row, out in zip(rows, outputs):
            if len(out.tokens) < limit and not row.met:
                warn(f"the output ends after {len(out.tokens)} of {limit} new tokens: the context "
                     f"is {target.capacity}")
        sequences = pad_sequence([row.sequence[0] for row in rows], batch_first=True,
                                 padding_value=config.pad_token_id or 0)
        if not config.return_dict_in_generate:
            return sequences
        kind = (utils.GenerateEncoderDecoderOutput if model.config.is_encoder_decoder
                else utils.GenerateDecoderOnlyOutput)
        name = "cache" if "cache" in kind.__dataclass_fields__ else "past_key_values"
        return kind(sequences=sequences, scores=rows[0].all_scores, logits=rows[0].all_logits,
                    **{name: cache})

    @contextmanager
    def alone(self, model):
        """Nobody else may decode by this callable meanwhile; the model is in evaluation mode."""
        refuse((self.busy, "this callable is decoding already: give each thread a callable and a "
                "drafter of its own"))
        training = [module for module in model.modules() if module.training]
        self.busy = True
        try:
            yield                                              # a Target takes model.eval()
        finally:
            for module in training:
                module.training = True
            self.busy = False

    def target_for(self, model, caller, model_kwargs):
        """The Target of the model in its present state."""
        made_for = getattr(getattr(self.drafter, "model", None), "made_for", None)
        if made_for and (differs := difference(made_for, model)):
            warn(f"the drafter was trained for another model ({differs})")
        encoded = {name: model_kwargs.get(name) for name in ("encoder_outputs", "attention_mask")}
        target, source = any_target(model, encoded=encoded), caller["inputs_tensor"]
        if model.config.is_encoder_decoder and not source.is_floating_point():
            target.source = source[0].tolist()
        return target

    def rounds(self, target, rows, limit, over):
        """As batch.rounds: yield {number of a row: Round}, until all rows are in `over`."""
        prompts = [row.prompt for row in rows]
        if len(rows) == 1:
            drafter = with_source(self.drafter, target)
            alone = verify.rounds(target, drafter, self.build, prompts[0], limit, rows[0])
            return ({0: one} for one in alone)
        copies = batch.copies([self.drafter, self.build], len(rows))
        drafters, builds = map(list, zip(*copies))
        return batch.rounds(target, drafters, builds, prompts, limit, rows, over=over)

def parts_of(named, b, B):
    """A dict in which tensors with an entry for each of B rows have that of row b alone."""
    parts = dict(named)
    for name, x in named.items():
        # Other tensors of one dimension are ids, such as those that SuppressTokens suppresses.
        is_of_rows = torch.is_tensor(x) and (x.ndim > 1 or name == "prompt_ignore_length")
        if is_of_rows and len(x) == B:
            parts[name] = x[b:b + 1]
    return parts

def processors_of(processors, b, B):
    """The processors of row b: copies, as they may remember what they saw, with its tensors."""
    if B == 1:
        return processors
    of_row = [copy.copy(processor) for processor in processors]
    for processor in of_row:
        vars(processor).update(parts_of(vars(processor), b, B))
    return of_row

# ---------------------------------------------------------------- what is refused
def check_supported(model, input_ids, config, caller):
    """Raise UserError for arguments of generate() that cannot be served."""
    mode = config.get_generation_mode(caller["assistant_model"])
    synced = utils.is_deepspeed_zero3_enabled() or utils.is_fsdp_managed_module(model)
    asked = ["output_attentions", "output_hidden_states"]
    if len(input_ids) > 1:
        asked += ["output_scores", "output_logits"]
    asked = [name for name in asked if getattr(config, name, None)]
    refuse(
        (mode not in ("greedy_search", "sample"), f"{mode.value} is not served: choose greedy "
         "decoding or sampling"),
        (not input_ids.numel(), "inputs_embeds is not served: give input_ids"),
        (caller["synced_gpus"] or synced, "synced_gpus is not served: give each rank all weights"),
        (getattr(model._sample, "__func__", None) is not GenerationMixin._sample,
         f"{type(model).__name__} decodes in a way of its own: decode without custom_generate"),
        (config.return_dict_in_generate and asked, f"{asked} is not served: leave it out"),
        (caller["streamer"] is not None and len(input_ids) > 1, "a streamer hears one sequence"))

def padding_of(model, config, model_kwargs, input_ids):
    """The number of padding tokens at the left; UserError where the mask hides other tokens."""
    n, mask = input_ids.shape[1], model_kwargs.get("attention_mask")
    if mask is None or model.config.is_encoder_decoder:        # or it is the encoder's
        mask = torch.ones(1, getattr(config, "_mask_length", n))       # as generate() has noted
    padding = int(mask[0].ne(0).long().argmax())
    refuse((mask.shape[1] != n or not mask[0, padding:].all(), "the attention mask hides tokens, "
            "or is not that of input_ids: give the whole text, padded at its left if at all"))
    return padding

def check_given(target, row, config, caller, model_kwargs):
    """Raise UserError if generate() would compute otherwise than the target by what it is given.

    What generate() itself prepares was part of the proof.  Where more is given than ids, say
    position_ids or a filled cache, it is made to go some steps on, and their logits are compared.
    """
    prompt, unusual = row.prompt, []
    for name, value in model_kwargs.items():
        if isinstance(value, utils.Cache):
            is_usual = int(value.get_seq_length()) == 0
        elif name == "use_cache":
            is_usual = value is not False
        elif name == "attention_mask":                         # padding may count as positions
            is_usual = not row.padding.numel() or target.verifies_trees
        else:
            is_usual = name == "encoder_outputs" or caller["kwargs"].get(name) is None
        if not is_usual:
            unusual.append(name)
    if unusual:
        following = prompt[-1:] * min(4, target.remaining(prompt) - 1)
        given = {name: copy_of(value) if isinstance(value, utils.Cache) else value
                 for name, value in model_kwargs.items()}
        with changed(config, do_sample=False):
            own = forced(target.model, row.sequence, None, None, config, following, **given)
        target.prefill(prompt)
        logits, _ = target.align(prompt + following, len(following) + 1)
        refuse((not target.agree(logits, own), f"{', '.join(unusual)}: as this is given, "
                "generate() goes on otherwise than after the ids alone: leave it out, or decode "
                "without custom_generate"))

# ---------------------------------------------------------------- caches
def copy_of(cache):
    """A copy of a cache with tensors of its own; deepcopy takes none with a gradient."""
    if isinstance(cache, EncoderDecoderCache):
        parts = cache.self_attention_cache, cache.cross_attention_cache
        return EncoderDecoderCache(*map(copy_of, parts))
    other = copy.copy(cache)
    other.layers = [copy.copy(layer) for layer in cache.layers]
    for layer in other.layers:
        tensors = {name: x for name, x in vars(layer).items() if torch.is_tensor(x)}
        vars(layer).update({name: x.detach().clone() for name, x in tensors.items()})
    return other

def fill(cache, target, row):
    """Append the target's entries of a row, but for its last token, to a cache that holds some."""
    if isinstance(cache, EncoderDecoderCache):
        cache.cross_attention_cache = target.caches.cross_attention_cache
        cache.is_updated = target.caches.is_updated
        cache = cache.self_attention_cache
    first, end = int(cache.get_seq_length()), row.sequence.shape[1] - 1
    padding = row.padding.shape[1]
    for layer, pair in sorted(target.cache.kv.items()):
        # No query sees the entries of padding.
        k, v = [F.pad(x, (0, 0, padding, 0))[:, :, first:end] for x in pair]
        slots = torch.arange(first, end, device=k.device)
        cache.update(k, v, layer, {"cache_position": slots})

# ---------------------------------------------------------------- a sequence
class Row(verify.Rule):
    """A sequence: its tokens are chosen by generate()'s logits processors, and heard one by one.

    prompt: a list; padding (1, p): before it, hidden from the model, not from processors
    scores, logits (n, V): of the last tree
    sequence (1, t); rounds: as far as they were heard; met: whether a stopping criterion is met
    all_scores, all_logits: tuples of (1, V), or None
    """
    def __init__(self, ids, padding, processors, criteria, streamer, config, vocab):
        is_sampled, returns = config.do_sample, config.return_dict_in_generate
        seed = torch.randint(2 ** 31, (1,)).item() if is_sampled else 0  # torch.manual_seed's
        super().__init__(temperature=1.0 if is_sampled else 0.0, seed=seed)
        self.sequence, self.prompt = ids, ids[0, padding:].tolist()
        self.padding, self.vocab = ids[:, :padding], vocab
        self.processors, self.criteria, self.streamer = processors, criteria, streamer
        self.for_drafts = [each for each in processors if type(each) in FOR_DRAFTS]
        self.all_scores = () if returns and config.output_scores else None
        self.all_logits = () if returns and config.output_logits else None
        self.rounds, self.met = [], False

    def probs(self, logits, temperature=1.0):
        """As verify.Rule.probs; in sampling by FOR_DRAFTS, which see the text so far."""
        # A drafter may have another vocabulary.  Other tokens than the target's are not accepted.
        scores = with_vocabulary(logits.float(), self.vocab)
        if not self.greedy:
            text = self.sequence.to(scores.device).expand(len(scores), -1)
            for processor in self.for_drafts:
                scores = processor(text, scores)
        return super().probs(scores, temperature)

    def choose(self, tree, logits, ids):
        """As verify.Rule.choose; -1 after a node to which the text does not lead."""
        self.logits = logits.float()
        if any(type(processor) not in SCORE_ONLY for processor in self.processors):
            return self.walk(tree, ids)
        self.scores = self.process(ids, self.logits)
        return super().choose(tree, self.scores, ids)

    def process(self, ids, logits):
        """logits (k, V) after the processors, which see the ids with their padding."""
        # As in generate(), they get ordinary tensors, on the device of input_ids.
        with torch.inference_mode(False), torch.no_grad():
            text = torch.cat((self.padding, self.padding.new_tensor([ids])), 1)
            scores = logits.to(text.device).clone()
            for processor in self.processors:
                scores = processor(text, scores)
        return scores.to(logits.device)

    def walk(self, tree, ids):
        """Choose by processors that look at the text, and may remember what they saw.

        As in plain decoding they are called for one text, once for each new token, in order: so
        this walks down the accepted path, with a device-to-host sync at each node.  Rule.choose
        gets the node and the next one as a chain, for a sampled one is accepted or rejected.
        """
        child = verify.children(tree.tokens.tolist(), tree.parents.tolist())
        choice = torch.full_like(tree.tokens, -1)
        self.scores = torch.zeros_like(self.logits)
        text, node = list(ids), 0
        while node is not None:
            tokens = tree.tokens[node:node + 2]
            parents = torch.arange(len(tokens), device=tokens.device) - 1
            p_draft = None if tree.p_draft is None else tree.p_draft[node:node + 1]
            chain = verify.Tree(tokens, parents, None, p_draft)
            self.scores[node] = self.process(text, self.logits[node:node + 1])[0]
            # The choice after the next node is not used: its scores may be zeros.
            choice[node] = super().choose(chain, self.scores[node:node + 2], text)[0]
            token = choice[node].item()
            text.append(token)
            node = child.get((node, token))
        return choice

    def hear(self, one):
        """Hear a Round's tokens, up to one that meets a criterion."""
        new = torch.tensor([one.new], device=self.sequence.device)
        nodes = (one.path or [0])[:len(one.new)]               # the prefill's round has no path
        for heard, node in enumerate(nodes, 1):
            scores, logits = self.scores[node:node + 1], self.logits[node:node + 1]    # (1, V)
            if not self.greedy and scores.softmax(-1).isnan().any():   # torch.multinomial's words
                raise RuntimeError("probability tensor contains either `inf`, `nan` or element < 0")
            if self.all_scores is not None:
                self.all_scores += (scores.clone(),)
            if self.all_logits is not None:
                self.all_logits += (logits.clone(),)
            self.sequence = torch.cat((self.sequence, new[:, heard - 1:heard]), 1)
            # All criteria are asked, as they may remember what they saw.
            self.met = bool(self.criteria(self.sequence, self.all_scores).all())
            if self.streamer is not None:
                self.streamer.put(new[0, heard - 1:heard].cpu())
            if self.met:
                break
        self.rounds.append(one._replace(new=one.new[:heard]))
