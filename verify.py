"""Tree verification: the target model, its KV cache, the acceptance rules and the decoding loop.

GLIDE with a CAPE (arXiv 2402.02082), sections 3 and 4.2, Figures 1 and 2; all three papers use it.

The idea.  A drafter proposes a tree of tokens below the root x_t, the text's last token, which is
not cached yet.  One forward of the target reads all nodes; each sees the cached prefix and its own
ancestors.  Walk down while the token that the target chooses after a node is a child: these nodes
are accepted, and the first chosen token that is no child is the next root.

    paper                  shape                 name here
    x_{<t}, its K and V    L x 2 x (1, H, t, d)  TreeCache.kv[layer]: the first `length` entries
    proposal P             (n,)                  tree.tokens, tree.parents
    mask_CAPE              (n, t + n)            t columns of ones, then ancestor_mask(parents)
    p_D(.|node)            (n - 1, V)            tree.p_draft, of a sampled chain: rows of expand

A builder is a function build(expand, root (1,)) -> Tree.  It calls expand(tokens (m,), parents [m
ints]) -> probabilities (m, V), one run of the drafter over m new nodes: the root first, with parent
-1.  All tensors lie on the root's device.  Parents come before children; of children with one token
the first counts.  A row of zeros is no prediction, and no child has probability zero.  It may use
expand.remaining (deeper nodes are wasted), .root (its id), .generator, .drafter, .rule, .memory.

Nodes have two numbers: the place in the tree, and the place among all nodes that expand was given
(expand_index).  The text ends with 7; CAPE drafts 3, then 5, and puts 4 beside the 3:
    p = expand(root, [-1])                              # expand_index 0: the root, 7
    p = expand(root.new_tensor([3]), [0])               # expand_index 1: 3, below the 7
    return Tree(root.new_tensor([7, 3, 5, 4]), root.new_tensor([-1, 0, 1, 0]))
The target chooses 3 after 7, 5 after 3, 9 after 5.  So the tree's nodes 0, 1, 2 are committed, the
drafter is told keep([0, 1]), and 9 is the next root.  The next view shows it 7, 3 and 5.

A drafter answers from any device.  A round may end without expand, and keep may get [].  It has
    needs                    what it reads: {"kv": [layers], "hidden": [indices of hidden_states],
                             "source": f}, where f is called with an encoder's ids
    reset(), begin(view)     a new sequence; a new round, and what was committed since the last one
    expand(tokens, parents)  as above -> logits (m, V), V the target's; a row of -inf: no prediction
    keep(path)               the expand_indices of accepted nodes, root first; it forgets the rest
and may have
    temperature              at which its softmax predicts the target's argmax best (calibration)
    chain(root, most, warp, generator) -> (ids, p_draft or None), for cascade.proposal
    suggest(token, parent, most, match) -> (ids, confidences), at no cost (beyond/graft.py)

Differences from the paper:
 1. The root is a node: the paper's mask leaves x_t out, though the target must read it.
 2. Sampling over a tree is ours: the target's sample is keyed by (seed, position), as without one.
 3. Under greedy decoding a builder gets softmax(logits / temperature): calibrated confidences.

    out = generate(Target(model), drafter, build, ids)       # to use it alone; out.tokens: new ids
    python verify.py                                         # the demo: a random Llama
"""
import hashlib
from collections import namedtuple
from copy import copy
from functools import lru_cache

import torch
import torch.nn.functional as F
from transformers.cache_utils import Cache
from transformers.generation import (LogitsProcessorList, StoppingCriteriaList,
                                     TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper)

Tree = namedtuple("Tree", "tokens parents p_draft", defaults=(None,))
# What a drafter is shown: tokens (k,) committed since the last view; the length of all that is;
# kv {layer: (K, V), each (1, H, length, d)}; hidden {index: (k, D)}; on the host ids [k] and root
View = namedtuple("View", "tokens length kv hidden ids root", defaults=(None, None))
Round = namedtuple("Round", "new path tokens parents")         # new: its tokens; path: accepted
CHUNK = 512              # cache entries to spare for trees

