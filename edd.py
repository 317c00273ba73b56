"""EDD: the Effective Draft Decoder, for which the target's hidden states are a soft prompt.

Effective Draft Decoder with Pruned Candidate Tree (ACL 2025): section 3.1, Figures 2 and 3(a), and
appendix B; the vanilla draft model (VDM) of appendix A.

The idea.  While the target verifies, it encodes all committed tokens, and its hidden states H come
at no cost.  EDD is one layer of the target's own class.  It reads H as a prompt before the
embeddings of the tokens that it drafts.  In decoding the prompt ends where the drafting begins.
Training imitates this with a mask of two blocks: a token sees the tokens of its own block up to
itself, and the hidden states of the blocks before.  The loss is the KL divergence to the target.

    paper                              shape      name here
    T = (t_1, t_2, ...)                (B, T)     ids; all indices in this file count from 0
    H = (h_1, h_2, ...)                (B, T, D)  hidden: one of the target's hidden_states
    L                                  int        block: the length of a block of the mask
    P_d(T | H), Eq. 2                  (B, T, V)  EDD.forward, then EDD.head
    h_0 ... h_{jL-1}, Eq. 3            (T, T)     the left half of dual_block_mask
    t_{jL} ... t_i, Eq. 3              (T, T)     the right half of dual_block_mask
    D_KL(P_t || P_d), Eq. 4            ()         kl

Differences from the paper:
 1. Eq. 3 prints h_{<=jL}.  For i = jL this is a state that has read t_i, the token to predict.
    The prose of section 3.1, the official code and this file use h_{<jL}.
 2. The paper reads "the fourth-to-last layer" and calls it the 28th of 32.  This counts from 0:
    it is hidden_states[-4] of Hugging Face, whose first entry are the embeddings.
 3. There is one layer, so the keys and values of h_i depend on h_i and i alone.  Training computes
    nothing else of the soft prompt.  Decoding computes them once, when a token is committed.
 4. The VDM ("w/o encoding result") is a language model of one layer.  The paper does not state its
    loss: "vdm" learns by KL, "vdm-ce" by cross entropy.
 5. The layer attends to all positions, also where the target's own uses a sliding window.
 6. A sum of losses is divided by the number of rows that the loss mask keeps.

Alone in a project: this file, a drafter from train.py, a Llama, Mistral or Qwen2 (for other
families: runtime/parts.py).  Greedy chains of five, without a KV cache for the target:

    import torch, edd
    from types import SimpleNamespace
    from transformers import AutoModelForCausalLM
    model = AutoModelForCausalLM.from_pretrained("my-target")
    drafter, _ = edd.load("my-edd", model)
    ids, seen, layer = torch.tensor([1, 5, 7]), 0, drafter.config.hidden
    with torch.no_grad():
        states = model(ids[None], output_hidden_states=True).hidden_states[layer][0]
        while len(ids) < 30:
            t = len(ids) - 1                                 # committed: all but the root
            new = {layer: states[seen:t]}
            drafter.begin(SimpleNamespace(tokens=ids[seen:t], length=t, hidden=new))
            chain, seen = ids[-1:], t
            for i in range(5):
                logits = drafter.expand(chain[-1:], [i - 1])     # the parent of node i is i - 1
                chain = torch.cat((chain, logits.argmax(-1)))
            out = model(torch.cat((ids[:-1], chain))[None], output_hidden_states=True)
            states, choice = out.hidden_states[layer][0], out.logits[0, t:].argmax(-1)
            accepted = (chain[1:] == choice[:-1]).long().cumprod(0).sum().item()
            drafter.keep(list(range(min(accepted + 1, 5))))      # accepted nodes, root first
            ids = torch.cat((ids, choice[:accepted + 1]))

begin(view): view.tokens (k,) and view.hidden[layer] (k, D) are of the tokens committed since the
last begin, the prompt included; view.length counts all committed tokens.  A tree is drafted alike:
after the root, expand(tokens (3,), [0, 0, 1]) gives logits (3, V) of two children of the root and a
child of the first.  Nodes are numbered in the order given to expand.  confidence(...) is the
calibrated softmax.

    python edd.py           # the demo: training under the mask and decoding give the same logits
    python train.py edd vdm
"""
import copy
import json
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn
from transformers.models.llama.modeling_llama import rotate_half

