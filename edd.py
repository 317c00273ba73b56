"""EDD: the Effective Draft Decoder, which reads the target's hidden states as a soft prompt.

Effective Draft Decoder with Pruned Candidate Tree (ACL 2025): section 3.1, Figures 2 and 3(a), and
appendix B.  The vanilla draft model (VDM) of appendix A is here, too: Config(encoding=False).

The idea.  When the target verifies tokens it encodes them, so its hidden states H of all committed
tokens are known without another forward.  EDD is one layer of the target's own class.  It reads H
as a prompt, and after the prompt the embeddings of the tokens that are being drafted.  In decoding
the prompt ends where the round begins.  Training imitates this with a mask of two halves: a token
sees the hidden states of all blocks before its own, and of the tokens only those of its own block,
up to itself.  The loss is the KL divergence between the target's distribution and the drafter's.

    paper                              shape      name here
    T = (t_1, t_2, ...)                (B, T)     ids; all indices in this file count from 0
    H = (h_1, h_2, ...)                (B, T, D)  hidden: one of the target's hidden_states
    L                                  int        block: the length of a block of the mask
    P_d(T | H), Eq. 2                  (B, T, V)  EDD.forward, then EDD.head
    h_0 ... h_{jL-1}, Eq. 3            (T, T)     the left half of dual_block_mask
    t_{jL} ... t_i, Eq. 3              (T, T)     the right half of dual_block_mask
    D_KL(P_t || P_d), Eq. 4            ()         kl

Differences from the paper:
 1. Eq. 3 prints h_{<=jL}, the prose says "blocks 0 to j - 1".  When a round begins at position jL,
    the target has generated t_{jL}, but not encoded it: h_{jL} does not exist yet.  The official
    code and this file use h_{<jL}.
 2. The paper reads "the fourth-to-last layer" of 32 and calls it the 28th, so it counts from 0.
    Entry 0 of Hugging Face's hidden_states is the embeddings, so the output of layer 28 is entry 29
    of 0 ... 32, hidden_states[-4].  It is the default here, and `edd-top` reads it.  The shipped
    `edd` reads hidden_states[10] of a target with 24 layers, since drafters that read this entry of
    that target learned more.  So the figures of `edd` are not those of the paper's own setting.
 3. With a single layer, the keys and values of h_i depend on h_i and i alone.  So training computes
    nothing but keys and values of the soft prompt, and decoding computes them once, when a token is
    committed.
 4. The VDM ("w/o encoding result") is a language model of one layer.  The paper does not state its
    loss: `vdm` is trained with KL, `vdm-ce` with cross entropy.  It sees all earlier tokens.
 5. The layer attends to all positions, also where the target's own layers use a sliding window.
 6. Eq. 4 is the loss of one position.  A training step takes its mean over the loss mask.
 7. In Eq. 3 the index i is that of the predicted token t_i.  Taken literally, the first token of a
    block would be predicted without reading any token of this block, since none comes before it.
    Here i is the index of the token that is read: t_i, which lies in block j = floor(i / L),
    predicts t_{i+1}.  This is how the paper's inference works, where the first token of a round
    comes from the target and is read by the drafter.
 8. In training a draft has at most L tokens, and L is drawn evenly from 5 to 10.  A tree of PCT is
    up to 10 tokens deep, and other trees may be deeper.  So the drafter has learned from few
    examples of the deepest nodes, or from none.

Alone in a project, you need this file, a Llama, Mistral or Qwen2, and a drafter from train.py (for
other families see runtime/drafters.py).  Greedy decoding with drafted chains of five tokens, here
without a KV cache for the target:

    import torch, edd
    from types import SimpleNamespace
    from transformers import AutoModelForCausalLM
    model = AutoModelForCausalLM.from_pretrained("my-target")
    drafter, _ = edd.load("my-edd", model)
    ids, encoded, layer = torch.tensor([1, 5, 7]), 0, drafter.config.hidden
    with torch.no_grad():
        states = model(ids[None], output_hidden_states=True).hidden_states[layer][0]
        while len(ids) < 30:
            # All tokens but the last one, the root, are committed.
            t = len(ids) - 1
            new = {layer: states[encoded:t]}
            drafter.begin(SimpleNamespace(tokens=ids[encoded:t], length=t, hidden=new))
            chain, encoded = ids[-1:], t
            for i in range(5):
                # Node 0 is the root, whose parent is -1.  The parent of node i is node i - 1.
                logits = drafter.expand(chain[-1:], [i - 1])
                chain = torch.cat((chain, logits.argmax(-1)))
            out = model(torch.cat((ids[:-1], chain))[None], output_hidden_states=True)
            # The target's choice after each of the six tokens, and how many drafts agree with it
            states, choice = out.hidden_states[layer][0], out.logits[0, t:].argmax(-1)
            accepted = (chain[1:] == choice[:-1]).long().cumprod(0).sum().item()
            ids = torch.cat((ids, choice[:accepted + 1]))

A tree is drafted in the same way: after the root, expand(tokens (3,), [0, 0, 1]) gives the logits
(3, V) of two children of node 0 and of one child of node 1.  Nodes are numbered in the order in
which they were given to expand.  softmax(logits / drafter.temperature) is calibrated: a token of
probability p is the target's greedy choice in a share p of all cases.

    python edd.py           # the demo: training under the mask and decoding give the same logits
    python train.py edd edd-top vdm
"""
import copy
import json
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn
from transformers.models.llama.modeling_llama import rotate_half

