"""Targets of any family: what verify.Target leaves out, and a proof that a model decodes right.

verify.Target serves models that are built as Llama is.  AnyTarget adds

    windows         layers with a sliding window, alone or beside layers with full attention
    devices         a model that accelerate has spread over several devices, or offloaded
    vocabularies    logits padded or cut to another model's vocabulary size
    contexts        other names for their length in a configuration; longrope's short table alone
    chains          a model that ignores a tree's mask or position_ids verifies chains only

and AnyEncoderDecoder serves T5 and its relatives.

The proof.  Whether a model of an unknown family can verify trees is found by experiment, when it is
wrapped: a few tiny forwards compare the logits of a tree's nodes with those of the model's own
forward over each path.  If they differ, the same is tried with a chain.  A model that fails both
tests is refused.  docs/families.md lists what is served.

    target = any_target(model)       # in place of verify.Target(model)
"""
from inspect import signature
from threading import Lock
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
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

# ---------------------------------------------------------------- what a configuration says
def context_of(config):
    """The most tokens that a sequence may have."""
    context = getattr(config, "max_position_embeddings", None)
    context = context or getattr(config, "max_seq_len", None) or UNSTATED
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kind = rope.get("rope_type") or rope.get("type")
    original = rope.get("original_max_position_embeddings")
    original = original or getattr(config, "original_max_position_embeddings", None) or context
    if kind == "longrope":
        # It rotates all keys of a long text by a second table, but cached keys cannot change.
        return original
    if kind == "yarn":
        return max(context, int(rope["factor"] * original))
    return context

def windows_of(config):
    """{kind of layer: its sliding window, or None for full attention}, and the kinds unknown here.

    The second is a set; our mask for a tree would be wrong in layers of such a kind.
    """
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
    """What a Target and its proof depend on.  Where it has changed they are made anew.

    That is the dtypes and devices of the weights, autocast, and the configuration.
    """
    kinds = {(p.dtype, p.device) for p in model.parameters()}
    device = device_of(model).type
    autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    return kinds, autocast, str(vars(model.config.get_text_config()))

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

