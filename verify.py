"""Tree verification: the target model, its KV cache, the acceptance rule and the decoding loop.

GLIDE with a CAPE (arXiv 2402.02082), sections 3 and 4.2, Figures 1 and 2.  The methods of all three
papers run on it.

The idea.  A drafter proposes a tree of tokens below the root x_t, the last token of the sequence,
which is not cached yet.  One forward of the target reads all nodes of the tree.  A node attends to
the cached prefix, to its ancestors and to itself, so its logits are those of plain decoding after
the same tokens.  Then walk down from the root while the token that the target chooses after a node
is one of its children: these nodes are accepted.  The first choice that is not is the next root.

    paper                  shape                 name here
    x_{<t}, its K and V    (1, H, t, d) each     TreeCache.kv[layer]: the first `length` entries
    proposal P             (n,)                  tree.tokens, tree.parents
    mask_CAPE              (n, t + n)            t columns of ones, then ancestor_mask(parents)
    p_D(.|node)            (n - 1, V)            tree.p_draft, only for a sampled chain

An example.  The sequence ends with 7.  A builder drafts 3, then 5 after it, and adds 4 beside 3:

    def build(expand, root):                                # root = tensor([7])
        expand(root, [-1])                                  # (1, V): what may follow 7, node 0
        expand(torch.tensor([3]), [0])                      # (1, V): what may follow 3, node 1
        return Tree(tokens=torch.tensor([7, 3, 5, 4]), parents=torch.tensor([-1, 0, 1, 0]),
                    expand_index=torch.tensor([0, 1, -1, -1]))

If the target chooses 3 after 7, 5 after 3 and 9 after 5, then 7, 3 and 5 are committed, the drafter
is told keep([0, 1]), and 9 is the next root.  For decoder-only models of transformers with rotary
embeddings of one table and full attention, as Llama (runtime/targets.py serves and proves others):

    out = generate(Target(model), drafter, build, ids)      # out.tokens: the new ids
    python verify.py                                        # the demo: a random Llama

A builder is a function build(expand, root (1,)) -> Tree.
  - expand(tokens (m,), parents [m ints]) -> probabilities (m, V) runs the drafter once over m new
    nodes.  It numbers the nodes of a round from 0 in the order in which it receives them, and
    `parents` are these numbers; the root comes first, with parent -1.  A row of zeros means no
    prediction.
  - A Tree has tensors (n,): tokens; parents, indices in the tree (node 0 is the root, with parent
    -1, and a node comes after its parent); expand_index, each node's number in expand, or -1.
    Only a sampled chain has p_draft (n - 1, V): what node i + 1 was sampled from.
  - expand is one object for a sequence.  Its `remaining` is the greatest useful depth: a round ends
    with a token of the target's own.  Its `generator` is for a builder that samples.

A drafter has `needs`, what it reads of the target: {"kv": layers, "hidden": indices of
hidden_states}.  Its methods, beside expand:
  - reset(probs) begins a sequence.  expand turns the drafter's logits (m, V) into probabilities by
    probs(logits, temperature), with the temperature that calibrates the drafter: see Rule.probs.
  - begin(view, root_id) begins a round.  The View shows what the last commit appended: the prompt,
    later the last root and the nodes accepted below it.  The new root is not committed yet; its id
    is for drafters that draft without expand (cascade.py).
  - keep(numbers) ends the round.  numbers: of the accepted nodes that expand was given, the root's
    first; they are expand's own, not indices in the tree.  The drafter forgets all other nodes.
"""
import hashlib
from collections import namedtuple
from functools import lru_cache, partial

import torch
import torch.nn.functional as F
from transformers.cache_utils import Cache
from transformers.generation import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

Tree = namedtuple("Tree", "tokens parents expand_index p_draft", defaults=(None,))
# What a commit appended: tokens (k,), at first the prompt's; ids, the same as a list; and hidden,
# {index: (k, D)}.  Of all `length` committed tokens: kv, {layer: [K, V]}, (1, H, length, d) each
View = namedtuple("View", "tokens ids length kv hidden")
# What happened in a round, as lists: its new tokens, the accepted nodes (the root first), the tree
Round = namedtuple("Round", "new path tokens parents")
# What generate() returns: the new ids, a Round for each tree, new tokens per such round
Output = namedtuple("Output", "tokens rounds tau")

