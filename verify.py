"""Tree verification: the target model, its KV cache, the acceptance rules and the decoding loop.

GLIDE with a CAPE (arXiv 2402.02082), sections 3 and 4.2, Figures 1 and 2; all three papers use it.

The idea.  A drafter proposes a tree of tokens below the root x_t, the last token of the sequence,
which is not cached yet.  One forward of the target reads all nodes of the tree.  A node attends to
the cached prefix, to its ancestors and to itself, so its logits are those of plain decoding after
the same tokens.  Then walk down from the root while the token that the target chooses after a node
is one of its children.  These nodes are accepted, and the first choice that is no child is the
next root.

    paper                  shape                 name here
    x_{<t}, its K and V    L x 2 x (1, H, t, d)  TreeCache.kv[layer]: the first `length` entries
    proposal P             (n,)                  tree.tokens, tree.parents
    mask_CAPE              (n, t + n)            t columns of ones, then ancestor_mask(parents)
    p_D(.|node)            (n - 1, V)            tree.p_draft, only for a sampled chain

The contract.  A builder is a function build(expand, root (1,)) -> Tree; a drafter is an object.
 1. expand(tokens (m,), parents [m ints]) -> probabilities (m, V) runs the drafter once over m new
    nodes.  It numbers nodes from 0 in the order in which it receives them.  That number is a node's
    expand_index, and `parents` are such numbers; the root comes first, with parent -1.
 2. In the Tree, `parents` are indices of its own nodes.  Node 0 is the root, with parent -1, and
    parents come before children.  Of two children with the same token the first counts.  All
    tensors are on the root's device.
 3. Where the drafter has no prediction, expand returns a row of zeros.  No node of a tree may have
    probability zero.
 4. Only a chain that was sampled with expand.generator has p_draft (n - 1, V): row i is the
    distribution from which node i + 1 was sampled.
 5. A builder may also read expand.remaining (nodes below that depth are wasted), expand.root (the
    root's id), expand.rule, expand.drafter and expand.memory (a dict that lasts for a sequence).
 6. drafter.needs = {"kv": [layers], "hidden": [indices of hidden_states]} names what the drafter
    reads of the target.
 7. drafter.reset() begins a sequence.  drafter.begin(view) begins a round; the View shows what was
    committed since the last one.  The builder's expand calls drafter.expand(tokens, parents) ->
    logits (m, V).  They are over the target's vocabulary, on any device; where the drafter has no
    prediction, they are a row of -inf.
 8. drafter.keep(path) ends the round.  path lists the expand_indices of those accepted nodes that
    were given to expand, the root first; it is empty if none was.  The drafter forgets all others.
 9. A drafter may also have
      temperature: its calibration temperature, by which greedy decoding divides its logits;
      adjust(probabilities) -> probabilities (m, V): applied to what expand is about to return;
      chain(root's id, most, warp, generator) -> (ids, p_draft or None): proposes a whole chain of
      at most `most` tokens, for cascade.proposal; with a generator, sampled from warp(logits).

Example.  The sequence ends with 7.  A builder drafts 3, then 5 after it, and adds 4 beside the 3:
    p = expand(root, [-1])                              # expand_index 0: the root, 7
    p = expand(root.new_tensor([3]), [0])               # expand_index 1: the 3
    return Tree(root.new_tensor([7, 3, 5, 4]), root.new_tensor([-1, 0, 1, 0]))
If the target chooses 3 after 7, 5 after 3 and 9 after 5, then the tree's nodes 0, 1 and 2 are
committed, the drafter is told keep([0, 1]), and 9 is the next root.  The next view shows 7, 3, 5.

Differences from the paper:
 1. The root is a node: the paper's mask leaves x_t out, though the target must read it.
 2. Sampling with a tree is ours.  The randomness of a sample depends only on the seed and the
    position, so the output is token for token that of plain sampling with the same seed.
 3. In greedy decoding a builder sees softmax(logits / temperature): calibrated confidences.

To use this file in a project of yours, with any decoder-only model of transformers:

    out = generate(Target(model), drafter, build, ids)       # out.tokens: the new ids
    model.generate(**inputs, custom_generate=speculative(drafter, build))

    python verify.py                                         # the demo: a random Llama
"""
import hashlib
import inspect
from collections import namedtuple
from copy import copy
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from transformers import generation
from transformers.cache_utils import Cache

