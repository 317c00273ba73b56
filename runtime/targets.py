"""Targets of any family: what verify.Target leaves out, and a proof that a model decodes right.

verify.Target serves models that are built as Llama is.  AnyTarget serves other decoder-only models,
AnyEncoderDecoder T5 and its relatives; docs/families.md lists them.

The proof.  Whether a model can verify trees is found by experiment, when it is wrapped: a few tiny
forwards compare the logits of a tree's nodes with those that the model's own generate() computes
along each path.  If they differ, the same is tried with a chain.  A model that fails both is
refused.

    target = any_target(model)       # in place of verify.Target(model)
"""
from functools import partial
from inspect import signature
from threading import Lock
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from transformers import (
    GenerationConfig, GenerationMixin, LogitsProcessorList, MaxLengthCriteria, StoppingCriteriaList)
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

from runtime.attention import NAME, changed
from runtime.program import UserError, first_line
from verify import Target, TreeCache

# What a model is tried with: the parents of a tree or a chain, and the paths to its leaves
TREE = [-1, 0, 0, 0, 1, 2, 3], [[0, 1, 4], [0, 2, 5], [0, 3, 6]]
CHAIN = [-1, 0, 1, 2], [[0, 1, 2, 3]]
WINDOW = 3               # the length of windows and chunks in the proof, whose texts are short

# ---------------------------------------------------------------- what a configuration says
def stated(config, *names, default=None):
    """The first of these settings that a configuration states."""
    return next((value for name in names if (value := getattr(config, name, None))), default)

def context_of(config):
    """The most tokens that a sequence may have."""
    context = stated(config, "max_position_embeddings", "max_seq_len",
                     "max_decoder_position_embeddings", "max_target_positions", default=2048)
    # Doge chooses among its keys where there are more, and rounding decides between equal ones.
    context = min(context, stated(config, "keep_window_size", default=context))
    rope = stated(config, "rope_parameters", "rope_scaling", default={})
    kind = rope.get("rope_type") or rope.get("type")
    original = rope.get("original_max_position_embeddings")
    original = original or stated(config, "original_max_position_embeddings", default=context)
    if kind == "longrope":
        return original                    # cached keys cannot change to its second table
    if kind == "yarn" and rope.get("factor"):
        return max(context, int(rope["factor"] * original))
    return context

def windows_of(config):
    """{kind of layer: its window, or None}, and the set of kinds for which our mask is wrong."""
    window = stated(config, "sliding_window")
    default = "sliding_attention" if window else "full_attention"
    kinds = set(stated(config, "layer_types", default=[default]))
    # GPT-Neo's "local" layers add a window of their own to the mask that they are given.
    kinds |= set(stated(config, "attention_layers", default=[])) - {"global"}
    windows = {"full_attention": None, "sliding_attention": window}
    return {kind: windows[kind] for kind in kinds & windows.keys()}, kinds - windows.keys()

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
    autocast = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    # By these a class, or an instance that was changed, decodes in generate().  A bound method is a
    # new object at each look; the ids keep no model alive.
    steps = (model.prepare_inputs_for_generation, model._update_model_kwargs_for_generation,
             model._sample, model.forward)
    steps = [id(getattr(step, "__func__", step)) for step in steps]
    return kinds, autocast, str(vars(model.config.get_text_config())), steps

# ---------------------------------------------------------------- small parts
def with_vocabulary(logits, vocab):
    """logits (n, V) -> (n, vocab): cut, or padded with -inf."""
    return F.pad(logits, (0, vocab - logits.shape[-1]), value=-torch.inf)

