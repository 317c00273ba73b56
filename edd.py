"""EDD: the Effective Draft Decoder, which reads the target's hidden states as a soft prompt.

Faster Speculative Decoding via Effective Draft Decoder with Pruned Candidate Tree (ACL 2025,
aclanthology.org/2025.acl-long.486): section 3.1, Figures 2 and 3(a), appendix B; and the vanilla
draft model (VDM) of appendix A: Config.for_target(model, encoding=False).

The idea.  When the target verifies tokens it encodes them, so its hidden states H of all committed
tokens are known without another forward.  EDD is one layer of the target's own class.  It reads H
as a prompt, then the embeddings of the tokens that are being drafted.  In decoding the prompt ends
where the round begins.  Training imitates this with a mask of two halves: a token sees the hidden
states of all blocks before its own, and the tokens of its own block up to itself.  The loss is the
KL divergence between the target's distribution and the drafter's.

    paper                              shape      name here
    T = (t_1, t_2, ...)                (B, S)     ids: t_0, t_1, ...; S is their number
    H = (h_1, h_2, ...)                (B, S, D)  hidden: one of the target's hidden_states
    L                                  int        block: the length of a block of the mask
    P_d(T | H), Eq. 2                  (B, S, V)  EDD.forward, then EDD.head
    h_{<=jL}, Eq. 3                    (S, S)     h_{<jL}: the left half of dual_block_mask
    t_{jL:i}, Eq. 3                    (S, S)     t_{jL} ... t_i: its right half
    D_KL(P_t || P_d), Eq. 4            ()         kl

To use it in your project, with verify.py and pct.py.  model: the target, of transformers.

    drafter, _ = edd.load("my-edd", model)
    out = verify.generate(verify.Target(model), drafter, pct.pct, ids)

    python edd.py           # the demo: training under the mask predicts what decoding does
    python train.py edd vdm --data my-texts              # for the stand-in target; docs/training.md
"""
import copy
import json
import warnings
from collections import namedtuple
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn
from transformers.models.llama.modeling_llama import rotate_half

# "the 28th (fourth-to-last) layer" (4.3.1) of 32, counted from 0: its output is entry 29, or -4, of
# the 33 hidden_states, whose entry i is the input of layer i.
HIDDEN = -4
BLOCKS = (5, 10)                 # appendix B: the range of block lengths, both ends included
FAMILIES = ("llama", "mistral", "qwen2")     # config.model_type of the targets that fit this file

@dataclass
class Config:
    """Sizes and settings; in parentheses, where the paper has them."""
    vocab: int                       # number of token ids: the target's
    width: int                       # D: the target's
    hidden: int                      # H is entry `hidden` of the target's hidden_states (app. B)
    encoding: bool = True            # False: the VDM, which reads no hidden states (appendix A)
    loss: str = "kl"                 # Eq. 4, or "ce": cross entropy (Table 3)
    blocks: tuple = BLOCKS           # the range from which a step's L is sampled (3.1, app. B)

    @classmethod
    def for_target(cls, model, hidden=HIDDEN, **more):
        """The Config of a drafter for the Hugging Face model `model`.

        hidden: index of hidden_states, of which the last is the normed output; a negative one
        counts from the end.  more: further settings.
        """
        c = model.config.get_text_config()
        if hidden < 0:
            hidden = c.num_hidden_layers + 1 + hidden
        return cls(c.vocab_size, c.hidden_size, hidden, **more)