HIDDEN = -4                      # appendix B: "the fourth-to-last layer"
BLOCKS = (5, 10)                 # appendix B: the range of block lengths, both ends included
FAMILIES = ("llama", "mistral", "qwen2")     # config.model_type of the targets that fit this file
# Names for train.py, and the settings of Config that each stands for
VARIANTS = {
    "edd": {},
    "edd-top": {"hidden": HIDDEN},                   # the paper's layer, whatever --hidden says
    "edd-ce": {"loss": "ce"},                        # Table 3: "w/o KL divergence"
    "edd-fixed": {"blocks": (5, 5)},                 # Table 3: "w/o random division length"
    "vdm": {"encoding": False},                      # appendix A
    "vdm-ce": {"encoding": False, "loss": "ce"},
}


@dataclass
class Config:
    """Sizes and settings; in parentheses, where the paper has them."""
    vocab: int                       # number of token ids: the target's
    width: int                       # D: the target's
    hidden: int                      # index of the target's hidden_states that H is (appendix B)
    encoding: bool = True            # False: the VDM, which reads no hidden states (appendix A)
    loss: str = "kl"                 # Eq. 4, or "ce": cross entropy (Table 3)
    blocks: tuple = BLOCKS           # the range from which L is drawn for each step (3.1)
    kind = "edd"                     # a class attribute, saved as the checkpoint's kind

    @classmethod
    def for_target(cls, model, hidden=HIDDEN, **more):
        """The Config of a drafter for the Hugging Face model `model`.

        hidden: index of hidden_states; a negative one counts from the end.  Entry i is the output
        of the i-th layer, i = 1, 2, ...; the last entry has passed the final norm, too.  Raises
        ValueError for 0, which is the embeddings, and out of range.  more: further settings.
        """
        c = model.config.get_text_config()
        index = hidden
        if hidden < 0:
            index = c.num_hidden_layers + 1 + hidden
        if index not in range(1, c.num_hidden_layers + 1):
            raise ValueError(f"hidden_states[{hidden}] of the target is no layer's output: choose "
                             f"--hidden from 1 to {c.num_hidden_layers}")
        return cls(c.vocab_size, c.hidden_size, index, **more)


# ---------------------------------------------------------------- equations 3 and 4
def dual_block_mask(length, block):
    """Eq. 3 and Figure 3(a) -> (length, 2 * length) bool.

    Row i is what token i sees: of the hidden states in the left half, of the tokens in the right.
    """
    j = torch.arange(length) // block                          # (T,): the block of each token
    hidden = j[:, None] > j[None, :]                           # h_{<jL}: of the blocks before
    tokens = j[:, None] == j[None, :]                          # of its own block ...
    tokens = tokens.tril()                                     # ... up to itself: t_{jL} ... t_i
    return torch.cat((hidden, tokens), 1)


