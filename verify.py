"""Tree verification: the target model, its KV cache, the acceptance rule and the decoding loop.

GLIDE with a CAPE (arXiv 2402.02082), sections 3 and 4.2, Figures 1 and 2.  The methods of all three
papers run on it.

The idea.  A drafter proposes a tree of tokens below the root x_t, the last token of the sequence,
which is not cached yet.  One forward pass of the target reads all nodes of the tree.  A node
attends to the cached prefix, to its ancestors and to itself, so its logits are those of plain
decoding after the same tokens.  Then walk down from the root while the token that the target
chooses after a node is one of its children.  These nodes are accepted.  The first choice that is
not a child is the next root.

    paper                  shape                 name here
    x_{<t}, its K and V    L x 2 x (1, H, t, d)  TreeCache.kv[layer]: the first `length` entries
    proposal P             (n,)                  tree.tokens, tree.parents
    mask_CAPE              (n, t + n)            t columns of ones, then ancestor_mask(parents)
    p_D(.|node)            (n - 1, V)            tree.p_draft, only for a sampled chain

The contract.  A builder is a function build(expand, root (1,)) -> Tree.  A drafter is an object
with `needs`, reset, begin, expand and keep (points 4 to 6).
 1. expand(tokens (m,), parents [m ints]) -> probabilities (m, V) runs the drafter once over m new
    nodes.  It numbers the nodes of a round from 0 in the order in which it receives them, and
    `parents` are these numbers, -1 for the root, which comes first.  A row of zeros: no prediction.
 2. A Tree holds long tensors (n,) on the root's device: tokens; parents, which come before their
    children (node 0 is the root, with parent -1); and expand_index, each node's number in expand,
    -1 if it was not given.  Only a sampled chain has p_draft (n - 1, V): row i is the distribution
    from which node i + 1 was sampled.  It must give that token more than zero, or the output is
    biased: speculative sampling accepts by p_target / p_draft.
 3. expand is one object for a whole sequence: a builder may keep what it remembers in attributes
    of it.  Two attributes are there in each round: expand.remaining, the greatest useful depth, one
    less than the number of tokens that may still come, since a round ends with one of the target's
    (where it is 0 no builder is called); and, in sampling, expand.generator, for a builder that
    samples its draft.
 4. drafter.needs = {"kv": layers, "hidden": indices of hidden_states}: what it reads of the target.
 5. drafter.reset(probs, source) begins a sequence.  expand turns the drafter's logits (m, V) into
    probabilities by probs(logits, temperature), with the temperature that calibrates the drafter.
    probs is Rule.probs.  In greedy decoding it is softmax(logits / temperature).  In sampling it
    ignores this temperature, and applies the target's own, its top-k, its top-p and so on.
    source: the ids of an encoder's input, or None.
 6. drafter.begin(view, root_id) begins a round.  The View shows what the last commit appended: the
    prompt, later the last root and the nodes accepted below it.  root_id, an int, is the new root,
    which is not committed yet.  drafter.expand is the function of 1.
    drafter.keep(path) ends the round.  path lists the numbers of the accepted nodes that expand was
    given, starting with the root's; it is empty where expand was not called.  The drafter forgets
    all other nodes.

Example.  The sequence ends with 7.  A builder drafts 3, then 5 after it, and adds 4 beside the 3:
    p = expand(root, [-1])                              # number 0: the root, 7
    p = expand(root.new_tensor([3]), [0])               # number 1: the 3
    tokens = root.new_tensor([7, 3, 5, 4])
    parents = root.new_tensor([-1, 0, 1, 0])
    return Tree(tokens, parents, expand_index=root.new_tensor([0, 1, -1, -1]))
If the target chooses 3 after 7, 5 after 3 and 9 after 5, then 7, 3 and 5 are committed and are the
tokens of the next view, the drafter is told keep([0, 1]), and 9 is the next root.

Differences from the paper:
 1. The root is a node: the paper's mask leaves x_t out, though the target must read it.
 2. Sampling with a tree is ours.  A token is argmax(p / noise), where the noise depends on the seed
    and the position alone (and on the kind of device): keyed_noise.  So a tree's output is token
    for token that of plain sampling.  (That of a sampled chain only has the same distribution.)
 3. In greedy decoding a builder sees softmax(logits / temperature): calibrated confidences.

To use this file in a project of yours, with a decoder-only model of transformers all of whose
layers have full attention (runtime/targets.py serves others):

    out = generate(Target(model), drafter, build, ids)       # out.tokens: the new ids

    python verify.py                                         # the demo: a random Llama
"""
import hashlib
from collections import namedtuple
from functools import lru_cache, partial