# ---------------------------------------------------------------- equations 3 and 4
def dual_block_mask(length, block, device="cpu"):
    """Eq. 3 and Figure 3(a) -> (length, 2 * length) bool

    Row i is what token i sees.  The block j = 1 for L = 2:

              h_0 h_1 h_2 h_3 | t_0 t_1 t_2 t_3
        t_2    x   x          |          x
        t_3    x   x          |          x   x

    Differs from Eq. 3 as printed, but not from the paper's inference and its code, in two ways:
    h_{<jL} stands for h_{<=jL}, because h_{jL} does not exist when a round begins with t_{jL}; and
    t_i is the token that is read, not the one that is predicted.
    """
    j = torch.arange(length, device=device) // block           # the block of each token
    hidden = j[:, None] > j[None, :]                           # h_{<jL}: of the blocks before
    tokens = j[:, None] == j[None, :]                          # of its own block ...
    tokens = tokens.tril()                                     # ... up to itself: t_{jL} ... t_i
    return torch.cat((hidden, tokens), 1)

def kl(target_logits, logits):
    """Eq. 4, D_KL(P_t || P_d), summed over n positions.  target_logits, logits (n, V) -> ()"""
    log_p_target = target_logits.float().log_softmax(-1)
    # If the target has a logit of -inf, 0 log 0 is 0.
    log_p_target.clamp_(min=torch.finfo(torch.float32).min)
    log_p_draft = logits.float().log_softmax(-1)
    # On a CPU F.kl_div is much faster if it is given log P_t instead of P_t.
    return F.kl_div(log_p_draft, log_p_target, reduction="sum", log_target=True)

# ---------------------------------------------------------------- the parts of a draft model
# What a draft model is made of
#   embed, head  modules: ids (...) -> (..., D), and (..., D) -> logits (..., V)
#   layer        a new decoder layer of the target's class, with transformers' signature
#   norm         a new norm of the target's class
#   rotary       the target's own function: (x, position (1, m)) -> cos and sin (1, m, d)
Parts = namedtuple("Parts", "embed head layer norm rotary")

def parts_of(model):
    """The Parts for the target `model`, with its device and dtype: trainable, all of them.

    Embedding and LM head are copies of the target's.  The layer and the norm start as in a new
    model.  Raises ValueError for other families than FAMILIES.
    """
    decoder = model.get_decoder()
    if decoder.config.model_type not in FAMILIES:
        raise ValueError(f"edd.py serves {', '.join(FAMILIES)}, not {type(model).__name__}: "
                         "see runtime/families.py")
    embed = copy.deepcopy(model.get_input_embeddings()).requires_grad_(True)
    head = copy.deepcopy(model.get_output_embeddings()).requires_grad_(True)
    norm = copy.deepcopy(decoder.norm).requires_grad_(True)
    # Some classes have layers of several kinds, and find the kind of this one in the config.
    layer = type(decoder.layers[-1])(decoder.config, layer_idx=len(decoder.layers) - 1)
    layer.apply(model._init_weights)
    norm.apply(model._init_weights)
    return Parts(embed, head, layer.to(embed.weight), norm, decoder.rotary_emb)

def run_layer(layer, rotary, x, position, mask, update=None):
    """Parts.layer over x (B, m, D), at the positions `position` (1, m) -> (B, m, D)

    mask (m, keys) bool; None, for m = 1 only: all keys are seen.  update(k, v) takes the KV entries
    of x, and returns the keys and values to attend to; None: x attends to itself only.
    Differs from the target if its own layers have a sliding window: this one sees all positions.
    """
    if mask is not None:
        mask = torch.where(mask, 0.0, float("-inf"))           # added to the scores
        mask = mask.to(x.dtype)[None, None]                    # (1, 1, m, keys)
    # The layer's attention calls cache.update(k, v, the layer's index), and nothing else of it.
    cache = None
    if update is not None:
        cache = SimpleNamespace(update=lambda k, v, *args, **kwargs: update(k, v))
    return layer(x, attention_mask=mask, position_ids=position, past_key_values=cache,
                 position_embeddings=rotary(x, position))

