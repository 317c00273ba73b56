"""Targets of any family: what verify.Target leaves out, and a proof that a model decodes right.

verify.Target serves models that are built as Llama is.  AnyTarget adds
    windows          layers with a sliding window, alone or beside layers with full attention
    devices          a model that accelerate spread over several: inputs go where the embeddings are
    vocabularies     logits padded, or cut, to the vocabulary of another model
    contexts         that the configuration names otherwise; positions that no text takes (RoBERTa)
    longrope         a RoPE table for short texts and one for long: cached keys cannot change
    chains           models that ignore a tree's mask or position_ids verify chains only
    one memory       for all layers' keys and values, so that one copy compacts an accepted path
and proves at load, by some tiny forwards, that a tree's logits are those of its paths.
docs/targets.md lists what is served.

    target = any_target(model)       # in the place of verify.Target(model)
"""
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F

from cascade import EncoderDecoder
from runtime.text import first_line
from verify import CHUNK, Target, TreeCache, UserError

TREE = [-1, 0, 0, 0, 1, 2, 3]            # parents of the small tree that a model is proved with
CHAIN = [-1, 0, 1, 2]


def short_context(config):
    """longrope: the longest text whose positions its short table rotates; else None."""
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
        padding = getattr(module, "padding_idx", None)
        if name.endswith("position_embeddings") and padding is not None:
            context -= padding + 1
    return max(context, 0)


def device_of(model):
    """Where a model takes its input: one that is spread over devices has its embeddings there."""
    if not getattr(model, "hf_device_map", None):
        return model.device
    hook = getattr(model.get_input_embeddings(), "_hf_hook", None)
    return torch.device(getattr(hook, "execution_device", None) or model.device)


def with_vocabulary(logits, vocab):
    """Logits (n, V) -> (n, vocab): cut off, or -inf for ids that are missing."""
    missing = vocab - logits.shape[-1]
    return F.pad(logits, (0, missing), value=float("-inf")) if missing else logits


def is_chain(parents):
    """Whether each node (n,) has the one before it as its parent."""
    return parents.tolist() == list(range(-1, len(parents) - 1))


def windows_of(config):
    """{kind of layer: its sliding window, or None}."""
    window = getattr(config, "sliding_window", None)
    kind = "sliding_attention" if window else "full_attention"
    kinds = getattr(config, "layer_types", None) or [kind]
    unknown = sorted(set(kinds) - {"full_attention", "sliding_attention"})
    if unknown:
        raise UserError(f"the target has layers of kind {', '.join(unknown)}, which keep no KV "
                        "entries for a tree")
    return {kind: window if kind == "sliding_attention" else None for kind in kinds}


def within_window(mask, window, position, slots):
    """A mask (n, keys) bool, less the keys that are `window` or more positions before a node."""
    # An entry's position is its number in the cache, but for those of the current nodes.
    key_position = torch.arange(mask.shape[1], device=mask.device)
    key_position = key_position.index_copy(0, slots, position)
    distance = position[:, None] - key_position                                        # (n, keys)
    return mask & (distance < window)