HIDDEN = -4                      # appendix B: "the fourth-to-last layer"
BLOCKS = (5, 10)                 # appendix B: the range of block lengths, both ends included
# Names for train.py: EDD and the ablations of its training in Table 3, the VDM of appendix A.
VARIANTS = {
    "edd": {},
    "edd-ce": {"loss": "ce"},
    "edd-fixed": {"blocks": (5, 5)},
    "vdm": {"encoding": False},
    "vdm-ce": {"encoding": False, "loss": "ce"},
}

@dataclass
class Config:
    """vocab, width: the target's.  hidden: index of hidden_states, 1: the first layer's output."""
    vocab: int
    width: int
    hidden: int
    encoding: bool = True            # False: the VDM, which reads no hidden states
    loss: str = "kl"                 # or "ce"
    blocks: tuple = BLOCKS
    kind = "edd"                     # no field: the name of this class of Config in a checkpoint

    @classmethod
    def for_target(cls, model, hidden=HIDDEN, **more):
        """The Config for a Hugging Face model.  hidden may be negative, as Python indexes lists.

        Raises ValueError where hidden_states[hidden] is not the output of a layer.
        """
        c = model.config.get_text_config()
        index = hidden
        if hidden < 0:
            index = c.num_hidden_layers + 1 + hidden
        if index < 1 or index > c.num_hidden_layers:
            raise ValueError(f"hidden_states[{hidden}] of the target is no layer's output: it has "
                             f"layers 1 to {c.num_hidden_layers}; pick one with --hidden")
        return cls(c.vocab_size, c.hidden_size, index, **more)

# ---------------------------------------------------------------- equations 3 and 4
def dual_block_mask(length, block):
    """Eq. 3, Figure 3(a) -> (length, 2 * length) bool: what token i sees, hidden states first."""
    j = torch.arange(length) // block                          # (T,): the block of each token
    hidden = j[:, None] > j[None, :]                           # h_{<jL}: of the blocks before
    tokens = j[:, None] == j[None, :]                          # of its own block ...
    tokens = tokens.tril()                                     # ... up to itself: t_{jL} ... t_i
    return torch.cat((hidden, tokens), 1)

def kl(p_target, logits):
    """Eq. 4, D_KL(P_t || P_d), summed over rows.  p_target, logits (n, V) -> ()"""
    log_p_draft = logits.float().log_softmax(-1)
    # sum_x P_t(x) log(P_t(x) / P_d(x))
    return F.kl_div(log_p_draft, p_target, reduction="sum")

def cross_entropy(head, x, labels):
    """Summed over rows.  x (n, D), which the head reads; labels: ids (n,) or p (n, V) -> ()"""
    return F.cross_entropy(head(x).float(), labels, reduction="sum")