def kl(target_logits, logits):
    """Eq. 4, D_KL(P_t || P_d), summed over n positions.  target_logits, logits (n, V) -> ()"""
    log_p_target = target_logits.float().log_softmax(-1)
    log_p_draft = logits.float().log_softmax(-1)
    # sum_x P_t(x) (log P_t(x) - log P_d(x)).  On a CPU F.kl_div is much faster if it is given
    # log P_t instead of P_t.
    return F.kl_div(log_p_draft, log_p_target, reduction="sum", log_target=True)


def cross_entropy(head, x, labels):
    """Cross entropy, summed over n positions -> ()

    x (n, D): what the LM head reads.  labels: token ids (n,), or distributions (n, V).
    """
    return F.cross_entropy(head(x).float(), labels, reduction="sum")


# ---------------------------------------------------------------- the draft model
class DraftModel(nn.Module):
    """A draft model around one layer of the target's class.

    Drafters for other families of targets (runtime/drafters.py) replace some of its methods.
    """
    config_class = Config

    def __init__(self, config, model):
        super().__init__()
        self.config = config
        # What the drafter uses of the target: a namespace, not a submodule, so that it is not saved
        self.target = SimpleNamespace()
        self.take(model, model.get_decoder())

    def take(self, model, decoder):
        """Put what the drafter uses of the target into self.target, without gradients."""
        if decoder.config.model_type not in FAMILIES:
            raise ValueError(f"edd.py serves {', '.join(FAMILIES)}, not {type(model).__name__}: "
                             "see runtime/drafters.py")
        self.target.rotary = decoder.rotary_emb
        # A tensor that has the device and dtype of the drafter
        self.target.like = decoder.norm.weight.detach()

    def own(self, module):
        """A trainable copy of one of the target's modules."""
        return copy.deepcopy(module).requires_grad_(True)

    def fresh_layer(self, model):
        """A new layer of the same class as the target's last one, initialised as that class is."""
        decoder = model.get_decoder()
        layer_class = type(decoder.layers[-1])
        layer = layer_class(decoder.config, layer_idx=len(decoder.layers) - 1)
        layer.apply(model._init_weights)
        return layer.to(self.target.like)

    def run_layer(self, x, position, mask, cache=None):
        """The layer over x (B, m, D), at the positions `position` (1, m) -> (B, m, D).

        mask (m, keys) bool; None: all keys are seen.  cache: its update(k, v) returns the keys and
        values to attend to, as that of a Hugging Face cache does; None: those of x alone.
        """
        cos_sin = self.target.rotary(x, position)
        if mask is not None:
            mask = torch.where(mask, 0.0, float("-inf"))       # added to the scores
            mask = mask.to(x.dtype)[None, None]                # (1, 1, m, keys)
        return self.layer(x, attention_mask=mask, position_ids=position, past_key_values=cache,
                          position_embeddings=cos_sin)

    def keys_values(self, x, position):
        """The layer's KV entries of x (B, m, D), at `position` (1, m) -> k, v (B, H, m, d) each"""
        x = self.layer.input_layernorm(x)
        cos_sin = self.target.rotary(x, position)
        # The function of the same name, below
        return keys_values(self.layer.self_attn, x, *cos_sin)

    def causal(self, x):
        """The layer over x (B, T, D) under a causal mask -> (B, T, D)"""
        position = torch.arange(x.shape[1], device=x.device)
        mask = position[:, None] >= position[None, :]
        return self.run_layer(x, position[None], mask)


def keys_values(attention, x, cos, sin):
    """k = RoPE(W_k x) and v = W_v x, for the weights of an attention module.

    x (B, m, D) is normed, cos and sin (1, m, d) -> k, v (B, H, m, d) each
    """
    heads = (-1, attention.head_dim)
    k = attention.k_proj(x).unflatten(-1, heads).transpose(1, 2)
    v = attention.v_proj(x).unflatten(-1, heads).transpose(1, 2)
    k = k * cos[:, None] + rotate_half(k) * sin[:, None]
    return k, v


