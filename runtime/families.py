"""Targets of any family: what verify.Target leaves out, and a proof at load that a model decodes right.

verify.Target serves models that are built as Llama is.  AnyTarget adds, each where the class below names it,
    devices          a model that accelerate spread over several: inputs go where the embeddings are
    vocabularies     rows of logits padded, or cut, to a vocabulary that another model has
    contexts         where the configuration calls it otherwise; positions that no text takes (RoBERTa)
    longrope         all positions are turned by another table once a text is long: cached rows cannot follow
    windows          models whose layers are of two kinds, each with a mask of its own
    chains           models that ignore a tree's mask or positions verify chains only
and proves, by some tiny forwards, that a tree's logits are those of its paths.  docs/families.md lists what
is served.

    target = any_target(model)       # in the place of verify.Target(model)
"""
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F

from cascade import EncoderDecoder
from data.read import first_line
from verify import Target, TreeCache, UserError

TREE = [-1, 0, 0, 0, 1, 2, 3]            # parents of the small tree that a model is proved with
CHAIN = [-1, 0, 1, 2]


def turning_point(config):
    """The length from which on longrope turns all positions by its other table, or None."""
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") != "longrope":
        return None
    return rope.get("original_max_position_embeddings") or config.original_max_position_embeddings


def context_of(model, config):
    """How many positions a text may have, as the configuration says."""
    names = ("max_position_embeddings", "max_seq_len")
    context = next((getattr(config, name) for name in names if getattr(config, name, None)), 2048)
    for name, module in model.named_modules():
        # RoBERTa's table begins with positions that no text takes.
        if name.endswith("position_embeddings") and getattr(module, "padding_idx", None) is not None:
            context -= module.padding_idx + 1
    return max(context, 0)


def device_of(model):
    """Where a model takes its input: one that is spread over devices has its embeddings there."""
    if not getattr(model, "hf_device_map", None):
        return model.device
    hook = getattr(model.get_input_embeddings(), "_hf_hook", None)
    return torch.device(getattr(hook, "execution_device", None) or model.device)


def with_vocabulary(logits, vocab):
    """Rows (n, V) as rows (n, vocab): what lies beyond is cut off, an id that is missing gets -inf."""
    missing = vocab - logits.shape[-1]
    return F.pad(logits, (0, missing), value=float("-inf")) if missing else logits


def is_chain(parents):
    """Whether each node (n,) has the one before it as its parent."""
    return parents.tolist() == list(range(-1, len(parents) - 1))


def windows_of(config):
    """{kind of layer: its sliding window, or None}."""
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention" if window else "full_attention"]
    unknown = sorted(set(kinds) - {"full_attention", "sliding_attention"})
    if unknown:
        raise UserError(f"the target has layers of kind {', '.join(unknown)}, which keep no KV rows for a "
                        "tree")
    return {kind: window if kind == "sliding_attention" else None for kind in kinds}


class SpreadCache(TreeCache):
    """A TreeCache whose layers lie on several devices."""

    def update(self, k, v, layer_idx, *args, **kwargs):
        self.slots = self.slots.to(k.device)
        return super().update(k, v, layer_idx, *args, **kwargs)

    def commit(self, path):
        length, end = self.length, self.length + len(path)
        index = torch.tensor(path) + length
        for held in self.kv.values():
            for x in held:
                x[:, :, length:end] = x.index_select(2, index.to(x.device))
        self.length = end