# ---------------------------------------------------------------- the draft model
class DraftModel(nn.Module):
    """One layer of the target's class.  runtime/parts.py overrides methods for other families."""
    config_class = Config

    def __init__(self, config, model):
        super().__init__()
        self.config = config
        # The target's own parts are no submodules: they are not saved with the drafter.
        self.target = SimpleNamespace()
        self.take(model, model.get_decoder())

    def take(self, model, decoder):
        """Remember what the drafter uses of the target.  It gets no gradient."""
        self.target.rotary = decoder.rotary_emb
        # A tensor whose device and type are those of the drafter
        self.target.like = decoder.norm.weight.detach()

    def own(self, module):
        """A trainable copy of a part of the target."""
        return copy.deepcopy(module).requires_grad_(True)

    def fresh_layer(self, model):
        """A layer of the class of the target's last one, initialised as the target was."""
        decoder = model.get_decoder()
        layer_class = type(decoder.layers[-1])
        layer = layer_class(decoder.config, layer_idx=len(decoder.layers) - 1)
        layer.apply(model._init_weights)
        return layer.to(self.target.like)

    def run_layer(self, x, position, mask, cache=None):
        """The layer over x (B, m, D) at position (1, m) -> (B, m, D).

        mask (m, keys) bool; None: all keys are seen.  cache.update(k, v) gives keys and values.
        """
        cos_sin = self.target.rotary(x, position)
        if mask is not None:
            mask = torch.where(mask, 0.0, float("-inf"))       # added to the scores
            mask = mask.to(x.dtype)[None, None]                # (1, 1, m, keys)
        return self.layer(x, attention_mask=mask, position_ids=position, past_key_values=cache,
                          position_embeddings=cos_sin)

    def keys_values(self, x, position):
        """The KV entries of x (B, m, D) at position (1, m), alone -> k, v (B, H, m, d)"""
        x = self.layer.input_layernorm(x)
        cos_sin = self.target.rotary(x, position)
        return keys_values(self.layer.self_attn, x, *cos_sin)

    def causal(self, x):
        """The layer over all positions, each of which sees those up to itself.  x (B, T, D)"""
        position = torch.arange(x.shape[1], device=x.device)
        mask = position[:, None] >= position[None, :]
        return self.run_layer(x, position[None], mask)

def keys_values(attention, x, cos, sin):
    """k = RoPE(W_k x), v = W_v x.  x (B, m, D) is normed, cos and sin (1, m, d) -> (B, H, m, d)"""
    heads = (-1, attention.head_dim)
    k = attention.k_proj(x).unflatten(-1, heads).transpose(1, 2)
    v = attention.v_proj(x).unflatten(-1, heads).transpose(1, 2)
    k = k * cos[:, None] + rotate_half(k) * sin[:, None]
    return k, v

class SoftPrompt:
    """Stands for the layer's cache in training: the KV entries of H, (B, H, T, d) each."""

    def __init__(self, k, v):
        self.k, self.v = k, v

    def update(self, k, v, *args, **kwargs):
        """-> keys and values of the soft prompt, then of the tokens"""
        return torch.cat((self.k, k), 2), torch.cat((self.v, v), 2)

class EDD(DraftModel):
    """EDD, or the VDM: a fresh layer between copies of the target's embedding and head."""

    def __init__(self, config, model):
        super().__init__(config, model)
        self.embed = self.own(model.get_input_embeddings())
        self.head = self.own(model.get_output_embeddings())
        self.layer = self.fresh_layer(model)
        self.norm = self.own(model.get_decoder().norm)
        self.norm.apply(model._init_weights)

    def forward(self, ids, hidden, block):
        """Eq. 2, teacher forcing.  ids (B, T), hidden (B, T, D), block: L -> (B, T, D), normed"""
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
        """Eq. 4, summed over rows.  x (n, D), target_logits (n, V) -> ()"""
        p_target = target_logits.float().softmax(-1)                           # (n, V)
        return kl(p_target, self.head(x))

    def loss(self, batch):
        """The mean loss of a step of train.py, whose docstring lists the entries of `batch`.

        "learn" (B, T) is the loss mask, "count" its size; "sum" adds up a loss over masked rows.
        """
        # Section 3.1: a block length for each step
        block = batch["block"]
        if block is None:
            low, high = self.config.blocks
            block = int(batch["random"].integers(low, high + 1))
        hidden = batch["hidden"].get(self.config.hidden)       # (B, T, D); None for the VDM
        x = self(batch["ids"], hidden, block)                                  # (B, T, D)
        loss = self.divergence
        labels = batch["logits"]                                               # (B, T, V)
        if self.config.loss == "ce":
            loss = partial(cross_entropy, self.head)
            labels = batch["ids"].roll(-1, 1)                  # (B, T): t_{i+1}
        total = batch["sum"](loss, batch["learn"], x, labels)
        return total / batch["count"]

