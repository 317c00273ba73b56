"""Tree verification: the target model, its KV cache, the acceptance rules and the decoding loop.

GLIDE with a CAPE (arXiv 2402.02082), sections 3 and 4.2, Figures 1 and 2; all three papers use it.

The idea.  A drafter proposes a tree of tokens, whose root is the last token of the text: the target
has not read it yet.  One forward of the target reads all nodes; each sees the cached prefix and its
own ancestors.  Walk down from the root while the token that the target chooses after a node is a
child: these nodes are accepted.  The last chosen token, which is no child, is the next root.

    paper                  shape                 name here
    x_{<t}, its K and V    L x 2 x (1, H, t, d)  TreeCache.kv[layer]: the first `length` entries
    x_t, not cached yet    ()                    the root: node 0 of the tree
    proposal P             (n,)                  tree.tokens, tree.parents
    mask_CAPE              (n, t + n)            tree_mask(ancestor_mask(parents), t)
    p_T(.|node)            (n, V)                p_target
    p_D(.|node)            (n - 1, V)            tree.p_draft: token i + 1 was sampled from row i

A builder is a function build(expand, root (1,)) -> Tree.  It calls expand(tokens (m,), parents [m
ints]) -> probabilities (m, V), which runs the drafter once over m new nodes: the root first, with
parent -1.  A tree's tensors lie on the root's device; parents come before their children, and of
children with one token the first counts.  A row of zeros is no prediction, and no child has
probability zero.  p_draft, the rows of expand, comes with a sampled chain alone.  A builder may use
expand.remaining (deeper nodes are wasted), .root (its id), .generator, .drafter, .rule, .memory.

Nodes have two numbers: the place in the tree, and the place among all nodes that expand was given
(expand_index).  The text ends with 7; CAPE drafts 3, then 5, and puts 4 beside the 3:
    p = expand(root, [-1])                              # expand_index 0: the root, 7
    p = expand(root.new_tensor([3]), [0])               # expand_index 1: 3, below the 7
    return Tree(root.new_tensor([7, 3, 5, 4]), root.new_tensor([-1, 0, 1, 0]))
The target chooses 3 after 7, 5 after 3, 9 after 5.  So the tree's nodes 0, 1, 2 are committed, the
drafter is told keep([0, 1]), and 9 is the next root.  The next view shows it 7, 3 and 5.

A drafter answers from any device.  A round may end without expand, and keep may get [].  It has
    needs                    what it reads: {"kv": [layers], "hidden": [indices of hidden_states]};
                             "source": called with the ids that an encoder reads, where there is one
    reset(), begin(view)     a new sequence; a new round, and what was committed since the last one
    expand(tokens, parents)  as above -> logits (m, V), V the target's; a row of -inf: no prediction
    keep(path)               the expand_indices of accepted nodes, root first; it forgets the rest
and may have
    temperature              at which its softmax predicts the target's argmax best (calibration)
    chain(root, most, warp, generator) -> (ids, p_draft or None): for cascade.proposal
    suggest(token, parent, most) -> (ids, confidences): a chain at no cost after `token`, the child
                             of expand_index `parent`

Differences from the paper:
 1. The root is a node: the paper's mask leaves x_t out, though the target must read it.
 2. The paper does not say how to sample over a tree.  Here the target's own sample at each position
    is keyed by (seed, position), so the output is plain sampling's with the same seed.
 3. Under greedy decoding a builder gets softmax(logits / temperature): calibrated confidences.

    out = generate(Target(model), drafter, build, ids)       # to use it alone; out.tokens: new ids
    python verify.py                                         # the demo: a random Llama
"""
import hashlib
from collections import namedtuple
from functools import lru_cache

import torch
import torch.nn.functional as F
from transformers.cache_utils import Cache
from transformers.generation import (LogitsProcessorList, StoppingCriteriaList,
                                     TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper)

Tree = namedtuple("Tree", "tokens parents p_draft", defaults=(None,))
# What a drafter is shown: tokens (k,) committed since the last view; the length of all that is;
# kv {layer: (K, V), each (1, H, length, d)}; hidden {index: (k, D)}, of those tokens; their ids
View = namedtuple("View", "tokens length kv hidden ids", defaults=(None,))
# A round, as lists: its new tokens; the accepted nodes, root first; the tree
Round = namedtuple("Round", "new path tokens parents")
FEW = 8                  # nodes of a tree, so few that its depth is not asked for
CHUNK = 512              # tokens of a prompt in one forward; cache entries to spare for trees

class UserError(ValueError):
    """A user's mistake, in one sentence that says what to do; programs exit with status 2."""