class AnyCache(TreeCache):
    """A TreeCache with tensors for each layer, as layers may differ in H, d or device."""

    @torch.inference_mode(False)
    def make_stack(self, like):
        """Lengthen the tensors of each layer, which are no slices of one."""
        for layer, pair in self.kv.items():
            more = self.allocated - pair[0].shape[2]
            if more:
                self.kv[layer] = [F.pad(x, (0, 0, 0, more)) for x in pair]
            self.stack = self.kv[layer][0]

    def update(self, k, v, layer, *args, **kwargs):
        """As TreeCache.update."""
        if layer not in self.kv:
            self.kv[layer] = [k[:, :, :0], v[:, :, :0]]
            self.make_stack(k)
        self.slots = self.slots.to(k.device)
        return super().update(k, v, layer)

    def compact(self, nodes):
        """As TreeCache.compact, for each layer."""
        end = self.length + len(nodes)
        for x in (x for pair in self.kv.values() for x in pair):
            slots = self.length + nodes.to(x.device)
            x[:, :, self.length:end] = x.index_select(2, slots)

    def uniform_layers(self):
        """The number of layers if a TreeCache could hold the same, else 0."""
        kinds = {(x.shape, x.dtype, x.device) for pair in self.kv.values() for x in pair}
        is_uniform = len(kinds) == 1 and max(self.kv) < len(self.kv)
        return len(self.kv) if is_uniform else 0