def keys_values(layer, rotary, x, position):
    """The KV entries of x (B, m, D) in Parts.layer, at `position` (1, m) -> k, v (B, n_kv, m, d).

    k = RoPE(W_k norm(x)) and v = W_v norm(x), as the layer itself computes them.
    """
    attention = layer.self_attn
    heads = (-1, attention.head_dim)
    x = layer.input_layernorm(x)
    k = attention.k_proj(x).unflatten(-1, heads).transpose(1, 2)
    v = attention.v_proj(x).unflatten(-1, heads).transpose(1, 2)
    cos, sin = rotary(x, position)
    k = k * cos[:, None] + rotate_half(k) * sin[:, None]
    return k, v

# ---------------------------------------------------------------- the draft model
class EDD(nn.Module):
    """EDD, or the VDM: a new layer between copies of the target's embedding and LM head.

    The VDM is a language model of one layer, which sees all earlier tokens.
    Differs from the paper, which states neither the VDM's loss, here EDD's, nor whether Table 3's
    "w/o encoding result" is the VDM.
    """
    def __init__(self, config, parts):
        super().__init__()
        self.config = config
        self.embed, self.head, self.layer, self.norm, _ = parts
        # A function, and not a module: it is neither moved nor saved with the drafter.
        self.rotary = partial(parts.rotary)

    def forward(self, ids, hidden, block):
        """Eq. 2 with teacher forcing -> (B, S, D), normed: what the LM head reads.

        ids (B, S), hidden (B, S, D), block: L.  The VDM uses neither hidden nor block.
        """
        S = ids.shape[1]
        position = torch.arange(S, device=ids.device)
        x = self.embed(ids)                                                    # (B, S, D)
        if self.config.encoding:
            # Eq. 3: what token i sees of hidden states and of tokens
            mask = dual_block_mask(S, block, ids.device)                       # (S, 2S)
            # The soft prompt.  Differs from the paper, which does not state it: h_i stands at
            # position i, and passes the input norm.  One layer needs no queries of a prompt.
            prompt_k, prompt_v = keys_values(
                self.layer, self.rotary, hidden.to(x.dtype), position[None])   # (B, n_kv, S, d)

            def update(k, v):
                return torch.cat((prompt_k, k), 2), torch.cat((prompt_v, v), 2)
        else:
            mask = position[:, None] >= position[None, :]                      # (S, S)
            update = None
        x = run_layer(self.layer, self.rotary, x, position[None], mask, update)
        return self.norm(x)

    def terms(self, batch, block):
        """The terms of train.py's loss, here one -> [(x (B, S, D), labels, no mask of its own)]

        batch: see train.py.  labels: the next token ids (B, S), or for "kl" the target's logits
        (B, S, V).  block: L, which train.py samples from config.blocks for each step.
        Differs from Eq. 4, the loss of one position: a training step takes the mean of all.
        """
        hidden = batch.hidden.get(self.config.hidden)          # the VDM does not use it
        x = self(batch.ids, hidden, block)
        # The last id wraps around, but its position is in no loss mask.
        labels = batch.ids.roll(-1, 1) if self.config.loss == "ce" else batch.logits
        return [(x, labels, None)]

    def loss_of(self, x, labels):
        """The loss, summed over n positions -> ().  x (n, D) and labels (n, ...) as in terms."""
        logits = self.head(x)
        if self.config.loss == "ce":
            return F.cross_entropy(logits.float(), labels, reduction="sum")
        return kl(labels, logits)

# ---------------------------------------------------------------- decoding
# write, place, reserve and has_other_weights stand in glide.py, too: each file is copied alone.
def write(store, slots, end, k, v):
    """Write KV entries k, v (1, n_kv, m, d) at slots (m,) -> all keys, all values before `end`

    store (2, 1, n_kv, capacity, d).
    """
    store.index_copy_(3, slots, torch.stack((k, v)))
    return store[:, :, :, :end]