# ---------------------------------------------------------------- a tree from its parents
def ancestor_mask(parents):
    """(n,) parents -> (n, n) bool: entry (i, j) says that node j is i or an ancestor of i."""
    n = len(parents)
    ancestor = parents.clamp(0, n - 1)                         # the root is its own parent
    seen = torch.eye(n, dtype=torch.bool, device=parents.device)               # each sees itself
    # Pointer doubling: add what the parent sees, then the ancestor two steps up, four ...
    for _ in range(n.bit_length()):
        seen = seen | seen[ancestor]
        ancestor = ancestor[ancestor]
    return seen

def tree_mask(seen, cached):
    """mask_CAPE: ancestor mask (n, n) -> (n, cached + n) bool, where all nodes see the prefix."""
    return F.pad(seen, (cached, 0), value=True)

# ---------------------------------------------------------------- the target
class TreeCache:
    """kv[layer]: [K, V], (1, H, allocated, d) each: `length` committed entries, then the tree's."""
    def __init__(self):
        self.allocated, self.length, self.kv = 0, 0, {}

    def reserve(self, entries):
        """Allocate at least so many entries; what is committed stays."""
        if entries > self.allocated:
            # Half as many again, so that copying a growing text costs each entry a constant.
            more = max(entries, self.allocated * 3 // 2) - self.allocated
            self.allocated += more
            for layer, held in self.kv.items():
                self.kv[layer] = [F.pad(x, (0, 0, 0, more)) for x in held]

    def of_layer(self, layer, k, v):
        """[K, V] of a layer, allocated when its first entries k, v are seen."""
        if layer not in self.kv:
            none_yet = (0, 0, 0, self.allocated)
            self.kv[layer] = [F.pad(x[:, :, :0], none_yet) for x in (k, v)]
        return self.kv[layer]

    def compact(self, nodes):
        """Move the entries of the current tree's nodes (k,) to the end of the committed ones."""
        end = self.length + len(nodes)
        for held in self.kv.values():
            for x in held:
                x[:, :, self.length:end] = x.index_select(2, self.length + nodes)

class StepCache(Cache):
    """A TreeCache in one forward: entries are written at slots (n,), and the first `end` read."""
    def __init__(self, store, slots, end):
        super().__init__(layers=[])
        self.store, self.slots, self.end = store, slots, end

    def update(self, k, v, layer_idx, *args, **kwargs):
        keys, values = self.store.of_layer(layer_idx, k, v)    # (1, H, allocated, d)
        slots = self.slots.to(k.device)
        keys.index_copy_(2, slots, k)
        values.index_copy_(2, slots, v)
        return keys[:, :, :self.end], values[:, :, :self.end]

    def get_seq_length(self, layer_idx=0):
        return self.store.length

    def get_mask_sizes(self, query_length, layer_idx=0):
        return self.end, 0

class Target:
    """A Hugging Face decoder-only causal LM (sdpa or eager).  capacity: its positions."""
    chunk_size = CHUNK

    def __init__(self, model, capacity=None):
        self.model, self.device = model.eval(), model.device
        self.config = model.config.get_text_config()
        self.check_attention()
        self.dtype = model.get_input_embeddings().weight.dtype
        self.vocab = self.config.vocab_size
        context = getattr(self.config, "max_position_embeddings", None) or 2048
        self.capacity = min(capacity or context, context)
        self.cache = TreeCache()
        self.capture({})

    def check_attention(self):
        """UserError where a layer does not see the whole prefix: our mask replaces the model's."""
        window = getattr(self.config, "sliding_window", None)
        kinds = getattr(self.config, "layer_types", None) or [window and "sliding_attention"]
        if set(kinds) - {None, "full_attention"}:
            raise UserError("not all layers of the target have full attention: take "
                            "runtime.families.any_target(model)")

    def capture(self, needs):
        """A new decoding: from here on collect what a drafter reads, its `needs`."""
        self.needs = {"kv": (), "hidden": (), **needs}
        self.reset()

    def reset(self):
        """Forget the text; the allocated memory stays."""
        self.cache.length, self.ids = 0, []                    # ids: what the cache holds
        self.shown = 0                                         # how many of them a view has shown
        self.hidden = {index: [] for index in self.needs["hidden"]}            # of the others

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
        # A lone node, and a text from its first token, need no mask: the model's own is causal.
        position, mask = slots, None
        if parents is None and cached:
            parents = torch.arange(-1, n - 1, device=self.device)
        if parents is not None and n > 1:
            seen = ancestor_mask(parents.to(self.device))                              # (n, n)
            depth = seen.sum(1) - 1
            # Nodes beyond the context are never part of the output.
            position = (cached + depth).clamp(max=self.capacity - 1)
            mask = tree_mask(seen, cached)
        nodes = tokens.to(self.device)
        logits, *states = self.run(end, nodes, position, slots, mask, logits_to_keep)
        self.states = dict(zip(self.needs["hidden"], states))  # until commit
        return logits

    def run(self, keys, tokens, position, slots, mask, logits_to_keep=0):
        """The model's forward -> [logits (n, V), hidden states (n, D) of each index in `needs`].

        Node i is written at slots[i], and sees entries j < keys where mask[i, j]; None: causal.
        """
        wanted = self.needs["hidden"]
        out = self.model(
            input_ids=tokens[None], past_key_values=StepCache(self.cache, slots, keys),
            use_cache=True, logits_to_keep=logits_to_keep, output_hidden_states=bool(wanted),
            **self.position_and_mask(keys, position, slots, mask))
        states = [out.hidden_states[index][0] for index in wanted]
        return [out.logits[0], *states]

    def position_and_mask(self, keys, position, slots, mask):
        """position_ids, and the mask as numbers that are added to the scores, for the model."""
        if mask is not None:
            # A kernel would pad the mask to a multiple of eight, in each layer.
            mask = F.pad(mask, (0, -keys % 8))
            mask = torch.where(mask, 0.0, float("-inf")).to(self.dtype)
            mask = mask[None, None, :, :keys]          # (1, 1, n, keys)
        return {"position_ids": position[None], "attention_mask": mask}

    def commit(self, path, ids):
        """Nodes `path` of the last forward join the text: a list, root first; ids: their tokens."""
        nodes = slice(len(path))                               # a chain's are already in place
        if path != list(range(len(path))):
            nodes = torch.tensor(path).to(self.device, non_blocking=True)
            self.cache.compact(nodes)
        self.cache.length += len(path)
        self.ids += ids
        for index, states in self.states.items():
            self.hidden[index].append(states[nodes])

    def sync(self, ids, logits_to_keep=1, unchanged=0):
        """Cache ids, whose first `unchanged` are cached already -> logits (logits_to_keep, V)."""
        # The longest common prefix stays, but for the tokens whose logits are wanted.
        longest = min(len(self.ids), len(ids) - logits_to_keep)
        common = min(unchanged, longest)
        while common < longest and self.ids[common] == ids[common]:
            common += 1
        self.cache.length, self.shown = common, min(self.shown, common)
        del self.ids[common:]
        # The rest is read in chunks: a mask of a whole prompt would grow with its square.
        logits = []
        for chunk in torch.tensor(ids[common:]).split(self.chunk_size):
            logits.append(self.forward(chunk, None, logits_to_keep))
            self.commit(list(range(len(chunk))), chunk.tolist())
        return torch.cat(logits)[-logits_to_keep:]

    def view(self):
        """What was committed since the last view, and what the drafter reads of it -> View."""
        ids = self.ids[self.shown:]
        tokens = torch.tensor(ids).to(self.device, non_blocking=True)
        self.shown = length = self.cache.length
        kv = {}
        for layer in self.needs["kv"]:
            kv[layer] = [entries[:, :, :length] for entries in self.cache.kv[layer]]
        hidden = {index: torch.cat(states) for index, states in self.hidden.items()}
        self.hidden = {index: [] for index in hidden}
        return View(tokens, length, kv, hidden, ids)

# ---------------------------------------------------------------- acceptance
def children(tokens, parents):
    """Lists (n,) each -> {(parent, token): node}; of children with one token the first counts."""
    child = {}
    for node, (parent, token) in enumerate(zip(parents, tokens)):
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
    """Speculative sampling of a chain (Leviathan et al. 2023) -> the token after each node (n,).

    Node i + 1, sampled from p_draft[i], passes with probability min(1, p_target[i] / p_draft[i]) of
    its token; else one is sampled from norm(max(0, p_target[i] - p_draft[i])): it follows p_target.
    """
    drafted = tree.tokens[1:, None]                                                    # (n - 1, 1)
    # min(1, p_target / p_draft)
    ratio = p_target[:-1].gather(1, drafted) / tree.p_draft.gather(1, drafted)
    u = torch.empty_like(ratio).uniform_(generator=generator)
    accepted = (u < ratio)[:, 0]
    accepted = F.pad(accepted, (0, 1))                         # (n,): nothing after the last node
    p_draft = F.pad(tree.p_draft, (0, 0, 0, 1))                                        # (n, V)
    # norm(max(0, p_target - p_draft)); p_target where both are equal
    residual = (p_target - p_draft).clamp(min=0)
    residual = residual + 1e-30 * p_target
    # An exponential race, as in torch.multinomial, which first checks p: two device-to-host syncs
    noise = torch.empty_like(residual).exponential_(generator=generator)
    sampled = (residual / noise).argmax(-1)                                            # (n,)
    return torch.where(accepted, tree.tokens.roll(-1), sampled)

def stream(seed, purpose, device="cpu"):
    """A generator for each (seed, purpose): what samples a draft must not decide its acceptance."""
    digest = hashlib.sha256(f"{seed} {purpose}".encode()).digest()         # hash() differs by run
    number = int.from_bytes(digest[:7], "big")
    return torch.Generator(device).manual_seed(number)

@lru_cache(maxsize=128)
def keyed_noise(seed, position, vocab, device):
    """Exponential noise (vocab,) of (seed, position) alone: argmax(p / noise) is a sample of p."""
    generator = stream(seed, position, device)
    return torch.empty(vocab, device=device).exponential_(generator=generator)

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
            self.processors += [warper(value)] if value else []

    def warp(self, logits):
        """Logits (n, V) -> the distributions that tokens are sampled from (n, V)."""
        return self.processors(None, logits.float()).softmax(-1)

    def probs(self, logits, temperature):
        """As Greedy.probs: the drafter's distribution, warped as the target's is."""
        return self.warp(logits)

    def choose(self, tree, logits, first):
        """As Greedy.choose, by keyed noise; a sampled chain by speculative sampling."""
        p_target = self.warp(logits)                                                   # (n, V)
        if tree.p_draft is not None:
            generator = stream(self.seed, f"accept {first}", logits.device)
            return accept_drawn(tree, p_target, generator)
        depth = ancestor_mask(tree.parents).sum(1) - 1                                 # (n,)
        # A few draws more cost less than a device-to-host sync.
        deepest = depth.max().item() if len(depth) > FEW else len(depth) - 1
        noise = []
        for d in range(deepest + 1):
            noise.append(keyed_noise(self.seed, first + d, logits.shape[1], logits.device))
        # Nodes of one depth share their noise, on whatever branch they are.
        noise = torch.stack(noise)[depth]                                              # (n, V)
        return (p_target / noise).argmax(-1)

# ---------------------------------------------------------------- the loop
class Output:
    """What generate() returns: tokens, the new ids; rounds, a Round each."""
    def __init__(self, ids, limit, criteria, streamer):
        self.tokens, self.rounds = [], []
        self.criteria, self.streamer = StoppingCriteriaList(criteria), streamer
        self.text = torch.tensor([ids + [0] * limit])          # (1, all): it grows in place
        self.length, self.ended = len(ids), False

    def add(self, tokens):
        """Append tokens up to the limit, or to the first after which a criterion holds -> those."""
        new = []
        while len(new) < len(tokens) and not self.ended:
            self.text[0, self.length] = tokens[len(new)]
            new.append(tokens[len(new)])
            self.length += 1
            full = self.length == self.text.shape[1]
            self.ended = full or bool(self.criteria(self.text[:, :self.length], None))
        self.tokens += new
        if self.streamer:
            self.streamer.put(torch.tensor(new))
        return new

    @property
    def runs(self):
        """New tokens of each round, the bonus token included."""
        return [len(step.new) for step in self.rounds]

    @property
    def tau(self):
        """Average acceptance length."""
        return sum(self.runs) / max(1, len(self.runs))

class Expand:
    """What a builder sees of a drafter: expand(tokens (m,), parents [m ints]) -> (m, V)."""
    def __init__(self, drafter, rule, device):
        self.drafter, self.rule, self.device = drafter, rule, device
        self.memory = {}                                       # a builder's own, for this text

    def begin(self, root, remaining, first):
        """A round starts.  root: its id; first: the position after it."""
        self.root, self.remaining = root, remaining
        self.generator = stream(self.rule.seed, f"draft {first}", self.device)
        self.tokens, self.parents = [], []                     # by expand_index

    def __call__(self, tokens, parents):
        tokens = tokens.to(self.device)
        self.tokens.append(tokens)
        self.parents += parents
        logits = self.drafter.expand(tokens, parents)                                  # (m, V)
        logits = logits.to(self.device).float()
        temperature = getattr(self.drafter, "temperature", 1.0)
        return self.rule.probs(logits, temperature).nan_to_num(0.0)        # a row of -inf: zeros

    def path(self, tokens, accepted):
        """The expand_indices of accepted tokens, root first.  tokens: a list, by expand_index."""
        child = children(tokens, self.parents)
        path = [-1]
        for token in accepted:
            path.append(child.get((path[-1], token)))
        return [node for node in path[1:] if node is not None]

def root_only(expand, root):
    """The tree of plain decoding: the root alone."""
    return Tree(root, torch.full_like(root, -1))

def read_prompt(target, input_ids, max_new_tokens):
    """-> the prompt, a list of ids, and how many tokens can follow it, at most max_new_tokens."""
    ids = torch.as_tensor(input_ids)
    if ids.numel() != ids.shape[-1]:
        raise UserError(f"input_ids has shape {tuple(ids.shape)}: give one sequence")
    ids = ids.flatten().tolist()
    limit = min(max_new_tokens, target.remaining(ids))
    if not ids or limit < 1:
        raise UserError(f"{len(ids)} tokens, {max_new_tokens} new ones, a context of "
                        f"{target.capacity}: give at least one of each, and a prompt that fits")
    return ids, limit

def to_lists(*tensors):
    """Tensors (n,) of one device as lists, by one device-to-host sync."""
    sizes = [len(tensor) for tensor in tensors]
    parts = torch.cat(tensors).cpu().split(sizes)
    return [part.tolist() for part in parts]

@torch.inference_mode()
def generate(target, drafter, build, input_ids, max_new_tokens=128, rule=None, stopping_criteria=(),
             streamer=None):
    """Speculative decoding of one sequence (GLIDE, Figures 1 and 2) -> Output.

    drafter, build: see the top; None and root_only: plain decoding.  input_ids: ids, a list or a
    tensor (n,) or (1, n).  rule: Greedy() (the default) or Sampled(...).  stopping_criteria,
    streamer: transformers' own.  Raises UserError for a prompt that does not fit.
    """
    ids, limit = read_prompt(target, input_ids, max_new_tokens)
    rule = rule or Greedy()
    out = Output(ids, limit, stopping_criteria, streamer)
    expand = Expand(drafter, rule, target.device)
    target.capture(drafter.needs if drafter else {})
    if drafter:
        drafter.reset()
    if streamer:
        streamer.put(torch.tensor([ids]))
    # Prefill: the target reads the prompt and predicts the first token, which is the first root.
    logits = target.prefill(ids, limit)[None]                                          # (1, V)
    no_tree = root_only(expand, torch.tensor(ids[-1:], device=target.device))
    root = rule.choose(no_tree, logits, target.cache.length)                           # (1,)
    new = out.add(root.tolist())

    while not out.ended:
        # Draft: the drafter proposes a tree that hangs from the root x_t.
        if drafter:
            drafter.begin(target.view())
        first = target.cache.length + 1
        expand.begin(new[-1], limit - len(out.tokens) - 1, first)
        tree = build(expand, root)
        assert len(tree.tokens) == len(tree.parents), "each node of a tree has a token and a parent"

        # Verify: one forward of the target over all nodes.
        logits = target.forward(tree.tokens, tree.parents)                             # (n, V)
        choice = rule.choose(tree, logits, first)                                      # (n,)

        # Accept: walk down while the target's choice is a child.
        tokens, parents, chosen, *drafted = to_lists(
            tree.tokens, tree.parents, choice, *expand.tokens)
        assert tokens[0] == new[-1], "a tree begins with the root"
        ordered = all(parent < node for node, parent in enumerate(parents))
        assert ordered, "a tree has parents before their children"
        path, new = accept(tokens, parents, chosen)

        # Commit: the accepted nodes join the cache; the target's own token is the next root.
        accepted = [tokens[node] for node in path]
        target.commit(path, accepted)
        root = choice[path[-1]:][:1]
        if drafter:
            drafter.keep(expand.path(sum(drafted, []), accepted))
        new = out.add(new)
        out.rounds.append(Round(new, path, tokens, parents))
    if streamer:
        streamer.end()
    return out

def main():
    """A builder that knows the answer: the output is plain decoding's, in fewer rounds."""
    from transformers import LlamaConfig, LlamaForCausalLM
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
    target = Target(LlamaForCausalLM(config))
    text = [3, 1, 4, 1, 5]
    for _ in range(40):                                        # no cache, no mask of ours
        text.append(target.model(torch.tensor([text])).logits[0, -1].argmax().item())

    def oracle(expand, root):
        chain = torch.tensor(text[target.cache.length:][:5])
        return Tree(chain, torch.arange(len(chain)) - 1)

    out = generate(target, None, oracle, text[:5], 40)
    assert text[:5] + out.tokens == text
    print(f"40 tokens in {len(out.runs)} rounds, token for token plain decoding's")

if __name__ == "__main__":
    main()