# ---------------------------------------------------------------- decoder-only models
class AnyTarget(Target):
    """verify.Target for any decoder-only family.

    vocab: how many logits a node has, for a stage beside a target with another vocabulary size.
    context: the most tokens that a sequence may have, by the configuration.  verifies_trees: what
    the proof found.  Raises UserError for a model that fails it.
    """
    encoder_decoder = False
    proven = WeakKeyDictionary()     # {model: (its state, verifies_trees, folds)}: tried once
    proving = Lock()                 # the proof changes the configuration for a moment

    def __init__(self, model, capacity=None, vocab=None):
        self.model, self.device = model.eval(), device_of(model)
        self.config = model.config.get_text_config()
        self.windows, self.unknown = windows_of(self.config)
        self.keeps_logits = "logits_to_keep" in signature(model.forward).parameters
        # On H100 and B200 torch prefers cuDNN's attention, which builds a plan for each new length
        # (23 to 440 ms), as each round has: check_prefer_cudnn_attention, ATen's sdp_utils.cpp.
        torch.backends.cuda.enable_cudnn_sdp(False)
        # The dtype of hidden states: weights may be quantised.
        with torch.no_grad():
            token = torch.zeros(1, 1, dtype=torch.long, device=self.device)
            self.dtype = model.get_input_embeddings()(token).dtype
        self.known_ids = self.vocab = self.config.vocab_size
        self.context = self.capacity = context_of(self.config)
        self.prepare()
        with self.proving:
            state = state_of(model)
            if self.proven.get(model, [None])[0] != state:
                self.proven[model] = state, self.prove(), self.folds
        _, self.verifies_trees, self.folds = self.proven[model]
        self.vocab = vocab or self.known_ids
        self.capacity = min(capacity or self.context, self.context)
        self.prepare()

    def prepare(self):
        """Take a new cache: what a failed forward has left there may be anything."""
        self.cache = TreeCache(layers_of(self.config))
        self.needs = {"kv": (), "hidden": ()}
        self.reset()

    def forward(self, tokens, parents=None, logits_to_keep=0):
        """As Target.forward, for ids and logits of self.vocab.

        Raises UserError for a tree where only chains can be verified.
        """
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
        wanted = self.needs["hidden"]
        out = self.model(
            input_ids=tokens[None], past_key_values=self.cache.step(slots, end),
            use_cache=True, output_hidden_states=bool(wanted),
            **self.inputs(position, slots, mask, logits_to_keep))
        hidden = [out.hidden_states[index][0] for index in wanted]
        return [out.logits[0, -logits_to_keep:], *hidden]

    def inputs(self, position, slots, mask, logits_to_keep):
        """The model's other arguments, with a mask for each kind of layer where they differ."""
        found = {"position_ids": position[None], "logits_to_keep": logits_to_keep,
                 "attention_mask": None, "return_dict": True}
        if not self.keeps_logits:
            del found["logits_to_keep"]
        if not self.verifies_trees:
            del found["position_ids"]                          # it counts them by its cache
        elif mask is not None:                                 # else it applies its windows itself
            masks = {}
            for kind, window in self.windows.items():
                seen = within_window(mask, window, position, slots) if window else mask
                numbers = torch.where(seen, 0.0, -torch.inf)
                masks[kind] = numbers.to(self.dtype)[None, None]
            found["attention_mask"] = masks if len(masks) > 1 else masks[kind]
        return found

    def run(self, *given):
        """As Target.run, with grouped queries folded where the proof has found that it may be."""
        with folding(self.config, self.folds):
            return super().run(*given)

    # ------------------------------------------------ the proof
    @torch.no_grad()
    def prove(self):
        """True where a tree's logits are those of its paths, False where only a chain's are."""
        windows, reason = self.windows, "nothing was tried"
        names = ("sliding_window", "attention_chunk_size")
        own = {name: getattr(self.config, name, None) for name in names}
        for name, length in own.items():
            if length:
                setattr(self.config, name, WINDOW)
        self.windows = {kind: window and WINDOW for kind, window in windows.items()}
        try:
            for parents, self.verifies_trees, self.folds in self.trials():
                try:
                    errors = self.errors(parents)
                except torch.OutOfMemoryError:
                    raise
                except Exception as why:           # a model's own code may fail in any way
                    reason = f"{type(why).__name__}: {first_line(why)}"
                    continue
                # In half precision, which may be autocast's, the routing of an MoE can flip for
                # single nodes: the median.
                exact = all(torch.finfo(x.dtype).bits > 16 for x in [self.cache.stack])
                error = (errors.max() if exact else errors.median()).item()
                if error < (1e-3 if exact else 0.1):
                    return self.verifies_trees
                reason = f"logits are off by {error:.0%} of their spread"
        finally:
            self.windows = windows
            for name, length in own.items():
                if length:
                    setattr(self.config, name, length)
        raise UserError(f"{type(self.model).__name__} does not decode with a KV cache as it does "
                        f"without one ({reason}): take a language model that caches keys and "
                        "values alone, or decode without speculation")

    def trials(self):
        """What is tried in turn: parents, whether it is a tree, and whether queries are folded."""
        trees = [] if self.unknown else [(TREE, True, False)]
        if trees and can_fold(self.config):
            trees.insert(0, (TREE, True, True))
        return [*trees, (CHAIN, False, False)]

    def errors(self, parents):
        """How far each node's logits are from those of its path alone -> (n + 1,).

        The last entry is that of a token after the last path, once that path is committed.
        """
        n = len(parents)
        # Some models number positions without the padding token's.
        padding = getattr(self.config, "pad_token_id", None)
        ids = [i for i in range(min(self.known_ids, 100)) if i != padding]
        text = [ids[(7 * i + 3) % len(ids)] for i in range(2 * WINDOW)]
        tokens = [ids[(5 * i + 1) % len(ids)] for i in range(n)]
        self.prepare()
        self.align(text)
        logits, states = self.forward(torch.tensor(tokens), torch.tensor(parents))     # (n, V)
        errors = []
        for node in range(n):
            path = [node]
            while path[0]:
                path.insert(0, parents[path[0]])
            path_ids = [tokens[i] for i in path]
            errors.append(self.error(logits[node], text + path_ids))
        self.commit(path, path_ids, states)
        following, _ = self.forward(torch.tensor(ids[-1:]), torch.tensor([-1]))        # (1, V)
        errors.append(self.error(following[0], text + path_ids + ids[-1:]))
        return torch.stack(errors)

    def error(self, logits, ids):
        """Logits (V,) against the model's own, without a cache, after ids: standard deviations."""
        alone = self.alone(torch.tensor([ids], device=self.device))[0, -1].to(self.device)
        # A model may give some tokens a logit of -inf, or nearly.
        finite = alone.isfinite() & (alone > -1e30)
        logits, alone = logits[finite].float(), alone[finite].float()
        return (logits - alone).norm() / (alone - alone.mean()).norm()

    def alone(self, ids):
        """The model's own logits (1, n, V) for ids (1, n), without a cache."""
        return self.model(input_ids=ids, use_cache=False, return_dict=True).logits