class Drafter:
    """Drafts with an EDD or a VDM, by the contract of a drafter in verify.py."""

    def __init__(self, model, temperature=1.0):
        """temperature calibrates: of the tokens that have probability p in softmax(logits /
        temperature), a fraction p is the target's greedy choice.
        """
        self.model, self.temperature = model.eval(), temperature
        self.config = model.config
        self.needs = {}
        if self.config.encoding:
            self.needs["hidden"] = (self.config.hidden,)
        attention = model.layer.self_attn
        weight = attention.k_proj.weight.detach()                              # (n_kv d, D)
        self.device = weight.device
        # The KV entries of committed tokens, then those of this round's nodes
        heads = len(weight) // attention.head_dim
        self.store = weight.new_zeros(2, 1, heads, 0, attention.head_dim)
        self.reset(probs=None)

    def reset(self, probs):
        """Begin a sequence.  probs(logits (m, V), temperature) -> probabilities (m, V)"""
        self.probs = probs
        self.t = 0                       # number of committed tokens: all have entries in the store
        self.paths = []                  # paths[i]: the nodes from the root to node i, i included

    @torch.no_grad()
    def begin(self, view, root_id):
        """Begin a round: forget the last round's nodes, and encode newly committed tokens.

        view.tokens (k,) are these, at first the prompt, and view.hidden[config.hidden] (k, D) the
        target's hidden states of them.  root_id is not used, as expand is given the root.
        """
        self.paths = []
        if self.config.encoding:
            x = view.hidden[self.config.hidden].to(self.store)                 # (k, D)
        else:
            x = self.model.embed(view.tokens.to(self.device))                  # (k, D)
        self.encode(x)

    def encode(self, x):
        """Append the KV entries of k committed tokens, of which the layer reads x (k, D)."""
        start = self.t
        self.t += len(x)
        self.reserve(self.t)
        slots = torch.arange(start, self.t, device=self.device)                # (k,)
        k, v = keys_values(self.model.layer, self.model.rotary, x[None], slots[None])
        write(self.store, slots, self.t, k, v)

    @torch.no_grad()
    def expand(self, tokens, parents):
        """One forward over m new nodes -> probabilities (m, V) of the token after each.

        tokens (m,); parents: m ints, the index of each node's parent among all nodes given to
        expand in this round, in order; -1 for the root.
        Differs from training, where a draft has at most L tokens, 5 to 10: trees may be deeper.
        """
        end, position, slots, mask = self.place(parents)
        x = self.model.embed(tokens.to(self.device))                           # (m, D)
        [x] = self.run(end, x, position, slots, mask)                          # (m, D)
        logits = self.model.head(self.model.norm(x))                           # (m, V)
        return self.probs(logits.to(tokens.device), self.temperature)

    def keep(self, path):
        """End the round.  The next begin encodes the accepted nodes again, as committed tokens."""

    def place(self, parents):
        """Add m nodes to the round's -> run's end, position (m,), slots (m,), mask (m, end).

        A node sees all committed tokens and the nodes of its path, itself included.
        """
        for parent in parents:
            above = self.paths[parent] if parent >= 0 else []
            self.paths.append(above + [len(self.paths)])
        m, nodes = len(parents), len(self.paths)
        paths = self.paths[nodes - m:]
        end = self.t + nodes
        self.reserve(end)
        slots = torch.arange(end - m, end, device=self.device)                 # (m,)
        if m == 1 and len(paths[0]) == nodes:
            # The next node of a chain sees all entries, and its position is its slot.
            return end, slots, slots, None
        # visible (m, nodes): which of this round's nodes are on the path of each new one
        visible = torch.zeros(m, nodes, dtype=torch.bool)
        rows = [row for row, path in enumerate(paths) for _ in path]
        columns = [node for path in paths for node in path]
        visible[rows, columns] = True
        visible = visible.to(self.device, non_blocking=True)
        # The root is at position t, and the path of a node at depth n has n + 1 nodes.
        position = self.t + visible.sum(1) - 1                                 # (m,)
        mask = F.pad(visible, (self.t, 0), value=True)                         # (m, end)
        return end, position, slots, mask

    def run(self, end, x, position, slots, mask):
        """The layer over m nodes -> [(m, D)].  runtime/static.py replaces it by CUDA graphs.

        x (m, D), position, slots (m,), mask (m, end); None: all entries before `end` are seen.
        """
        model, update = self.model, partial(write, self.store, slots, end)
        x = run_layer(model.layer, model.rotary, x[None], position[None], mask, update)
        return [x[0]]

    # A tensor that is made in inference mode cannot be written to outside of it.
    @torch.inference_mode(False)
    def reserve(self, entries):
        """Make sure that the store has a capacity of at least `entries` entries."""
        if entries > self.store.shape[-2]:
            # The capacity at least doubles, so there are few copies.
            self.store = F.pad(self.store, (0, 0, 0, max(1024, entries)))