class UserError(ValueError):
    """A user's mistake, in one sentence that says what to do; programs exit with status 2."""

# ---------------------------------------------------------------- the target
def ancestor_mask(parents):
    """(n,) parents -> (n, n) bool: entry (i, j) says that node j is i or an ancestor of i."""
    n = len(parents)
    ancestor = parents.clamp(0, n - 1)                         # the root is its own parent
    seen = torch.eye(n, dtype=torch.bool, device=parents.device)               # each sees itself
    for _ in range(n.bit_length()):
        seen = seen | seen[ancestor]                           # and what its ancestor sees
        ancestor = ancestor[ancestor]                          # two steps up, four, eight ...
    return seen

class TreeCache(Cache):
    """kv[layer]: [K, V], (1, H, allocated, d) each: `length` committed entries, then the tree's."""
    def __init__(self):
        super().__init__(layers=[])
        self.allocated, self.length, self.kv = 0, 0, {}

    def reserve(self, entries):
        """Allocate at least so many entries; what is committed stays."""
        if entries > self.allocated:
            more = max(entries - self.allocated, self.allocated // 2)
            self.allocated += more             # half as many again: few copies of a growing text
            for layer, held in self.kv.items():
                self.kv[layer] = [F.pad(x, (0, 0, 0, more)) for x in held]

    def step(self, slots, end):
        """The cache of one forward, which writes at slots (n,) and reads the first `end`."""
        step = copy(self)                                      # with the same kv
        step.slots, step.end = slots, end
        return step

    def update(self, k, v, layer, *args, **kwargs):
        """A layer writes its entries k, v, (1, H, n, d) each -> keys and values that it reads."""
        if layer not in self.kv:
            none_yet = (0, 0, 0, self.allocated)
            self.kv[layer] = [F.pad(x[:, :, :0], none_yet) for x in (k, v)]
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
        for held in self.kv.values():
            for x in held:
                x[:, :, self.length:end] = x.index_select(2, self.length + nodes)

class Target:
    """A Hugging Face decoder-only causal LM (sdpa or eager).  capacity: its positions."""
    def __init__(self, model, capacity=None):
        self.model, self.device, self.dtype = model.eval(), model.device, model.dtype
        self.config = model.config.get_text_config()
        window = getattr(self.config, "sliding_window", None)
        kinds = getattr(self.config, "layer_types", None) or [window]
        if set(kinds) - {None, "full_attention"}:              # our mask replaces the model's
            raise UserError("not all layers of the target have full attention: take "
                            "runtime.families.any_target(model)")
        self.vocab = self.config.vocab_size
        context = getattr(self.config, "max_position_embeddings", None) or 2048
        self.capacity = min(capacity or context, context)
        self.cache = TreeCache()
        self.capture({})

    def capture(self, needs):
        """A new decoding: from here on collect what a drafter reads, its `needs`."""
        self.needs = {"kv": (), "hidden": (), **needs}
        self.reset()

    def reset(self):
        """Forget the text; the allocated memory stays."""
        self.cache.length, self.ids = 0, []                    # ids: what the cache holds

    def remaining(self, ids):
        """How many tokens may follow a prompt; the last one is never forwarded."""
        return self.capacity - len(ids) + 1

    def prefill(self, ids, new_tokens=0):
        """Forget the text and read a prompt, which so many tokens may follow -> logits (V,)."""
        self.reset()
        self.cache.reserve(len(ids) + new_tokens + CHUNK)
        return self.sync(ids)[-1]

    @torch.no_grad()
    def forward(self, tokens, parents=None, logits_to_keep=0):
        """Forward a tree, or a chain (parents None), after the prefix -> logits (n, V)."""
        n, cached = len(tokens), self.cache.length
        end = cached + n
        self.cache.reserve(end)
        slots = torch.arange(cached, end, device=self.device)
        position, mask = slots, None                           # None: the model's own, causal
        if parents is None and cached:
            parents = slots - cached - 1                       # each node below the one before it
        if parents is not None and n > 1:
            seen = ancestor_mask(parents.to(self.device))                              # (n, n)
            mask = F.pad(seen, (cached, 0), value=True)        # mask_CAPE (n, end)
            depth = seen.sum(1) - 1
            position = cached + depth
            position = position.clamp(max=self.capacity - 1)   # beyond: never accepted
        tokens = tokens.to(self.device)
        logits, *states = self.run(end, tokens, position, slots, mask, logits_to_keep)
        self.nodes = [tokens, *states]                         # (n,), and (n, D) of each index
        return logits

    def run(self, keys, tokens, position, slots, mask, logits_to_keep=0):
        """Node i, written at slots[i], sees entries j < keys where mask[i, j]; None: causal."""
        wanted = self.needs["hidden"]
        out = self.model(
            input_ids=tokens[None], past_key_values=self.cache.step(slots, keys),
            use_cache=True, logits_to_keep=logits_to_keep, output_hidden_states=bool(wanted),
            **self.position_and_mask(position, slots, mask))
        states = [out.hidden_states[index][0] for index in wanted]
        return [out.logits[0], *states]                        # (n, V), and (n, D) of each index

    def position_and_mask(self, position, slots, mask):
        """position_ids, and the mask (1, 1, n, keys) as numbers that are added to the scores."""
        if mask is not None:
            mask = torch.where(mask, 0.0, -torch.inf).to(self.dtype)[None, None]
        return {"position_ids": position[None], "attention_mask": mask}

    def commit(self, path, ids):
        """Nodes `path` of the last forward join the text: a list, root first; ids: their tokens."""
        nodes = slice(len(path))                               # a chain's are already in place
        if path != list(range(len(path))):
            nodes = torch.tensor(path).to(self.device, non_blocking=True)
            self.cache.compact(nodes)
        self.cache.length += len(path)
        self.ids += ids
        self.committed = [of_nodes[nodes] for of_nodes in self.nodes]      # until view

    def sync(self, ids, logits_to_keep=1, unchanged=0):
        """Cache ids, whose first `unchanged` are cached already -> logits (logits_to_keep, V)."""
        longest = min(len(self.ids), len(ids) - logits_to_keep)        # whose logits are not wanted
        common = min(unchanged, longest)
        while common < longest and self.ids[common] == ids[common]:
            common += 1
        self.cache.length = common
        del self.ids[common:]
        rest = ids[common:]
        logits = self.forward(torch.tensor(rest), None, logits_to_keep)
        self.commit(list(range(len(rest))), rest)
        return logits[-logits_to_keep:]

    def view(self, root=None):
        """What the last commit added, and what the drafter reads of the text -> View."""
        tokens, *hidden = self.committed
        ids = self.ids[-len(tokens):]
        length = self.cache.length
        kv = {}
        for layer in self.needs["kv"]:
            kv[layer] = [entries[:, :, :length] for entries in self.cache.kv[layer]]
        hidden = dict(zip(self.needs["hidden"], hidden))
        return View(tokens, length, kv, hidden, ids, root)

# ---------------------------------------------------------------- acceptance
def children(tokens, parents):
    """Lists (n,) each -> {(parent, token): node}; of children with one token the first counts."""
    child = {}
    for node, (parent, token) in enumerate(zip(parents, tokens)):
        assert parent < node, "a tree has parents before their children"
        child.setdefault((parent, token), node)
    return child

def accept(tokens, parents, choice):
    """Walk from the root while the target's choice (n,) is a child -> nodes, choice after each."""
    child = children(tokens, parents)
    path, node = [], 0
    while node is not None:
        path.append(node)
        node = child.get((node, choice[node]))
    return path, [choice[node] for node in path]

def accept_drawn(tree, p_target, generator):
    """Speculative sampling of a chain (Leviathan et al. 2023) -> the token after each node (n,)."""
    drafted = tree.tokens.roll(-1)                             # (n,): none after the last node
    p_draft = F.pad(tree.p_draft, (0, 0, 0, 1))                                        # (n, V)
    # A drafted token is accepted with probability min(1, p_target / p_draft).
    ratio = (p_target / p_draft).gather(1, drafted[:, None])[:, 0]                     # (n,)
    u = torch.empty_like(ratio[1:]).uniform_(generator=generator)
    accepted = F.pad(u, (0, 1), value=torch.inf) < ratio
    # Else one is sampled from norm(max(0, p_target - p_draft)); where they are equal, p_target.
    residual = (p_target - p_draft).clamp(min=0) + 1e-30 * p_target
    # An exponential race, as in torch.multinomial, which first checks p: two device-to-host syncs
    noise = torch.empty_like(residual).exponential_(generator=generator)
    sampled = (residual / noise).argmax(-1)
    return torch.where(accepted, drafted, sampled)

def stream(seed, purpose, device="cpu"):
    """A generator for each (seed, purpose): what samples a draft must not decide its acceptance."""
    digest = hashlib.sha256(f"{seed} {purpose}".encode())      # Python's hash() differs by run
    number = int(digest.hexdigest()[:14], 16)
    return torch.Generator(device).manual_seed(number)

@lru_cache(maxsize=128)
def keyed_noise(seed, position, vocab, device):
    """Exponential noise (vocab,) of (seed, position) alone: argmax(p / noise) is a sample of p."""
    noise = torch.empty(vocab, device=device)
    return noise.exponential_(generator=stream(seed, position, device))

class Greedy:
    """The rule of greedy decoding: the target's argmax."""
    seed = None                                                # nothing is sampled

    def probs(self, logits, temperature):
        """A drafter's logits (m, V) -> what a builder sees: its confidence in the argmax."""
        return (logits / temperature).softmax(-1)

    def choose(self, tree, logits, first):
        """logits (n, V) -> the token after each node (n,).  first: the position after the root."""
        return logits.argmax(-1)

class Sampled:
    """The rule of sampling, from the distribution that transformers' own processors make."""
    def __init__(self, temperature=1.0, top_k=None, top_p=None, seed=0):
        self.seed = seed
        self.processors = LogitsProcessorList([TemperatureLogitsWarper(float(temperature))])
        for warper, value in ((TopKLogitsWarper, top_k), (TopPLogitsWarper, top_p)):
            if value:
                self.processors.append(warper(value))

    def warp(self, logits):
        """Logits (n, V) -> the distributions that tokens are sampled from (n, V)."""
        return self.processors(None, logits.float()).softmax(-1)

    def probs(self, logits, temperature):
        return self.warp(logits)                               # as the target's are

    def choose(self, tree, logits, first):
        """As Greedy.choose, by keyed noise; a sampled chain by speculative sampling."""
        p_target = self.warp(logits)                                                   # (n, V)
        if tree.p_draft is not None:
            generator = stream(self.seed, f"accept {first}", logits.device)
            return accept_drawn(tree, p_target, generator)
        depth = ancestor_mask(tree.parents).sum(1) - 1                                 # (n,)
        of_vocab = logits.shape[1], logits.device
        noise = [keyed_noise(self.seed, first + d, *of_vocab) for d in range(len(depth))]
        noise = torch.stack(noise)[depth]      # (n, V): one for all nodes of a depth
        return (p_target / noise).argmax(-1)

# ---------------------------------------------------------------- the loop
class Output:
    """What generate() returns: tokens, the new ids; rounds, a Round each."""
    def __init__(self, ids, limit, criteria, streamer):
        self.tokens, self.rounds = [], []
        self.criteria, self.streamer = StoppingCriteriaList(criteria), streamer
        self.text = torch.tensor([ids + [0] * limit])          # (1, all): it grows in place
        self.length, self.ended = len(ids), False
        if streamer:
            streamer.put(torch.tensor([ids]))

    def add(self, tokens):
        """Append tokens up to the limit, or to the first after which a criterion holds -> those."""
        new = []
        for token in tokens:
            new.append(token)
            self.text[0, self.length] = token
            self.length += 1
            full = self.length == self.text.shape[1]
            self.ended = full or bool(self.criteria(self.text[:, :self.length], None))
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
        """Average acceptance length: new tokens a round, without the prefill's."""
        return (len(self.tokens) - 1) / max(1, len(self.rounds))

class Expand:
    """What a builder sees in a round: expand(tokens (m,), parents [m ints]) -> (m, V)."""
    def __init__(self, drafter, rule, memory, root, remaining, generator):
        self.drafter, self.rule, self.memory = drafter, rule, memory
        self.root, self.remaining, self.generator = root, remaining, generator
        self.tokens, self.parents = [], []                     # by expand_index

    def __call__(self, tokens, parents):
        self.tokens.append(tokens)
        self.parents += parents
        logits = self.drafter.expand(tokens, parents).to(tokens.device).float()        # (m, V)
        temperature = getattr(self.drafter, "temperature", 1.0)
        return self.rule.probs(logits, temperature).nan_to_num(0.0)        # a row of -inf: zeros

    def path(self, tokens, accepted):
        """The expand_indices of accepted tokens, root first.  tokens: a list, by expand_index."""
        child = children(tokens, self.parents)
        path, node = [], -1
        for token in accepted:
            node = child.get((node, token))
            if node is not None:
                path.append(node)
        return path

def root_only(expand, root):
    """The tree of plain decoding: the root alone."""
    return Tree(root, torch.full_like(root, -1))

@torch.inference_mode()
def generate(target, drafter, build, input_ids, max_new_tokens=128, rule=None, stopping_criteria=(),
             streamer=None):
    """Speculative decoding of one sequence (GLIDE, Figures 1 and 2) -> Output.

    drafter, build: see the top; None and root_only: plain decoding.  input_ids: (n,) or (1, n), or
    UserError.  rule: Greedy() or Sampled(...).  stopping_criteria, streamer: transformers' own.
    """
    given = torch.as_tensor(input_ids)
    ids = given.flatten().tolist()
    limit = min(max_new_tokens, target.remaining(ids))
    if given.shape[-1] != len(ids) or not ids or limit < 1:
        raise UserError(f"{len(ids)} tokens, {max_new_tokens} new ones, a context of "
                        f"{target.capacity}: give one sequence that fits, and at least one of each")
    rule = rule or Greedy()
    out = Output(ids, limit, stopping_criteria, streamer)
    memory = {}
    target.capture(drafter.needs if drafter else {})
    if drafter:
        drafter.reset()
    logits = target.prefill(ids, limit)[None]                  # (1, V), of the first root
    no_tree = root_only(None, torch.tensor(ids[-1:], device=target.device))
    root = rule.choose(no_tree, logits, target.cache.length)                           # (1,)
    new = out.add(root.tolist())
    while not out.ended:
        # Draft: the drafter proposes a tree that hangs from the root x_t.
        if drafter:
            drafter.begin(target.view(new[-1]))
        first = target.cache.length + 1
        remaining = limit - len(out.tokens) - 1
        generator = stream(rule.seed, f"draft {first}", target.device)
        expand = Expand(drafter, rule, memory, new[-1], remaining, generator)
        tree = build(expand, root)
        assert tree.tokens.shape == tree.parents.shape, "each node of a tree has one parent"

        # Verify: one forward of the target over all nodes.
        logits = target.forward(tree.tokens, tree.parents)                             # (n, V)
        choice = rule.choose(tree, logits, first)                                      # (n,)

        # Accept: walk down while the target's choice is a child.
        n = len(tree.tokens)
        numbers = torch.cat((tree.tokens, tree.parents, choice, *expand.tokens)).tolist()
        tokens = numbers[:n]
        parents = numbers[n:2 * n]
        assert tokens[0] == new[-1], "a tree begins with the root"
        path, new = accept(tokens, parents, numbers[2 * n:3 * n])

        # Commit: the accepted nodes join the cache; the target's own token is the next root.
        accepted = [tokens[node] for node in path]
        target.commit(path, accepted)
        root = choice[path[-1]:][:1]
        if drafter:
            drafter.keep(expand.path(numbers[3 * n:], accepted))
        new = out.add(new)
        out.rounds.append(Round(new, path, tokens, parents))
    return out

def main():
    """Of all tokens below the root one is right: two tokens a round, those of plain decoding."""
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
    print("41 tokens in 20 rounds, token for token plain decoding's")

if __name__ == "__main__":
    main()