Tree = namedtuple("Tree", "tokens parents p_draft", defaults=(None,))
BLOCK = 16               # keys or values of so many layers lie in one block of a cache
CHUNK = 512              # cache entries that are allocated for trees, beyond the sequence

class View(NamedTuple):
    """What a drafter is shown when a round begins: k tokens were committed since the last view."""
    tokens: torch.Tensor         # (k,); in a decoding's first view they are the prompt
    length: int                  # the number of all committed tokens
    kv: dict                     # {layer: [K, V]}, each (1, H, length, d)
    hidden: dict                 # {index: (k, D)}, the hidden states of `tokens`
    ids: list = None             # `tokens` on the host
    root: int = None             # the root's id, on the host
    source: list = None          # in the first view of an encoder-decoder target: the prompt

class Round(NamedTuple):
    """What happened in a round, as lists."""
    new: list                    # its new tokens
    path: list                   # the accepted nodes, the root first
    tokens: list                 # the tree's
    parents: list                # the tree's

class UserError(ValueError):
    """A user's mistake.  The message says what to do: programs print it and exit with status 2."""

# ---------------------------------------------------------------- the target
def ancestor_mask(parents):
    """Parents (n,) -> (n, n) bool: entry (i, j) is True if node j is i itself or its ancestor."""
    n = len(parents)
    # Here the root is its own parent, so that climbing ends there.  A parent beyond the last node
    # is clamped, too, and children() refuses it later.
    ancestor = parents.clamp(0, n - 1)
    seen = torch.eye(n, dtype=torch.bool, device=parents.device)
    # Each pass doubles the number of steps up that a node sees.
    for _ in range(n.bit_length()):
        seen = seen | seen[ancestor]                           # what the node or that ancestor sees
        ancestor = ancestor[ancestor]                          # 2 steps up, then 4, 8, ...
    return seen

