"""Tree verification: the target model, its KV cache, the acceptance rules and the decoding loop.

GLIDE with a CAPE (arXiv 2402.02082), sections 3 and 4.2, Figures 1 and 2; it serves all three papers.

The idea.  A drafter proposes a tree of tokens below the root, the last token, not read by the target yet.
One forward of the target over all nodes, in which a node sees the cached prefix and its ancestors, gives its
choice after every node.  Walk down from the root while that choice is a child; the first that is not is the
next root.  So the output is the target's own.

    paper                  shape               name here
    x_{<t}, its K and V    L x 2 x (1,H,t,d)   TreeCache.kv[layer], their first t rows
    x_t, not cached yet    ()                  the root: tree.tokens[0]
    proposal P             (n,)                tree.tokens; tree.parents[0] = -1, parents before children
    mask_CAPE              (n, t + n)          tree_mask(ancestor_mask(parents), t)
    p_T(.|node)            (n, V)              p_target
    p_D(.|node)            (n - 1, V)          tree.p_draft: node i + 1 was drawn from row i (drawn chains)

A builder, build(expand, root (1,)) -> Tree, asks expand(tokens (m,), parents [m ints]) for probabilities
(m, V).  parents count the nodes in the order given to expand in this round; -1 is the committed prefix.  No
child has probability zero.  It may use expand.remaining (a deeper tree is wasted), .root (an id), .generator
(of a drawn chain), .drafter and .rule.  The tree has its own order.  CAPE, with 3 and 5, and 4 beside the 3:
    rows = expand(root, [-1])                             # expand's node 0, the root, 7
    rows = expand(root.new_tensor([3]), [0])              # expand's node 1
    return Tree(root.new_tensor([7, 3, 5, 4]), root.new_tensor([-1, 0, 1, 0]))
Once 3 and 5 are accepted, the tree's nodes 0, 1, 2 are committed, and expand's 0 and 1 kept.  A drafter has
    needs                    what it reads: {"kv": [layers], "hidden": [indices of hidden_states]}, or {}
    reset(), begin(view)     a new sequence; a new round, with what was committed since the last one (View)
    expand(tokens, parents)  as above, but -> logits (m, V); a row of -inf: it cannot go on there
    keep(path)               expand's nodes that were accepted, root first; all others are forgotten
and may have temperature, at which its confidence in the target's argmax is calibrated; source(ids), for an
encoder's input; chain(root, most, warp, generator) -> (tokens, p_draft), which writes a chain by itself.

Differences from the paper:
 1. The root is a node: the paper's mask leaves x_t out, though it must be read.
 2. Sampling over a tree is stated nowhere; here it follows the target's own draws, keyed by (seed, position).
 3. Greedy decoding shows builders softmax(logits / temperature), a calibrated confidence in the argmax.

    python verify.py      # the demo: a random Llama and a drafter that knows the answer
"""
import hashlib
from collections import namedtuple
from functools import lru_cache

import torch
import torch.nn.functional as F
from transformers.cache_utils import Cache
from transformers.generation import (
    LogitsProcessorList, MaxLengthCriteria, StoppingCriteriaList, TemperatureLogitsWarper, TopKLogitsWarper,
    TopPLogitsWarper)

Tree = namedtuple("Tree", "tokens parents p_draft", defaults=(None,))
# What a drafter is shown: tokens (k,) committed since the last round; length: of all that is committed;
# kv {layer: (K, V), each (1, H, length, d)}; hidden {index: (k, D)}, rows of `tokens`; ids: tokens, as a list
View = namedtuple("View", "tokens length kv hidden ids", defaults=(None,))
# Of the output, lists: new tokens, the accepted path of nodes, root first, the tree's tokens and parents
Round = namedtuple("Round", "new path tokens parents")

SLICE = 512              # tokens of a prompt that are read at once; rows that a cache grows by

class UserError(ValueError):
    """A user's mistake, in one sentence that says what to do.  Programs print it and exit with 2."""

