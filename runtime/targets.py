"""Targets of any family: what verify.Target leaves out, and a proof that a model decodes right.

verify.Target serves models that are built as Llama is.  AnyTarget adds

    windows         layers with a sliding window, alone or beside layers with full attention
    devices         a model that accelerate has spread over several devices
    vocabularies    logits padded or cut to another model's vocabulary size
    contexts        other names for their length in a configuration; longrope's short table alone
    chains          a model that ignores a tree's mask or position_ids verifies chains only

and AnyEncoderDecoder serves T5 and its relatives.

The proof.  Whether a model of an unknown family can verify trees is found by experiment, when it is
loaded: a few tiny forwards compare the logits of a tree's nodes with those of the model's own
forward over each path.  If they differ, the same is tried with a chain.  A model that fails both
tests is refused.  docs/families.md lists what is served.

    target = any_target(model)       # in place of verify.Target(model)
"""
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

from runtime.text import first_line
from verify import CHUNK, Target, TreeCache, UserError

# Parents of the small tree and of the chain that a model is tried with
TREE = [-1, 0, 0, 0, 1, 2, 3]
CHAIN = [-1, 0, 1, 2]
WINDOW = 3               # the length of sliding windows in the proof, so that its texts are short

# ---------------------------------------------------------------- what a configuration says
def context_of(config):
    """The most tokens that a sequence may have."""
    context = getattr(config, "max_position_embeddings", None) or 2048
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") != "longrope":
        return context
    # longrope rotates all keys of a long text by a second table, but cached keys cannot change.
    short = rope.get("original_max_position_embeddings")
    return short or config.original_max_position_embeddings

def windows_of(config):
    """{kind of layer: its sliding window, or None for full attention}"""
    window = getattr(config, "sliding_window", None)
    default = "sliding_attention" if window else "full_attention"
    kinds = set(getattr(config, "layer_types", None) or [default])
    # GPT-Neo's "local" layers add a window of their own to the mask that they are given.
    others = set(getattr(config, "attention_layers", None) or []) - {"global"}
    unknown = others | kinds - {"full_attention", "sliding_attention"}
    if unknown:
        raise UserError(f"the target has layers of kind {', '.join(unknown)}: take a target with "
                        "full or sliding attention")
    return {kind: window if kind == "sliding_attention" else None for kind in kinds}

def device_of(model):
    """The device of a model's inputs: where its embedding is, if accelerate has spread it."""
    if not getattr(model, "hf_device_map", None):
        return model.device
    hook = getattr(model.get_input_embeddings(), "_hf_hook", None)
    return torch.device(getattr(hook, "execution_device", None) or model.device)