import torch
import torch.nn.functional as F
from transformers import generation
from transformers.cache_utils import Cache

Tree = namedtuple("Tree", "tokens parents expand_index p_draft", defaults=(None,))
# What a commit appended, and what a drafter reads of the target:
#   tokens  (k,): the committed tokens; in a sequence's first view they are the prompt
#   ids     [k ints]: the same, on the host
#   length  int: the number of all committed tokens
#   kv      {layer: [K, V]}, (1, H, length, d) each
#   hidden  {index: (k, D)}: the hidden states of `tokens`
View = namedtuple("View", "tokens ids length kv hidden")
# What happened in a round, as lists: its new tokens, the accepted nodes (the root first), the tree
Round = namedtuple("Round", "new path tokens parents")

MARGIN = 512             # cache entries that are allocated for trees, beyond the sequence

# ---------------------------------------------------------------- the target
def ancestor_mask(parents):
    """Parents (n,) -> (n, n) bool: entry (i, j) is True if node j is i itself or its ancestor."""
    n = len(parents)
    # Here the root is its own parent, so that climbing ends there.
    ancestor = parents.clamp(min=0)
    seen = torch.eye(n, dtype=torch.bool, device=parents.device)
    # Each pass doubles the number of nodes on the way up that a node sees.
    for _ in range(n.bit_length()):
        seen = seen | seen[ancestor]                           # what the node or that ancestor sees
        ancestor = ancestor[ancestor]                          # 2 steps up, then 4, 8, ...
    return seen