# ---------------------------------------------------------------- a tree from its parents
def ancestor_mask(parents):
    """(n,) parents -> (n, n) bool: entry (i, j) says that j is i or an ancestor of i."""
    n = parents.shape[0]
    # Row n is a sentinel, "no ancestor": it sees nothing, and its parent is itself.
    parent = torch.where(parents < 0, n, parents).clamp(max=n)
    parent = F.pad(parent, (0, 1), value=n)                                            # (n + 1,)
    seen = torch.eye(n + 1, dtype=torch.bool, device=parents.device)                   # each sees itself
    seen[n].fill_(False)
    # Pointer doubling: add the row of the parent, then of the ancestor two steps up, four ...
    for _ in range(n.bit_length()):
        seen = seen | seen[parent]
        parent = parent[parent]
    return seen[:n, :n]

def tree_mask(seen, cached):
    """mask_CAPE -> (n, cached + n) bool: a node sees the prefix and, by the ancestor mask, of the tree."""
    return F.pad(seen, (cached, 0), value=True)

# ---------------------------------------------------------------- the target
class TreeCache(Cache):
    """kv[layer]: [keys, values], (1, H, rows, d) each; rows from `length` on belong to the tree in hand."""
    def __init__(self):
        super().__init__(layers=[])
        self.rows, self.length, self.kv = 0, 0, {}

    def reserve(self, rows):
        """Grow to `rows` or more; what is there stays."""
        more = rows + SLICE - self.rows
        if rows > self.rows:
            self.rows += more
            for layer, held in self.kv.items():
                below = (0, 0, 0, more)
                self.kv[layer] = [F.pad(x, below) for x in held]

    def update(self, k, v, layer_idx, *args, **kwargs):
        """Write a layer's new rows, (1, H, n, d), to self.slots -> the first self.read of all (views)."""
        if layer_idx not in self.kv:
            empty = (0, 0, 0, self.rows)                       # no row yet, and room for so many
            self.kv[layer_idx] = [F.pad(x[:, :, :0], empty) for x in (k, v)]
        keys, values = self.kv[layer_idx]
        keys.index_copy_(2, self.slots, k)
        values.index_copy_(2, self.slots, v)
        end = self.read
        return keys[:, :, :end], values[:, :, :end]

    def get_seq_length(self, layer_idx=0):
        return self.length

    def get_mask_sizes(self, query_length, layer_idx=0):
        return self.length + query_length, 0

    def commit(self, path):
        """Keep the tree's nodes `path`, a list: their rows move together."""
        end = self.length + len(path)
        if path != list(range(len(path))):                     # a chain's are already in place
            index = torch.tensor(path, device=self.slots.device) + self.length
            for held in self.kv.values():
                for x in held:
                    x[:, :, self.length:end] = x.index_select(2, index)
        self.length = end