class AnyTarget(Target):
    """verify.Target of any decoder-only family.

    vocab: how many ids its rows of logits shall have, where it stands beside a target whose vocabulary is
    padded otherwise.  verifies_trees: what the proof found.  Raises UserError for a model that cannot be
    decoded with a KV cache.
    """
    proven = WeakKeyDictionary()                               # {model: its verifies_trees}

    def __init__(self, model, capacity=None, vocab=None):
        attention = getattr(model.config, "_attn_implementation", None)
        if attention not in (None, "sdpa", "eager"):
            raise UserError(f"attn_implementation {attention} takes no tree mask: load with 'sdpa' or "
                            "'eager'")
        super().__init__(model, capacity)
        self.device, self.known = device_of(model), self.config.vocab_size     # known: ids that it takes
        # The type of hidden states: weights may be quantised, and of no floating type.
        with torch.no_grad():
            token = torch.zeros(1, 1, dtype=torch.long, device=self.device)
            self.dtype = model.get_input_embeddings()(token).dtype
        self.context = context_of(model, self.config)
        self.capacity = self.context
        self.turn, self.turned = turning_point(self.config), False             # turned: its text is beyond
        if len(set(getattr(model, "hf_device_map", {}).values())) > 1:
            self.cache = SpreadCache()
        self.vocab = self.known
        if model not in self.proven:
            self.proven[model] = self.prove()
        self.verifies_trees = self.proven[model]
        self.vocab = vocab or self.known
        self.capacity = min(capacity or self.context, self.context)
        self.reset()

    # ------------------------------------------------------------ windows, devices, vocabularies, chains
    def window_of(self, config):
        """The smallest sliding window of any layer, or None."""
        self.windows = windows_of(config)                      # {kind of layer: window or None}
        return min(filter(None, self.windows.values()), default=None)

    def forward(self, tokens, parents=None, logits_to_keep=0):
        """As Target.forward; refuses a tree where only chains can be verified."""
        if not self.verifies_trees and parents is not None and not is_chain(parents):
            raise UserError(f"{type(self.model).__name__} verifies chains only (it does not honour the mask "
                            "or the positions of a tree): use --tree chain")
        own = self.capacity
        if self.turn and not self.turned:
            # A node beyond the turning point would turn the whole tree.
            self.capacity = min(own, self.turn)
        try:
            return super().forward(tokens, parents, logits_to_keep)
        finally:
            self.capacity = own

    def run(self, keys, tokens, position, slots, mask):
        """As Target.run; an id that the model does not know is any other."""
        if self.known < self.vocab:
            tokens = tokens.clamp(max=self.known - 1)
        logits, *states = super().run(keys, tokens, position, slots, mask)
        return [with_vocabulary(logits.to(self.device), self.vocab), *states]

    def places(self, keys, position, slots, mask):
        """As Target.places; of several kinds of layers each has a mask.

        A model that ignores positions, or takes none, counts them by its cache.
        """
        if not self.verifies_trees:
            return {}
        if mask is None or len(self.windows) == 1:
            return super().places(keys, position, slots, mask)
        smallest = self.window
        masks = {}
        try:
            for kind, window in self.windows.items():
                self.window = window
                found = super().places(keys, position, slots, mask)
                masks[kind] = found["attention_mask"]
        finally:
            self.window = smallest
        return found | {"attention_mask": masks}

    # ------------------------------------------------------------ longrope
    def remaining(self, ids):
        """As Target.remaining; rows in the cache cannot follow where longrope switches tables."""
        room = super().remaining(ids)
        return min(room, self.turn - len(ids) + 1) if self.turn and len(ids) <= self.turn else room

    def sync(self, ids, rows=1, same=0):
        """As Target.sync; longrope turns all rows of a long text otherwise: it is read anew, at once."""
        own, turned = self.slice_size, bool(self.turn) and len(ids) > self.turn
        if turned != self.turned:
            self.reset()
        self.turned = turned
        if turned:
            self.slice_size = len(ids)
        try:
            return super().sync(ids, rows, same)
        finally:
            self.slice_size = own

    # ------------------------------------------------------------ the proof
    @torch.no_grad()
    def prove(self):
        """True if a small tree's logits are those of its paths alone, False if only a chain's are.

        Some classes ignore a tree's mask or positions, and would decode wrongly without a word.
        """
        config, own = self.config, (self.windows, self.window, getattr(self.config, "sliding_window", None))
        exact = torch.finfo(self.dtype).bits > 16
        # A window of three, as the model's own may be longer than what one wants to read here
        if any(self.windows.values()):
            config.sliding_window = self.window = 3
            self.windows = {kind: window and 3 for kind, window in self.windows.items()}
        try:
            for parents, self.verifies_trees in ((TREE, True), (CHAIN, False)):
                try:
                    errors = self.errors(parents)
                    # In half precision MoE routing can flip for a single node: the median counts.
                    error = (errors.max() if exact else errors.median()).item()
                    reason = f"logits are off by {error:.0%} of their spread"
                    if error < (1e-3 if exact else 0.1):
                        return self.verifies_trees
                except torch.OutOfMemoryError:
                    raise
                except Exception as why:
                    reason = f"{type(why).__name__}: {first_line(why)}"
        finally:
            self.windows, self.window, window = own
            if window:
                config.sliding_window = window
        raise UserError(f"{type(self.model).__name__} does not decode with a KV cache as it does without one "
                        f"({reason}): take a decoder-only language model that caches keys and values")

    def errors(self, parents):
        """How far each node's logits are from those of its path alone, in standard deviations -> (n + 1,)."""
        n, errors = len(parents), []
        text, tokens, after = self.probe(n)
        # A cache of its own: a failed forward may leave anything in it.
        self.cache = type(self.cache)()
        self.reset()
        self.sync(text)
        logits = self.forward(torch.tensor(tokens), torch.tensor(parents))             # (n, V)
        for node in range(n):
            path = [node]
            while path[0]:
                path.insert(0, parents[path[0]])
            line = [tokens[i] for i in path]
            errors.append(self.error(logits[node], text + line))
        # The last path joins the cache, and a token follows it.
        self.commit(path, line)
        following = self.forward(torch.tensor([after]), torch.tensor([-1]))[0]         # (V,)
        errors.append(self.error(following, text + line + [after]))
        return torch.stack(errors)

    def probe(self, n):
        """-> a text, n tokens of a tree behind it, and one token more."""
        config = self.config
        # Some number positions without the padding token's.
        padding = getattr(config, "pad_token_id", None)
        ids = [i for i in range(min(config.vocab_size, 100)) if i != padding]
        # Longer than a window that the model alone knows of (GPT-Neo's), where it has one
        windows = [size for name, size in vars(config).items() if "window" in name and isinstance(size, int)]
        length = 6 if any(self.windows.values()) else max([6] + [size + 4 for size in windows])
        length = min(length, self.context - n - 1)
        text = [ids[(7 * i + 3) % len(ids)] for i in range(length)]
        tokens = [ids[(5 * i + 1) % len(ids)] for i in range(n)]
        return text, tokens, ids[-1]

    def error(self, logits, ids):
        """logits (V,) against the model's own uncached forward over ids."""
        ids = torch.tensor([ids], device=self.device)
        alone = self.model(input_ids=ids, use_cache=False).logits[0, -1]
        return (logits - alone).float().norm() / (alone - alone.mean()).float().norm()


class AnyEncoderDecoder(AnyTarget, EncoderDecoder):
    """cascade.EncoderDecoder of any family, for chains."""

    def prove(self):
        """Positions of its decoder follow the cache, not the depth in a tree."""
        return False

    def forward(self, tokens, parents=None, logits_to_keep=0):
        return EncoderDecoder.forward(self, tokens, parents, logits_to_keep)

    def encode(self, ids):
        """As EncoderDecoder.encode; an id that the model does not know is any other."""
        return super().encode([min(i, self.known - 1) for i in ids])


def any_target(model, capacity=None, vocab=None):
    """What decodes with a Hugging Face language model: AnyEncoderDecoder, or AnyTarget."""
    kind = AnyEncoderDecoder if model.config.is_encoder_decoder else AnyTarget
    return kind(model, capacity, vocab)