class SoftPrompt:
    """Takes the place of the layer's cache in training.  k, v (B, H, T, d): KV entries of H.

    The layer's attention calls update with the keys and values of the tokens, and attends to what
    it returns.
    """

    def __init__(self, k, v):
        self.k, self.v = k, v

    def update(self, k, v, *args, **kwargs):
        """The tokens' k, v -> the soft prompt's keys and values, followed by the tokens'"""
        return torch.cat((self.k, k), 2), torch.cat((self.v, v), 2)


class EDD(DraftModel):
    """EDD, or the VDM: a new layer between copies of the target's embedding and LM head."""

    def __init__(self, config, model):
        super().__init__(config, model)
        self.embed = self.own(model.get_input_embeddings())
        self.head = self.own(model.get_output_embeddings())
        self.layer = self.fresh_layer(model)
        # A norm of the target's class, but with initial weights, as the layer has
        self.norm = self.own(model.get_decoder().norm)
        self.norm.apply(model._init_weights)

    def forward(self, ids, hidden, block):
        """Eq. 2 with teacher forcing -> (B, T, D), normed: what the LM head reads.

        ids (B, T), hidden (B, T, D), block: L.  The VDM uses neither hidden nor block.
        """
        x = self.embed(ids)                                                    # (B, T, D)
        if not self.config.encoding:
            return self.norm(self.causal(x))
        # The soft prompt: h_i stands at position i, as t_i does.
        T = ids.shape[1]
        position = torch.arange(T, device=ids.device)[None]                    # (1, T)
        k, v = self.keys_values(hidden.to(x.dtype), position)                  # (B, H, T, d)
        # Eq. 3: what token i sees of hidden states and of tokens
        mask = dual_block_mask(T, block).to(ids.device)                        # (T, 2T)
        x = self.run_layer(x, position, mask, SoftPrompt(k, v))                # (B, T, D)
        return self.norm(x)

    def divergence(self, x, target_logits):
        """Eq. 4, summed over n positions.  x (n, D) of forward, target_logits (n, V) -> ()"""
        return kl(target_logits, self.head(x))

    def loss(self, batch):
        """The mean loss of a training step; train.py's docstring lists the entries of `batch`.

        batch["learn"] (B, T) is the loss mask, and batch["count"] the number of labels in the step.
        batch["sum"] sums a loss over the positions that the mask selects.
        """
        # Section 3.1: a random block length for each training step.  Held-out losses fix it.
        block = batch["block"]
        if block is None:
            low, high = self.config.blocks
            block = int(batch["random"].integers(low, high + 1))
        hidden = batch["hidden"].get(self.config.hidden)       # (B, T, D); None for the VDM
        x = self(batch["ids"], hidden, block)                                  # (B, T, D)
        loss_of = self.divergence
        labels = batch["logits"]                                               # (B, T, V)
        if self.config.loss == "ce":
            loss_of = partial(cross_entropy, self.head)
            labels = batch["ids"].roll(-1, 1)                  # (B, T): t_{i+1}
        total = batch["sum"](loss_of, batch["learn"], x, labels)
        return total / batch["count"]


# ---------------------------------------------------------------- decoding
class Cache:
    """The KV entries of one layer, in preallocated tensors (1, H, capacity, d)."""

    def __init__(self):
        self.capacity = 0
        self.kept = {}                   # "keys" and "values"; allocated by the first write

    def reserve(self, length):
        """Make sure that the capacity is at least `length` entries."""
        if length > self.capacity:
            # The capacity at least doubles, so growing copies each entry a few times at most.
            more = max(1024, 2 * length) - self.capacity
            for name, entries in self.kept.items():
                self.kept[name] = F.pad(entries, (0, 0, 0, more))
            self.capacity += more

    def write(self, k, v, slots):
        """Put k, v (1, H, m, d) into the slots (m,)."""
        for name, entries in (("keys", k), ("values", v)):
            if name not in self.kept:
                empty = entries[:, :, :0]                      # (1, H, 0, d)
                self.kept[name] = F.pad(empty, (0, 0, 0, self.capacity))
            self.kept[name].index_copy_(2, slots, entries)