class Target:
    """A Hugging Face decoder-only causal LM (sdpa or eager), with a TreeCache.  capacity: its positions."""
    encoder_decoder = False
    verifies_trees = True
    slice_size = SLICE

    def __init__(self, model, capacity=None):
        self.model, self.device = model.eval(), model.device
        self.config = config = model.config.get_text_config()
        self.dtype = model.get_input_embeddings().weight.dtype
        self.vocab = config.vocab_size
        self.window = self.window_of(config)
        context = getattr(config, "max_position_embeddings", None) or 2048
        self.capacity = min(capacity or context, context)
        self.cache = TreeCache()
        self.capture({})

    def window_of(self, config):
        """The sliding window of all layers, or None; a mask of ours switches the model's own window off."""
        window = getattr(config, "sliding_window", None)
        kind = "sliding_attention" if window else "full_attention"
        kinds = getattr(config, "layer_types", None) or [kind]         # of each layer
        kinds = sorted(set(kinds))
        if kinds not in (["full_attention"], ["sliding_attention"]):
            raise UserError(f"layers of kind {', '.join(kinds)}: here all have full or all have sliding "
                            "attention; take runtime.families.any_target(model)")
        return window if kinds == ["sliding_attention"] else None

    def reset(self):
        """Forget everything; the allocated memory is kept."""
        self.cache.length, self.ids = 0, []                    # ids: what the cache holds
        self.shown, self.hidden = 0, []                        # what a view has shown, has still to show

    def capture(self, needs):
        """From here on collect what a drafter reads: its `needs`."""
        self.needs = {"kv": (), "hidden": (), **needs}
        self.reset()

    def remaining(self, ids):
        """How many tokens may follow a prompt; the last one is not forwarded."""
        return self.capacity - len(ids) + 1

    def prefill(self, ids, drafter=None):
        """Forget everything and read the prompt -> logits (V,) after its last token."""
        self.reset()
        return self.sync(ids)[-1]

    def forward(self, tokens, parents=None, logits_to_keep=0):
        """Forward a tree, tokens and parents (n,), behind the cached prefix -> logits, (n, V) or the last."""
        n, cached = tokens.shape[0], self.cache.length
        keys = cached + n
        self.cache.reserve(keys)
        slots = torch.arange(cached, keys, device=self.device)
        position, mask = slots, None                           # a lone node sees everything
        if parents is not None and (n > 1 or self.window and keys > self.window):
            seen = ancestor_mask(parents.to(self.device))                                      # (n, n)
            position = cached + seen.sum(1) - 1
            position = position.clamp(max=self.capacity - 1)   # what lies beyond is never part of the output
            mask = tree_mask(seen, cached)
        self.keep = logits_to_keep
        tokens = tokens.to(self.device)
        logits, *self.states = self.run(keys, tokens, position, slots, mask)
        return logits

    def run(self, keys, tokens, position, slots, mask):
        """The forward proper -> [logits (n, V), hidden states (n, D) ...].  tokens, position, slots: (n,).

        Nodes write rows `slots`, and read `keys` rows; mask (n, keys) bool, None: a lone node sees all.
        """
        self.cache.slots, self.cache.read = slots, keys
        wanted = self.needs["hidden"]
        places = self.places(keys, position, slots, mask)
        out = self.model(input_ids=tokens[None], use_cache=True, past_key_values=self.cache,
                         logits_to_keep=self.keep, output_hidden_states=bool(wanted), **places)
        states = [out.hidden_states[k][0] for k in wanted]
        return [out.logits[0], *states]

    def places(self, keys, position, slots, mask):
        """Positions and mask, as the model takes them."""
        if mask is not None:
            if self.window:
                # A row's position is its number, but for those of the nodes.
                key_position = torch.arange(keys, device=self.device)
                key_position = key_position.index_copy(0, slots, position)
                distance = position[:, None] - key_position                                    # (n, keys)
                mask = mask & (distance < self.window)
            mask = torch.where(mask, 0.0, float("-inf"))       # added to the scores
            mask = mask.to(self.dtype)[None, None]
        return {"position_ids": position[None], "attention_mask": mask}

    def commit(self, path, ids):
        """Keep the nodes `path` of the last forward.  ids: their tokens, a list."""
        self.cache.commit(path)
        self.ids += ids
        kept = [rows[path] for rows in self.states]
        self.hidden.append(kept)

    def sync(self, ids, rows=1, same=0):
        """Make the cache hold ids; the first `same` are known to be there -> last logits, (rows, V)."""
        longest = min(len(self.ids), len(ids) - rows)
        same = min(same, longest)
        # The longest common prefix stays.
        while same < longest and self.ids[same] == ids[same]:
            same += 1
        self.cache.length, self.shown = same, min(self.shown, same)
        del self.ids[same:]
        # The rest is read in slices, since a mask of all against all would grow with the square.
        logits = []
        for piece in torch.tensor(ids[same:]).split(self.slice_size):
            chain = torch.arange(len(piece)) - 1
            logits.append(self.forward(piece, chain, rows))
            self.commit(list(range(len(piece))), piece.tolist())
        return torch.cat(logits)[-rows:]

    def view(self):
        """What was committed since the last view, and what the drafter reads of it -> View."""
        length, kv, hidden = self.cache.length, {}, {}
        for layer in self.needs["kv"]:
            held = self.cache.kv[layer]
            kv[layer] = [rows[:, :, :length] for rows in held]
        for index, *rows in zip(self.needs["hidden"], *self.hidden):
            hidden[index] = torch.cat(rows)
        ids = self.ids[self.shown:]
        tokens = torch.tensor(ids, device=self.device)
        self.shown, self.hidden = length, []
        return View(tokens, length, kv, hidden, ids)

