"""Tree verification: the target model, its KV cache, the acceptance rules and the decoding loop.

GLIDE with a CAPE (arXiv 2402.02082), sections 3 and 4.2, Figures 1 and 2; the loop also serves the Pruned
Candidate Tree (ACL 2025) and Cascade Speculative Drafting (arXiv 2312.11462).

The idea.  A drafter proposes a tree of tokens that hangs from the root, the last token that the target has
produced but not yet read.  One forward of the target over all nodes, in which a node sees the cached prefix
and its own ancestors, gives the target's choice after every node.  Walk down from the root while that
choice is a child; the first that is not is the next root.  The output is the target's own, whatever the
drafter says.

    paper                  shape               name here
    x_{<t}, its K and V    L x 2 x (1,H,t,d)   TreeCache.keys / values [layer][:, :, :t]
    x_t, not cached yet    ()                  the root: tree.tokens[0]
    proposal P             (n,)                tree.tokens; tree.parents[0] = -1, parents before children
    mask_CAPE              (n, t + n)          tree_mask(ancestor_mask(parents), t)
    p_T(.|node)            (n, V)              p_target
    p_D(.|node)            (n - 1, V)          tree.p_draft: node i + 1 was drawn from row i (drawn chains)

The contract.  A builder, build(expand, root (1,)) -> Tree, asks expand(tokens (m,), parents [m ints]) for
probabilities (m, V); parents count the nodes in the order given to expand in this round, -1 is the committed
prefix.  It adds no child of probability zero.  Where the drafter finds 3 after the root 7, and then 5:
    rows = expand(torch.tensor([7]), [-1])                # node 0; rows[0].argmax() == 3
    rows = expand(torch.tensor([3]), [0])                 # node 1, below node 0; rows[0].argmax() == 5
    return Tree(torch.tensor([7, 3, 5]), torch.tensor([-1, 0, 1]))
(A node but the root with parent -1 is absent: a place that a builder which reads nothing back left empty.)
A drafter has
    needs                    what it reads: {"kv": [layers], "hidden": [hidden_states indices >= 1]}, or {}
    reset(), begin(view)     a new sequence; a new round, with what was committed since the last one (View)
    expand(tokens, parents)  as above, but -> logits (m, V); a row of -inf: it cannot go on there
    keep(path)               the nodes (numbers as in parents) that were accepted, root first; forget others
and may have temperature (1.0), at which its confidence in the argmax is calibrated; vocab, how many ids it
knows, and device, where it wants its tokens, if not the target's; call, by which it runs its forwards, as
direct() does, and in whose place it gets a Static on CUDA.  One that writes chains itself has chain(root,
most, warp, generator) -> (tokens, p_draft), for the builder cascade.proposal.

Differences from the paper:
 1. The root is a node: the paper's mask leaves x_t out (the proposal starts at x_{t+1}), though it must be
    read.
 2. Sampling over a tree is stated nowhere (CAPE is evaluated greedily).  Here the target's own draw, with
    noise keyed by (seed, position), decides at each node: the output is plain sampling's with that seed.
 3. Greedy decoding shows builders softmax(logits / temperature): a drafter that learned the target's
    distribution knows how often the target would draw its token, not how often that is the argmax.

    python verify.py      # the demo: a random Llama and a drafter that knows the answer
"""
import hashlib
import sys
from collections import namedtuple
from functools import lru_cache, partial
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from transformers.cache_utils import Cache
from transformers.generation import logits_process, stopping_criteria

Tree = namedtuple("Tree", "tokens parents p_draft", defaults=(None,))
# What a drafter is shown: tokens (k,) committed since the last round; length: all that is cached, with those;
# kv {layer: (K, V), each (1, H, length or more, d)}; hidden {index: (k, D)}, rows of `tokens`.
View = namedtuple("View", "tokens length kv hidden")

SLICE = 512              # tokens of a prompt that are read at once
MOST_NODES = 512         # of a tree, the root counted
GRAPHED = 64             # nodes; a larger forward keeps a GPU busy without a graph
KEYS = 256               # padded forwards read so many rows of the cache, or twice, three times ... as many

class UserError(ValueError):
    """A user's mistake, in one sentence that says what to do.  Programs print it and exit with 2."""

# ---------------------------------------------------------------- a tree from its parents
def ancestor_mask(parents):
    """(n,) parents -> (n, n) bool: entry (i, j) says that j is i or above it."""
    n = parents.shape[0]
    # A further row, number n, stands for "nothing above": it sees nothing and has itself above it.
    above = torch.cat((parents, parents.new_full((1,), n)))
    above = torch.where(above < 0, n, above)                                           # (n + 1,)
    # Each sees itself
    seen = torch.eye(n + 1, dtype=torch.bool, device=parents.device)
    seen[n].fill_(False)
    # Copy the row of the node above; as that row then reaches a step further, of the node two above, four ...
    for _ in range((n - 1).bit_length()):
        seen = seen | seen[above]
        above = above[above]
    return seen[:n, :n]