class WriteAndRead:
    """Takes the place of the layer's cache in one forward of decoding; SoftPrompt does in training.

    cache: a Cache; slots (m,): where the m nodes' entries are written; end: how many are read.
    """

    def __init__(self, cache, slots, end):
        self.cache, self.slots, self.end = cache, slots, end

    def update(self, k, v, *args, **kwargs):
        """Write k, v to the slots -> views of all entries before `end`, (1, H, end, d) each"""
        self.cache.write(k, v, self.slots)
        kept = self.cache.kept
        return kept["keys"][:, :, :self.end], kept["values"][:, :, :self.end]


class Drafter:
    """Drafts with an EDD or a VDM, by the contract of a drafter in verify.py.

    In each round begin is called once, then expand any number of times, then keep.
    """
    # Calibration temperature: of the tokens that have probability p in softmax(logits /
    # temperature), a share p is the target's greedy choice.
    temperature = 1.0

    def __init__(self, model):
        self.model = model.eval()
        self.config = model.config
        self.device = model.target.like.device
        self.needs = {}
        if self.config.encoding:
            self.needs["hidden"] = (self.config.hidden,)
        # The KV entries of committed tokens, then those of this round's nodes
        self.cache = Cache()
        self.reset()

    def reset(self):
        """Forget the sequence."""
        self.t = 0                       # number of committed tokens: all have entries in the cache
        self.paths = []                  # paths[i]: the nodes from the root to node i, i included

    @torch.no_grad()
    def begin(self, view):
        """Start a round: forget the last round's nodes, and encode newly committed tokens.

        view.tokens (k,) are the tokens committed since the last begin, a prompt included.
        view.length is the number of all committed tokens.  view.hidden[config.hidden] (k, D) are
        the target's hidden states of the k tokens.
        """
        first = view.length - len(view.tokens)
        assert first == self.t, f"begin was given tokens from {first} on, and {self.t} are encoded"
        self.paths = []
        if self.config.encoding:
            # The soft prompt, in the layer's dtype
            x = view.hidden[self.config.hidden]
            x = x.to(next(self.model.layer.parameters()))                      # (k, D)
        else:
            x = self.model.embed(view.tokens.to(self.device))                  # (k, D)
        self.encode(x)

    def encode(self, x):
        """Append the KV entries of k committed tokens to the cache.

        x (k, D): what the layer reads of them.
        """
        if not len(x):
            return
        start = self.t
        self.t += len(x)
        self.cache.reserve(self.t)
        slots = torch.arange(start, self.t, device=x.device)                   # (k,)
        k, v = self.model.keys_values(x[None], slots[None])                    # (1, H, k, d)
        self.cache.write(k, v, slots)

    @torch.no_grad()
    def expand(self, tokens, parents):
        """One forward over m new nodes -> logits (m, V) of the token after each.

        tokens (m,); parents: m ints, the index of each node's parent among all nodes given to
        expand in this round, in order; -1 for the root.
        """
        x = self.model.embed(tokens.to(self.device))                           # (m, D)
        x = self.run_nodes(x, parents)                                         # (m, D)
        return self.model.head(self.model.norm(x))

    def keep(self, path):
        """End the round.  No entry of a node is kept.

        The entries of a node come from its embedding, those of a committed token from the target's
        hidden state.  So the next begin encodes accepted nodes anew, as committed tokens.  (For the
        VDM, which reads no hidden states, it does the same with the embeddings.)
        """

    def add_paths(self, parents):
        """Number new nodes -> the path of each, from the root to the node itself."""
        for parent in parents:
            above = self.paths[parent] if parent >= 0 else []
            self.paths.append(above + [len(self.paths)])
        return self.paths[-len(parents):]

    def run_nodes(self, x, parents):
        """The layer over m new nodes, x (m, D) -> (m, D)

        A node sees all committed tokens and the nodes of its path.
        """
        paths = self.add_paths(parents)
        m, nodes = len(paths), len(self.paths)
        end = self.t + nodes
        slots = torch.arange(end - m, end, device=x.device)                    # (m,)
        # A single node that continues a chain sees all entries, and its position is its slot.
        position = slots
        mask = None
        if m > 1 or len(paths[0]) < nodes:
            sees = self.tree_mask(paths).to(x.device, non_blocking=True)       # (m, nodes)
            # Every node sees all committed tokens.
            prefix = sees.new_ones(m, self.t)
            mask = torch.cat((prefix, sees), 1)                                # (m, end)
            # The root is at position t, and the path of a node at depth n has n + 1 nodes.
            position = self.t + sees.sum(1) - 1                                # (m,)
        self.cache.reserve(end)
        return self.run(end, x, position, slots, mask)[0]

    def tree_mask(self, paths):
        """The paths of m nodes -> (m, nodes) bool: which of this round's nodes each of them sees"""
        sees = torch.zeros(len(paths), len(self.paths), dtype=torch.bool)
        rows, columns = [], []
        for row, path in enumerate(paths):
            rows += [row] * len(path)
            columns += path
        sees[rows, columns] = True
        return sees

    def run(self, end, x, position, slots, mask):
        """The tensor part of run_nodes, which runtime/static.py gives static shapes -> [(m, D)]

        x (m, D), position, slots (m,), mask (m, end); None: all entries before `end` are seen.
        It returns a list, since verify.Target.run does.
        """
        cache = WriteAndRead(self.cache, slots, end)
        x = self.model.run_layer(x[None], position[None], mask, cache)         # (1, m, D)
        return [x[0]]