# ---------------------------------------------------------------- acceptance
def children(tokens, parents):
    """Lists (n,) each -> {(parent, token): node}; duplicates: the first wins."""
    child = {}
    for node, place in enumerate(zip(parents, tokens)):
        child.setdefault(place, node)
    return child

def accept(tokens, parents, choice):
    """Walk down from the root while the target's choice (n,) is a child -> nodes, and the choice at each."""
    child = children(tokens, parents)
    path, node = [], 0
    while node is not None:
        path.append(node)
        node = child.get((node, choice[node]))
    return path, [choice[node] for node in path]

def accept_drawn(tree, p_target, generator):
    """Speculative sampling of a drawn chain (Leviathan et al. 2023): the output follows p_target (n, V).

    Node i + 1, drawn from p_draft[i], passes with probability min(1, p_target[i] / p_draft[i]) of its token;
    else one is drawn from norm(max(0, p_target[i] - p_draft[i])).  -> (n,): the token after each node.
    """
    drawn = tree.tokens[1:, None]                                                      # (n - 1, 1)
    # min(1, p_target / p_draft); after the last node nothing was drafted
    p = p_target[:-1].gather(1, drawn)
    ratio = p / tree.p_draft.gather(1, drawn)
    u = torch.empty_like(ratio).uniform_(generator=generator)
    passed = u < ratio
    passed = F.pad(passed[:, 0], (0, 1))                                               # (n,)
    # norm(max(0, p_target - p_draft)); after the last node p_target itself, as where both are equal
    p_draft = F.pad(tree.p_draft, (0, 0, 0, 1))                                        # (n, V)
    residual = (p_target - p_draft).clamp(min=0)
    residual = residual + 1e-30 * p_target
    redrawn = torch.multinomial(residual, 1, generator=generator)[:, 0]                # (n,)
    return torch.where(passed, tree.tokens.roll(-1), redrawn)

def stream(seed, purpose, device="cpu"):
    """A random stream for each (seed, purpose): what draws a draft must not decide its acceptance."""
    text = f"{seed} {purpose}"
    digest = hashlib.sha256(text.encode()).digest()            # hash() differs from run to run
    number = int.from_bytes(digest[:7], "big")
    return torch.Generator(device).manual_seed(number)

@lru_cache(maxsize=128)
def keyed_noise(seed, position, vocab, device):
    """Exponential noise (vocab,) of (seed, position) alone: argmax(p / noise) is a draw from p."""
    generator = stream(seed, position, device)
    return torch.empty(vocab, device=device).exponential_(generator=generator)

class Greedy:
    """The rule of greedy decoding: the target's argmax."""
    seed = None                                                # nothing is drawn

    def probs(self, logits, temperature):
        """A drafter's logits (m, V) -> what a builder sees: its calibrated confidence in the argmax."""
        return (logits / temperature).softmax(-1)

    def choose(self, tree, logits, first):
        """logits (n, V) -> the target's token after each node, (n,).  first: the position after the root."""
        return logits.argmax(-1)