# ---------------------------------------------------------------- small parts
def with_vocabulary(logits, vocab):
    """Logits (n, V) -> (n, vocab): cut, or padded with -inf."""
    missing = vocab - logits.shape[-1]
    return F.pad(logits, (0, missing), value=float("-inf")) if missing else logits

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
    proven = WeakKeyDictionary()     # {model: verifies_trees}: a model is tried once

    def __init__(self, model, capacity=None, vocab=None):
        self.model, self.device = model.eval(), device_of(model)
        self.config = model.config.get_text_config()
        self.windows = windows_of(self.config)
        # On H100 and B200 torch prefers cuDNN's attention, which builds a plan for each new length
        # (23 to 440 ms), as each round has: check_prefer_cudnn_attention, ATen's sdp_utils.cpp.
        torch.backends.cuda.enable_cudnn_sdp(False)
        # The dtype of hidden states: weights may be quantised.
        with torch.no_grad():
            token = torch.zeros(1, 1, dtype=torch.long, device=self.device)
            self.dtype = model.get_input_embeddings()(token).dtype
        self.known_ids = self.vocab = self.config.vocab_size
        self.context = self.capacity = context_of(self.config)
        self.cache = TreeCache()
        self.capture({})
        if model not in self.proven:
            self.proven[model] = self.prove()
        self.verifies_trees = self.proven[model]
        self.vocab = vocab or self.known_ids
        self.capacity = min(capacity or self.context, self.context)
        self.cache = TreeCache()
        self.reset()

    def forward(self, tokens, parents=None, logits_to_keep=0):
        """As Target.forward; refuses a tree where only chains can be verified."""
        chain = list(range(-1, len(tokens) - 1))
        if not self.verifies_trees and parents is not None and parents.tolist() != chain:
            raise UserError(f"{type(self.model).__name__} verifies chains only (it does not honour "
                            "the mask or the positions of a tree): use --tree chain")
        return super().forward(tokens, parents, logits_to_keep)

    def run(self, end, tokens, position, slots, mask, logits_to_keep=0):
        """As Target.run, for ids and logits of self.vocab."""
        tokens = self.within_vocabulary(tokens)
        logits, *states = super().run(end, tokens, position, slots, mask, logits_to_keep)
        states = [state.to(self.device) for state in states]
        return [with_vocabulary(logits.to(self.device), self.vocab), *states]

    def within_vocabulary(self, ids):
        """Ids that the model does not know become the last that it knows: nobody predicts them."""
        return ids.clamp(max=self.known_ids - 1) if self.known_ids < self.vocab else ids

    def position_and_mask(self, position, slots, mask):
        """As Target.position_and_mask, with a mask for each kind of layer where they differ."""
        if not self.verifies_trees:
            return {}                # the model counts positions by its cache
        found = super().position_and_mask(position, slots, mask)
        if mask is None:
            return found             # the model applies its windows itself
        masks = {}
        for kind, window in self.windows.items():
            seen = within_window(mask, window, position, slots) if window else mask
            of_kind = super().position_and_mask(position, slots, seen)
            masks[kind] = of_kind["attention_mask"]
        found["attention_mask"] = masks if len(masks) > 1 else masks[kind]
        return found

    # ------------------------------------------------ the proof
    @torch.no_grad()
    def prove(self):
        """True where a tree's logits are those of its paths, False where only a chain's are."""
        config, windows = self.config, self.windows
        own_window = getattr(config, "sliding_window", None)
        exact = torch.finfo(self.dtype).bits > 16
        if own_window:
            config.sliding_window = WINDOW
            self.windows = {kind: window and WINDOW for kind, window in windows.items()}
        try:
            for parents, self.verifies_trees in ((TREE, True), (CHAIN, False)):
                try:
                    errors = self.errors(parents)
                except torch.OutOfMemoryError:
                    raise
                except Exception as why:           # a model's own code may fail in any way
                    reason = f"{type(why).__name__}: {first_line(why)}"
                    continue
                # In half precision the routing of an MoE can flip for single nodes: the median.
                error = (errors.max() if exact else errors.median()).item()
                if error < (1e-3 if exact else 0.1):
                    return self.verifies_trees
                reason = f"logits are off by {error:.0%} of their spread"
        finally:
            self.windows = windows
            if own_window:
                config.sliding_window = own_window
        raise UserError(f"{type(self.model).__name__} does not decode with a KV cache as it does "
                        f"without one ({reason}): take a decoder-only language model that caches "
                        "keys and values")

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
        # A failed forward may have left anything in the cache.
        self.cache = TreeCache()
        self.reset()
        self.sync(text)
        logits = self.forward(torch.tensor(tokens), torch.tensor(parents))     # (n, V)
        errors = []
        for node in range(n):
            path = [node]
            while path[0]:
                path.insert(0, parents[path[0]])
            path_ids = [tokens[i] for i in path]
            errors.append(self.error(logits[node], text + path_ids))
        self.commit(path, path_ids)
        following = self.forward(torch.tensor(ids[-1:]), torch.tensor([-1]))[0]        # (V,)
        errors.append(self.error(following, text + path_ids + ids[-1:]))
        return torch.stack(errors)

    def error(self, logits, ids):
        """Logits (V,) against the model's own, without a cache, after ids: standard deviations."""
        ids = torch.tensor([ids], device=self.device)
        alone = self.model(input_ids=ids, use_cache=False).logits[0, -1]
        return (logits - alone).float().norm() / (alone - alone.mean()).float().norm()

def any_target(model, capacity=None, vocab=None):
    """What decodes with a Hugging Face language model: AnyTarget or AnyEncoderDecoder."""
    kind = AnyEncoderDecoder if model.config.is_encoder_decoder else AnyTarget
    return kind(model, capacity, vocab)

# ---------------------------------------------------------------- encoder-decoder models
class AnyEncoderDecoder(AnyTarget):
    """An encoder-decoder target, such as FLAN-T5 (Cascade Speculative Drafting, section 5.2).

    It verifies chains only.  The encoder reads the prompt once; the decoder begins with its start
    token.  A drafter finds the prompt in the first view of a decoding, as view.source.
    """
    encoder_decoder = True

    def prove(self):
        """Positions in the decoder follow the cache, not the depth in a tree."""
        return False

    def remaining(self, ids):
        """The prompt takes no position of the decoder; its start token takes one."""
        return self.capacity

    def prefill(self, ids, new_tokens=0):
        """Encode the prompt and reserve cache for new_tokens -> logits (V,) of the first token."""
        self.encode(ids)
        self.source = ids
        self.cache.reserve(1 + new_tokens + CHUNK)
        start = self.model.generation_config.decoder_start_token_id
        return self.sync([start])[-1]

    def encode(self, ids):
        """Run the encoder over ids (list), and empty the decoder's cache."""
        self.reset()
        ids = self.within_vocabulary(torch.tensor([ids], device=self.device))
        encoder = self.model.get_encoder()
        self.encoded = encoder(input_ids=ids, attention_mask=torch.ones_like(ids))
        # run() sets the first cache, of self-attention.  The model's first decoder step fills the
        # second, of cross-attention, with the keys and values of what the encoder returned.
        self.caches = EncoderDecoderCache(DynamicCache(), DynamicCache())

    def run(self, end, tokens, position, slots, mask, logits_to_keep=0):
        """As Target.run, without hidden states.  The decoder makes a chain's positions and mask."""
        self.caches.self_attention_cache = self.cache.step(slots, end)
        tokens = self.within_vocabulary(tokens)
        out = self.model(encoder_outputs=self.encoded, decoder_input_ids=tokens[None],
                         past_key_values=self.caches, use_cache=True)
        logits = out.logits[0, -logits_to_keep:].to(self.device)
        return [with_vocabulary(logits, self.vocab)]