# ---------------------------------------------------------------- from a checkpoint
def load(folder, model, draft_class=EDD, drafter_class=Drafter):
    """Load a checkpoint of train.py for the target `model` -> (drafter, training.json as a dict).

    The drafter has the target's dtype and device.  Raises ValueError where the checkpoint does not
    fit the target.
    """
    about = json.loads(Path(folder, "training.json").read_text())
    saved, known = about["config"], fields(draft_class.config_class)
    settings = {field.name: saved[field.name] for field in known if field.name in saved}
    config = draft_class.config_class(**settings)
    c = model.config.get_text_config()
    made_for = config.vocab, config.width
    found = c.vocab_size, c.hidden_size
    if made_for != found or config.hidden > c.num_hidden_layers:
        raise ValueError(f"the drafter in {folder} was made for another target (vocabulary and "
                         f"width {made_for}, here {found}; it reads hidden_states[{config.hidden}] "
                         f"of {c.num_hidden_layers}): train one for this with train.py")
    draft_model = draft_class(config, model)
    try:
        draft_model.load_state_dict(load_file(Path(folder, "model.safetensors")))
    except RuntimeError:
        raise ValueError(f"{folder} does not hold the weights that its training.json describes: "
                         "train the drafter again") from None
    drafter = drafter_class(draft_model)
    drafter.temperature = about.get("validation", {}).get("temperature", 1.0)
    return drafter, about


def main():
    """Fifteen tokens in blocks of five: training under the mask equals decoding."""
    from transformers import LlamaConfig, LlamaForCausalLM
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=20, hidden_size=16, num_hidden_layers=6, num_attention_heads=4)
    target = LlamaForCausalLM(config).double()
    model = EDD(Config.for_target(target), target)
    for p in model.parameters():
        p.data.normal_(0, 0.3)
    ids = torch.arange(15)
    states = target(ids[None], output_hidden_states=True).hidden_states
    hidden = states[-4].detach()                               # (1, 15, D)
    trained = model.head(model(ids[None], hidden, 5))[0].detach()              # (15, V)
    # Ten tokens are committed.  The last block of five is drafted.
    drafter = Drafter(model)
    known = {model.config.hidden: hidden[0, :10]}
    drafter.begin(SimpleNamespace(tokens=ids[:10], length=10, hidden=known))
    drafted = drafter.expand(ids[10:], [-1, 0, 1, 2, 3])                       # (5, V)
    error = (drafted - trained[10:]).abs().max()
    assert error < 1e-6, error
    print(f"training under the mask = decoding: largest difference {error:.0e}")


if __name__ == "__main__":
    main()