class Sampled:
    """The rule of sampling: a draw from the target's distribution, warped by transformers' own processors."""
    def __init__(self, temperature=1.0, top_k=None, top_p=None, seed=0):
        processors = [TemperatureLogitsWarper(float(temperature))]
        if top_k:
            processors.append(TopKLogitsWarper(top_k))
        if top_p:
            processors.append(TopPLogitsWarper(top_p))
        self.seed, self.processors = seed, LogitsProcessorList(processors)

    def warp(self, logits):
        """Logits (n, V) -> the distributions that tokens are drawn from, (n, V)."""
        return self.processors(None, logits.float()).softmax(-1)

    def probs(self, logits, temperature):
        """As Greedy.probs: the drafter's distribution, warped as the target's."""
        return self.warp(logits)

    def choose(self, tree, logits, first):
        """As Greedy.choose: keyed draws, or speculative sampling's of a drawn chain."""
        p_target, device = self.warp(logits), logits.device
        if tree.p_draft is not None:
            generator = stream(self.seed, f"accept {first}", device)
            return accept_drawn(tree, p_target, generator)
        n, vocab = p_target.shape
        depth = ancestor_mask(tree.parents).sum(1) - 1                                 # (n,): below n
        noise = [keyed_noise(self.seed, first + d, vocab, device) for d in range(n)]
        noise = torch.stack(noise)[depth]                                              # (n, V)
        # argmax(p / noise) draws from p; nodes of one depth, on whatever branch, share their noise
        return (p_target / noise).argmax(-1)

# ---------------------------------------------------------------- the loop
class Output:
    """What generate() returns: tokens, the new ids; rounds, a Round each; runs, the tokens that each gave."""
    def __init__(self, ids, limit, criteria, streamer):
        self.tokens, self.rounds, self.runs = [], [], []
        self.prompt, self.ended, self.streamer = ids, False, streamer
        length = MaxLengthCriteria(len(ids) + limit)
        self.criteria = StoppingCriteriaList([length, *criteria])

    def add(self, tokens):
        """Append tokens, up to the first after which a criterion holds -> those."""
        text = torch.tensor([self.prompt + self.tokens + tokens])                      # (1, length)
        end, new = text.shape[1] - len(tokens), []
        while len(new) < len(tokens) and not self.ended:
            new.append(tokens[len(new)])
            read = text[:, :end + len(new)]
            self.ended = self.criteria(read, None).item()
        self.tokens += new
        if self.streamer:
            self.streamer.put(torch.tensor(new))
        return new

    @property
    def tau(self):
        """Average acceptance length: new tokens a round, the bonus token included, the prefill's left out."""
        return sum(self.runs) / max(1, len(self.runs))

class Expand:
    """What a builder sees of a drafter: expand(tokens (m,), parents [m ints]) -> probabilities (m, V)."""
    def __init__(self, drafter, rule, device):
        self.drafter, self.rule, self.device = drafter, rule, device
        self.memory = {}                                       # a builder's own, for this text

    def begin(self, root, remaining, first):
        """A round starts.  root: the last token, an int; first: the position of the one after it."""
        self.root, self.remaining = root, remaining
        self.generator = stream(self.rule.seed, f"draft {first}", self.device)
        self.tokens, self.parents = [], []                     # of the nodes that the drafter has seen

    def __call__(self, tokens, parents):
        self.tokens.append(tokens.to(self.device))
        self.parents += parents
        logits = self.drafter.expand(self.tokens[-1], parents)                         # (m, V)
        logits = logits.to(self.device).float()
        temperature = getattr(self.drafter, "temperature", 1.0)
        return self.rule.probs(logits, temperature).nan_to_num(0.0)                    # a row of -inf: zeros

    def path(self, tokens, kept):
        """Its own nodes under the tokens kept, root first.  tokens: those of its nodes, a list."""
        child = children(tokens, self.parents)
        path, node = [], -1
        for token in kept:
            node = child.get((node, token))
            if node is None:
                break
            path.append(node)
        return path

def root_only(expand, root):
    """The tree of plain decoding: the root alone."""
    return Tree(root, torch.full_like(root, -1))

