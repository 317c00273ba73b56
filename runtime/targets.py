"""Targets of any family: what verify.Target leaves out, and a proof that a model decodes right.

verify.Target serves models that are built as Llama is.  AnyTarget adds

    windows         layers with a sliding window, alone or beside layers with full attention
    layers          keys and values that differ in size or device, also of an offloaded model
    vocabularies    logits padded or cut to another model's vocabulary size
    contexts        other names for their length in a configuration; longrope's short table alone
    chains          a model that ignores a tree's mask or position_ids verifies chains only

and AnyEncoderDecoder serves T5 and its relatives.

The proof.  Whether a model of an unknown family can verify trees is found by experiment, when it is
wrapped: a few tiny forwards compare the logits of a tree's nodes with those that the model's own
generate() computes along each path, by whatever it prepares for a prompt and for a step.  If they
differ, the same is tried with a chain.  A model that fails both is refused.  docs/families.md lists
what is served.

    target = any_target(model)       # in place of verify.Target(model)
"""
from contextlib import contextmanager
from functools import partial
from inspect import signature
from threading import Lock
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from transformers import (
    GenerationConfig, GenerationMixin, LogitsProcessorList, MaxLengthCriteria, StoppingCriteriaList)
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

from runtime.attention import can_fold, folding
from runtime.errors import UserError
from runtime.program import first_line
from verify import MARGIN, Target, TreeCache

# Parents of the small tree and of the chain that a model is tried with
TREE = [-1, 0, 0, 0, 1, 2, 3]
CHAIN = [-1, 0, 1, 2]
WINDOW = 3               # the length of windows and chunks in the proof, whose texts are short
UNSTATED = 2048          # the context of a model whose configuration states none
# The methods by which a class, or an instance that was changed, decodes in generate()
STEPS = ("prepare_inputs_for_generation", "_update_model_kwargs_for_generation", "_sample",
         "forward")

# ---------------------------------------------------------------- what a configuration says
def context_of(config):
    """The most tokens that a sequence may have."""
    names = ("max_position_embeddings", "max_seq_len", "max_decoder_position_embeddings",
             "max_target_positions")
    context = next((getattr(config, name) for name in names if getattr(config, name, None)),
                   UNSTATED)
    # Doge chooses among its keys where there are more, and rounding decides between equal ones.
    context = min(context, getattr(config, "keep_window_size", None) or context)
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kind = rope.get("rope_type") or rope.get("type")
    original = rope.get("original_max_position_embeddings")
    original = original or getattr(config, "original_max_position_embeddings", None) or context
    if kind == "longrope":
        return original                    # cached keys cannot change to its second table
    if kind == "yarn" and rope.get("factor"):
        return max(context, int(rope["factor"] * original))
    return context

def windows_of(config):
    """{kind of layer: its window, or None}, and the set of kinds for which our mask is wrong."""
    window = getattr(config, "sliding_window", None)
    default = "sliding_attention" if window else "full_attention"
    kinds = set(getattr(config, "layer_types", None) or [default])
    known = kinds & {"full_attention", "sliding_attention"}
    # GPT-Neo's "local" layers add a window of their own to the mask that they are given.
    others = set(getattr(config, "attention_layers", None) or []) - {"global"}
    windows = {kind: window if kind == "sliding_attention" else None for kind in known}
    return windows, others | kinds - known

def layers_of(config):
    """The number of layers that cache keys and values: of an encoder-decoder, the decoder's."""
    names = ("num_decoder_layers", "decoder_layers", "num_hidden_layers")
    return next((getattr(config, name) for name in names if getattr(config, name, None)), 1)

def device_of(model):
    """The device of a model's inputs: where its embedding computes, if accelerate places it."""
    hook = getattr(model.get_input_embeddings(), "_hf_hook", None)
    for part in (hook, *getattr(hook, "hooks", ())):           # accelerate may chain several
        if getattr(part, "execution_device", None) is not None:
            return torch.device(part.execution_device)
    return model.device

def state_of(model):
    """What a Target and its proof depend on.  Where it has changed they are made anew."""
    kinds = {(p.dtype, p.device) for p in model.parameters()}
    device = device_of(model).type
    autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    # A bound method is a new object at each look; the ids keep no model alive.
    steps = [getattr(model, name) for name in STEPS]
    steps = [(id(getattr(f, "__self__", None)), id(getattr(f, "__func__", f))) for f in steps]
    return kinds, autocast, str(vars(model.config.get_text_config())), steps