# ---------------------------------------------------------------- decoding
class Cache:
    """The KV entries of one layer, preallocated: (1, H, allocated, d) each."""

    def __init__(self):
        self.allocated = 0
        self.kept = {}                   # "keys" and "values", from the first write on

    def reserve(self, length):
        """Allocate for `length` tokens.  Doubling makes growth a constant cost for each."""
        if length > self.allocated:
            more = max(1024, 2 * length) - self.allocated
            for name, entries in self.kept.items():
                self.kept[name] = F.pad(entries, (0, 0, 0, more))
            self.allocated += more

    def write(self, k, v, slots):
        """Put k, v (1, H, m, d) into slots (m,)."""
        for name, entries in (("keys", k), ("values", v)):
            if name not in self.kept:
                none = entries[:, :, :0]                       # (1, H, 0, d)
                self.kept[name] = F.pad(none, (0, 0, 0, self.allocated))
            self.kept[name].index_copy_(2, slots, entries)

class WriteAndRead:
    """Stands for the layer's cache in one forward: writes slots, reads up to an end."""

    def __init__(self, cache, slots, end):
        self.cache, self.slots, self.end = cache, slots, end

    def update(self, k, v, *args, **kwargs):
        """Write the nodes' entries -> views of all entries before `end`, (1, H, end, d) each"""
        self.cache.write(k, v, self.slots)
        kept = self.cache.kept
        return kept["keys"][:, :, :self.end], kept["values"][:, :, :self.end]

class Drafter:
    """Decoding with an EDD or a VDM, by the contract of a drafter in verify.py."""
    temperature = 1.0                # calibrates its confidence in the target's greedy choice

    def __init__(self, model):
        self.model = model.eval()
        self.config = model.config
        self.device = model.target.like.device
        self.needs = {}
        if self.config.encoding:
            self.needs["hidden"] = (self.config.hidden,)
        self.cache = Cache()
        self.reserve = self.cache.reserve
        self.reset()

    def reset(self):
        """Forget the sequence."""
        self.length = 0                  # committed tokens
        self.t = 0                       # their entries in the cache, which come before the nodes'
        self.paths = []                  # paths[i]: node i's ancestors, root first, and itself

    @torch.no_grad()
    def begin(self, view):
        """A round starts: encode the tokens committed since the last one."""
        self.next_round(view)
        self.encode(self.inputs(view))

    def next_round(self, view):
        """Forget the nodes of the last round, and count its committed tokens."""
        first = view.length - len(view.tokens)
        assert first == self.length, f"cannot go on from token {first} after {self.length}"
        self.length = view.length
        self.paths = []

    def inputs(self, view):
        """What the layer reads of newly committed tokens: H, or the VDM embeddings -> (k, D)"""
        if self.config.encoding:
            hidden = view.hidden[self.config.hidden]
            return hidden.to(next(self.model.layer.parameters()))
        return self.model.embed(view.tokens.to(self.device))

    def encode(self, x):
        """Append the KV entries of committed tokens to the cache.  x (k, D)"""
        if not len(x):
            return
        start = self.t
        self.t += len(x)
        self.reserve(self.t)
        slots = torch.arange(start, self.t, device=x.device)                   # (k,)
        k, v = self.model.keys_values(x[None], slots[None])                    # (1, H, k, d)
        self.cache.write(k, v, slots)

    @torch.no_grad()
    def expand(self, tokens, parents):
        """One forward over new nodes.  tokens (m,), parents [m], the root's: -1 -> logits (m, V)"""
        x = self.model.embed(tokens.to(self.device))                           # (m, D)
        x = self.run_nodes(x, parents)                                         # (m, D)
        return self.model.head(self.model.norm(x))

    def confidence(self, tokens, parents):
        """As expand -> (m, V): calibrated probabilities of being the target's greedy choice"""
        logits = self.expand(tokens, parents).float()
        p = (logits / self.temperature).softmax(-1)
        return p.nan_to_num(0.0)                               # a row of -inf: no prediction

    def keep(self, path):
        """Drafted entries are forgotten: accepted tokens come back as hidden states."""

    def add_paths(self, parents):
        """Number new nodes -> the path of each."""
        for parent in parents:
            above = self.paths[parent] if parent >= 0 else []
            self.paths.append(above + [len(self.paths)])
        return self.paths[-len(parents):]

    def run_nodes(self, x, parents):
        """The layer over m new nodes, x (m, D) -> (m, D).  They see the prefix and their paths."""
        paths = self.add_paths(parents)
        m, nodes = len(paths), len(self.paths)
        end = self.t + nodes
        slots = torch.arange(end - m, end, device=x.device)                    # (m,)
        position, mask = slots, None
        # The last node of a chain sees all entries, and stands at the position of its slot.
        if m > 1 or len(paths[0]) < nodes:
            sees = self.tree_mask(paths).to(x.device, non_blocking=True)       # (m, nodes)
            prefix = sees.new_ones(m, self.t)
            mask = torch.cat((prefix, sees), 1)                                # (m, end)
            # A path has one node for each depth, and the root is at position t.
            position = self.t + sees.sum(1) - 1
        self.reserve(end)
        return self.run(end, x, position, slots, mask)[0]

    def tree_mask(self, paths):
        """paths [m lists of nodes] -> (m, nodes) bool: node i sees its path."""
        sees = torch.zeros(len(paths), len(self.paths), dtype=torch.bool)
        rows, columns = [], []
        for row, path in enumerate(paths):
            rows += [row] * len(path)
            columns += path
        sees[rows, columns] = True
        return sees

    def run(self, end, x, position, slots, mask):
        """One forward of tensors alone, which runtime/graphs.py gives static shapes -> [(m, D)]

        x (m, D), position, slots (m,), mask (m, end) or None: all of the entries before `end`
        """
        cache = WriteAndRead(self.cache, slots, end)
        x = self.model.run_layer(x[None], position[None], mask, cache)         # (1, m, D)
        return [x[0]]