MARGIN = 512             # cache entries that are allocated for trees, beyond the sequence

# ---------------------------------------------------------------- the target
def ancestor_mask(parents):
    """Parents (n,) -> (n, n) bool: entry (i, j) is True if node j is i itself or its ancestor."""
    n = len(parents)
    ancestor = parents.clamp(min=0)                            # climbing ends at the root
    seen = torch.eye(n, dtype=torch.bool, device=parents.device)
    # Each pass doubles the number of nodes on the way up that a node sees.
    for _ in range(n.bit_length()):
        seen = seen | seen[ancestor]                           # what the node or that ancestor sees
        ancestor = ancestor[ancestor]                          # 2 steps up, then 4, 8, ...
    return seen

class TreeCache(Cache):
    """The KV cache of a target, in which keeping the accepted path of a tree is one copy.

    Its first `length` entries are committed, and those of the current tree follow.  kv[layer] is
    [K, V], each (1, H, allocated, d): slices of one tensor for all layers, the stack, which is made
    when the first layer writes.
    """
    def __init__(self, layers):
        super().__init__(layers=[])
        self.num_layers = layers
        self.allocated, self.length = 0, 0
        self.stack, self.kv = None, {}
        self.slots, self.end = None, 0     # the next forward writes at slots, and reads [:end]

    def reserve(self, entries):
        """Allocate at least `entries` entries, and keep what is committed."""
        if entries > self.allocated:
            # Grow by at least half of what is allocated, so that entries are seldom copied.
            self.allocated = max(entries, self.allocated * 3 // 2)
            if self.stack is not None:
                self.make_stack(like=self.stack[0])

    # A tensor that is made in inference mode cannot be written to outside of it.
    @torch.inference_mode(False)
    def make_stack(self, like):
        """Make a stack for keys like these (1, H, n, d), and copy what the last one holds."""
        _, H, _, d = like.shape
        before = self.stack
        self.stack = like.new_zeros(2 * self.num_layers, 1, H, self.allocated, d)
        if before is not None:
            self.stack[:, :, :, :before.shape[3]] = before
        self.kv = {layer: list(pair) for layer, pair in enumerate(self.stack.split(2))}

    # The model calls these three methods: they are the interface of transformers' caches.
    def update(self, k, v, layer, *args, **kwargs):
        """Write a layer's new entries k, v (1, H, n, d) -> all keys and values to attend to."""
        if self.stack is None:
            self.make_stack(k)
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
        slots = self.length + nodes
        self.stack[:, :, :, self.length:end] = self.stack.index_select(3, slots)

class Target:
    """A decoder-only causal LM of transformers, with sdpa or eager attention, and its KV cache."""

    def __init__(self, model):
        """Raises ValueError for a model whose attention takes no mask of ours."""
        self.model, self.device, self.dtype = model.eval(), model.device, model.dtype
        self.config = model.config.get_text_config()
        check_attention(self.config)
        self.vocab = self.config.vocab_size
        # The most positions of a sequence: the model's context
        self.capacity = getattr(self.config, "max_position_embeddings", None) or 2048
        self.cache = TreeCache(self.config.num_hidden_layers)
        self.needs = {"kv": (), "hidden": ()}
        self.reset()

    def reset(self):
        """Start a new sequence.  The allocated memory is kept."""
        self.cache.length = 0
        self.ids = []                                          # the tokens in the cache

    def remaining(self, ids):
        """The most tokens that may follow a prompt: the last one needs no position."""
        return self.capacity - len(ids) + 1

    def prefill(self, ids, new_tokens=0, needs={}):
        """Start a new sequence: forward the prompt, and allocate cache for `new_tokens` more.

        needs: the drafter's.  Returns the logits (V,) after the last token, and the prompt's View.
        """
        self.needs = {"kv": (), "hidden": (), **needs}
        self.reset()
        self.cache.reserve(len(ids) + new_tokens + MARGIN)
        [logits], states = self.forward(torch.tensor(ids), logits_to_keep=1)
        return logits, self.commit(list(range(len(ids))), ids, states)

    @torch.no_grad()
    def forward(self, tokens, parents=None, logits_to_keep=0):
        """Forward the n nodes of a tree after the prefix.  tokens, parents (n,); None: a chain.

        Returns the logits (n, V), or only the last `logits_to_keep` of them unless that is 0; and
        the states of the nodes, a list that commit takes: the tokens, and for each index of
        needs["hidden"] the hidden states (n, D).
        """
        n, cached = len(tokens), self.cache.length
        end = cached + n
        self.cache.reserve(end)
        slots = torch.arange(cached, end, device=self.device)
        # One node sees everything, and a prompt has the model's causal mask: no mask is needed.
        position, mask = slots, None
        if parents is None and cached:
            parents = slots - cached - 1                       # of a chain
        if parents is not None and n > 1:
            # Differs from the paper, whose mask leaves out x_t: the target must read the root, too.
            seen = ancestor_mask(parents.to(self.device))                              # (n, n)
            mask = F.pad(seen, (cached, 0), value=True)        # mask_CAPE (n, end)
            depth = seen.sum(1) - 1
            # Nodes beyond the last position never become output: any position will do.
            position = (cached + depth).clamp(max=self.capacity - 1)
        tokens = tokens.to(self.device)
        logits, *hidden = self.run(end, tokens, position, slots, mask, logits_to_keep)
        return logits, [tokens, *hidden]

    def run(self, end, tokens, position, slots, mask, logits_to_keep=0):
        """Run the model once.  Node i is written to the cache at slots[i].

        It attends to entry e of the cache where mask[i, e]; mask (n, end), or None: the model's
        causal mask.  Returns a list: the logits as in forward, and the hidden states.
        runtime/ replaces this method, for other models and to record CUDA graphs.
        """
        if mask is not None:
            mask = torch.where(mask, 0.0, -torch.inf)          # added to the scores
            mask = mask.to(self.dtype)[None, None]             # (1, 1, n, end)
        self.cache.slots, self.cache.end = slots, end
        wanted = self.needs["hidden"]
        out = self.model(
            input_ids=tokens[None], position_ids=position[None], attention_mask=mask,
            past_key_values=self.cache, use_cache=True, output_hidden_states=bool(wanted),
            logits_to_keep=logits_to_keep)
        hidden = [out.hidden_states[index][0] for index in wanted]
        return [out.logits[0], *hidden]

    def commit(self, path, ids, states):
        """Append accepted nodes to the sequence -> the View of what was appended.

        path: their indices in the tree, the root first; ids: their tokens; both lists.  states: of
        the tree, by forward.
        """
        nodes = slice(len(path))
        if path != list(range(len(path))):                     # else they are in place
            nodes = torch.tensor(path).to(self.device, non_blocking=True)
            self.cache.compact(nodes)
        self.cache.length += len(path)
        self.ids += ids
        tokens, *hidden = [state[nodes] for state in states]
        hidden = dict(zip(self.needs["hidden"], hidden))
        length = self.cache.length
        kv = {}
        for layer in self.needs["kv"]:
            kv[layer] = [entries[:, :, :length] for entries in self.cache.kv[layer]]
        return View(tokens, ids, length, kv, hidden)

    def align(self, ids, logits_to_keep=1):
        """Make the cache hold exactly `ids`: keep the prefix that it holds, and forward the rest.

        For a target that drafts (cascade.py).  Returns the logits (logits_to_keep, V) after the
        last ids, and the View of the rest.  Raises ValueError beyond the capacity.
        """
        if len(ids) > self.capacity:
            raise ValueError(f"{len(ids)} tokens exceed the capacity of {self.capacity} positions")
        # The last `logits_to_keep` ids are forwarded even if they are cached, for their logits.
        longest = min(len(self.ids), len(ids) - logits_to_keep)
        common = 0
        while common < longest and self.ids[common] == ids[common]:
            common += 1
        self.cache.length = common
        del self.ids[common:]
        rest = ids[common:]
        logits, states = self.forward(torch.tensor(rest), None, logits_to_keep)
        return logits, self.commit(list(range(len(rest))), rest, states)

def check_attention(config):
    """Raise ValueError if our mask would be wrong: it replaces the model's own."""
    window = getattr(config, "sliding_window", None)
    default = "full_attention" if window is None else "sliding_attention"
    if set(getattr(config, "layer_types", None) or [default]) != {"full_attention"}:
        raise ValueError("some layers lack full attention: runtime.targets.any_target serves them")
    kernel = getattr(config, "_attn_implementation", None) or "eager"
    if "flash" in kernel or "flex" in kernel:
        raise ValueError(f'{kernel} takes no mask: load with attn_implementation="sdpa"')

# ---------------------------------------------------------------- acceptance
def children(tokens, parents):
    """{(a node, a token): its child with that token}; of several such children the first counts."""
    child = {}
    for node, (parent, token) in enumerate(zip(parents, tokens)):
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
    # After a rejection the token is sampled from the residual norm(max(0, p_target - p_draft));
    # after the last node, where nothing was drafted, from p_target.
    residual = p_target.clone()
    # If p and q are nearly equal, rounding may leave no residual at all.  Then this is p.
    residual[:-1] = (p - q).clamp(min=0) + 1e-30 * p
    # Sample by inverting the cumulative sums; float32 would lose rare tokens in them.  One number
    # serves all, as only the sample after the last accepted node is used.
    sums = residual.cumsum(-1, dtype=torch.float64)                                    # (n, V)
    uniform = torch.rand((), dtype=torch.float64, device=sums.device, generator=generator)
    uniform = 1 - uniform          # in (0, 1]: 0 would give token 0, even if its p is 0
    sampled = torch.searchsorted(sums, uniform * sums[:, -1:])                         # (n, 1)
    sampled[:-1] = torch.where(accepted, drafted, sampled[:-1])
    return sampled[:, 0]

def generator_for(seed, purpose, device="cpu"):
    """A generator of its own for each (seed, purpose).

    The output would be biased if the numbers that sample a draft also decided its acceptance.
    """
    digest = hashlib.sha256(f"{seed} {purpose}".encode())      # Python's hash() differs by run
    number = int(digest.hexdigest()[:13], 16)                  # of 52 bits
    return torch.Generator(device).manual_seed(number)

@lru_cache(maxsize=32)
def keyed_noise(seed, position, vocab, device):
    """Exponential noise (vocab,), keyed by (seed, position).

    argmax(p / noise) is a sample of p: the Gumbel-max trick, in its form with exponential noise.
    Rounding in p hardly ever changes it.  lru_cache keeps noise for the next round.
    """
    # Made in float32, noise has coarse steps near zero, where rare tokens are sampled.
    noise = torch.empty(vocab, dtype=torch.float64, device=device)
    return noise.exponential_(generator=generator_for(seed, position, device)).float()

def sample_tree(parents, p_target, seed, first):
    """Sample a token after each node of a tree, by the noise of its position -> (n,).

    parents (n,), p_target (n, V); first: the position of the token after the root.

    Differs from the paper, which samples no trees: a token is argmax(p / noise), where the noise
    depends on the seed and the position alone.  So the output of a tree is token for token that of
    plain sampling, on the same kind of device.
    """
    n, vocab = p_target.shape
    depth = ancestor_mask(parents).sum(1) - 1                                          # (n,)
    deepest = depth.max().item() if n > 1 else 0               # a device-to-host sync for a tree
    noise = [keyed_noise(seed, first + d, vocab, p_target.device) for d in range(deepest + 1)]
    noise = torch.stack(noise)                                                         # (depths, V)
    return (p_target / noise[depth]).argmax(-1)

class Rule:
    """How the target chooses a token: the argmax, or a sample.

    temperature: 0 is greedy decoding.  top_k, top_p: as in transformers; None: all tokens.
    seed: the same seed gives the same tokens.  Give each prompt another one: prompts with one seed
    share their random numbers.
    """
    def __init__(self, temperature=0.0, top_k=None, top_p=None, seed=0):
        self.greedy, self.seed = temperature == 0, seed
        self.warpers = []
        if not self.greedy:
            self.warpers.append(TemperatureLogitsWarper(float(temperature)))
        if top_k is not None:
            self.warpers.append(TopKLogitsWarper(top_k))
        if top_p is not None:
            self.warpers.append(TopPLogitsWarper(top_p))

    def p_target(self, logits):
        """The distributions (n, V) that tokens are sampled from.  logits (n, V)."""
        scores = logits.float()
        for warper in self.warpers:
            scores = warper(None, scores)
        return scores.softmax(-1)

    def probs(self, logits, temperature=1.0):
        """A drafter's logits (m, V) -> probabilities (m, V); a row of -inf becomes one of zeros.

        Greedy: softmax(logits / temperature), by the drafter's calibration temperature.  Sampling:
        what the target's own temperature, top-k and top-p make of these logits.
        """
        if self.greedy:
            p = (logits.float() / temperature).softmax(-1)
        else:
            p = self.p_target(logits)
        return p.nan_to_num(0.0)

    def choose(self, tree, logits, ids):
        """The target's logits (n, V) at the tree's nodes -> the token after each node (n,).

        ids: the sequence so far, a list that ends with the root.
        """
        if self.greedy:
            return logits.argmax(-1)
        p_target = self.p_target(logits)                                               # (n, V)
        first = len(ids)
        if tree.p_draft is None:
            return sample_tree(tree.parents, p_target, self.seed, first)
        # The output of a sampled chain has the distribution of plain sampling, not its tokens.
        generator = generator_for(self.seed, f"accept {first}", p_target.device)
        return accept_sampled(tree, p_target, generator)

# ---------------------------------------------------------------- the loop
class NoDrafter:
    """The drafter of plain decoding: it reads nothing, and root_only never calls its expand."""
    needs = {}

    def reset(self, *given):
        """Do nothing."""

    begin = expand = keep = reset

def root_only(expand, root):
    """The builder of plain decoding: the tree is the root alone."""
    none = torch.full_like(root, -1)
    return Tree(root, parents=none, expand_index=none)

def check_prompt(target, ids, limit):
    """Raise ValueError for a prompt that cannot be decoded."""
    if not isinstance(ids, list) or not ids:
        raise ValueError("ids is a list of at least one id: give ids[0].tolist() of a tensor")
    if limit < 1:
        raise ValueError(f"{len(ids)} tokens leave no position for a new one: give at most "
                         f"{target.capacity}, and ask for at least one")
    if not all(0 <= token < target.vocab for token in ids):
        raise ValueError(f"the prompt has ids beyond the target's vocabulary of {target.vocab}")

def check_tree(tree, tokens, parents, root_id):
    """Raise ValueError unless this is a Tree below the root.  tokens, parents: as lists."""
    in_order = all(0 <= parent < node for node, parent in enumerate(parents[1:], 1))
    if tokens[0] != root_id or parents[0] != -1 or not in_order:
        raise ValueError("a tree begins with the root, parent -1; parents precede their children")
    if tree.p_draft is not None and parents != list(range(-1, len(parents) - 1)):
        raise ValueError("only a sampled chain has p_draft: the sample of a tree would be biased")

def until_end(tokens, ends):
    """The tokens up to the first that is one of `ends`, a set."""
    for count, token in enumerate(tokens, 1):
        if token in ends:
            return tokens[:count]
    return tokens

@torch.inference_mode()
def rounds(target, drafter, build, ids, new_tokens=128, rule=Rule(), eos=()):
    """Decode as generate() does, whose arguments these are: yield one Round after another.

    The first Round has the prefill's token and no tree.  The caller may stop at any Round.
    """
    ends = {eos} if isinstance(eos, int) else set(eos or ())
    limit = min(new_tokens, target.remaining(ids))
    check_prompt(target, ids, limit)
    drafter = drafter or NoDrafter()
    logits, view = target.prefill(ids, limit, drafter.needs)
    drafter.reset(rule.probs)
    expand = partial(drafter.expand)       # a method takes no attributes, and a partial does
    if not target.ids:
        raise ValueError("the drafter has reset the target: give it a Target of its own")
    sequence = list(target.ids)            # an encoder-decoder's begins with its start token
    # The choice after the prompt's last token, as after a tree of one node, is the first root.
    last = root_only(None, view.tokens[-1:])
    root = rule.choose(last, logits[None], sequence)                                   # (1,)
    root_id = root.item()
    sequence.append(root_id)
    left = limit - 1                       # how many tokens may still come
    yield Round([root_id], [], [], [])
    while left and root_id not in ends:
        # Draft: the drafter proposes a tree below the root x_t.
        drafter.begin(view, root_id)
        expand.remaining = left - 1        # one token is the target's own
        if not rule.greedy:
            expand.generator = generator_for(rule.seed, f"draft {len(sequence)}", target.device)
        tree = build(expand, root) if expand.remaining else root_only(expand, root)

        # Verify: one forward of the target over all nodes, and its choice after each.
        logits, states = target.forward(tree.tokens, tree.parents)                     # (n, V)
        choice = rule.choose(tree, logits, sequence)                                   # (n,)

        # Accept: walk down while the target's choice is a child.  A device-to-host sync.
        numbers = torch.stack((tree.tokens, tree.parents, tree.expand_index, choice))  # (4, n)
        tokens, parents, expand_index, chosen = numbers.tolist()
        check_tree(tree, tokens, parents, root_id)
        path, new = accept(tokens, parents, chosen)

        # Commit: the accepted nodes stay cached; the target's own token is the next root.
        view = target.commit(path, [tokens[node] for node in path], states)
        drafter.keep([expand_index[node] for node in path if expand_index[node] >= 0])
        root = choice[path[-1]:path[-1] + 1]                                           # (1,)
        # If the output ends within `new`, there is no next round, and root is not used.
        new = until_end(new[:left], ends)
        root_id = new[-1]
        sequence += new
        left -= len(new)
        yield Round(new, path, tokens, parents)

def generate(target, drafter, build, ids, new_tokens=128, rule=Rule(), eos=()):
    """Speculative decoding of one sequence (GLIDE, Figures 1 and 2) -> Output.

    drafter, build: see the top of this file; None and root_only are plain decoding.  ids: the
    prompt, a list.  eos: an end-of-text id, or several.  The output ends after new_tokens, with the
    target's capacity, or with the first of these ids.
    """
    return output_of(rounds(target, drafter, build, ids, new_tokens, rule, eos))

def output_of(all_rounds):
    """The Rounds of a sequence, the prefill's first -> Output"""
    prefill, *of_trees = all_rounds
    tokens = [token for one in (prefill, *of_trees) for token in one.new]
    tau = (len(tokens) - 1) / max(1, len(of_trees))
    return Output(tokens, of_trees, tau)

# ---------------------------------------------------------------- the demo
def main():
    """Every token is a child of the root, so one child is accepted: a round has two new tokens."""
    from transformers import LlamaConfig, LlamaForCausalLM
    config = LlamaConfig(vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
    model = LlamaForCausalLM(config)

    def build(expand, root):
        parents = torch.tensor([-1] + 50 * [0])
        tokens = torch.cat((root, torch.arange(50)))
        return Tree(tokens, parents, expand_index=torch.full_like(parents, -1))

    out = generate(Target(model), None, build, [3], 41)
    own = model(torch.tensor([[3, *out.tokens]])).logits[0].argmax(-1)    # no cache, no mask
    assert own[:-1].tolist() == out.tokens and out.tau == 2
    print("41 tokens in 20 rounds, the same as those of plain decoding")

# Differences from the paper, all of them:
#  1. The root is a node of the tree (Target.forward).
#  2. Trees are sampled by noise that is keyed by position (sample_tree).
#  3. In greedy decoding a builder sees calibrated confidences (Rule.probs).

if __name__ == "__main__":
    main()