# ---------------------------------------------------------------- small parts
def with_vocabulary(x, vocab, value=float("-inf")):
    """Logits, or probabilities, x (n, V) -> (n, vocab): cut, or padded with `value`."""
    missing = vocab - x.shape[-1]
    return F.pad(x, (0, missing), value=value) if missing else x

def within_window(mask, window, position, slots):
    """mask (n, keys) bool -> the same without keys that lie `window` or more before their query."""
    # A committed entry's position is its slot.  The current nodes stand at `position`.
    key_position = torch.arange(mask.shape[1], device=mask.device)
    key_position = key_position.index_copy(0, slots, position)
    distance = position[:, None] - key_position                                # (n, keys)
    return mask & (distance < window)

@contextmanager
def short_windows(config):
    """All windows and chunks have WINDOW tokens."""
    own = {name: getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size")}
    own = {name: length for name, length in own.items() if length}
    try:
        for name in own:
            setattr(config, name, WINDOW)
        yield
    finally:
        for name, length in own.items():
            setattr(config, name, length)

class AnyCache(TreeCache):
    """A TreeCache whose layers may differ in H, d or device: it has a stack for each kind.

    A stack has a slice for the keys and for the values of all layers, though a kind may use fewer.
    """
    def __init__(self, layers):
        super().__init__(layers)
        self.stacks = []
        self.free = {}           # {kind: the slices of its last stack that no layer has taken}

    @torch.inference_mode(False)
    def reserve(self, entries):
        """As TreeCache.reserve."""
        if entries > self.allocated:
            self.allocated = max(entries, self.allocated * 3 // 2)
            before, self.kv = self.kv, {}
            self.stacks, self.free = [], {}
            for layer, pair in before.items():
                self.kv[layer] = [self.slice_like(x) for x in pair]
                for larger, x in zip(self.kv[layer], pair):
                    larger[:, :, :x.shape[2]] = x

    @torch.inference_mode(False)
    def slice_like(self, x):
        """Zeros (1, H, allocated, d) for keys or values x (1, H, n, d): a free slice of a stack."""
        shape = (x.shape[0], x.shape[1], self.allocated, x.shape[3])
        free = self.free.setdefault((shape, x.dtype, x.device), [])
        if not free:
            stack = torch.zeros(2 * self.num_layers, *shape, dtype=x.dtype, device=x.device)
            self.stacks.append(stack)
            self.stack = self.stacks[0]
            free += stack.unbind(0)
        return free.pop(0)

    def update(self, k, v, layer, *args, **kwargs):
        """As TreeCache.update."""
        if layer not in self.kv:
            self.kv[layer] = [self.slice_like(k), self.slice_like(v)]
        self.slots = self.slots.to(k.device)
        return super().update(k, v, layer)

    def compact(self, nodes):
        """As TreeCache.compact, for each stack."""
        end = self.length + len(nodes)
        for stack in self.stacks:
            slots = self.length + nodes.to(stack.device)
            stack[:, :, :, self.length:end] = stack.index_select(3, slots)

# ---------------------------------------------------------------- decoder-only models
class AnyTarget(Target):
    """verify.Target for any decoder-only family.

    vocab: how many logits a node has, for a stage beside a target with another vocabulary size.
    context: the most tokens that a sequence may have, by the configuration.  The proof finds
    verifies_trees; folds, whether grouped queries are folded (runtime/attention.py); and first, the
    position_id of a text's first token, None where the model takes none.  Raises UserError for a
    model that fails it.
    """
    encoder_decoder = False
    source = None
    proven = WeakKeyDictionary()     # {model: (its state, what was found)}: a model is tried once
    proving = Lock()                 # the proof changes the configuration for a moment

    def __init__(self, model, capacity=None, vocab=None):
        self.model, self.device = model.eval(), device_of(model)
        self.config = model.config.get_text_config()
        kernel = getattr(self.config, "_attn_implementation", None) or ""
        if "flash" in kernel or "flex" in kernel:              # some abort the process by a mask
            raise UserError(f"{kernel} takes no mask of a tree: load the target with "
                            'attn_implementation="sdpa"')
        self.windows, self.unknown = windows_of(self.config)
        takes = signature(model.forward).parameters
        self.options = {"output_router_logits": False} if "output_router_logits" in takes else {}
        self.keeps_logits = "logits_to_keep" in takes
        # On H100 and B200 torch prefers cuDNN's attention, which builds a plan for each new length
        # (23 to 440 ms), as each round has: check_prefer_cudnn_attention, ATen's sdp_utils.cpp.
        torch.backends.cuda.enable_cudnn_sdp(False)
        # The dtype of hidden states: weights may be quantised.
        with torch.no_grad():
            token = torch.zeros(1, 1, dtype=torch.long, device=self.device)
            self.dtype = model.get_input_embeddings()(token).dtype
        self.known_ids = self.vocab = self.config.vocab_size
        self.context = self.capacity = context_of(self.config)
        with self.proving:
            state = state_of(model)
            if self.proven.get(model, [None])[0] != state:
                self.proven[model] = state, self.prove()
        self.verifies_trees, self.folds, self.first = self.proven[model][1]
        self.around = partial(folding, self.config, self.folds)        # for beyond/batch.py
        self.vocab = vocab or self.known_ids
        self.capacity = min(capacity or self.context, self.context)
        self.prepare()

    def prepare(self):
        """Take a new cache: what a failed forward has left there may be anything."""
        self.cache = AnyCache(layers_of(self.config))
        self.needs = {"kv": (), "hidden": ()}
        self.reset()

    def forward(self, tokens, parents=None, logits_to_keep=0):
        """As Target.forward, with self.vocab logits.  UserError for a tree that cannot be."""
        chain = list(range(-1, len(tokens) - 1))
        if not self.verifies_trees and parents is not None and parents.tolist() != chain:
            raise UserError(f"{type(self.model).__name__} verifies chains only (it does not honour "
                            "the mask or the positions of a tree): draft a chain, by cape.chain, "
                            "which is --tree chain on the command line")
        # Ids that the model does not know become the last that it knows: nobody predicts them.
        known = tokens.clamp(0, self.known_ids - 1)
        logits, states = super().forward(known, parents, logits_to_keep)
        states = [state.to(self.device) for state in (tokens, *states[1:])]
        return with_vocabulary(logits.to(self.device), self.vocab), states

    def run(self, end, tokens, position, slots, mask, logits_to_keep=0):
        """As Target.run."""
        how = dict(self.options)
        if self.keeps_logits:
            how["logits_to_keep"] = logits_to_keep
        if self.first is not None:
            how["position_ids"] = self.first + position[None]
        if mask is not None and self.verifies_trees:           # else the model makes a chain's mask
            how["attention_mask"] = self.masks(mask, position, slots)
        wanted = self.needs["hidden"]
        with folding(self.config, self.folds):
            out = self.model(
                input_ids=tokens[None], past_key_values=self.cache.step(slots, end), use_cache=True,
                output_hidden_states=bool(wanted), return_dict=True, **how)
        hidden = [out.hidden_states[index][0] for index in wanted]
        return [out.logits[0, -logits_to_keep:], *hidden]

    def masks(self, mask, position, slots):
        """mask (n, end) bool -> numbers (1, 1, n, end), added to scores; by kind if of several."""
        masks = {}
        for kind, window in self.windows.items():
            seen = within_window(mask, window, position, slots) if window else mask
            masks[kind] = torch.where(seen, 0.0, -torch.inf).to(self.dtype)[None, None]
        return masks if len(masks) > 1 else masks[kind]

    # ------------------------------------------------ the proof
    @torch.no_grad()
    def prove(self):
        """Try the model -> (verifies_trees, folds, first)."""
        reason = "nothing was tried"
        try:
            with short_windows(self.config):
                self.windows, _ = windows_of(self.config)
                for parents, self.verifies_trees, self.folds in self.trials():
                    try:
                        errors = self.errors(parents)
                    except torch.OutOfMemoryError:
                        raise
                    except Exception as why:       # a model's own code may fail in any way
                        reason = f"{type(why).__name__}: {first_line(why)}"
                        continue
                    # In half precision, which may be autocast's, the routing of an MoE can flip for
                    # single nodes: the median.
                    exact = all(torch.finfo(x.dtype).bits > 16 for x in self.cache.stacks)
                    error = (errors.max() if exact else errors.median()).item()
                    if error < (1e-3 if exact else 0.1):
                        return self.verifies_trees, self.folds, self.first
                    reason = f"logits are off by {error:.0%} of their spread"
        finally:
            self.windows, _ = windows_of(self.config)
        raise UserError(f"{type(self.model).__name__} does not decode with a KV cache as its "
                        f"generate() does ({reason}): take a language model that caches keys and "
                        "values alone, or decode without speculation (of PEFT, LoRA is served)")

    def trials(self):
        """What is tried in turn: parents, whether it is a tree, and whether queries are folded."""
        trees = [] if self.unknown else [(TREE, True, False)]
        if trees and can_fold(self.config):
            trees.insert(0, (TREE, True, True))
        return [*trees, (CHAIN, False, False)]

    def errors(self, parents):
        """How far logits are from generate()'s own, which is made to write each path -> (n + 2,).

        Those after the prompt, after each node, and after a token that follows the last path.
        """
        n, (text, tokens, last) = len(parents), self.ids_to_try(len(parents))
        own = {}                                               # {node: generate()'s logits}
        for leaf in sorted(set(range(n)) - set(parents)):
            path = [leaf]
            while path[0]:
                path.insert(0, parents[path[0]])
            path_ids = [tokens[node] for node in path]
            own.update(zip(["prompt", *path, "last"], self.own_logits(text, path_ids + last)))
        self.prepare()
        found = {}
        [found["prompt"]], _ = self.align(text)
        logits, states = self.forward(torch.tensor(tokens), torch.tensor(parents))     # (n, V)
        found.update(enumerate(logits))
        self.commit(path, path_ids, states)
        [found["last"]], _ = self.forward(torch.tensor(last), torch.tensor([-1]))
        return torch.stack([self.error(found[name], own[name]) for name in found])

    def ids_to_try(self, n):
        """Lists of ids: a text that is longer than a window, n tokens, one token."""
        # Some models number positions without the padding token's.
        padding = getattr(self.config, "pad_token_id", None)
        ids = [i for i in range(min(self.known_ids, 100)) if i != padding]
        text = [ids[(7 * i + 3) % len(ids)] for i in range(2 * WINDOW)]
        return text, [ids[(5 * i + 1) % len(ids)] for i in range(n)], ids[-1:]

    def needs_cache(self):
        """Whether generate() itself decodes otherwise without a cache than with one."""
        text, tokens, _ = self.ids_to_try(len(CHAIN))
        with self.proving, short_windows(self.config):
            both = [self.own_logits(text, tokens, use_cache) for use_cache in (False, True)]
        errors = torch.stack([self.error(*pair) for pair in zip(*both)])
        return not errors.median() < 0.01

    def error(self, logits, own):
        """Logits (V,) against generate()'s own: their distance in standard deviations."""
        # A model may give some tokens a logit of -inf, or nearly.
        own = own.to(logits.device)
        finite = own.isfinite() & (own > -1e30)
        logits, own = logits[finite].float(), own[finite].float()
        return (logits - own).norm() / (own - own.mean()).norm()

    def own_logits(self, ids, following, use_cache=True):
        """generate()'s own logits after ids, and after each token, which it is made to choose.

        Sets `first`, by the position_ids that the model is given.
        """
        found, positions = [], []
        following = [*following, 0]                            # the last one is not used

        def force(text, scores):
            token = following[len(found)]
            found.append(scores[0].clone())
            forced = torch.full_like(scores, -torch.inf)
            forced[:, token] = 0.0
            return forced

        def decode(model, input_ids, logits_processor, stopping_criteria, generation_config,
                   **prepared):
            for name, value in prepared.items():
                if isinstance(value, EncoderDecoderCache):     # some are made with too few layers
                    prepared[name] = EncoderDecoderCache(DynamicCache(), DynamicCache())
            end = MaxLengthCriteria(input_ids.shape[1] + len(following))
            return model._sample(
                input_ids, logits_processor=LogitsProcessorList([force]),
                stopping_criteria=StoppingCriteriaList([end]),
                generation_config=generation_config, **prepared)

        def look(model, given, how):
            positions.append(how.get("position_ids"))

        handle = self.model.register_forward_pre_hook(look, with_kwargs=True)
        # Nothing of the model's own generation_config is part of a forward.
        own_config, self.model.generation_config = self.model.generation_config, GenerationConfig()
        config = GenerationConfig(max_new_tokens=len(following), use_cache=use_cache,
                                  decoder_start_token_id=ids[0])
        try:
            GenerationMixin.generate(
                self.model, generation_config=config, custom_generate=decode,
                **self.prompt(torch.tensor([ids], device=self.device)))
        finally:
            self.model.generation_config = own_config
            handle.remove()
        self.first = None if positions[0] is None else positions[0].flatten()[0].item()
        return found

    def prompt(self, ids):
        """generate()'s arguments for ids (1, n)."""
        return {"inputs": ids}

def any_target(model, capacity=None, vocab=None, encoded=None):
    """What decodes with a model: AnyTarget, or AnyEncoderDecoder, which says what `encoded` is."""
    if model.config.is_encoder_decoder:
        return AnyEncoderDecoder(model, capacity, vocab, encoded)
    return AnyTarget(model, capacity, vocab)

# ---------------------------------------------------------------- encoder-decoder models
class AnyEncoderDecoder(AnyTarget):
    """An encoder-decoder target, such as FLAN-T5 (Cascade Speculative Drafting, section 5.2).

    It verifies chains only: positions in the decoder follow the cache, not the depth in a tree.
    The encoder reads the prompt once; the decoder begins with its start token.  Where `encoded` is
    given, encoder outputs and their attention mask, the encoder has run already, and a prompt is
    the decoder's.  source: the ids that the encoder has read, or None.
    """
    encoder_decoder = True

    def __init__(self, model, capacity=None, vocab=None, encoded=None):
        self.given = encoded
        super().__init__(model, capacity, vocab)

    def trials(self):
        return [(CHAIN, False, False)]

    def remaining(self, ids):
        """The encoder's prompt takes no position of the decoder; its start token takes one."""
        return super().remaining(ids if self.given else [0])

    def errors(self, parents):
        self.encode([0, 1])                                    # any text
        return super().errors(parents)

    def prompt(self, ids):
        return {"encoder_outputs": self.encoded, "attention_mask": self.mask,
                "decoder_input_ids": ids}

    def prefill(self, ids, new_tokens=0, needs={}):
        """As Target.prefill.  The View is that of the decoder's tokens."""
        self.needs = {"kv": (), "hidden": (), **needs}
        self.encode(ids)
        if self.given is None:
            self.source = ids
            ids = [self.model.generation_config.decoder_start_token_id]
        self.reset()
        self.cache.reserve(len(ids) + new_tokens + MARGIN)
        logits, view = self.align(ids)
        return logits[-1], view

    def reset(self):
        """As Target.reset; and the decoder will attend to what the encoder returned last."""
        super().reset()
        # run() sets the first cache, of self-attention.  The model's first decoder step fills the
        # second, of cross-attention, with the keys and values of what the encoder returned.
        self.caches = EncoderDecoderCache(DynamicCache(), DynamicCache())

    @torch.no_grad()
    def encode(self, ids):
        """At the beginning of a sequence, run the encoder over ids (list), unless it has run."""
        if self.given is not None:
            self.encoded, self.mask = self.given
            return
        ids = torch.tensor([ids], device=self.device).clamp(max=self.known_ids - 1)
        self.mask = torch.ones_like(ids)
        encoder = self.model.get_encoder()
        self.encoded = encoder(input_ids=ids, attention_mask=self.mask, return_dict=True)

    def run(self, end, tokens, position, slots, mask, logits_to_keep=0):
        """As Target.run, without hidden states.  The decoder makes a chain's positions and mask."""
        self.caches.self_attention_cache = self.cache.step(slots, end)
        out = self.model(
            encoder_outputs=self.encoded, attention_mask=self.mask, decoder_input_ids=tokens[None],
            past_key_values=self.caches, use_cache=True, return_dict=True)
        return [out.logits[0, -logits_to_keep:]]

def with_source(cascade, target):
    """Let a cascade beside an encoder-decoder encode and search what the target reads -> cascade"""
    def reset(probs):
        type(cascade).reset(cascade, probs)
        if target.source is not None:
            cascade.encode(target.source)

    cascade.reset = reset
    return cascade