# ---------------------------------------------------------------- decoder-only models
class AnyTarget(Target):
    """verify.Target for any decoder-only family.  Raises UserError for a model that fails.

    vocab: how many logits a node has, for a stage beside a target with another vocabulary size.
    The proof finds verifies_trees; folds, whether grouped queries are folded (see attention.py);
    first, the position_id of a text's first token, None where the model takes none; and layers,
    how many one tensor can hold the keys and values of.
    """
    ids_name, encoded = "input_ids", {}                        # what the model is given, in part
    source = None
    layers = 0
    proven = WeakKeyDictionary()     # {model: (its state, what was found)}: a model is tried once
    proving = Lock()                 # the proof changes the configuration for a moment

    def __init__(self, model, vocab=None):
        self.model, self.device = model.eval(), device_of(model)
        self.config = model.config.get_text_config()
        kernel = str(self.config._attn_implementation)
        if "flash" in kernel or "flex" in kernel:              # some abort the process by a mask
            raise UserError(f'{kernel} takes no mask: load with attn_implementation="sdpa"')
        self.keeps_logits = "logits_to_keep" in signature(model.forward).parameters
        # On H100 and B200 torch prefers cuDNN's, which plans for 23 to 440 ms at each new length.
        torch.backends.cuda.enable_cudnn_sdp(False)
        self.dtype = model.dtype
        self.vocab = vocab or self.config.vocab_size
        self.capacity = context_of(self.config)
        with self.proving:
            state = state_of(model)
            if self.proven.get(model, [None])[0] != state:
                self.proven[model] = state, self.prove()
        self.verifies_trees, self.folds, self.first, self.layers = self.proven[model][1]
        self.windows, _ = windows_of(self.config)
        self.prepare()

    def prepare(self):
        """Take a new cache: what a failed forward has left there may be anything."""
        self.cache = self.caches = (TreeCache if self.layers else AnyCache)(self.layers)
        self.needs = {"kv": (), "hidden": ()}
        self.reset()

    def forward(self, tokens, parents=None, logits_to_keep=0):
        """As Target.forward, with self.vocab logits.  UserError for a tree that cannot be."""
        chain = list(range(-1, len(tokens) - 1))
        if not self.verifies_trees and parents is not None and parents.tolist() != chain:
            raise UserError(f"{type(self.model).__name__} verifies chains only: draft a chain, by "
                            "cape.chain, which is --tree chain on the command line")
        # Ids that the model does not know become the last that it knows: nobody predicts them.
        known = tokens.clamp(0, self.config.vocab_size - 1)
        logits, states = super().forward(known, parents, logits_to_keep)
        states = [state.to(self.device) for state in (tokens, *states[1:])]
        return with_vocabulary(logits.to(self.device), self.vocab), states

    def run(self, end, tokens, position, slots, mask, logits_to_keep=0):
        """As Target.run."""
        self.cache.slots, self.cache.end = slots, end
        how = {self.ids_name: tokens[None], **self.encoded}
        if self.keeps_logits:
            how["logits_to_keep"] = logits_to_keep
        if self.first is not None:
            how["position_ids"] = self.first + position[None]
        if mask is not None and self.verifies_trees:           # else the model makes a chain's mask
            how["attention_mask"] = self.masks(mask, position, slots)
        wanted = self.needs["hidden"]
        with self.around():
            out = self.model(past_key_values=self.caches, use_cache=True,
                             output_hidden_states=bool(wanted), return_dict=True, **how)
        hidden = [out.hidden_states[index][0] for index in wanted]
        return [out.logits[0, -logits_to_keep:], *hidden]

    def around(self):
        """A forward runs within it: grouped queries are folded, and no router's logits returned."""
        kernel = NAME if self.folds else self.config._attn_implementation
        return changed(self.config, _attn_implementation=kernel, output_router_logits=False)

    def masks(self, mask, position, slots):
        """mask (n, end) bool -> numbers (1, 1, n, end), added to scores; by kind if of several."""
        # A committed entry's position is its slot.  The current nodes stand at `position`.
        key_position = torch.arange(mask.shape[1], device=mask.device)
        key_position = key_position.index_copy(0, slots, position)
        distance = position[:, None] - key_position                            # (n, end)
        masks = {}
        for kind, window in self.windows.items():
            seen = mask & (distance < window) if window else mask
            masks[kind] = torch.where(seen, 0.0, -torch.inf).to(self.dtype)[None, None]
        return masks if len(masks) > 1 else masks[kind]

    # ------------------------------------------------ the proof
    @torch.no_grad()
    def prove(self):
        """Try the model -> (verifies_trees, folds, first, layers)."""
        reason = "its logits are others"
        with changed(self.config, sliding_window=WINDOW, attention_chunk_size=WINDOW):
            self.windows, unknown = windows_of(self.config)
            can_fold = self.config._attn_implementation == "sdpa"
            ways = [(True, can_fold), (True, False), (False, False)]   # (verifies_trees, folds)
            if unknown or self.model.config.is_encoder_decoder:
                ways = ways[2:]
            for self.verifies_trees, self.folds in ways:
                try:
                    if self.decodes():
                        layers = self.cache.uniform_layers()
                        return self.verifies_trees, self.folds, self.first, layers
                except Exception as why:               # a model's own code may fail in any way
                    reason = f"{type(why).__name__}: {first_line(why)}"
        raise UserError(f"{type(self.model).__name__} does not decode with a KV cache as its "
                        f"generate() does ({reason}): it may cache more than keys and values (of "
                        "PEFT, LoRA is served)")

    def decodes(self):
        """Whether the logits after a prompt, each node of a tree or chain, and a token that follows
        its last path are those of generate(), which is made to write each path.
        """
        self.prepare()
        parents, paths = TREE if self.verifies_trees else CHAIN
        # Some models number positions without the padding token's.
        padding = getattr(self.config, "pad_token_id", None)
        ids = [i for i in range(min(self.config.vocab_size, 100)) if i != padding]
        text = [ids[(7 * i + 3) % len(ids)] for i in range(2 * WINDOW)]        # beyond a window
        tokens = torch.tensor([ids[(5 * i + 1) % len(ids)] for i in range(len(parents))])
        written = [tokens[path].tolist() for path in paths]
        last = ids[-1:]
        written[-1] += last
        own = torch.cat([self.own_logits(text, following) for following in written])
        of_text, _ = self.align(text)                                                  # (1, V)
        of_nodes, states = self.forward(tokens, torch.tensor(parents))                 # (n, V)
        self.commit(paths[-1], written[-1][:-1], states)
        of_last, _ = self.forward(torch.tensor(last), torch.tensor([-1]))              # (1, V)
        found = [torch.cat((of_text, of_nodes[path])) for path in paths]
        return self.agree(torch.cat((*found, of_last)), with_vocabulary(own, self.vocab))

    def agree(self, logits, own):
        """Whether logits (k, V) are generate()'s own (k, V) but for rounding."""
        own = own.to(logits.device)
        finite = own.isfinite() & (own > -1e30)                # some may have -inf, or nearly
        x, y = [torch.where(finite, of_any, 0).float() for of_any in (logits, own)]
        errors = (x - y).norm(dim=1) / (y - y.mean(1, keepdim=True)).norm(dim=1)
        # In half precision, also by autocast, an MoE may route single nodes otherwise: the median.
        exact = all(torch.finfo(k.dtype).bits > 16 for k, _ in self.cache.kv.values())
        return bool(errors.max() < 1e-3 if exact else errors.median() < 0.1)

    def own_logits(self, ids, following):
        """generate()'s logits after ids and after each of `following` (k + 1, V).  Sets first."""
        config = GenerationConfig(max_new_tokens=len(following) + 1, decoder_start_token_id=ids[0])
        name = self.ids_name if self.encoded else "inputs"
        how = {name: torch.tensor([ids], device=self.device), **self.encoded}
        positions = []
        handle = self.model.register_forward_pre_hook(
            lambda model, given, how: positions.append(how.get("position_ids")), with_kwargs=True)
        try:
            # Nothing of the model's own generation_config is part of a forward.
            with changed(self.model, generation_config=GenerationConfig()):
                logits = GenerationMixin.generate(
                    self.model, generation_config=config,
                    custom_generate=partial(forced, following=following), **how)
        finally:
            handle.remove()
        self.first = None if positions[0] is None else positions[0].flatten()[0].item()
        return logits

