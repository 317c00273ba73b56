"""Tree verification: the target model, its KV cache, the acceptance rules and the decoding loop.

GLIDE with a CAPE (arXiv 2402.02082), section 3, section 4.2 "Verification of Expanded Proposals", Figures 1 and 2; the
same loop serves the Pruned Candidate Tree (ACL 2025) and Cascade Speculative Drafting (arXiv 2312.11462).

The idea.  A drafter proposes a tree of tokens that hangs from the root, the last token that the target has produced but
not yet read.  One forward of the target over all nodes, in which a node sees the cached prefix and its own ancestors,
gives the target's choice after every node.  Walk down from the root while the target's choice is a child; where it is not,
it is the next root.  The output is the target's own, whatever the drafter says.

    paper                  shape               name here
    x_{<t}, its K and V    2 x (L,1,H,t,d)     TreeCache.keys / values [..., :t, :]
    x_t (not cached yet)   ()                  the root: tree.tokens[0]
    proposal P             (n,)                tree.tokens; tree.parents[0] = -1, parents come before children
    mask_CAPE              (n, t + n)          tree_mask(ancestor_mask(parents), t)
    p_T(.|node)            (n, V)              p_target
    p_D(.|node)            (n - 1, V)          tree.p_draft: node i + 1 was drawn from row i (drawn chains only)

Differences from the paper:
 1. The root is a node: the paper's mask leaves x_t out (the proposal starts at x_{t+1}), though x_t must be forwarded too.
 2. Sampling over a tree is stated nowhere (CAPE is evaluated greedily).  Here the target's own draw, with noise keyed by
    (seed, position), decides at each node: the output is that of plain sampling with the same seed, token for token.
 3. A drafter's distributions are rescaled by its own temperature in greedy decoding (see generate), since the confidence of one that
    learned the target's distribution says how often the target would draw its token, not how often that is the greedy choice.
 4. E_{x~p_D} min(p_T, p_D), printed as the acceptance rate in section 5.1, is meant as the sum over x of min(p_T, p_D).

    python verify.py          # the demo at the end: a random Llama, an oracle drafter and a useless one, both lossless
"""
import time
from collections import namedtuple
from dataclasses import dataclass, field

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, EncoderDecoderCache

Tree = namedtuple("Tree", "tokens parents p_draft", defaults=(None,))
# What a drafter is shown: tokens (k,) committed since the last round; length: all that is cached, those included;
# kv {layer: (K, V), each (1, H, length, d)}; hidden {index: (k, D)}, rows of `tokens`, numbered as Hugging Face does.
View = namedtuple("View", "tokens length kv hidden")


class UserError(ValueError):
    """A user's mistake: one sentence that says what is wrong and what to do.  Programs print it and exit with 2."""


# ---------------------------------------------------------------- a tree from its parents
def ancestor_mask(parents):
    """(n,) parents -> (n, n) bool: entry (i, j) says that j is i or above it.

    Doubling: a matrix that reaches s steps up, times itself, reaches 2s, so log2(n) small products, no host read.
    """
    n = parents.shape[0]
    reach = torch.eye(n, device=parents.device)
    rows = torch.arange(n, device=parents.device)
    # parents of -1 point at a column beyond the last, which is cut off
    reach = torch.cat((reach, reach.new_zeros(n, 1)), 1).index_put((rows, parents), reach.new_ones(()))[:, :n]
    for _ in range((n - 1).bit_length()):
        reach = (reach @ reach).clamp_(max=1)
    return reach > 0