def read_prompt(target, input_ids, max_new_tokens):
    """-> the prompt, a list of ids, and how many tokens can follow it, at most max_new_tokens."""
    ids = torch.as_tensor(input_ids)
    if ids.numel() != ids.shape[-1]:
        raise UserError(f"input_ids has shape {tuple(ids.shape)}: give one sequence, (n,) or (1, n)")
    ids = ids.flatten().tolist()
    room = min(max_new_tokens, target.remaining(ids))
    if not ids or room < 1:
        raise UserError(f"{len(ids)} tokens, {max_new_tokens} new ones, a context of {target.capacity}: give "
                        "at least one of each, and a prompt that fits")
    return ids, room

def read(*tensors):
    """Tensors (n,) as lists, by one read of the device."""
    sizes = [len(tensor) for tensor in tensors]
    parts = torch.cat(tensors).cpu().split(sizes)
    return [part.tolist() for part in parts]

@torch.inference_mode()
def generate(target, drafter, build, input_ids, max_new_tokens=128, rule=None, stopping_criteria=(),
             streamer=None):
    """Speculative decoding of one sequence (GLIDE, Figures 1, 2) -> Output.

    drafter, build: see the top of this file; None and root_only: plain decoding.  input_ids: list of ids or
    tensor (n,) or (1, n).  rule: Greedy() (the default) or Sampled(...).  stopping_criteria, streamer:
    transformers' own; the output ends behind the token at which a criterion holds.
    """
    ids, limit = read_prompt(target, input_ids, max_new_tokens)
    rule, out = rule or Greedy(), Output(ids, limit, stopping_criteria, streamer)
    expand = Expand(drafter, rule, target.device)
    target.capture(drafter.needs if drafter else {})
    if drafter:
        drafter.reset()
    if streamer:
        streamer.put(torch.tensor([ids]))
    # Prefill: the target reads the prompt, and says the first token.
    logits = target.prefill(ids, drafter)[None]                                                # (1, V)
    root = torch.tensor(ids[-1:], device=target.device)
    root = rule.choose(root_only(expand, root), logits, target.cache.length)                    # (1,)
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
        logits = target.forward(tree.tokens, tree.parents)                                     # (n, V)

        # Accept: walk down while the target's choice is a child.
        choice = rule.choose(tree, logits, first)                                              # (n,)
        tokens, parents, choice, *drafted = read(*tree[:2], choice, *expand.tokens)
        ordered = all(parent < node for node, parent in enumerate(parents))
        assert tokens[0] == new[-1] and ordered, "a tree begins with the root, and has parents first"
        path, new = accept(tokens, parents, choice)

        # Commit: the root and what was accepted join the cache; the target's own token is the next root.
        kept = [tokens[node] for node in path]
        target.commit(path, kept)
        root = torch.tensor(new[-1:], device=target.device)
        if drafter:
            drafted = sum(drafted, [])
            drafter.keep(expand.path(drafted, kept))
        new = out.add(new)
        out.rounds.append(Round(new, path, tokens, parents))
        out.runs.append(len(new))
    if streamer:
        streamer.end()
    return out

def main():
    """A drafter that knows the answer: the output is plain decoding's, in fewer rounds."""
    from transformers import LlamaConfig, LlamaForCausalLM
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
    target = Target(LlamaForCausalLM(config))
    plain = [3, 1, 4, 1, 5]
    # Plain decoding by the model's own forward: no cache, no mask of ours
    for _ in range(40):
        plain.append(target.model(torch.tensor([plain])).logits[0, -1].argmax().item())

    def oracle(expand, root):
        chain = torch.tensor(plain[target.cache.length:][:5])
        return Tree(chain, torch.arange(len(chain)) - 1)

    out = generate(target, None, oracle, plain[:5], 40)
    assert plain[:5] + out.tokens == plain
    print(f"40 tokens in {len(out.runs)} rounds, token for token plain decoding's")

if __name__ == "__main__":
    main()