# ---------------------------------------------------------------- from a checkpoint
def has_other_weights(model, probe):
    """Whether `model` lacks the weights that training.json notes: `probe`, one of some matrices."""
    pairs = [(0.0, 0.0)]
    for name, p in model.named_parameters():
        is_readable = type(p) is nn.Parameter and p.dtype.itemsize > 1 and not p.is_meta
        if name in probe and is_readable:
            pairs.append((probe[name], p[len(p) // 3, p.shape[1] // 2].item()))
    noted, own = torch.tensor(pairs).T
    return bool((noted - own).norm() > 0.25 * own.norm())      # by rounding to 4 bits: 0.16

def load(folder, model):
    """Load a checkpoint of train.py for the target `model` -> (Drafter, training.json as a dict).

    The drafter has the target's dtype and device.  Raises ValueError for a drafter of another kind,
    and warns if it was trained for other weights.
    """
    about = json.loads(Path(folder, "training.json").read_text())
    if about["kind"] not in ("edd", "vdm"):
        raise ValueError(f"{folder} holds no drafter of these kinds: edd, vdm")
    if has_other_weights(model, about["target"]["probe"]):
        warnings.warn("the drafter was trained for a model with other weights", stacklevel=2)
    draft_model = EDD(Config(**about["config"]), parts_of(model))
    draft_model.load_state_dict(load_file(Path(folder, "model.safetensors")))
    return Drafter(draft_model, about["validation"].get("temperature", 1.0)), about

def main():
    """Fifteen tokens in blocks of five: training under the mask equals decoding."""
    from transformers import LlamaConfig, LlamaForCausalLM
    torch.manual_seed(0)
    target = LlamaForCausalLM(LlamaConfig(
        vocab_size=20, hidden_size=16, num_hidden_layers=6, num_attention_heads=4))
    model = EDD(Config.for_target(target), parts_of(target))
    for p in model.parameters():
        p.data.normal_(0, 0.3)
    ids = torch.arange(15)
    with torch.no_grad():
        states = target(ids[None], output_hidden_states=True).hidden_states
        hidden = states[-4]                    # entry 3 of 0 ... 6: (1, 15, D)
        trained = model.head(model(ids[None], hidden, 5))[0].softmax(-1)       # (15, V)
    # Ten tokens are committed.  The last block of five is drafted.
    drafter = Drafter(model)
    drafter.reset(probs=lambda logits, temperature: logits.softmax(-1))
    view = SimpleNamespace(tokens=ids[:10], length=10, hidden={3: hidden[0, :10]})
    drafter.begin(view, root_id=10)
    drafted = drafter.expand(ids[10:], [-1, 0, 1, 2, 3])                       # (5, V)
    error = (drafted - trained[10:]).abs().max()
    assert error < 1e-5, error
    print(f"training under the mask = decoding: largest difference {error:.0e}")

# Differences from the paper, all of them: what a token sees and predicts (dual_block_mask); no
# sliding window (run_layer); the VDM's loss (EDD); where hidden states stand (EDD.forward); the
# mean of Eq. 4 (EDD.terms); calibration (Drafter.__init__); deeper trees (Drafter.expand).

if __name__ == "__main__":
    main()