class StackedCache(TreeCache):
    """A TreeCache whose layers lie in one tensor for each size and device (a model may be spread).

    stacks: these tensors, (count, copies, H, allocated, d), one copy but for figures/batches.py; kv
    holds views of them.
    """

    def __init__(self):
        super().__init__()
        self.stacks = []

    def reserve(self, entries):
        """As TreeCache.reserve."""
        if entries > self.allocated:
            self.allocated = max(entries, self.allocated * 3 // 2)
            if self.stacks:
                self.stack(self.length)

    def update(self, k, v, layer, *args, **kwargs):
        """As TreeCache.update.  stack() follows the first forward: it must know all layers."""
        if not self.stacks:
            self.kv[layer] = [k.clone(), v.clone()]
        self.slots = self.slots.to(k.device)
        return super().update(k, v, layer)

    def stack(self, filled):
        """Move the first `filled` entries of all layers to new memory."""
        of_one_size = {}
        for pair in self.kv.values():
            for i in (0, 1):
                pair[i] = pair[i][:, :, :filled].clone()       # frees the old memory
                copies, heads, _, d = pair[i].shape
                size = pair[i].device, pair[i].dtype, copies, heads, d
                of_one_size.setdefault(size, []).append((pair, i))
        self.stacks = []
        for (device, dtype, copies, heads, d), places in of_one_size.items():
            # Zeros: an entry that a mask hides still takes part, with weight zero.
            shape = len(places), copies, heads, self.allocated, d
            memory = torch.zeros(shape, dtype=dtype, device=device)
            self.stacks.append(memory)
            for place, (pair, i) in enumerate(places):
                memory[place, :, :, :filled] = pair[i]
                pair[i] = memory[place]

    def compact(self, nodes):
        """As TreeCache.compact, by one copy a stack."""
        end = self.length + len(nodes)
        for memory in self.stacks:
            slots = self.length + nodes.to(memory.device)
            memory[:, :, :, self.length:end] = memory.index_select(3, slots)


class AnyTarget(Target):
    """verify.Target of any decoder-only family.

    vocab: how many ids its logits shall have, beside a target whose vocabulary is padded otherwise.
    verifies_trees: what the proof found.  Raises UserError for a model that cannot be
    decoded with a KV cache.
    """
    encoder_decoder = False
    proven = WeakKeyDictionary()                               # {model: its verifies_trees}
    chunk_size = CHUNK                                         # tokens of a prompt in one forward

    def __init__(self, model, capacity=None, vocab=None):
        attention = getattr(model.config, "_attn_implementation", None)
        if attention not in (None, "sdpa", "eager"):
            raise UserError(f"attn_implementation {attention} takes no tree mask: load with 'sdpa' "
                            "or 'eager'")
        self.model, self.device = model.eval(), device_of(model)
        self.config = model.config.get_text_config()
        self.windows = windows_of(self.config)
        # On H100 and B200 torch prefers cuDNN's attention, which builds a plan for each new length
        # (23 to 440 ms), as each round has: check_prefer_cudnn_attention, ATen's sdp_utils.cpp.
        torch.backends.cuda.enable_cudnn_sdp(False)
        # The type of hidden states: weights may be quantised, and of no floating type.
        with torch.no_grad():
            token = torch.zeros(1, 1, dtype=torch.long, device=self.device)
            self.dtype = model.get_input_embeddings()(token).dtype
        self.known = self.config.vocab_size                    # ids that the model takes
        self.context = context_of(model, self.config)
        self.capacity = self.context
        # longrope: the length up to which the short table serves; whether the text is beyond
        self.short, self.long = short_context(self.config), False
        self.vocab = self.known
        self.cache = StackedCache()
        self.capture({})
        if model not in self.proven:
            self.proven[model] = self.prove()
        self.verifies_trees = self.proven[model]
        self.vocab = vocab or self.known
        self.capacity = min(capacity or self.context, self.context)
        self.cache = StackedCache()
        self.reset()

    # ------------------------------------------------ windows, devices, vocabularies, chains
    def forward(self, tokens, parents=None, logits_to_keep=0):
        """As Target.forward; refuses a tree where only chains can be verified."""
        if not self.verifies_trees and parents is not None and not is_chain(parents):
            raise UserError(f"{type(self.model).__name__} verifies chains only (it does not honour "
                            "the mask or the positions of a tree): use --tree chain")
        own = self.capacity
        if self.short and not self.long:
            # One position beyond the short table would rotate the whole tree by the long one.
            self.capacity = min(own, self.short)
        try:
            return super().forward(tokens, parents, logits_to_keep)
        finally:
            self.capacity = own

    def run(self, keys, tokens, position, slots, mask, logits_to_keep=0):
        """As Target.run; an id that the model does not know is any other."""
        if self.known < self.vocab:
            tokens = tokens.clamp(max=self.known - 1)
        logits, *states = super().run(keys, tokens, position, slots, mask, logits_to_keep)
        if not self.cache.stacks:
            self.cache.stack(keys)
        states = [state.to(self.device) for state in states]
        return [with_vocabulary(logits.to(self.device), self.vocab), *states]

    def position_and_mask(self, position, slots, mask):
        """As Target.position_and_mask; windows shorten the mask, one for each kind of layer.

        A model that ignores position_ids, or takes none, counts them by its cache.  Without a mask
        of ours a model applies its window itself.
        """
        if not self.verifies_trees:
            return {}
        found = super().position_and_mask(position, slots, mask)
        if mask is None:
            return found
        masks = {}
        for kind, window in self.windows.items():
            near = within_window(mask, window, position, slots) if window else mask
            added = super().position_and_mask(position, slots, near)["attention_mask"]
            masks[kind] = added
        found["attention_mask"] = masks if len(masks) > 1 else masks[kind]
        return found

    # ------------------------------------------------------------ long prompts, longrope
    def remaining(self, ids):
        """As Target.remaining; a text that begins with longrope's short table ends with it."""
        remaining = super().remaining(ids)
        if self.short and len(ids) <= self.short:
            return min(remaining, self.short - len(ids) + 1)
        return remaining

    def sync(self, ids, logits_to_keep=1, unchanged=0):
        """As Target.sync, in chunks: all hidden states of a long prompt would fill the memory.

        longrope rotates all of a long text by its long table: it is read at once.
        """
        long = bool(self.short) and len(ids) > self.short
        if long != self.long:
            self.reset()
        self.long = long
        size = len(ids) if long else self.chunk_size
        chunks = []
        for end in range((unchanged // size + 1) * size, len(ids) - logits_to_keep + 1, size):
            if self.ids[:end] != ids[:end]:
                super().sync(ids[:end], 1, unchanged)
                chunks.append(self.committed)
            unchanged = end
        logits = super().sync(ids, logits_to_keep, unchanged)
        # A view shows all of them.
        if chunks:
            chunks.append(self.committed)
            self.committed = [torch.cat(of_chunks) for of_chunks in zip(*chunks)]
        return logits

    # ------------------------------------------------------------ the proof
    @torch.no_grad()
    def prove(self):
        """True if a small tree's logits are those of its paths alone, False if only a chain's are.

        Some classes ignore a tree's mask or positions, and would decode wrongly without a word.
        """
        config, windows = self.config, self.windows
        own = getattr(config, "sliding_window", None)
        exact = torch.finfo(self.dtype).bits > 16
        # A window of three, as the model's own may be longer than what one wants to read here
        if any(self.windows.values()):
            config.sliding_window = 3
            self.windows = {kind: window and 3 for kind, window in windows.items()}
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
            self.windows = windows
            if own:
                config.sliding_window = own
        raise UserError(f"{type(self.model).__name__} does not decode with a KV cache as it does "
                        f"without one ({reason}): take a decoder-only language model that caches "
                        "keys and values")

    def errors(self, parents):
        """How far each node's logits are from its path's alone -> (n + 1,), standard deviations."""
        n, errors = len(parents), []
        text, tokens, after = self.probe(n)
        # A cache of its own: a failed forward may leave anything in it.
        self.cache = StackedCache()
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
        settings = vars(config).items()
        windows = [size for name, size in settings if "window" in name and isinstance(size, int)]
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
    encoder_decoder = True

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