# ---------------------------------------------------------------- from a checkpoint
def load(folder, model, draft_class=EDD, drafter_class=Drafter):
    """A checkpoint of train.py -> its drafter, in the type of the target `model`, and training.json

    Raises ValueError where the checkpoint was made for another target.
    """
    from safetensors.torch import load_file
    about = json.loads(Path(folder, "training.json").read_text())
    saved, known = about["config"], fields(draft_class.config_class)
    settings = {field.name: saved[field.name] for field in known if field.name in saved}
    config = draft_class.config_class(**settings)
    c = model.config.get_text_config()
    was = config.vocab, config.width
    now = c.vocab_size, c.hidden_size
    if was != now or config.hidden > c.num_hidden_layers:
        raise ValueError(f"the drafter in {folder} was made for another target (vocabulary and "
                         f"width {was}, against {now}): train one for this with train.py --target")
    draft_model = draft_class(config, model)
    draft_model.load_state_dict(load_file(Path(folder, "model.safetensors")))
    drafter = drafter_class(draft_model)
    drafter.temperature = about.get("validation", {}).get("temperature", 1.0)
    return drafter, about

def main():
    """On fifteen tokens in blocks of five: training under the mask equals decoding."""
    from transformers import LlamaConfig, LlamaForCausalLM
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
    drafter.begin(SimpleNamespace(tokens=ids[:10], length=10, hidden={3: hidden[0, :10]}))
    drafted = drafter.expand(ids[10:], [-1, 0, 1, 2, 3])                       # (5, V)
    error = (drafted - trained[10:]).abs().max()
    assert error < 1e-6, error
    print(f"training under the mask = decoding: largest difference {error:.0e}")

if __name__ == "__main__":
    main()