class TreeCache(Cache):
    """The KV cache of a target, for which keeping the accepted path of a tree is one copy.

    Its first `length` entries are committed, and those of the current tree follow.  kv[layer] is
    [K, V], each (1, H, allocated, d).  They are slices of one tensor for all layers, a stack
    (2 x layers, 1, H, allocated, d), so compact() moves the entries of all layers by one copy.  A
    model whose layers differ in H, d or device has a stack for each kind, with 2 x layers slices
    though fewer are used.  A stack is made when the first layer of its kind writes; `free` holds
    the slices that no layer has taken yet.
    """
    def __init__(self, layers):
        """layers: the number of the model's layers."""
        super().__init__(layers=[])
        self.num_slices = 2 * layers
        self.allocated, self.length, self.kv = 0, 0, {}
        self.slots, self.end = None, 0                         # of the next forward: step()
        self.stacks = []                                       # one for each kind of layer
        self.free = {}                                         # {kind: slices}

    def reserve(self, entries):
        """Allocate at least `entries` entries, and keep what is committed."""
        if entries > self.allocated:
            # Grow by at least half of what is allocated, so that entries are seldom copied.
            self.allocated = max(entries, self.allocated * 3 // 2)
            before, self.kv = self.kv, {}
            self.stacks, self.free = [], {}
            for layer, pair in before.items():
                self.kv[layer] = [self.slice_like(x) for x in pair]
                for larger, x in zip(self.kv[layer], pair):
                    larger[:, :, :x.shape[2]] = x

    def slice_like(self, x):
        """Zeros (1, H, allocated, d) for keys or values x (1, H, n, d).

        This takes the next free slice of its kind, and makes a new stack where none is left.
        """
        shape = (x.shape[0], x.shape[1], self.allocated, x.shape[3])
        kind = (shape, x.dtype, x.device)
        free = self.free.setdefault(kind, [])
        if not free:
            stack = x.new_zeros(self.num_slices, *shape)
            self.stacks.append(stack)
            free += stack.unbind(0)
        return free.pop(0)

    def step(self, slots, end):
        """Tell the next forward to write at slots (n,) and attend to entries [:end] -> self."""
        self.slots, self.end = slots, end
        return self

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
        for stack in self.stacks:
            slots = self.length + nodes.to(stack.device)
            stack[:, :, :, self.length:end] = stack.index_select(3, slots)

class Target:
    """A decoder-only causal LM of transformers, with sdpa or eager attention, and its KV cache.

    capacity: the most positions that a sequence may have; by default the model's context.  Raises
    ValueError for a model with sliding windows: runtime/targets.py serves those.
    """
    source = None            # the encoder's input as ids, for an encoder-decoder model

    def __init__(self, model, capacity=None):
        self.model, self.device, self.dtype = model.eval(), model.device, model.dtype
        self.config = model.config.get_text_config()
        layer_types = getattr(self.config, "layer_types", None)
        if layer_types:
            has_window = set(layer_types) != {"full_attention"}
        else:
            has_window = getattr(self.config, "sliding_window", None) is not None
        if has_window:                                         # our mask replaces the model's own
            raise ValueError("not all layers of the target have full attention: take "
                             "runtime.targets.any_target(model)")
        self.vocab = self.config.vocab_size
        context = getattr(self.config, "max_position_embeddings", None) or 2048
        self.capacity = min(capacity or context, context)
        self.cache = TreeCache(self.config.num_hidden_layers)
        self.configure({})

    def configure(self, needs):
        """Store what the drafter reads, its `needs`, and start a new sequence."""
        self.needs = {"kv": (), "hidden": (), **needs}
        self.reset()

    def reset(self):
        """Start a new sequence.  The allocated memory is kept."""
        self.cache.length = 0
        self.ids = []                                          # the tokens in the cache

    def remaining(self, ids):
        """The most tokens that may follow a prompt.  The last one needs no position."""
        return self.capacity - len(ids) + 1

    def prefill(self, ids, new_tokens=0, needs={}):
        """Start a new sequence: forward the prompt, and allocate cache for `new_tokens` more.

        ids: a list.  needs: the drafter's.  Returns the logits (V,) after the last token, and the
        View of the prompt.
        """
        self.configure(needs)
        self.cache.reserve(len(ids) + new_tokens + MARGIN)
        logits, view = self.align(ids)                         # the cache is empty: all ids are run
        return logits[-1], view

    @torch.no_grad()
    def forward(self, tokens, parents=None, logits_to_keep=0):
        """Forward the n nodes of a tree after the prefix; parents None: a chain.

        tokens, parents (n,).  Returns the logits (n, V), or the last `logits_to_keep` (0: all);
        and the states of the nodes, which commit takes: [tokens, hidden states (n, D) per index].
        """
        n, cached = len(tokens), self.cache.length
        end = cached + n
        self.cache.reserve(end)
        slots = torch.arange(cached, end, device=self.device)
        # parents   cached   n       what a node sees
        # None      0        any     a prompt: the model's own causal mask is right
        # any       any      1       everything: no mask is needed
        # None      > 0      > 1     the prefix, the nodes before it and itself: a chain
        # given     any      > 1     the prefix, its ancestors and itself
        position, mask = slots, None
        if parents is None and cached:
            parents = slots - cached - 1
        if parents is not None and n > 1:
            seen = ancestor_mask(parents.to(self.device))                              # (n, n)
            mask = F.pad(seen, (cached, 0), value=True)        # mask_CAPE (n, end)
            depth = seen.sum(1) - 1
            # Nodes beyond the capacity get the last position, so their logits are wrong.  No token
            # is chosen from them: the output ends before.
            position = (cached + depth).clamp(max=self.capacity - 1)
        tokens = tokens.to(self.device)
        logits, *hidden = self.run(end, tokens, position, slots, mask, logits_to_keep)
        return logits, [tokens, *hidden]

    def run(self, end, tokens, position, slots, mask, logits_to_keep=0):
        """Run the model once.  Node i is written to the cache at slots[i].

        It attends to entry e < end of the cache where mask[i, e]; mask (n, end), or None: the
        model's causal mask.  Returns a list: logits, and hidden states (n, D) per index.
        runtime/ replaces this method: for other families of models, and to record CUDA graphs.
        """
        wanted = self.needs["hidden"]
        out = self.model(
            input_ids=tokens[None], past_key_values=self.cache.step(slots, end),
            use_cache=True, output_hidden_states=bool(wanted),
            **self.inputs(position, slots, mask, logits_to_keep))
        hidden = [out.hidden_states[index][0] for index in wanted]
        return [out.logits[0], *hidden]

    def inputs(self, position, slots, mask, logits_to_keep):
        """The model's other arguments; the mask becomes numbers (1, 1, n, end), added to scores.

        slots is for runtime/targets.py, which extends this method.
        """
        if mask is not None:
            mask = torch.where(mask, 0.0, -torch.inf).to(self.dtype)[None, None]
        return {"position_ids": position[None], "attention_mask": mask,
                "logits_to_keep": logits_to_keep}

    def commit(self, path, ids, states):
        """Append the accepted nodes to the sequence -> the View of what was appended.

        path: their indices in the last tree (a list, the root first).  ids: their token ids.
        states: what forward returned for the tree.
        """
        nodes = slice(len(path))
        if path != list(range(len(path))):                     # else they are in place already
            nodes = torch.tensor(path).to(self.device, non_blocking=True)
            self.cache.compact(nodes)
        self.cache.length += len(path)
        self.ids += ids
        tokens, *hidden = [of_nodes[nodes] for of_nodes in states]
        hidden = dict(zip(self.needs["hidden"], hidden))
        length = self.cache.length
        kv = {}
        for layer in self.needs["kv"]:
            kv[layer] = [entries[:, :, :length] for entries in self.cache.kv[layer]]
        return View(tokens, ids, length, kv, hidden)

    def align(self, ids, logits_to_keep=1):
        """Make the cache hold exactly `ids`: keep the prefix that it holds, and forward the rest.

        Returns the logits (logits_to_keep, V) after the last ids, and the View of the rest.
        """
        # The last `logits_to_keep` ids are forwarded even if they are cached, for their logits.
        longest = min(len(self.ids), len(ids) - logits_to_keep)
        common = 0
        while common < longest and self.ids[common] == ids[common]:
            common += 1
        self.cache.length = common
        del self.ids[common:]
        rest = ids[common:]
        logits, states = self.forward(torch.tensor(rest), None, logits_to_keep)
        view = self.commit(list(range(len(rest))), rest, states)
        return logits[-logits_to_keep:], view                  # some models ignore logits_to_keep

# ---------------------------------------------------------------- acceptance
def children(tokens, parents):
    """{(a node, a token): its child with that token}; of several such children the first counts."""
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

def sample_by(uniform, p):
    """Sample from unnormalised distributions p (n, V), by inverting their cumulative sums -> (n,)

    uniform (n, 1) or (): in (0, 1]; 0 would give token 0 even where its p is 0.  In float32 the
    cumulative sums would lose rare tokens.
    """
    sums = p.cumsum(-1, dtype=torch.float64)                                           # (n, V)
    return torch.searchsorted(sums, uniform * sums[:, -1:])[:, 0]

def accept_sampled(tree, p_target, generator):
    """Speculative sampling of a chain (Leviathan et al. 2023) -> the token after each node (n,).

    tree.p_draft (n - 1, V), p_target (n, V).
    """
    drafted = tree.tokens[1:, None]                                                    # (n - 1, 1)
    p, q = p_target[:-1], tree.p_draft                                                 # (n - 1, V)
    # A drafted token is accepted with probability min(1, p_target / p_draft).
    ratio = p.gather(1, drafted) / q.gather(1, drafted)                                # (n - 1, 1)
    u = torch.empty_like(ratio).uniform_(generator=generator)
    accepted = u < ratio
    # Otherwise the token is sampled from the residual norm(max(0, p_target - p_draft)); after the
    # last node, where nothing was drafted, from p_target.  Where p_target and p_draft are equal the
    # residual is zero, and the term 1e-30 p_target makes it a sample of p_target.
    residual = p_target.clone()
    residual[:-1] = (p - q).clamp(min=0) + 1e-30 * p
    # Only the sample after the last accepted node is used, so all nodes can share one number.
    uniform = 1 - torch.rand((), dtype=torch.float64, device=residual.device, generator=generator)
    choice = sample_by(uniform, residual)                                              # (n,)
    choice[:-1] = torch.where(accepted, drafted, choice[:-1, None])[:, 0]
    return choice

def generator_for(seed, purpose, device="cpu"):
    """A generator of its own for each (seed, purpose).

    Two generators with one seed give the same numbers.  If a draft was sampled by the numbers that
    then decide its acceptance, the output would be biased.
    """
    digest = hashlib.sha256(f"{seed} {purpose}".encode())      # Python's hash() differs by run
    number = int(digest.hexdigest()[:13], 16)                  # of 52 bits
    return torch.Generator(device).manual_seed(number)

@lru_cache(maxsize=32)
def keyed_noise(seed, position, vocab, device):
    """Exponential noise (vocab,) of the Gumbel-max trick, keyed by (seed, position).

    argmax(p / noise) is a sample of p, and rounding in p hardly ever changes it.  (A sample by
    cumulative sums over a large vocabulary is not robust to rounding: it would change about one
    token in some hundreds.)  lru_cache keeps the noise of positions whose drafts were rejected: the
    next round has them, too.
    """
    # A rare token is sampled only when its noise is almost zero.  In float32 the uniform numbers
    # behind the noise have steps of 2^-24, too coarse there: so it is drawn in float64, and stored
    # in float32.
    noise = torch.empty(vocab, dtype=torch.float64, device=device)
    return noise.exponential_(generator=generator_for(seed, position, device)).float()

# Logits processors of transformers that look at the scores alone.  All others may look at the
# preceding tokens, too, and these differ from node to node of a tree.
NAMES_ALONE = """
    TemperatureLogitsWarper TopKLogitsWarper TopPLogitsWarper MinPLogitsWarper TopHLogitsWarper
    TypicalLogitsWarper EpsilonLogitsWarper EtaLogitsWarper SuppressTokensLogitsProcessor
    InfNanRemoveLogitsProcessor LogitNormalization""".split()
SCORES_ALONE = {getattr(generation, name, None) for name in NAMES_ALONE}     # None: an old release

class Rule:
    """How the target chooses a token: logits processors, then the argmax or a sample.

    processors: transformers' own or yours, applied in order.  seed: None is greedy decoding; with
    a number tokens are sampled, and the same seed gives the same tokens.  See also sampling().
    """
    def __init__(self, processors=(), seed=None):
        self.processors, self.seed = list(processors), seed
        self.scores_only = [p for p in self.processors if type(p) in SCORES_ALONE]

    def probs(self, logits, temperature=1.0):
        """A drafter's logits (m, V) -> probabilities (m, V); a row of -inf becomes one of zeros.

        Greedy: the confidence that a token is the target's argmax, by the drafter's calibration
        temperature.  Sampled: the distribution that the target's processors would make, as far as
        they look at the scores alone.
        """
        logits = logits.float()
        if self.seed is None:
            logits = logits / temperature
        else:
            for processor in self.scores_only:
                logits = processor(None, logits)
        return logits.softmax(-1).nan_to_num(0.0)

    def choose(self, tree, logits, text):
        """The target's logits (n, V) at the tree's nodes -> the token after each node (n,).

        text (1, t + 1): the ids of the sequence, which ends with the root.  Where a processor looks
        at the text, nodes that are not accepted get -1.
        """
        if len(self.scores_only) < len(self.processors):
            return self.choose_by_text(tree, logits, text)
        scores = self.process(None, logits)
        return self.choose_by_scores(tree, scores, text.shape[1])

    def process(self, text, logits):
        """The target's logits (k, V) after the processors; text: as in choose, or None."""
        scores = logits.float() if self.processors else logits
        for processor in self.processors:
            scores = processor(text, scores)
        return scores

    def choose_by_text(self, tree, logits, text):
        """Choose by processors that look at the text, and may remember what they saw.

        They are called as plain decoding calls them: for one text, once for each new token, in
        order.  So this walks down the accepted path, with a device-to-host sync at each node.

        Each step makes the choice after one node.  choose_by_scores gets this node as a tree of its
        own.  In a sampled chain this tree also has the next drafted token, since the choice is to
        accept or to reject it.
        """
        child = children(tree.tokens.tolist(), tree.parents.tolist())
        choice = torch.full_like(tree.tokens, -1)
        text = text.to(logits.device)
        node = 0
        while node is not None:
            tokens, p_draft = tree.tokens[node:node + 1], None
            if tree.p_draft is not None:
                # At the last node both slices are shorter by one: there is nothing to accept.
                tokens, p_draft = tree.tokens[node:node + 2], tree.p_draft[node:node + 1]
            parents = torch.arange(len(tokens), device=tokens.device) - 1
            chain = Tree(tokens, parents, None, p_draft)
            scores = self.process(text, logits[node:node + 1])                         # (1, V)
            # The choice after the next node is not used, so it gets the scores of this one.
            scores = scores.expand(len(tokens), -1)
            choice[node] = self.choose_by_scores(chain, scores, text.shape[1])[0]
            token = choice[node].item()
            text = F.pad(text, (0, 1), value=token)
            node = child.get((node, token))
        return choice

    def choose_by_scores(self, tree, scores, first):
        """Processed scores (n, V) -> the token after each node (n,), the argmax or a sample.

        first: the position of the token that follows the root.
        """
        if self.seed is None:
            return scores.argmax(-1)
        p_target = self.distribution(tree, scores)                                     # (n, V)
        if tree.p_draft is not None:
            generator = generator_for(self.seed, f"accept {first}", scores.device)
            return accept_sampled(tree, p_target, generator)
        # All nodes of one depth share their noise, since they share a position.
        depth = ancestor_mask(tree.parents).sum(1) - 1                                 # (n,)
        root_alone = len(depth) == 1                           # plain decoding: no sync
        deepest = 0 if root_alone else depth.max().item()      # a device-to-host sync
        noise = []
        for d in range(deepest + 1):
            noise.append(keyed_noise(self.seed, first + d, scores.shape[1], scores.device))
        noise = torch.stack(noise)                                                     # (depths, V)
        return (p_target / noise[depth]).argmax(-1)

    def distribution(self, tree, scores):
        """The distributions p_target (n, V) that the tokens after a tree's nodes are sampled from.

        runtime/measure.py replaces this method by one that records GLIDE's alpha in sampling.
        """
        return scores.float().softmax(-1)

def sampling(temperature=1.0, top_k=None, top_p=None, seed=0):
    """The Rule of sampling: temperature, then top-k and top-p, if these are not None."""
    processors = [generation.TemperatureLogitsWarper(float(temperature))]
    if top_k:
        processors.append(generation.TopKLogitsWarper(top_k))
    if top_p:
        processors.append(generation.TopPLogitsWarper(top_p))
    return Rule(processors, seed)

# ---------------------------------------------------------------- the loop
class Output:
    """What generate() returns.

    tokens: the new ids.  rounds: a Round for each tree.  tau: new tokens per round, excluding the
    token that the prefill gave.
    """
    def __init__(self, ids, limit, stop, streamer):
        self.tokens, self.rounds = [], []
        self.stop, self.streamer = stop, streamer
        self.sequence = torch.tensor([ids + [0] * limit])      # (1, all), filled as tokens come
        self.length, self.ended = len(ids), False
        if streamer:
            streamer.put(torch.tensor([ids]))

    @property
    def text(self):
        """All ids so far, the prompt's, too: (1, t + 1)."""
        return self.sequence[:, :self.length]

    @property
    def tau(self):
        return (len(self.tokens) - 1) / max(1, len(self.rounds))

    def __repr__(self):
        return f"Output(tokens={self.tokens}, tau={self.tau:.2f})"

    def add(self, tokens):
        """Append tokens up to the limit, or the first that meets a criterion -> those appended."""
        new = []
        for token in tokens:
            new.append(token)
            self.sequence[0, self.length] = token
            self.length += 1
            full = self.length == self.sequence.shape[1]
            # All criteria are asked, also about the last token: they may remember what they saw.
            answers = [criterion(self.text, None) for criterion in self.stop]
            # An answer is a bool, or a tensor with one for each sequence, of which there is one.
            met = [bool(torch.as_tensor(answer).all()) for answer in answers]
            self.ended = full or any(met)
            if self.ended:
                break
        self.tokens += new
        if self.streamer:
            self.streamer.put(torch.tensor(new))
            if self.ended:
                self.streamer.end()
        return new

class NoDrafter:
    """The drafter of plain decoding: by the contract, it reads nothing and is never expanded."""
    needs = {}

    def reset(self, probs, source):
        pass

    def begin(self, view, root_id):
        pass

    def expand(self, tokens, parents):
        raise NotImplementedError("plain decoding drafts nothing")

    def keep(self, path):
        pass

def root_only(expand, root):
    """The builder of plain decoding: the tree is the root alone."""
    none = torch.full_like(root, -1)
    return Tree(root, parents=none, expand_index=none)

@torch.inference_mode()
def generate(target, drafter, build, ids, new_tokens=128, rule=Rule(), stop=(), streamer=None):
    """Speculative decoding of one sequence (GLIDE, Figures 1 and 2) -> Output.

    drafter, build: see the contract at the top; None and root_only are plain decoding.  ids: the
    prompt, a list of token ids.  stop, streamer: stopping criteria and a streamer of transformers.
    The output ends after new_tokens, with the target's capacity, or where a criterion is met.  An
    end-of-text token needs a criterion, too: stop=[transformers.EosTokenCriteria(id)].
    """
    limit = min(new_tokens, target.remaining(ids))
    assert ids and limit > 0, f"{len(ids)} tokens leave no position for a new one: give a prompt " \
                              f"of at most {target.capacity} tokens, and ask for at least one"
    drafter = drafter or NoDrafter()
    logits, view = target.prefill(ids, limit, drafter.needs)
    drafter.reset(rule.probs, target.source)
    expand = partial(drafter.expand)       # a method takes no attributes, and a partial does
    # target.ids is the prompt.  (Of an encoder-decoder model `ids` is the encoder's input, and the
    # sequence begins with target.ids, its start token.)
    out = Output(list(target.ids), limit, stop, streamer)
    # The prefill counts as the verification of a tree of one node, the prompt's last token.  The
    # target's choice after that node is the first root.
    last = view.tokens[-1:]
    root = rule.choose(root_only(None, last), logits[None], out.text)                  # (1,)
    [root_id] = out.add(root.tolist())
    while not out.ended:
        # Draft: the drafter proposes a tree below the root x_t.
        drafter.begin(view, root_id)
        expand.remaining = limit - len(out.tokens) - 1         # one token is the target's own
        if rule.seed is not None:
            expand.generator = generator_for(rule.seed, f"draft {out.length}", target.device)
        tree = build(expand, root) if expand.remaining else root_only(expand, root)

        # Verify: one forward pass of the target over all nodes, and its choice after each.  For a
        # sampled chain the choice is the drafted token where speculative sampling accepts it.
        logits, states = target.forward(tree.tokens, tree.parents)                     # (n, V)
        choice = rule.choose(tree, logits, out.text)                                   # (n,)

        # Accept: walk down while the target's choice is a child.  One device-to-host sync.
        numbers = torch.stack((tree.tokens, tree.parents, tree.expand_index, choice))  # (4, n)
        tokens, parents, expand_index, chosen = numbers.tolist()
        assert tokens[0] == root_id, "a tree begins with the root"
        path, new = accept(tokens, parents, chosen)

        # Commit: the accepted nodes are cached; the target's own token is the next root.
        view = target.commit(path, [tokens[node] for node in path], states)
        drafter.keep([expand_index[node] for node in path if expand_index[node] >= 0])
        root = choice[path[-1]:path[-1] + 1]                                           # (1,)
        new = out.add(new)
        root_id = new[-1]
        out.rounds.append(Round(new, path, tokens, parents))
    return out

# ---------------------------------------------------------------- the demo
def main():
    """Every token of the vocabulary is a child of the root, so exactly one child matches the
    target's choice.  Each round therefore yields two tokens.
    """
    from transformers import LlamaConfig, LlamaForCausalLM
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
    model = LlamaForCausalLM(config)

    def build(expand, root):
        tokens = torch.cat((root, torch.arange(50)))
        parents = torch.tensor([-1] + 50 * [0])
        return Tree(tokens, parents, expand_index=torch.full_like(parents, -1))

    out = generate(Target(model), None, build, [3], 41)
    own = model(torch.tensor([[3, *out.tokens]])).logits[0].argmax(-1)    # no cache, no mask
    assert own[:-1].tolist() == out.tokens and out.tau == 2
    print("41 tokens in 20 rounds, the same as those of plain decoding")

if __name__ == "__main__":
    main()