def forced(model, input_ids, logits_processor, stopping_criteria, generation_config, following,
           **prepared):
    """A custom_generate that is made to write `following` -> the logits before each and after."""
    found, end = [], MaxLengthCriteria(input_ids.shape[1] + len(following) + 1)

    def force(text, scores):
        token = [*following, 0][len(found)]                    # the last one is not used
        found.append(scores[0].clone())
        scores[:, token] = torch.inf
        return scores

    model._sample(input_ids, logits_processor=LogitsProcessorList([force]),
                  stopping_criteria=StoppingCriteriaList([end]),
                  generation_config=generation_config, **prepared)
    return torch.stack(found)                                  # (k + 1, V)

def any_target(model, vocab=None, encoded=None):
    """What decodes with a model: AnyTarget, or AnyEncoderDecoder, which says what `encoded` is."""
    if model.config.is_encoder_decoder:
        return AnyEncoderDecoder(model, vocab, encoded)
    return AnyTarget(model, vocab)

# ---------------------------------------------------------------- encoder-decoder models
class AnyEncoderDecoder(AnyTarget):
    """An encoder-decoder target, such as FLAN-T5 (Cascade Speculative Drafting, section 5.2).

    It verifies chains only: positions in the decoder follow the cache, not the depth in a tree.
    The encoder reads the prompt, and the decoder begins with its start token; unless `encoded` is
    given, {"encoder_outputs", "attention_mask"}: then a prompt is the decoder's.  source: the ids
    that the encoder has read, or None.
    """
    ids_name = "decoder_input_ids"

    def __init__(self, model, vocab=None, encoded=None):
        self.given = self.encoded = encoded
        super().__init__(model, vocab)

    def prepare(self):
        """As AnyTarget.prepare; the encoder reads any text."""
        super().prepare()
        self.encode([0, 1])

    def remaining(self, ids):
        """The encoder's prompt takes no position of the decoder; its start token takes one."""
        return super().remaining(ids if self.given else [0])

    def prefill(self, ids, new_tokens=0, needs={}):
        """As Target.prefill.  The View is that of the decoder's tokens."""
        self.encode(ids)
        start = [self.model.generation_config.decoder_start_token_id]
        return super().prefill(ids if self.given else start, new_tokens, needs)

    @torch.no_grad()
    def encode(self, ids):
        """At the beginning of a sequence, run the encoder over ids (list), unless it has run."""
        # The model's first decoder step fills the second cache, of cross-attention, with the keys
        # and values of what the encoder returned.
        self.caches = EncoderDecoderCache(self.cache, DynamicCache())
        if self.given is None:
            self.source = ids
            ids = torch.tensor([ids], device=self.device).clamp(max=self.config.vocab_size - 1)
            mask, encoder = torch.ones_like(ids), self.model.get_encoder()
            outputs = encoder(input_ids=ids, attention_mask=mask, return_dict=True)
            self.encoded = {"encoder_outputs": outputs, "attention_mask": mask}

def with_source(drafter, target):
    """Let a drafter that can encode, a cascade, search what target's encoder reads -> drafter"""
    def reset(drafter, probs):
        type(drafter).reset(drafter, probs)
        if target.source is not None:
            drafter.encode(target.source)

    if hasattr(drafter, "encode"):
        drafter.reset = partial(reset, drafter)                # a copy's will be the copy's
    return drafter