def any_target(model, capacity=None, vocab=None):
    """What decodes with a Hugging Face language model: AnyTarget or AnyEncoderDecoder."""
    kind = AnyEncoderDecoder if model.config.is_encoder_decoder else AnyTarget
    return kind(model, capacity, vocab)

# ---------------------------------------------------------------- encoder-decoder models
class AnyEncoderDecoder(AnyTarget):
    """An encoder-decoder target, such as FLAN-T5 (Cascade Speculative Drafting, section 5.2).

    It verifies chains only: positions in the decoder follow the cache, not the depth in a tree.
    The encoder reads the prompt once; the decoder begins with its start token.  Where `given` is
    set, to encoder outputs and their attention mask, the encoder has run already, and a prompt is
    the decoder's.
    """
    encoder_decoder = True
    given = None

    def trials(self):
        return [(CHAIN, False, False)]

    def remaining(self, ids):
        """The encoder's prompt takes no position of the decoder; its start token takes one."""
        return super().remaining(ids if self.given else [0])

    def errors(self, parents):
        self.encode([0, 1])                                    # any text
        return super().errors(parents)

    def prefill(self, ids, new_tokens=0, needs={}):
        """As Target.prefill.  The View is that of the decoder's tokens."""
        self.needs = {"kv": (), "hidden": (), **needs}
        self.reset()
        if self.given is None:
            self.encode(ids)
            self.source = ids
            ids = [self.model.generation_config.decoder_start_token_id]
        else:
            self.attend(*self.given)
        self.cache.reserve(len(ids) + new_tokens + MARGIN)
        logits, view = self.align(ids)
        return logits[-1], view

    @torch.no_grad()
    def encode(self, ids):
        """Run the encoder over ids (list), and empty the decoder's cache."""
        ids = torch.tensor([ids], device=self.device).clamp(max=self.known_ids - 1)
        mask = torch.ones_like(ids)
        encoder = self.model.get_encoder()
        self.attend(encoder(input_ids=ids, attention_mask=mask, return_dict=True), mask)

    def attend(self, encoded, mask):
        """Attend to what the encoder returned, and empty the decoder's cache."""
        self.reset()
        self.encoded, self.mask = encoded, mask
        # run() sets the first cache, of self-attention.  The model's first decoder step fills the
        # second, of cross-attention, with the keys and values of what the encoder returned.
        self.caches = EncoderDecoderCache(DynamicCache(), DynamicCache())

    def run(self, end, tokens, position, slots, mask, logits_to_keep=0):
        """As Target.run, without hidden states.  The decoder makes a chain's positions and mask."""
        self.caches.self_attention_cache = self.cache.step(slots, end)
        logits = self.decode(tokens[None], past_key_values=self.caches, use_cache=True)
        return [logits[0, -logits_to_keep:]]

    def alone(self, ids):
        return self.decode(ids, use_cache=False)

    def decode(self, ids, **how):
        """The model's logits (1, n, V) for the decoder's ids (1, n)."""
        return self.model(encoder_outputs=self.encoded, attention_mask=self.mask,
                          decoder_input_ids=ids, return_dict=True, **how).logits