def tree_mask(seen, cached, window=None, dtype=torch.float32, keys=None):
    """Additive mask (1, 1, n, keys) over cached prefix and tree: 0 where a node may look, else -inf.

    seen (n, n) bool: the tree's ancestor_mask.  cached: how many tokens the cache holds, int or tensor ().
    window: a node sees the last `window` positions up to its own, as sliding-window models do.
    keys: rows of the cache that are read, cached + n or, where they are padded, more.
    """
    n, device = seen.shape[0], seen.device
    keys = cached + n if keys is None else keys
    row = torch.arange(keys, device=device)
    slots = cached + torch.arange(n, device=device)            # the nodes' rows
    # mask_CAPE: all of the prefix, and of the tree a node itself and what is above it
    looks = (row < cached).repeat(n, 1)                                                # (n, keys)
    looks.index_copy_(1, slots, seen)
    if window is not None:
        position = cached + seen.sum(1) - 1                                            # (n,)
        key_position = row.index_copy(0, slots, position)                              # (keys,)
        looks &= position[:, None] - key_position < window
    # CUDA's kernels want rows that lie a multiple of 16 apart.
    mask = torch.zeros(n, -(-keys // 16) * 16, dtype=dtype, device=device)[:, :keys]
    return mask.masked_fill_(~looks, float("-inf"))[None, None]

# ---------------------------------------------------------------- static shapes and CUDA graphs
def direct(run, reserve, keys, numbers, *tensors):
    """Run a forward as it is: have room for so many keys, then run(keys, numbers, *tensors)."""
    reserve(keys)
    return run(keys, numbers, *tensors)

class Static:
    """The same in few shapes, each as a CUDA graph.

    At batch 1 a forward launches hundreds of kernels of some microseconds each, and launching them takes
    longer than running them.  A graph records which kernels ran on which addresses, and replays all by one
    launch.  Hence shapes and addresses must stay: rows are padded to a power of two, keys to a multiple of
    256; inputs are copied into the tensors that the graph was recorded with; numbers of the host become
    tensors.  Before recording the function runs twice, since libraries set themselves up at a first call,
    which no recording may see.  What is computed for rows that pad is cut off, or written over later.
    """

    def __init__(self, device, graphs=True, least=1):
        """graphs: record them, where the device has them.  least: rows of every forward."""
        self.device, self.least = torch.device(device), least
        self.graphs, self.recorded = graphs and self.device.type == "cuda", {}
        self.pool = None                                       # the memory that all recordings share
        self.numbers = torch.zeros(4, dtype=torch.long, device=device)

    def __call__(self, run, reserve, keys, numbers, *tensors):
        """As direct().  tensors: (n, ...), flags (n, nodes) with columns to pad; numbers: ints.

        -> what run() returns, n rows of each.  reserve(keys) says where the caches lie.
        """
        n = len(tensors[0])
        if n > GRAPHED:                                        # it keeps a GPU busy as it is
            return direct(run, reserve, keys, numbers, *tensors)
        size = max(1 << (n - 1).bit_length(), self.least)
        padded, more = [], size - n                            # more: rows behind the last node's
        for x in tensors:
            pad = [0, 0] * (x.ndim - 1) + [0, size - n]
            if x.dtype == torch.bool:
                nodes = x.shape[1]
                pad[1] = (1 << (nodes - 1).bit_length()) - nodes
                more = max(more, pad[1])
            padded.append(F.pad(x, pad))
        keys = -(-(keys + more) // KEYS) * KEYS
        place = reserve(keys)
        padded[:0] = [self.numbers[i].fill_(number) for i, number in enumerate(numbers)]
        count = len(numbers)

        def function(*padded):
            return run(keys, padded[:count], *padded[count:])
        key = (run.__name__, keys, place, *(x.shape for x in padded))
        return [rows[:n] for rows in self.replay(key, function, padded)]

    def replay(self, key, function, tensors):
        """function(*tensors) -> a list of tensors, by a recording where there can be one."""
        if self.graphs and key not in self.recorded:
            held = [x.clone() for x in tensors]
            try:
                self.recorded[key] = held, self.record(function, held)
            except RuntimeError as why:
                self.graphs = False
                print(f"no CUDA graphs, this model cannot be recorded: {str(why).splitlines()[0][:100]}",
                      file=sys.stderr)
        if not self.graphs:
            return function(*tensors)
        held, replay = self.recorded[key]
        for kept, x in zip(held, tensors):
            kept.copy_(x)
        return [x.clone() for x in replay()]

    def record(self, function, held):
        """function(*held) as a callable without arguments, whose results lie at fixed addresses."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            function(*held)
            function(*held)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # One pool serves all: no two replay at once, and results are copied out before the next one does.
        self.pool = self.pool or torch.cuda.graph_pool_handle()
        with torch.cuda.graph(graph, pool=self.pool):
            out = function(*held)

        def replay():
            graph.replay()
            return out
        return replay

# ---------------------------------------------------------------- the target
class TreeCache(Cache):
    """Keys and values of each layer, (1, H, rows, d); rows from `length` on belong to the tree in hand.

    slots, read: of a padded forward the rows that its nodes get, (n,) on the device, and how many it reads.
    """

    def __init__(self, most):
        super().__init__(layers=[])
        self.rows, self.length, self.most = 0, 0, most
        self.keys, self.values = {}, {}                        # by layer: a model may share, or vary in size
        self.slots, self.read, self.unit = None, None, 1       # unit: rows come in multiples of it

    def reserve(self, rows):
        """Have room for so many rows -> how many there are.  What is there stays."""
        if rows <= self.rows:
            return self.rows
        if self.keys:
            # Twice as many, so that growing costs each row a constant
            rows = max(rows, min(2 * self.rows, self.most))
        rows = -(-rows // self.unit) * self.unit
        for held in (self.keys, self.values):
            for layer in held:
                held[layer] = F.pad(held[layer], (0, 0, 0, rows - self.rows))
        self.rows = rows
        return rows

    def update(self, k, v, layer_idx, *args, **kwargs):
        """Write the nodes' rows of one layer, (1, H, n, d) each, behind the cached ones -> all (views)."""
        if layer_idx not in self.keys:
            self.keys[layer_idx] = k.new_zeros(*k.shape[:2], self.rows, k.shape[3])
            self.values[layer_idx] = v.new_zeros(*v.shape[:2], self.rows, v.shape[3])
        # The rows of a node stay void until commit() moves `length` beyond them.
        end = self.read or self.length + k.shape[2]
        keys = self.keys[layer_idx][:, :, :end]
        values = self.values[layer_idx][:, :, :end]
        if self.read:
            keys.index_copy_(2, self.slots.to(k.device), k)
            values.index_copy_(2, self.slots.to(v.device), v)
        else:
            keys[:, :, self.length:] = k
            values[:, :, self.length:] = v
        return keys, values

    def get_seq_length(self, layer_idx=0):
        return self.length

    def get_mask_sizes(self, query_length, layer_idx=0):
        return self.length + query_length, 0

    def commit(self, count, index=None):
        """Keep `count` rows of the tree: the first, or those of index (count,), moved together."""
        if index is not None:
            index = index + self.length
            for rows in (*self.keys.values(), *self.values.values()):
                moved = rows.index_select(2, index.to(rows.device))
                rows[:, :, self.length:self.length + count] = moved
        self.length += count

def capture(model, indices, into):
    """Forward hooks that leave hidden_states[k] (k >= 1: the output of layer k) of every forward in into[k].

    Hooks, since releases number output_hidden_states differently; the last layer's is not normed here.
    """
    def hook(k):
        def keep(module, args, out):
            into[k] = out[0] if isinstance(out, tuple) else out
        return keep
    if not indices:
        return []
    # The decoder's layers: the one list of modules that is as long as the configuration says
    layers = model.config.get_text_config().num_hidden_layers
    lists = [m for m in model.get_decoder().modules() if isinstance(m, torch.nn.ModuleList)]
    blocks = next((m for m in lists if len(m) == layers), None)
    if blocks is None:
        raise UserError(f"{type(model).__name__} has no list of {layers} layers whose outputs can be read: "
                        "take a drafter that reads none")
    return [blocks[k - 1].register_forward_hook(hook(k)) for k in indices]

def windows_of(model, config):
    """{kind of layer: its sliding window, or None}: a 4-D mask switches the model's own window off."""
    name, window = type(model).__name__, getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention" if window else "full_attention"]
    unknown = sorted(set(kinds) - {"full_attention", "sliding_attention"})
    if unknown:
        raise UserError(f"{name} has layers of kind {', '.join(unknown)}, which keep no KV rows for a tree")
    attention = getattr(config, "_attn_implementation", None)
    if attention not in (None, "sdpa", "eager"):
        raise UserError(f"attn_implementation {attention} takes no tree mask: load with 'sdpa' or 'eager'")
    return {kind: window if kind == "sliding_attention" else None for kind in kinds}

def turning_point(config):
    """The length from which on a rotary table is another one for all positions (longrope), or None."""
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") != "longrope":
        return None
    return rope.get("original_max_position_embeddings") or config.original_max_position_embeddings

def context_of(model, config):
    """How many positions a text may have, as the configuration says."""
    names = ("max_position_embeddings", "max_seq_len")
    context = next((getattr(config, name) for name in names if getattr(config, name, None)), 2048)
    for name, module in model.named_modules():
        # RoBERTa's table begins with places that no text takes.
        if name.endswith("position_embeddings") and getattr(module, "padding_idx", None) is not None:
            context -= module.padding_idx + 1
    return max(context, 0)

def device_of(model):
    """Where a model takes its input: one that is spread over devices has its embeddings there."""
    places = getattr(model, "hf_device_map", None)
    if not places:
        return model.device
    hook = getattr(model.get_input_embeddings(), "_hf_hook", None)
    return torch.device(getattr(hook, "execution_device", None) or model.device)

def with_vocabulary(logits, vocab):
    """Rows (n, V) as rows (n, vocab): what lies beyond is cut off, an id that is missing gets -inf."""
    missing = vocab - logits.shape[-1]
    return F.pad(logits, (0, missing), value=float("-inf")) if missing else logits

def is_chain(parents):
    """Whether the nodes (n,) follow each other; absent ones may lie behind them."""
    before = torch.arange(len(parents), device=parents.device) - 1
    return not ((parents >= 0) & (parents != before)).any()

class Target:
    """Any Hugging Face decoder-only causal LM, unchanged, with a TreeCache.

    forward(tokens, parents) -> logits (n, V) of a tree's nodes, which become permanent by commit(path).
    sync(ids) -> logits (V,) after the last of ids: the longest common prefix stays, the rest is forwarded.
    capacity: the most positions, prompt and new tokens; the model's context when None.  vocab: how many ids
    its rows of logits shall have, where a smaller model stands beside a target whose vocabulary is padded
    otherwise.  padded: static shapes; None: on CUDA, since on a CPU each row takes its time.  graphs: record
    them there.  exact: one size for every forward of up to 64 nodes, plain decoding's too, so that in half
    precision a row is rounded alike whatever stands beside it; behind a branch of a tree, though, keys lie at
    other places, and sums over them may round otherwise.  verifies_trees: what prove() found.  Raises
    UserError for a model that cannot be decoded so.
    """
    encoder_decoder = False
    proven = WeakKeyDictionary()                               # {model: its verifies_trees}

    def __init__(self, model, capacity=None, vocab=None, padded=None, graphs=True, exact=False):
        config = model.config if model.config.is_encoder_decoder else model.config.get_text_config()
        self.model, self.config = model.eval(), config
        self.device = device_of(model)
        self.vocab = self.known = config.vocab_size            # known: what may go in
        # The type of hidden states: weights may be quantised, and of no floating type.
        token = torch.zeros(1, 1, dtype=torch.long, device=self.device)
        self.dtype = model.get_input_embeddings()(token).dtype
        self.windows = windows_of(model, config)               # {kind of layer: window or None}
        self.context = context_of(model, config)
        self.capacity = min(capacity or self.context, self.context)
        self.turn = turning_point(config)
        self.needs, self.hooks, self.captured = {}, [], {}
        self.padded = exact or self.device.type == "cuda" if padded is None else padded
        self.call = Static(self.device, graphs, GRAPHED if exact else 1) if self.padded else direct
        if model not in self.proven:
            self.proven[model] = self.prove()
        self.verifies_trees = self.proven[model]
        self.vocab = vocab or self.known
        self.empty()

    def empty(self):
        """A cache without memory, and no recording of the one there was."""
        if self.padded:
            self.call.recorded.clear()
        self.cache = TreeCache(self.capacity + MOST_NODES)
        self.cache.unit = KEYS if self.padded else 1
        self.reset()

    @torch.no_grad()
    def prove(self):
        """True if a small tree's logits are those of its paths alone, False if only a chain's are.

        Some classes ignore a tree's mask or positions, and would decode wrongly without a word.
        """
        config, own = self.config, (self.windows, getattr(self.config, "sliding_window", None))
        exact = torch.finfo(self.dtype).bits > 16
        # A window of three, as the model's own may be longer than what one wants to read here
        if any(self.windows.values()):
            config.sliding_window = 3
            self.windows = dict.fromkeys(self.windows) | {k: 3 for k, w in self.windows.items() if w}
        try:
            for parents, self.verifies_trees in (([-1, 0, 0, 0, 1, 2, 3], True), ([-1, 0, 1, 2], False)):
                try:
                    errors = self.errors(parents)
                    # In half precision one node may go to another expert: the middle one counts.
                    error = (errors.max() if exact else errors.median()).item()
                    reason = f"logits are off by {error:.0%} of their spread"
                    if error < (1e-3 if exact else 0.1):
                        return self.verifies_trees
                except Exception as why:
                    reason = f"{type(why).__name__}: {(str(why).splitlines() or [''])[0][:100]}"
        finally:
            self.windows, window = own
            if window:
                config.sliding_window = window
        raise UserError(f"{type(self.model).__name__} does not decode with a KV cache as it does without one "
                        f"({reason}): take a decoder-only language model that caches keys and values")

    def errors(self, parents):
        """How far each node's logits are from those of its path alone, in standard deviations -> (n + 1,)."""
        n, errors, pad = len(parents), [], getattr(self.config, "pad_token_id", None)
        # Some number positions without the padding token's.
        ids = [i for i in range(min(self.config.vocab_size, 100)) if i != pad]
        # Behind a window that the model alone knows of (GPT-Neo's), where it has one
        windows = [w for name, w in vars(self.config).items() if "window" in name and isinstance(w, int)]
        length = 6 if any(self.windows.values()) else max([6] + [w + 4 for w in windows])
        text = [ids[(7 * i + 3) % len(ids)] for i in range(min(length, self.context - n - 1))]
        tokens = [ids[(5 * i + 1) % len(ids)] for i in range(n)]

        def compare(logits, ids):
            ids = torch.tensor([ids], device=self.device)
            alone = self.model(input_ids=ids, use_cache=False).logits[0, -1]
            errors.append((logits - alone).float().norm() / (alone - alone.mean()).float().norm())
        self.empty()
        self.sync(text)
        logits = self.forward(torch.tensor(tokens), torch.tensor(parents))             # (n, V)
        for node in range(n):
            path = [node]
            while path[0]:
                path.insert(0, parents[path[0]])
            line = [tokens[i] for i in path]
            compare(logits[node], text + line)
        # The last path joins the cache, and a token follows it.
        self.commit(path, line)
        compare(self.forward(torch.tensor(ids[-1:]))[0], text + line + ids[-1:])
        return torch.stack(errors)

    def reset(self):
        """Forget everything; the allocated memory is kept."""
        self.cache.length, self.ids = 0, []                    # ids: what the cache holds
        self.shown, self.latest = 0, None                      # how much of it a view has shown; the newest
        self.hidden = {k: [] for k in self.needs.get("hidden", ())}

    def watch(self, needs):
        """Say what a drafter reads: its `needs`."""
        for hook in self.hooks:
            hook.remove()
        self.needs, self.captured = needs, {}
        self.hooks = capture(self.model, needs.get("hidden", ()), self.captured)
        self.reset()

    def prompt_rows(self, ids):
        """How many positions of the cache a prompt takes."""
        return len(ids)

    def room(self, ids):
        """How many tokens may follow a prompt; the last of them need not be forwarded."""
        rows = self.prompt_rows(ids)
        # Rows in the cache cannot follow where a rotary table changes.
        most = min(self.capacity, self.turn) if self.turn and rows <= self.turn else self.capacity
        return most - rows + 1

    def prefill(self, ids, drafter=None):
        """Forget everything and read the prompt -> logits (V,) after its last token."""
        self.reset()
        return self.sync(ids)

    def forward(self, tokens, parents=None, logits_to_keep=0):
        """Forward a tree (or, without parents, a chain) behind the cached prefix, each node once.

        tokens (n,), parents (n,) -> logits (n, V), or (logits_to_keep, V).  Nothing is kept until commit().
        """
        n, cached = tokens.shape[0], self.cache.length
        tokens = tokens.to(self.device, non_blocking=True)
        if self.known < self.vocab:
            tokens = tokens.clamp(max=self.known - 1)          # an id that it does not know is any other
        assert cached + n <= self.capacity + MOST_NODES, f"{n} nodes behind {cached} exceed {self.capacity}"
        if not self.verifies_trees and parents is not None and not is_chain(parents):
            raise UserError(f"{type(self.model).__name__} verifies chains only (it does not honour the mask "
                            "or the positions of a tree): use --tree chain")
        inputs = [tokens]                                      # the model's own causal mask serves
        if self.verifies_trees and (cached or parents is not None):
            parents = torch.arange(-1, n - 1) if parents is None else parents
            inputs.append(parents.to(self.device, non_blocking=True))          # (what pads hangs from node 0)
        call = self.call if len(inputs) > 1 else direct
        self.keep = logits_to_keep if n > GRAPHED or call is direct else 0
        logits, self.depth, *rows = call(self.run, self.reserve, cached + n, [cached], *inputs)
        # Of this forward, whoever else runs the model: (n, D)
        self.rows = dict(zip(self.needs.get("hidden", ()), rows))
        return logits[-logits_to_keep:]

    def reserve(self, keys):
        """Room in the cache -> what a recording of run() depends on, its shapes aside."""
        return self.cache.reserve(keys), self.needs.get("hidden")

    def run(self, keys, numbers, tokens, parents=None):
        """The forward itself, without a host read -> logits (n, V), depths (n,), hidden rows (n, D) ...

        tokens (n,); parents (n,), or None for a chain that the model masks by itself; numbers: how many
        tokens are cached, an int, or, where shapes are padded, a tensor ().
        """
        n, (cached,), where = len(tokens), numbers, {}
        static = torch.is_tensor(cached)
        if parents is None:
            depth = torch.arange(n, device=self.device)
        else:
            seen = ancestor_mask(parents)
            depth = seen.sum(1) - 1
            masks = None                                       # a lone token looks everywhere
            if n > 1 or static or any(w and keys > w for w in self.windows.values()):
                masks = {kind: tree_mask(seen, cached, window, self.dtype, keys)
                         for kind, window in self.windows.items()}
                # A model of one kind of layers takes the mask itself.
                masks = masks if len(masks) > 1 else masks.popitem()[1]
            where = {"attention_mask": masks, "position_ids": (cached + depth)[None]}
        if static:
            self.cache.slots, self.cache.read = cached + torch.arange(n, device=self.device), keys
        out = self.model(input_ids=tokens[None], use_cache=True, past_key_values=self.cache,
                         logits_to_keep=self.keep, **where)
        self.cache.read = None
        logits = with_vocabulary(out.logits[0].to(self.device), self.vocab)
        return [logits, depth, *(self.captured[k][0] for k in self.needs.get("hidden", ()))]

    def commit(self, path, ids, tokens=None):
        """Keep the nodes `path` of the last forward.  ids: their tokens, a list; tokens: on the device."""
        # A path along the first nodes, a chain's, lies where it shall stay.
        moved = path != list(range(len(path)))
        index = torch.tensor(path, device=self.device) if moved else None
        self.cache.commit(len(path), index)
        self.ids += ids
        self.latest = tokens
        for k in self.hidden:
            # Where the layer lies
            rows = self.rows[k]
            self.hidden[k].append(rows[index.to(rows.device) if moved else slice(len(path))])

    def sync(self, ids, rows=None):
        """Make the cache hold ids, forwarding what is missing -> the last logits, (V,) or (rows, V)."""
        wanted = rows or 1                                     # these are forwarded, cached or not
        same = min(len(self.ids), len(ids) - wanted)
        # The longest common prefix stays.
        if self.ids[:same] != ids[:same]:
            same = next(i for i in range(same) if self.ids[i] != ids[i])
        assert same == len(self.ids) or not self.hidden, "hidden states cannot be rolled back: use prefill()"
        self.cache.length, self.shown = same, min(self.shown, same)
        del self.ids[same:]
        # The rest is read in slices: a mask of all rows against all would grow with the square of the prompt.
        # (But at once where rows of a first slice would be turned otherwise than those of the last.)
        slice_size = len(ids) if self.turn and len(ids) > self.turn else SLICE
        # From an empty cache no mask is made at all, if no window and no eager attention asks for one.
        if same == 0 and self.config._attn_implementation == "sdpa" and not any(self.windows.values()):
            slice_size = len(ids)
        while same < len(ids):
            end = same + slice_size if same + slice_size + wanted <= len(ids) else len(ids)
            piece = ids[same:end]
            logits = self.forward(torch.tensor(piece, device=self.device), logits_to_keep=wanted)
            self.commit(list(range(len(piece))), piece)
            same = end
        return logits[-wanted:] if rows else logits[-1]

    def view(self):
        """What was committed since the last view, and what the drafter reads of it."""
        new, length = self.ids[self.shown:], self.cache.length
        tokens = self.latest
        if tokens is None or len(tokens) != len(new):
            tokens = torch.tensor(new, device=self.device)
        # Where shapes are padded the rows are, too: those behind `length` are void.
        kv, end = {}, -(-length // KEYS) * KEYS if self.padded else length
        for i in self.needs.get("kv", ()):
            kv[i] = self.cache.keys[i][:, :, :end], self.cache.values[i][:, :, :end]
        hidden = {k: torch.cat(parts) for k, parts in self.hidden.items()}
        self.shown, self.hidden = length, {k: [] for k in self.hidden}
        return View(tokens, length, kv, hidden)

# ---------------------------------------------------------------- sampling and acceptance
def warper(temperature=1.0, top_k=None, top_p=None):
    """transformers' own logits processors as one function, logits (n, V) -> probabilities (n, V)."""
    processors = logits_process.LogitsProcessorList()
    processors.append(logits_process.TemperatureLogitsWarper(float(temperature)))
    if top_k:
        processors.append(logits_process.TopKLogitsWarper(top_k))
    if top_p is not None and top_p < 1:
        processors.append(logits_process.TopPLogitsWarper(top_p))
    return lambda logits: processors(None, logits).softmax(-1)

def stream(seed, purpose, device="cpu"):
    """A random stream for each (seed, purpose): what draws a draft must not decide its acceptance."""
    digest = hashlib.sha256(f"{seed} {purpose}".encode()).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest[:7], "big"))

@lru_cache(maxsize=64)
def keyed_noise(seed, position, vocab, device):
    """Exponential noise (vocab,) of (seed, position) alone: argmax(p / noise) is a draw from p."""
    return torch.empty(vocab, device=device).exponential_(generator=stream(seed, position, device))

def children(tokens, parents):
    """Lists (n,) each -> {(parent, token): node}; of twins the first."""
    child = {}
    for node, place in enumerate(zip(parents, tokens)):
        child.setdefault(place, node)
    return child

def accept(tokens, parents, choice):
    """Walk down from the root while the target's choice is a child (GLIDE, section 4.2).

    tokens, parents, choice: lists (n,); choice is the target's token after each node, its argmax or its keyed
    draw.  -> (path of nodes, root first; the target's token after each of them).
    """
    child, path = children(tokens, parents), [0]
    while (path[-1], choice[path[-1]]) in child:
        path.append(child[path[-1], choice[path[-1]]])
    return path, [choice[node] for node in path]

def accept_drawn(tree, p_target, generator):
    """Speculative sampling of a drawn chain (Leviathan et al. 2023): the output follows p_target (n, V).

    Node i + 1, drawn from p_draft[i], is accepted with probability min(1, p_target[i] / p_draft[i]) of its
    token; at the first rejection the next one is drawn from the normalised positive part of p_target[i] -
    p_draft[i].  Returns as accept(), then the tree's parents and tokens, lists.  One host read.
    """
    drawn, rows = tree.tokens[1:, None], p_target[:-1]
    # min(1, p_target / p_draft), of nodes that are there
    ratio = rows.gather(1, drawn) / tree.p_draft.gather(1, drawn)                      # (n - 1, 1)
    u = torch.rand(ratio.shape, generator=generator, device=ratio.device, dtype=ratio.dtype)
    passed = (u < ratio)[:, 0] & (tree.parents[1:].to(u.device) >= 0)
    k = passed.long().cumprod(0).sum()[None]                                           # (1,): nodes accepted
    # norm(max(0, p_target - p_draft)); behind the last node nothing was drafted: the target's own row
    p_draft = torch.cat((tree.p_draft, torch.zeros_like(p_target[:1])))
    p_target, p_draft = p_target.index_select(0, k), p_draft.index_select(0, k)        # (1, V)
    residual = (p_target - p_draft).clamp(min=0)
    # Rounding can leave nothing where both distributions are the same; then a rejection had probability zero.
    residual = torch.where(residual.sum() > 0, residual, p_target)
    token = torch.multinomial(residual[0], 1, generator=generator)
    accepted, token, *read = torch.cat((k, token, tree.tokens, tree.parents.to(k.device))).tolist()
    tokens, parents = read[:len(tree.tokens)], read[len(tree.tokens):]
    return list(range(accepted + 1)), tokens[1:accepted + 1] + [token], parents, tokens

class Judge:
    """The target's verdict on a tree."""

    def __init__(self, warp, seed, device):
        self.warp, self.seed = warp, seed
        self.accepting = stream(seed, "accept", device)
        self.p_target = None                                   # (n, V), of a drawn chain

    def choose(self, logits, first, depth, deepest):
        """The target's token after nodes of these depths (n,): its argmax, or its draw, keyed by position.

        first: position of the token after the root; deepest: no node is deeper.
        """
        if self.warp is None:
            return logits.argmax(-1)
        p_target = self.warp(logits.float())                   # (n, V)
        noise = []
        for position in range(first, first + deepest + 1):
            noise.append(keyed_noise(self.seed, position, p_target.shape[-1], p_target.device))
        # argmax(p / noise) draws from p; nodes of one depth, on whatever branch, share their noise
        return (p_target / torch.stack(noise)[depth]).argmax(-1)

    def __call__(self, tree, logits, target, expand):
        """-> path, new tokens, the tree's parents, the drafter's tokens, lists (a tree's by one read)."""
        if tree.p_draft is not None:
            if self.warp is None:
                raise UserError("a drawn chain is accepted by sampling: give a temperature above 0")
            self.p_target = self.warp(logits.float())
            return accept_drawn(tree, self.p_target, self.accepting)
        deepest = expand.deepest or len(tree.tokens) - 1
        choice = self.choose(logits, target.cache.length + 1, target.depth, deepest)           # (n,)
        # What the host must know, read at once
        read = torch.cat((tree.tokens, tree.parents, choice, *expand.tokens)).tolist()
        n = len(choice)
        tokens, parents, choice, own = read[:n], read[n:2 * n], read[2 * n:3 * n], read[3 * n:]
        path, new = accept(tokens, parents, choice)
        return path, new, parents, own

# ---------------------------------------------------------------- what the loop is made of
class Output:
    """What generate() fills and returns: tokens, the new ids; runs, how many of them each round gave.

    A subclass can measure the decoding (bench.py's does): mark(what) is called when `what` (prefill, draft,
    verify, other) has just ended, settle() when the device has just been read, round() after each round;
    tell(new, drafted) as the output grows: by the ids `new`, of which the first `drafted` were drafted.
    """

    def __init__(self):
        self.tokens, self.runs = [], []

    def mark(self, what):
        """The time since the last mark was spent on `what`."""

    def settle(self):
        """All marks so far have happened."""

    def tell(self, new, drafted):
        """What is made known of the output: after the prefill (drafted is 0) and after each round."""

    def round(self, new, path, parents, p_target=None, p_draft=None):
        """new: its tokens; path: of nodes; parents: the tree's, a list; p_target, p_draft: of drawn ones."""
        self.tokens += new
        self.runs.append(len(new))

    @property
    def tau(self):
        """Average acceptance length: new tokens a round, the bonus token included, the prefill's left out."""
        return sum(self.runs) / max(1, len(self.runs))

class Expand:
    """What a builder sees of a drafter: expand(tokens (m,), parents [m ints]) -> probabilities (m, V)."""

    def __init__(self, drafter, out, warp, generator, vocab):
        self.drafter, self.out, self.warp, self.vocab = drafter, out, warp, vocab
        self.generator = generator                             # of drawn chains
        self.temperature = getattr(drafter, "temperature", 1.0)
        self.known = getattr(drafter, "vocab", None) or vocab  # how many ids the drafter knows

    def for_drafter(self, tokens):
        """Ids (m,) as the drafter takes them: on its device, and none that it does not know."""
        tokens = tokens.to(getattr(self.drafter, "device", tokens.device))
        return tokens.clamp(max=self.known - 1) if self.known < self.vocab else tokens

    def begin(self, root, room):
        """A round starts.  root (1,): the last token; room: how many tokens may still follow it."""
        self.room, self.deepest = room, 0                      # deepest: what depth its tree can have
        self.tokens, self.parents, self.depths = [root[:0]], [], []  # of the nodes that the drafter has seen

    def __call__(self, tokens, parents):
        # A node as deep as there is room can have no child: nobody need ask the drafter any more.
        known = list(self.depths)
        for parent in parents if self.room > 0 else ():
            known.append(known[parent] + 1 if parent >= 0 else 0)
        depths = known[len(self.depths):]
        if min(depths, default=0) >= self.room:
            self.room = 0
            return torch.zeros(len(parents), self.vocab, device=tokens.device)
        self.tokens.append(tokens)
        self.parents += parents
        self.depths = known
        self.deepest = max(known) + 1
        self.out.mark("other")
        logits = self.drafter.expand(self.for_drafter(tokens), parents)                # (m, V)
        self.out.mark("draft")
        logits = with_vocabulary(logits.float().to(tokens.device), self.vocab)
        # What a builder sees is warped as the target is, or calibrated for its argmax.
        probs = self.warp(logits) if self.warp else (logits / self.temperature).softmax(-1)
        if max(depths) >= self.room:
            probs = probs * torch.tensor([[d < self.room] for d in depths], device=probs.device)
        return probs.nan_to_num(0.0)                                                   # a row of -inf: zeros

    def path(self, tokens, kept):
        """The drafter's own nodes under the tokens kept, root first.  tokens: those of its nodes, a list."""
        child, path = children(tokens, self.parents), [-1]
        for token in kept:
            if (path[-1], token) not in child:
                break
            path.append(child[path[-1], token])
        return path[1:]

def no_draft(expand, root):
    """The tree of plain decoding: the root alone."""
    return Tree(root, torch.full_like(root, -1))

def no_draft_padded(expand, root):
    """The same with a second root, nobody's child: one query takes a slow matrix-vector path on many CPUs."""
    return Tree(root.repeat(2), torch.full_like(root, -1).repeat(2))

def limit_of(target, ids, max_new_tokens, attention_mask=None):
    """How many tokens can be made behind a prompt (a tensor), at most max_new_tokens."""
    if ids.ndim > 2 or ids.ndim == 2 and ids.shape[0] != 1:
        raise UserError(f"input_ids has shape {tuple(ids.shape)}: give one sequence, (n,) or (1, n)")
    if attention_mask is not None and not torch.as_tensor(attention_mask).all():
        raise UserError("attention_mask hides tokens: give one sequence without padding, and no mask")
    if not ids.numel():
        raise UserError("the prompt is empty: give at least one token")
    if max_new_tokens < 1:
        raise UserError(f"max_new_tokens is {max_new_tokens}: ask for at least 1")
    room = target.room(ids.flatten())
    if room < 1:
        raise UserError(f"the prompt has {ids.numel()} tokens, but the target's context holds "
                        f"{target.capacity}: shorten it")
    return min(max_new_tokens, room)

class Stop:
    """Where the output ends, by transformers' own criteria: it is cut behind the token at which one holds."""

    def __init__(self, ids, eos_token_id, stop_strings, tokenizer, max_time):
        if stop_strings and tokenizer is None:
            raise UserError("stop_strings need the tokenizer: give it, too")
        eos = [] if eos_token_id is None else eos_token_id     # one or several, a tensor of them too
        self.eos, self.ids, self.ended = set(torch.as_tensor(eos).flatten().tolist()), ids, False
        self.criteria = stopping_criteria.StoppingCriteriaList()
        if stop_strings:
            self.criteria.append(stopping_criteria.StopStringCriteria(tokenizer, stop_strings))
        if max_time is not None:
            self.criteria.append(stopping_criteria.MaxTimeCriteria(max_time))

    def cut(self, new, limit):
        """New tokens, a list -> those up to the length limit, and up to the first that ends the output."""
        self.ended = len(new) >= limit
        for i, token in enumerate(new[:limit], 1):
            self.ids.append(token)
            if token in self.eos or self.criteria and self.criteria(torch.tensor([self.ids]), None).any():
                self.ended = True
                return new[:i]
        return new[:limit]

def without_absent(tree):
    """The tree without absent nodes: on a CPU one that nobody needs costs time; on CUDA a read costs more."""
    there = tree.parents >= 0
    there[0] = True
    if there.all():
        return tree
    number = there.cumsum(0) - 1                               # of each node among those that stay
    parents = torch.where(tree.parents >= 0, number[tree.parents], -1)[there]
    p_draft = tree.p_draft if tree.p_draft is None else tree.p_draft[:len(parents) - 1]
    return Tree(tree.tokens[there], parents, p_draft)

# ---------------------------------------------------------------- the loop
@torch.inference_mode()
def generate(target, drafter, build, input_ids, max_new_tokens=128, temperature=0.0, top_k=None, top_p=None,
             eos_token_id=None, seed=0, streamer=None, out=None, attention_mask=None, do_sample=None,
             stop_strings=None, tokenizer=None, max_time=None):
    """Speculative decoding of one sequence (GLIDE, Figures 1, 2); drafter None and no_draft: plain decoding.

    target: Target.  drafter, build(expand, root (1,)) -> Tree: see the contract at the top of this file.
    input_ids: list of ids or tensor (n,) or (1, n).  The rest as transformers' generate() takes it, but:
    temperature 0 is greedy, as is do_sample False; nothing is taken from the model's generation_config.
    streamer: any of transformers'; it gets the prompt, then each round's tokens.  seed: of all draws.
    out: the Output to fill, for instance one that measures.  Raises UserError for an empty prompt, a batch, a
    mask that hides something, a prompt that leaves no room in the context.
    """
    ids, device, out = torch.as_tensor(input_ids), target.device, out or Output()
    limit = limit_of(target, ids, max_new_tokens, attention_mask)
    ids = ids.flatten().tolist()
    stop = Stop(list(ids), eos_token_id, stop_strings, tokenizer, max_time)
    if do_sample and temperature == 0:
        raise UserError("do_sample=True with temperature 0: give a temperature above 0")
    warp = warper(temperature, top_k, top_p) if temperature > 0 and do_sample is not False else None
    judge = Judge(warp, seed, device)
    expand = Expand(drafter, out, warp, stream(seed, "draft", device), target.vocab)

    # Prefill: the target reads the prompt, and says the first token.
    target.watch(drafter.needs if drafter else {})
    target.cache.reserve(target.prompt_rows(ids) + limit + MOST_NODES)
    if drafter:
        drafter.reset()
        if hasattr(drafter, "call") and target.padded and not isinstance(drafter.call, Static):
            drafter.call = type(target.call)(drafter.device, target.call.graphs)
    logits = target.prefill(ids, drafter)[None]
    root = judge.choose(logits, target.cache.length, torch.zeros_like(target.depth[:1]), 0)    # (1,)
    out.tokens = stop.cut(root.tolist(), limit)
    out.mark("prefill")
    out.tell(list(out.tokens), 0)
    if streamer:
        streamer.put(torch.tensor([ids]))
        streamer.put(torch.tensor(out.tokens))

    while not stop.ended:
        # Draft: the drafter proposes a tree that hangs from the root x_t.
        if drafter:
            out.mark("other")
            view = target.view()
            drafter.begin(view._replace(tokens=expand.for_drafter(view.tokens)))
            out.mark("draft")
        expand.begin(root, limit - len(out.tokens) - 1)
        tree = build(expand, root)
        if drafter and device.type == "cpu":
            tree = without_absent(tree)
        out.mark("other")

        # Verify: one forward of the target over all nodes.
        logits = target.forward(tree.tokens, tree.parents)                                     # (n, V)
        out.mark("verify")

        # Accept: walk down while the target's choice is a child.
        path, new, parents, own = judge(tree, logits, target, expand)
        out.settle()

        # Commit: the root and what was accepted join the cache; the target's own token is the next root.
        kept = out.tokens[-1:] + new[:-1]
        fresh = torch.tensor(kept + new[-1:], device=device)
        target.commit(path, kept, fresh[:-1])
        root = fresh[-1:]
        if drafter:
            drafter.keep(expand.path(own, kept))

        # The output goes up to the length limit, an end-of-text token, a stop string.
        new = stop.cut(new, limit - len(out.tokens))
        out.round(new, path, parents if drafter else [-1], judge.p_target, tree.p_draft)
        out.tell(new, min(len(path) - 1, len(new)))
        if streamer:
            streamer.put(torch.tensor(new))
    out.mark("other")
    out.settle()
    if streamer:
        streamer.end()
    return out

# ---------------------------------------------------------------- demo
def main():
    """A random tiny Llama: a drafter that knows the answer gives plain decoding's output, in fewer rounds."""
    from transformers import LlamaConfig, LlamaForCausalLM
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=50, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                         num_attention_heads=4, num_key_value_heads=2)
    model = LlamaForCausalLM(config).double().eval()
    plain = [3, 1, 4, 1, 5]
    # Plain decoding by the model's own forward: no cache, no mask of ours.
    for _ in range(40):
        plain.append(model(torch.tensor([plain])).logits[0, -1].argmax().item())
    target = Target(model)

    def oracle(expand, root):
        at = target.cache.length                          # the place of the root
        return Tree(torch.tensor((plain + [0] * 4)[at:at + 5]), torch.arange(-1, 4))

    out = generate(target, None, oracle, plain[:5], max_new_tokens=40)
    assert plain[:5] + out.tokens == plain
    print(f"40 tokens in {len(out.runs)} rounds, token for token plain decoding's")

if __name__ == "__main__":
    main()