class TreeCache(Cache):
    """The KV cache of a target: `length` committed entries, and after them those of the tree.

    kv[layer]: [K, V], each (1, H, allocated, d).  They are slices of a few blocks of memory, so
    that a few copies compact all layers: blocks[i] is (BLOCK, 1, H, allocated, d).
    """
    def __init__(self):
        super().__init__(layers=[])
        self.allocated, self.length, self.kv = 0, 0, {}
        self.blocks, self.free = [], {}                        # free: {shape and so on: [slice]}

    def reserve(self, entries):
        """Allocate at least `entries` entries, and keep what is committed."""
        if entries > self.allocated:
            # Grow by at least half of what is allocated, so that entries are seldom copied.
            self.allocated = max(entries, self.allocated * 3 // 2)
            before, self.kv = self.kv, {}
            self.blocks, self.free = [], {}
            for layer, held in before.items():
                self.kv[layer] = [self.slice_like(x) for x in held]
                for larger, x in zip(self.kv[layer], held):
                    larger[:, :, :x.shape[2]] = x

    def slice_like(self, x):
        """Zeros (1, H, allocated, d) for keys or values x (1, H, n, d): a free slice of a block."""
        shape = (x.shape[0], x.shape[1], self.allocated, x.shape[3])
        free = self.free.setdefault((shape, x.dtype, x.device), [])
        if not free:
            block = x.new_zeros(BLOCK, *shape)
            self.blocks.append(block)
            free += [block[i] for i in range(BLOCK)]
        return free.pop(0)

    def step(self, slots, end):
        """The cache for one forward, which writes at slots (n,) and attends to entries [:end]."""
        step = copy(self)                                      # it shares kv
        step.slots, step.end = slots, end
        return step

    # The model calls these three methods: they are the interface of transformers' caches.
    def update(self, k, v, layer, *args, **kwargs):
        """Write a layer's new entries k, v (1, H, n, d) -> all keys and values to attend to."""
        if layer not in self.kv:
            self.kv[layer] = [self.slice_like(k), self.slice_like(v)]
        self.slots = self.slots.to(k.device)                   # a model may be spread over devices
        for held, new in zip(self.kv[layer], (k, v)):
            held.index_copy_(2, self.slots, new)
        return [held[:, :, :self.end] for held in self.kv[layer]]

    def get_seq_length(self, layer_idx=0):
        return self.length

    def get_mask_sizes(self, query_length, layer_idx):
        return self.end, 0

    def compact(self, nodes):
        """Move the entries of the current tree's nodes (k,) to the end of the committed ones."""
        end = self.length + len(nodes)
        for block in self.blocks:
            slots = self.length + nodes.to(block.device)
            block[:, :, :, self.length:end] = block.index_select(3, slots)

class Target:
    """A decoder-only causal LM of transformers, with sdpa or eager attention, and its KV cache.

    capacity: the most positions that a sequence may have; by default the model's context.
    """
    def __init__(self, model, capacity=None):
        self.model, self.device, self.dtype = model.eval(), model.device, model.dtype
        self.config = model.config.get_text_config()
        window = getattr(self.config, "sliding_window", None)
        kinds = getattr(self.config, "layer_types", None) or [window]
        if set(kinds) - {None, "full_attention"}:              # our mask replaces the model's own
            raise UserError("not all layers of the target have full attention: take "
                            "runtime.targets.any_target(model)")
        self.vocab = self.config.vocab_size
        context = getattr(self.config, "max_position_embeddings", None) or 2048
        self.capacity = min(capacity or context, context)
        self.cache = TreeCache()
        self.capture({})

    def capture(self, needs):
        """Set what the views hold, a drafter's `needs`, and start a new sequence."""
        self.needs = {"kv": (), "hidden": (), **needs}
        self.reset()

    def reset(self):
        """Start a new sequence.  The allocated memory is kept."""
        self.cache.length = 0
        self.ids = []                                          # the tokens in the cache
        self.source = None                                     # an encoder-decoder's prompt

    def remaining(self, ids):
        """The most tokens that may follow a prompt.  The last one needs no position."""
        return self.capacity - len(ids) + 1

    def prefill(self, ids, new_tokens=0):
        """Start a new sequence: forward the prompt, and allocate the cache for `new_tokens` more.

        Returns the logits (V,) after the last prompt token.
        """
        self.reset()
        self.cache.reserve(len(ids) + new_tokens + CHUNK)
        return self.sync(ids)[-1]

    @torch.no_grad()
    def forward(self, tokens, parents=None, logits_to_keep=0):
        """Forward the n nodes of a tree after the prefix; parents None: a chain.

        Returns the logits (n, V), or only the last `logits_to_keep` of them.
        """
        n, cached = len(tokens), self.cache.length
        end = cached + n
        self.cache.reserve(end)
        slots = torch.arange(cached, end, device=self.device)
        position, mask = slots, None                           # no mask: the model's own, causal
        if parents is None and cached:
            parents = slots - cached - 1                       # each node's is the one before it
        if parents is not None and n > 1:
            seen = ancestor_mask(parents.to(self.device))                              # (n, n)
            mask = F.pad(seen, (cached, 0), value=True)        # mask_CAPE (n, end)
            depth = seen.sum(1) - 1
            # The model has no positions beyond the capacity, so nodes there get the last position
            # and wrong logits.  The output ends with the first such node at the latest, so none of
            # its tokens is chosen from these logits.
            position = (cached + depth).clamp(max=self.capacity - 1)
        tokens = tokens.to(self.device)
        logits, *states = self.run(end, tokens, position, slots, mask, logits_to_keep)
        self.nodes = [tokens, *states]                         # for commit: (n,), (n, D) per index
        return logits

    def run(self, end, tokens, position, slots, mask, logits_to_keep=0):
        """Run the model once.  Node i is written to the cache at slots[i].

        It attends to those of the cache's first `end` entries that mask (n, end) shows it; mask
        None: the model's causal mask.  Returns a list: logits, and hidden states (n, D) per index.
        """
        wanted = self.needs["hidden"]
        out = self.model(
            input_ids=tokens[None], past_key_values=self.cache.step(slots, end),
            use_cache=True, logits_to_keep=logits_to_keep, output_hidden_states=bool(wanted),
            **self.position_and_mask(position, slots, mask))
        states = [out.hidden_states[index][0] for index in wanted]
        return [out.logits[0], *states]

    def position_and_mask(self, position, slots, mask):
        """position_ids, and the mask (1, 1, n, end) as numbers that are added to the scores."""
        if mask is not None:
            mask = torch.where(mask, 0.0, -torch.inf).to(self.dtype)[None, None]
        return {"position_ids": position[None], "attention_mask": mask}

    def commit(self, path, ids):
        """Append the accepted nodes to the sequence.

        path: their indices in the last tree (a list, the root first).  ids: their token ids.
        """
        nodes = slice(len(path))
        if path != list(range(len(path))):                     # else they are in place already
            nodes = torch.tensor(path).to(self.device, non_blocking=True)
            self.cache.compact(nodes)
        self.cache.length += len(path)
        self.ids += ids
        self.committed = [of_nodes[nodes] for of_nodes in self.nodes]      # for the next view

    def sync(self, ids, logits_to_keep=1):
        """Make the cache hold exactly `ids`: keep the prefix that it holds, and forward the rest.

        Returns the logits (logits_to_keep, V) after the last ids.
        """
        # The last `logits_to_keep` ids are forwarded even if they are cached, for their logits.
        longest = min(len(self.ids), len(ids) - logits_to_keep)
        common = 0
        while common < longest and self.ids[common] == ids[common]:
            common += 1
        self.cache.length = common
        del self.ids[common:]
        rest = ids[common:]
        logits = self.forward(torch.tensor(rest), None, logits_to_keep)
        self.commit(list(range(len(rest))), rest)
        return logits[-logits_to_keep:]

    def view(self, root=None):
        """What the last commit appended, and what the drafter reads of the sequence -> View."""
        tokens, *hidden = self.committed
        ids = self.ids[-len(tokens):]
        length = self.cache.length
        kv = {}
        for layer in self.needs["kv"]:
            kv[layer] = [entries[:, :, :length] for entries in self.cache.kv[layer]]
        hidden = dict(zip(self.needs["hidden"], hidden))
        source, self.source = self.source, None
        return View(tokens, length, kv, hidden, ids, root, source)

# ---------------------------------------------------------------- acceptance
def children(tokens, parents):
    """Lists of n tokens and parents -> {(parent, token): node}: of equal children the first."""
    child = {}
    for node, (parent, token) in enumerate(zip(parents, tokens)):
        assert -1 <= parent < node, "a tree has parents before their children"
        child.setdefault((parent, token), node)
    return child

def accept(tokens, parents, choice):
    """Walk down from the root while the target's choice after a node is one of its children.

    tokens, parents, choice: lists of n.  Returns the accepted nodes, and the choice after each.
    """
    child = children(tokens, parents)
    path, node = [], 0
    while node is not None:
        path.append(node)
        node = child.get((node, choice[node]))
    return path, [choice[node] for node in path]

def sample(p, uniform):
    """Sample from distributions p (n, V), of any sums, by inverting their cumulative sums -> (n,)

    uniform (n, 1) or (): in (0, 1].  In float32 the cumulative sums would lose rare tokens.
    """
    sums = p.cumsum(-1, dtype=torch.float64)                                           # (n, V)
    return torch.searchsorted(sums, uniform * sums[:, -1:])[:, 0]

def accept_drawn(tree, p_target, generator):
    """Speculative sampling of a chain (Leviathan et al. 2023) -> the token after each node (n,)."""
    # After the last node nothing is drafted.  There u is set to inf, so that nothing is accepted,
    # and p_draft to 0, so that the residual is p_target.
    drafted = tree.tokens.roll(-1)[:, None]                                            # (n, 1)
    p_draft = F.pad(tree.p_draft, (0, 0, 0, 1))                                        # (n, V)
    # A drafted token is accepted with probability min(1, p_target / p_draft).
    ratio = p_target.gather(1, drafted) / p_draft.gather(1, drafted)                   # (n, 1)
    u = torch.empty_like(ratio[1:]).uniform_(generator=generator)
    accepted = F.pad(u, (0, 0, 0, 1), value=torch.inf) < ratio
    # Otherwise the token is sampled from the residual norm(max(0, p_target - p_draft)).  Where the
    # two are equal that is zero, and the term 1e-30 * p_target makes it a sample of p_target.
    residual = (p_target - p_draft).clamp(min=0) + 1e-30 * p_target
    # Only the sample after the last accepted node is used, so all nodes can share one number.
    uniform = 1 - torch.rand((), dtype=torch.float64, device=residual.device, generator=generator)
    sampled = sample(residual, uniform)                                                # (n,)
    return torch.where(accepted[:, 0], drafted[:, 0], sampled)

def stream(seed, purpose, device="cpu"):
    """A generator of its own for each (seed, purpose).

    If one generator both sampled a draft and decided its acceptance, the output would be biased.
    """
    digest = hashlib.sha256(f"{seed} {purpose}".encode())      # Python's hash() differs by run
    number = int(digest.hexdigest()[:13], 16)                  # of 52 bits
    return torch.Generator(device).manual_seed(number)

@lru_cache(maxsize=32)
def keyed_noise(seed, position, vocab, device):
    """Exponential noise (vocab,) that depends on (seed, position) alone.

    argmax(p / noise) is a sample of p, and rounding in p hardly ever changes it.  (A cumulative sum
    over a large vocabulary does not stand rounding: one token in hundreds would be another.)
    lru_cache keeps the noise of positions whose drafts were rejected: the next round has them, too.
    """
    # Drawn in float64: float32 has too few numbers near zero, where the noise of a rare token is
    # when that token is sampled.
    noise = torch.empty(vocab, dtype=torch.float64, device=device)
    return noise.exponential_(generator=stream(seed, position, device)).float()

class Greedy:
    """The rule of greedy decoding: the target's argmax."""
    seed = None                                                # nothing is sampled

    def probs(self, logits, temperature):
        """A drafter's logits (m, V) -> confidence that a token is the target's argmax (m, V)."""
        return (logits / temperature).softmax(-1)

    def choose(self, tree, logits, first):
        """The target's logits (n, V) -> the token after each node (n,).

        first: the position of the token that follows the root.
        """
        return logits.argmax(-1)

class Sampled:
    """The rule of sampling, from the distribution that transformers' own processors make."""
    def __init__(self, temperature=1.0, top_k=None, top_p=None, seed=0):
        self.seed = seed
        self.processors = generation.LogitsProcessorList()
        self.processors.append(generation.TemperatureLogitsWarper(float(temperature)))
        if top_k:
            self.processors.append(generation.TopKLogitsWarper(top_k))
        if top_p:
            self.processors.append(generation.TopPLogitsWarper(top_p))

    def warp(self, logits):
        """Logits (n, V) -> the distributions that tokens are sampled from (n, V)."""
        return self.processors(None, logits.float()).softmax(-1)

    def probs(self, logits, temperature):
        """A drafter's logits (m, V) -> probabilities (m, V), warped as the target's are."""
        return self.warp(logits)

    def choose(self, tree, logits, first):
        """As Greedy.choose, by keyed noise; for a sampled chain by speculative sampling."""
        p_target = self.warp(logits)                                                   # (n, V)
        if tree.p_draft is not None:
            generator = stream(self.seed, f"accept {first}", logits.device)
            return accept_drawn(tree, p_target, generator)
        # All nodes of one depth share their noise, since they share a position.
        depth = ancestor_mask(tree.parents).sum(1) - 1                                 # (n,)
        root_alone = len(depth) == 1
        deepest = 0 if root_alone else depth.max().item()      # a device-to-host sync
        noise = []
        for d in range(deepest + 1):
            noise.append(keyed_noise(self.seed, first + d, logits.shape[1], logits.device))
        noise = torch.stack(noise)                                                     # (depths, V)
        return (p_target / noise[depth]).argmax(-1)

# ---------------------------------------------------------------- the loop
class Output:
    """What generate() returns.  tokens: the new ids; rounds: a Round per target forward."""
    def __init__(self, ids, limit, criteria, streamer):
        self.tokens, self.rounds = [], []
        self.criteria = generation.StoppingCriteriaList(criteria)
        self.streamer = streamer
        self.sequence = torch.tensor([ids + [0] * limit])      # (1, all), filled as tokens come
        self.length, self.ended = len(ids), False
        if streamer:
            streamer.put(torch.tensor([ids]))

    def add(self, tokens):
        """Append tokens up to the limit, or up to the first that meets a criterion -> those."""
        new = []
        for token in tokens:
            new.append(token)
            self.sequence[0, self.length] = token
            self.length += 1
            full = self.length == self.sequence.shape[1]
            self.ended = full or bool(self.criteria(self.sequence[:, :self.length], None))
            if self.ended:
                break
        self.tokens += new
        if self.streamer:
            self.streamer.put(torch.tensor(new))
            if self.ended:
                self.streamer.end()
        return new

    @property
    def tau(self):
        """Average acceptance length: new tokens per round, excluding the one after the prefill."""
        return (len(self.tokens) - 1) / max(1, len(self.rounds))

class Expand:
    """What a builder sees in a round: expand(tokens (m,), parents [m ints]) -> (m, V)."""
    def __init__(self, drafter, rule, memory, root, remaining, generator):
        self.drafter, self.rule = drafter, rule
        self.memory = memory
        self.root, self.remaining, self.generator = root, remaining, generator
        self.tokens, self.parents = [], []                     # by expand_index

    def __call__(self, tokens, parents):
        self.tokens.append(tokens)
        self.parents += parents
        logits = self.drafter.expand(tokens, parents).to(tokens.device).float()        # (m, V)
        temperature = getattr(self.drafter, "temperature", 1.0)
        probs = self.rule.probs(logits, temperature).nan_to_num(0.0)       # a row of -inf: zeros
        if hasattr(self.drafter, "adjust"):
            probs = self.drafter.adjust(probs)
        return probs

    def path(self, tokens, accepted):
        """The expand_indices of those accepted tokens that were given to expand, the root first.

        tokens: the ids of all nodes that were given to expand, a list by expand_index.  accepted:
        the ids of the accepted nodes, the root's first.
        """
        child = children(tokens, self.parents)
        path, node = [], -1
        for token in accepted:
            node = child.get((node, token))
            if node is not None:
                path.append(node)
        return path

def root_only(expand, root):
    """The builder of plain decoding: the tree is the root alone."""
    return Tree(root, torch.full_like(root, -1))

def prompt_ids(target, input_ids, new_tokens):
    """input_ids (n,) or (1, n) as a list, if it is one sequence and fits; else UserError."""
    given = torch.as_tensor(input_ids)
    shape = tuple(given.shape)
    ids = given.flatten().tolist()
    if not ids or shape not in ((len(ids),), (1, len(ids))):
        raise UserError(f"input_ids have the shape {shape}: give one sequence of tokens")
    if new_tokens < 1:
        raise UserError(f"max_new_tokens is {new_tokens}: ask for at least one")
    if target.remaining(ids) < 1:
        raise UserError(f"{len(ids)} tokens exceed the context of {target.capacity}: give fewer")
    return ids

@torch.inference_mode()
def generate(target, drafter, build, input_ids, max_new_tokens=128, rule=None, stopping_criteria=(),
             streamer=None):
    """Speculative decoding of one sequence (GLIDE, Figures 1 and 2) -> Output.

    drafter, build: see the contract at the top; None and root_only are plain decoding.  input_ids:
    (n,) or (1, n).  rule: Greedy() or Sampled(...).  stopping_criteria, streamer: transformers'
    own.  The output ends where the target's capacity does.
    """
    ids = prompt_ids(target, input_ids, max_new_tokens)
    limit = min(max_new_tokens, target.remaining(ids))
    rule = rule or Greedy()
    out = Output(ids, limit, stopping_criteria, streamer)
    memory = {}
    target.capture(drafter.needs if drafter else {})
    if drafter:
        drafter.reset()
    # The prefill counts as the verification of a tree of one node, the prompt's last token.  The
    # target's choice after that node is the first root.
    logits = target.prefill(ids, limit)[None]                                          # (1, V)
    last_id = torch.tensor(ids[-1:], device=target.device)
    root = rule.choose(root_only(None, last_id), logits, target.cache.length)          # (1,)
    new = out.add(root.tolist())
    while not out.ended:
        # Draft: the drafter proposes a tree below the root x_t.
        if drafter:
            drafter.begin(target.view(new[-1]))
        first = target.cache.length + 1                        # the position of the root's children
        remaining = limit - len(out.tokens) - 1                # one token is the target's own
        generator = stream(rule.seed, f"draft {first}", target.device)
        expand = Expand(drafter, rule, memory, new[-1], remaining, generator)
        tree = build(expand, root)
        assert tree.tokens.shape == tree.parents.shape, "each node of a tree has one parent"

        # Verify: one forward of the target over all nodes.
        logits = target.forward(tree.tokens, tree.parents)                             # (n, V)
        choice = rule.choose(tree, logits, first)                                      # (n,)

        # Accept: walk down while the target's choice is a child.  One device-to-host sync reads
        # the tree, the choices, and the tokens that the builder gave to expand.
        n = len(tree.tokens)
        numbers = torch.cat((tree.tokens, tree.parents, choice, *expand.tokens)).tolist()
        tokens, parents = numbers[:n], numbers[n:2 * n]
        assert tokens[0] == new[-1], "a tree begins with the root"
        path, new = accept(tokens, parents, numbers[2 * n:3 * n])

        # Commit: the accepted nodes are cached; the target's own token is the next root.
        accepted = [tokens[node] for node in path]
        target.commit(path, accepted)
        last = path[-1]
        root = choice[last:last + 1]                                                   # (1,)
        if drafter:
            drafter.keep(expand.path(numbers[3 * n:], accepted))
        new = out.add(new)
        out.rounds.append(Round(new, path, tokens, parents))
    return out

# ---------------------------------------------------------------- inside transformers' generate()
class speculative:
    """A callable for model.generate(..., custom_generate=speculative(drafter, build)).

    The arguments of generate() keep their meaning: lengths, sampling, stopping criteria, streamer.
    So a pipeline works, too.  What cannot be served is refused by a UserError.  For stop strings
    pass stopping_criteria=[StopStringCriteria(tokenizer, strings)], because transformers 5.23 loses
    the tokenizer that belongs to stop_strings.

    target: the Target of the model, if it is not to be Target(model); see runtime/targets.py.
    last: the Output of the last call, whose last.tau is the average acceptance length.
    """
    def __init__(self, drafter, build, target=None):
        self.drafter, self.build, self.target = drafter, build, target
        self.last = None

    def __call__(self, model, input_ids, logits_processor, stopping_criteria, generation_config,
                 streamer=None, **model_kwargs):
        # generate() of transformers 5.23 keeps streamer and assistant_model to itself.
        caller = inspect.currentframe().f_back.f_locals
        streamer = streamer or caller.get("streamer")
        assistant = caller.get("assistant_model")
        refuse(input_ids, logits_processor, generation_config, assistant, model_kwargs)
        if self.target is None or self.target.model is not model:
            self.target = Target(model)
        if generation_config.do_sample:
            seed = torch.randint(2 ** 31, (1,)).item()         # torch.manual_seed() decides it
            rule = Sampled(seed=seed)
            rule.processors = logits_processor
        else:
            rule = Processed(logits_processor)
        if streamer:
            streamer = AfterPrompt(streamer)
        limit = generation_config.max_length - input_ids.shape[1]
        self.last = generate(self.target, self.drafter, self.build, input_ids, limit, rule,
                             stopping_criteria, streamer)
        new = torch.tensor([self.last.tokens], device=input_ids.device)
        ids = torch.cat((input_ids, new), dim=1)
        if generation_config.return_dict_in_generate:
            return generation.GenerateDecoderOnlyOutput(sequences=ids)
        return ids

class Processed(Greedy):
    """Greedy decoding after logits processors."""
    def __init__(self, processors):
        self.processors = processors

    def choose(self, tree, logits, first):
        return self.processors(None, logits.float()).argmax(-1)

class AfterPrompt:
    """Passes on to a streamer all but the prompt, which transformers has shown it already."""
    def __init__(self, streamer):
        self.streamer, self.end, self.prompt_seen = streamer, streamer.end, False

    def put(self, ids):
        if self.prompt_seen:
            self.streamer.put(ids)
        self.prompt_seen = True

# Logits processors that look at the scores alone.  Others look at the preceding tokens, too, and
# these differ from node to node of a tree.
SCORES_ALONE = {
    "TemperatureLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper", "MinPLogitsWarper",
    "TopHLogitsWarper", "TypicalLogitsWarper", "EpsilonLogitsWarper", "EtaLogitsWarper",
    "SuppressTokensLogitsProcessor", "InfNanRemoveLogitsProcessor", "LogitNormalization"}
# What generate() prepares for its own loops; `speculative` prepares its own
PREPARED = {"attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep"}
# Options of generate() for outputs that `speculative` does not have
NOT_RETURNED = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")

def refuse(input_ids, processors, config, assistant, model_kwargs):
    """Raise UserError for arguments of generate() that `speculative` cannot serve."""
    mode = config.get_generation_mode(assistant)
    if mode not in ("greedy_search", "sample"):
        raise UserError(f"{mode.value} is not served: leave its arguments out, and choose greedy "
                        "decoding or sampling")
    if len(input_ids) != 1:
        raise UserError(f"{len(input_ids)} sequences: give one, with num_return_sequences=1")
    for processor in processors:
        name = type(processor).__name__
        if name not in SCORES_ALONE:
            raise UserError(f"{name} may look at earlier tokens: switch it off, in the arguments "
                            "or in model.generation_config")
    mask = model_kwargs.get("attention_mask")
    if mask is not None and not mask.all():
        raise UserError("the attention mask hides tokens: give a prompt without padding")
    given = [name for name, value in model_kwargs.items() if value is not None]
    unserved = [name for name in given if name not in PREPARED]
    unserved += [name for name in NOT_RETURNED if getattr(config, name, None)]
    if unserved:
        raise UserError(f"{unserved[0]} is not served: leave it out")

# ---------------------------------------------------------------- the demo
def main():
    """Every token of the vocabulary is a child of the root, so exactly one child matches the
    target's choice.  Each round therefore yields two tokens.
    """
    from transformers import LlamaConfig, LlamaForCausalLM
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
    model = LlamaForCausalLM(config)
    tokens = torch.arange(50)
    parents = torch.tensor([-1] + 50 * [0])

    def build(expand, root):
        return Tree(torch.cat((root, tokens)), parents)
    out = generate(Target(model), None, build, [3], 41)
    own = model(torch.tensor([[3, *out.tokens]])).logits[0].argmax(-1)    # no cache, no mask
    assert own[:-1].tolist() == out.tokens and out.tau == 2
    print("41 tokens in 20 rounds, the same as those of plain decoding")

if __name__ == "__main__":
    main()