def tree_mask(seen, cached, window=None, dtype=torch.float32, device="cpu"):
    """Additive mask (1, 1, n, cached + n) over the cached prefix and the tree: 0 where a node may look, else -inf.

    seen: (n, n) bool, the tree's ancestor_mask.  window: a node sees the last `window` positions up to its own, as
    sliding-window models do.  Rows are laid out a multiple of 16 apart, as CUDA's kernels want them.
    """
    n = seen.shape[0]
    wide = -(-(cached + n) // 16) * 16
    mask = torch.zeros(n, wide, dtype=dtype, device=device)[:, :cached + n]
    mask[:, cached:].masked_fill_(~seen.to(device), float("-inf"))
    if window is not None:
        position = (cached + seen.sum(1) - 1).to(device)
        key_position = torch.cat((torch.arange(cached, device=device), position))
        mask.masked_fill_(position[:, None] - key_position >= window, float("-inf"))
    return mask[None, None]


# ---------------------------------------------------------------- the target
class TreeLayer(CacheLayerMixin):
    """One layer of the TreeCache, in the shape in which transformers asks for it."""

    def __init__(self, cache, index):
        super().__init__()
        self.cache, self.index, self.is_initialized = cache, index, True

    def lazy_initialization(self, key_states, value_states=None):
        pass

    def update(self, key_states, value_states, *args, **kwargs):
        """Write the rows of the nodes behind the cached ones; return all rows up to them (views)."""
        return self.cache.write(self.index, key_states, value_states)

    def get_seq_length(self, *args):
        return self.cache.length

    def get_mask_sizes(self, query_length):
        return self.cache.length + query_length, 0

    def get_max_length(self):
        return self.cache.capacity

    get_max_cache_shape = get_max_length


class TreeCache(Cache):
    """Preallocated keys and values, (L, 1, H, capacity, d) each; rows from `length` on belong to the tree in hand."""

    def __init__(self, layers, capacity):
        super().__init__(layers=[TreeLayer(self, i) for i in range(layers)])
        self.capacity, self.length, self.keys, self.values = capacity, 0, None, None

    def write(self, layer, k, v):
        if self.keys is None:
            self.keys, self.values = (x.new_zeros(len(self.layers), *x.shape[:2], self.capacity, x.shape[3]) for x in (k, v))
        end = self.length + k.shape[2]
        keys, values = self.keys[layer, :, :, :end], self.values[layer, :, :, :end]
        keys[:, :, self.length:] = k
        values[:, :, self.length:] = v
        return keys, values

    def commit(self, path):
        """Keep the tree's rows `path` (ascending), moved together behind the cached ones; the rest is forgotten."""
        if path != list(range(len(path))):
            rows = torch.tensor(path, device=self.keys.device) + self.length
            for store in (self.keys, self.values):
                store[..., self.length:self.length + len(path), :] = store.index_select(-2, rows)
        self.length += len(path)


def capture(model, indices, into):
    """Forward hooks that leave hidden_states[k] (k >= 1: the output of layer k) of every forward in into[k] -> the hooks.

    Hooks, since the numbering of output_hidden_states differs between releases; the last one is not normed here.
    """
    def hook(k):
        def keep(module, args, out):
            into[k] = out[0] if isinstance(out, tuple) else out
        return keep
    if not indices:
        return []
    n = model.config.get_text_config().num_hidden_layers
    blocks = next(m for m in model.get_decoder().modules() if isinstance(m, torch.nn.ModuleList) and len(m) == n)
    return [blocks[k - 1].register_forward_hook(hook(k)) for k in indices]


class Target:
    """Any Hugging Face decoder-only causal LM, unchanged, with a TreeCache; an encoder-decoder model for chains.

    forward(tokens, parents) -> logits (n, V) of a tree's nodes, which become permanent by commit(path).
    sync(ids) -> logits (V,) after the last of ids: keeps the longest common prefix in the cache and forwards the rest.
    encode(ids): the encoder's input, once a prompt; the decoder then starts from `start`, its start token.
    capacity: the most positions, prompt and new tokens; the model's context when None.
    """

    def __init__(self, model, capacity=None, max_nodes=512):
        self.encoder_decoder = model.config.is_encoder_decoder
        config = model.config if self.encoder_decoder else model.config.get_text_config()
        kind = getattr(config, "_attn_implementation", None)
        if kind not in (None, "sdpa", "eager"):
            raise UserError(f"attn_implementation {kind} takes no tree mask: load the model with 'sdpa' or 'eager'")
        self.model, self.config, self.max_nodes = model.eval(), config, max_nodes
        self.start = getattr(model.generation_config, "decoder_start_token_id", None) if self.encoder_decoder else None
        self.depth = getattr(config, "num_decoder_layers", None) or config.num_hidden_layers      # T5's name for the decoder's layers
        self.context = getattr(config, "max_position_embeddings", None) or 2048
        self.capacity = min(capacity or self.context, self.context)
        self.device, self.dtype = model.device, model.dtype
        # A 4-D mask switches the model's own sliding window off, so the window goes into the mask, by kind of layer.
        window = getattr(config, "sliding_window", None)
        kinds = getattr(config, "layer_types", None) or ["sliding_attention" if window else "full_attention"] * config.num_hidden_layers
        if unknown := set(kinds) - {"full_attention", "sliding_attention"}:
            raise UserError(f"{type(model).__name__} has layers of kind {', '.join(sorted(unknown))}, which keep no KV rows to verify a tree with")
        if config.model_type in ("bloom", "mpt") or getattr(config, "alibi", False):
            raise UserError(f"{type(model).__name__} builds its position biases (ALiBi) from a 2-D mask, which cannot say what a tree is")
        self.windows = {kind: window if kind == "sliding_attention" else None for kind in kinds}
        self.hooks, self.captured, self.rows, self.needs = [], {}, {}, {}
        self.reset()

    def reset(self):
        """Forget everything; the allocated memory is kept."""
        if not hasattr(self, "cache"):
            self.cache = TreeCache(self.depth, self.capacity + self.max_nodes)
        self.cache.length, self.ids, self.shown = 0, [], 0
        self.hidden = {k: [] for k in self.needs.get("hidden", ())}

    def watch(self, needs):
        """Say what a drafter reads: {"kv": [layers], "hidden": [Hugging Face's hidden_states indices >= 1]}."""
        for hook in self.hooks:
            hook.remove()
        self.needs, self.captured = needs, {}
        self.hooks = capture(self.model, needs.get("hidden", ()), self.captured)
        self.reset()

    def encode(self, ids):
        """Run the encoder over ids (list), once; the decoder's cache is emptied, its cross-attention is computed at its first step."""
        ids = torch.tensor([ids], device=self.device)
        self.encoded = self.model.get_encoder()(input_ids=ids, attention_mask=torch.ones_like(ids))
        self.crossed = EncoderDecoderCache(self.cache, DynamicCache())
        self.reset()

    def forward(self, tokens, parents=None, logits_to_keep=0):
        """Forward a tree (or, without parents, a chain) behind the cached prefix, each node once.

        tokens (n,), parents (n,) -> logits (n, V), or (logits_to_keep, V).  Nothing is kept until commit().
        """
        n, t = tokens.shape[0], self.cache.length
        assert t + n <= self.cache.capacity, f"{n} nodes behind {t} cached tokens exceed the cache of {self.cache.capacity}"
        if self.encoder_decoder:
            if parents is not None and parents.tolist() != list(range(-1, n - 1)):
                raise UserError(f"{type(self.model).__name__} verifies chains only: relative positions of its decoder follow the order of "
                                "the cache, not the depth in a tree; use --tree chain")
            return self.model(encoder_outputs=self.encoded, decoder_input_ids=tokens[None].to(self.device),
                              past_key_values=self.crossed, use_cache=True).logits[0, -logits_to_keep:]
        if n == 1 and all(w is None or t < w for w in self.windows.values()):
            position, mask = torch.full((1, 1), t, device=self.device), None           # a lone token may look everywhere
        else:
            seen = torch.ones(n, n, dtype=torch.bool).tril_() if parents is None else ancestor_mask(parents)
            position = (t + seen.sum(1) - 1).to(self.device)[None]
            masks = {kind: tree_mask(seen, t, w, self.dtype, self.device) for kind, w in self.windows.items()}
            mask = masks if len(masks) > 1 else next(iter(masks.values()))
        out = self.model(input_ids=tokens[None].to(self.device), position_ids=position, attention_mask=mask,
                         past_key_values=self.cache, use_cache=True, logits_to_keep=logits_to_keep)
        self.rows = {k: h[0] for k, h in self.captured.items()}      # (n, D): of this forward, whoever else runs the model
        return out.logits[0]

    def commit(self, path, tokens):
        """Keep the nodes `path` (ascending list) of the last forward, whose ids are `tokens` (list)."""
        self.cache.commit(path)
        self.ids += tokens
        for k in self.hidden:
            self.hidden[k].append(self.rows[k][path])

    def sync(self, ids, rows=None):
        """Make the cache hold ids, forwarding what is missing -> logits (V,) after ids[-1]; with `rows`, (rows, V): after the last so many."""
        same = min(len(self.ids), len(ids) - (rows or 1))          # what must be forwarded is not looked for in the cache
        if self.ids[:same] != ids[:same]:
            same = next(i for i, (a, b) in enumerate(zip(self.ids, ids)) if a != b)
        self.cache.length, self.shown = same, min(self.shown, same)
        del self.ids[same:]
        logits = self.forward(torch.tensor(ids[same:], device=self.device), logits_to_keep=rows or 1)
        self.commit(list(range(len(ids) - same)), list(ids[same:]))
        return logits if rows else logits[-1]

    def view(self):
        """What was committed since the last view, and what the drafter reads of it."""
        t, new = self.cache.length, self.ids[self.shown:]
        self.shown = t
        hidden = {k: rows[0] if len(rows) == 1 else torch.cat(rows) for k, rows in self.hidden.items() if rows}
        self.hidden = {k: [] for k in self.hidden}
        return View(torch.tensor(new, device=self.device), t,
                    {i: (self.cache.keys[i, :, :, :t], self.cache.values[i, :, :, :t]) for i in self.needs.get("kv", ())}, hidden)


# ---------------------------------------------------------------- acceptance
def warper(temperature=1.0, top_k=None, top_p=None):
    """transformers' own logits processors as one function, logits (n, V) -> probabilities (n, V)."""
    from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper
    chain = [TemperatureLogitsWarper(float(temperature))] if temperature != 1 else []
    chain += [TopKLogitsWarper(top_k)] if top_k else []
    chain += [TopPLogitsWarper(top_p)] if top_p is not None and top_p < 1 else []

    def warp(logits):
        for processor in chain:
            logits = processor(None, logits)
        return logits.softmax(-1)
    return warp


def keyed_noise(seed, position, vocab, device, dtype=torch.float32):
    """Exponential noise (vocab,) that depends on (seed, position) alone: argmax(p / noise) is a draw from p."""
    key = (seed * 0x9E3779B97F4A7C15 + position * 0xBF58476D1CE4E5B9 + 1) % 2**64
    generator = torch.Generator(device).manual_seed((key ^ key >> 31) % 2**63)
    return torch.empty(vocab, device=device, dtype=dtype).exponential_(generator=generator)


def accept(tree, choice):
    """Walk down while the target's choice is a child.  -> (path of node indices, root first; the target's token after each).

    choice: (n,) the target's token after each node: its argmax (greedy), or its keyed draw (sampling).  One host read.
    """
    tokens, choice = torch.stack((tree.tokens, choice)).tolist()
    child = {}
    for i, (parent, token) in enumerate(zip(tree.parents.tolist(), tokens)):
        child.setdefault((parent, token), i)
    path = [0]
    while (path[-1], choice[path[-1]]) in child:
        path.append(child[path[-1], choice[path[-1]]])
    return path, [choice[node] for node in path]


def accept_drawn(tree, p_target, generator):
    """Speculative sampling of a drawn chain (Leviathan et al. 2023): the output follows p_target exactly.  Returns as accept().

    Node i + 1, drawn from p_draft[i], is accepted with probability min(1, p_target[i] / p_draft[i]) of its token; at the
    first rejection the next token is drawn from the normalised positive part of p_target[i] - p_draft[i].
    """
    drawn, rows = tree.tokens[1:, None], p_target[:-1]
    ratio = rows.gather(1, drawn) / tree.p_draft.gather(1, drawn)                              # (n - 1, 1)
    u = torch.rand(ratio.shape, generator=generator, device=ratio.device, dtype=ratio.dtype)
    k = (u < ratio)[:, 0].long().cumprod(0).sum()                                              # nodes accepted
    left = torch.cat((tree.p_draft, torch.zeros_like(p_target[:1])))[k]
    residual = (p_target[k] - left).clamp(min=0)
    # Rounding can leave nothing where both distributions are the same; then a rejection had probability zero.
    residual = torch.where(residual.sum() > 0, residual, p_target[k])
    token = torch.multinomial(residual, 1, generator=generator)
    k, token, *drawn = torch.cat((k[None], token, tree.tokens[1:])).tolist()
    return list(range(k + 1)), drawn[:k] + [token]


# ---------------------------------------------------------------- the loop
@dataclass
class Output:
    """What generate() returns.  tokens: the new ids.  Times in seconds; tau and alpha as the design's words define them."""
    tokens: list
    rounds: int = 0
    nodes: int = 0                  # tree nodes verified, roots not counted
    depth: int = 0                  # sum of the trees' depths
    accepted: int = 0               # drafted tokens that became output
    tested: int = 0                 # drafted tokens on chains that the target judged
    overlap: float = 0.0            # sum over tested draws of sum_x min(p_target, p_draft)
    draft_forwards: int = 0
    draft: float = 0.0
    verify: float = 0.0
    other: float = 0.0
    prefill: float = 0.0
    runs: list = field(default_factory=list)      # tokens gained in each round, the bonus token included
    stage_runs: list = field(default_factory=list)      # forwards of each stage of a cascade
    drawn: bool = False             # a drawn chain: the same distribution as plain sampling, not the same tokens
    chain: bool = True

    @property
    def tau(self):
        """Average acceptance length: new tokens a round, the bonus token included; prefill and its token left out."""
        return sum(self.runs) / max(1, self.rounds)

    @property
    def alpha(self):
        """Accepted / tested drafted tokens on chains; None for trees, or where nothing was tested."""
        return self.accepted / self.tested if self.chain and self.tested else None


def clock(device):
    """A mark in time: on CUDA an event in the stream (no synchronisation), elsewhere the clock."""
    if torch.device(device).type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def between(a, b):
    """Seconds between two marks."""
    return b - a if isinstance(a, float) else a.elapsed_time(b) / 1000


def proposal(expand, root, generator=None):
    """The chain that a sequence drafter (one with chain(): a cascade, Max-Gram) proposes itself; drawn, if a generator is given."""
    tokens, p_draft = expand.chain(generator)
    return Tree(torch.cat((root, torch.tensor(tokens, dtype=torch.long, device=root.device))), torch.arange(-1, len(tokens)), p_draft)


def no_draft(expand, root):
    """The tree of plain decoding: the root alone."""
    return Tree(root, torch.tensor([-1]))


def no_draft_padded(expand, root):
    """Plain decoding padded to two queries: one query takes a slow matrix-vector path on many CPUs.

    The second node is another root, nobody's child, so it can never be accepted.
    """
    return Tree(root.repeat(2), torch.tensor([-1, -1]))


@torch.inference_mode()
def generate(target, drafter, build, input_ids, max_new_tokens=128, temperature=0.0, top_k=None, top_p=None,
             eos_token_id=None, seed=0):
    """Speculative decoding of one sequence (GLIDE, Figures 1 and 2); plain decoding with drafter None, build no_draft.

    target: Target.  build(expand, root (1,)) -> Tree, a function such as those of cape.py.
    drafter: any object with `needs` (see Target.watch), reset(), begin(view): a round starts, expand(tokens (m,), parents [m
    ints, -1 for the root]) -> probabilities (m, V) at temperature 1 (a row of zeros: cannot go on), keep(tokens): the
    accepted ids of the round, root first.  Where it has a `temperature`, greedy decoding shows builders its distributions at
    that one (temperature scaling: what it is most sure of stays, how sure it is becomes calibrated).  A sequence drafter has
    chain(root, most, warp, generator) -> (tokens, p_draft) too, which `proposal` asks for, `runs` (forwards of each stage), and
    source(ids) where the target has an encoder.
    input_ids: list of ids or tensor (n,) or (1, n).  temperature 0 is greedy.  eos_token_id: int, list or None.
    Returns Output.  Raises UserError for an empty prompt and for one that leaves no room in the context.
    """
    ids = torch.as_tensor(input_ids).flatten().tolist()
    if not ids:
        raise UserError("the prompt is empty: give at least one token")
    room = target.capacity - (1 if target.encoder_decoder else len(ids)) + 1           # the last token produced need not be forwarded
    if room < 1:
        raise UserError(f"the prompt has {len(ids)} tokens, but the target's context holds {target.capacity}: shorten it")
    if max_new_tokens < 1:
        raise UserError(f"max_new_tokens is {max_new_tokens}: ask for at least 1")
    limit = min(max_new_tokens, room)
    eos = set() if eos_token_id is None else {eos_token_id} if isinstance(eos_token_id, int) else set(eos_token_id)
    warp = warper(temperature, top_k, top_p) if temperature > 0 else None
    generator = torch.Generator(target.device).manual_seed(seed)
    marks, spans, expanding = [], [], []            # (start, built, verified, end) of each round; (start, end) of each expand
    out, noise = Output([]), {}

    def choose(logits, positions):
        """The target's token after nodes whose next token has these positions.  logits (n, V), positions (n,) list."""
        if not warp:
            return logits.argmax(-1)
        p = warp(logits.float())
        for q in [q for q in noise if q < min(positions)]:          # positions met again in the next round keep their noise
            del noise[q]
        for q in set(positions) - set(noise):
            noise[q] = keyed_noise(seed, q, p.shape[-1], p.device)
        return (p / torch.stack([noise[q] for q in positions])).argmax(-1)

    def expand(tokens, parents):
        """The drafter's distributions, as the builder sees them: warped like the target's, zero at the length limit."""
        start = clock(target.device)
        for parent in parents:
            depths.append(depths[parent] + 1 if parent >= 0 else 0)
        new = depths[-len(parents):]
        probs = drafter.expand(tokens, parents)
        out.draft_forwards += 1
        expanding.append((start, clock(target.device)))
        if warp:
            probs = warp(probs.log()).nan_to_num(0.0)           # an all-zero row stays one
        elif sharp != 1:
            probs = (probs.log() / sharp).softmax(-1).nan_to_num(0.0)
        last = limit - len(out.tokens) - 1                      # a node this deep has no room for a child
        if max(new) >= last:
            probs = probs.masked_fill(torch.tensor([[d >= last] for d in new], device=probs.device), 0)
        return probs

    def own_chain(generator=None):
        """A sequence drafter's own chain, no longer than the length limit allows -> (tokens, p_draft)."""
        start, most = clock(target.device), limit - len(out.tokens) - 1
        drafted = drafter.chain(out.tokens[-1], most, warp, generator) if most > 0 else ([], None)
        expanding.append((start, clock(target.device)))
        return drafted
    expand.chain = own_chain

    sharp = getattr(drafter, "temperature", 1.0)    # at which the drafter's confidence in the greedy choice is calibrated
    begun = clock(target.device)
    target.watch(drafter.needs if drafter else {})
    if drafter:
        drafter.reset()
    if target.encoder_decoder:
        target.encode(ids)
        if hasattr(drafter, "source"):
            drafter.source(ids)
        ids = [target.start]
    logits = target.sync(ids)                                                          # prefill
    root = choose(logits[None], [len(ids)])
    out.tokens.append(root.item())
    marks.append((begun, clock(target.device)))
    while len(out.tokens) < limit and out.tokens[-1] not in eos:
        start = clock(target.device)
        depths = []                                 # of this round's nodes, in the order of expand
        if drafter:
            drafter.begin(target.view())
            spans.append((start, clock(target.device)))
        tree = build(expand, root)                                                     # draft
        built = clock(target.device)
        logits = target.forward(tree.tokens, tree.parents)                             # verify
        verified = clock(target.device)
        parents, levels = tree.parents.tolist(), []
        for parent in parents:
            levels.append(levels[parent] + 1 if parent >= 0 else 1)
        out.drawn |= tree.p_draft is not None
        if tree.p_draft is not None:                                                   # accept
            if not warp:
                raise UserError("a drawn chain is accepted by sampling: give a temperature above 0, or a builder without `pick`")
            p_target = warp(logits.float())
            path, new = accept_drawn(tree, p_target, generator)
        else:
            path, new = accept(tree, choose(logits, [target.cache.length + depth for depth in levels] if warp else ()))
        kept = out.tokens[-1:] + new[:-1]                                              # the root and what was accepted
        target.commit(path, kept)                                                      # commit
        if drafter:
            drafter.keep(kept)
        root = torch.tensor(new[-1:], device=target.device)

        drafted = tree.tokens.shape[0] - 1 if drafter else 0
        new = new[:limit - len(out.tokens)]
        new = new[:next((i + 1 for i, x in enumerate(new) if x in eos), len(new))]
        gained = min(len(path) - 1, len(new))
        tested = gained + (gained < len(new) and gained < drafted)     # beyond a cut by EOS or the limit nothing was tested
        if tree.p_draft is not None and tested:
            out.overlap = out.overlap + torch.minimum(p_target[:tested], tree.p_draft[:tested]).sum()      # read at the end
        out.tokens += new
        out.runs.append(len(new))
        out.rounds += 1
        out.nodes += drafted
        out.accepted += gained
        out.tested += tested
        out.depth += max(levels) - 1
        out.chain &= not drafter or parents == list(range(-1, drafted))
        marks.append((start, built, verified, clock(target.device)))

    if torch.device(target.device).type == "cuda":
        torch.cuda.synchronize()
    out.overlap = float(out.overlap)
    out.stage_runs = list(getattr(drafter, "runs", ()))
    out.draft_forwards += sum(out.stage_runs)
    out.prefill = between(*marks[0])
    out.draft = sum(between(a, b) for a, b in spans + expanding)
    out.verify = sum(between(b, v) for _, b, v, _ in marks[1:])
    out.other = sum(between(a, e) for a, _, _, e in marks[1:]) - out.draft - out.verify
    return out


# ---------------------------------------------------------------- demo
def main():
    """A random tiny Llama: a drafter that knows the answer and one that knows nothing give plain decoding's output."""
    from transformers import LlamaConfig, LlamaForCausalLM
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=50, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                                         num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64)).double().eval()
    prompt, new = [3, 1, 4, 1, 5], 40
    plain = list(prompt)
    for _ in range(new):                          # the model's own plain forward: no cache, no mask of ours
        plain.append(model(torch.tensor([plain])).logits[0, -1].argmax().item())
    target = Target(model)

    def chain_of(guess, length=4):
        def build(expand, root):
            done = target.cache.length            # the root is token number `done`
            return Tree(torch.cat((root, torch.tensor(guess(done + 1, length)))), torch.arange(-1, length))
        return build

    for name, guess in (("knows the answer", lambda i, k: (plain + [0] * k)[i:i + k]), ("knows nothing", lambda i, k: [7] * k)):
        out = generate(target, None, chain_of(guess), prompt, max_new_tokens=new)
        assert prompt + out.tokens == plain, name
        print(f"a drafter that {name}: {new} tokens in {out.rounds} rounds, token for token plain decoding's")


if __name__ == "__main__":
    main()
