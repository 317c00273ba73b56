"""EDD: the effective draft decoder, whose soft prompt is what the target has encoded.

Effective Draft Decoder with Pruned Candidate Tree (ACL 2025), section 3.1, Figures 2 and 3(a), appendix B;
its baselines VDM, MEDUSA-1 (arXiv 2401.10774) and EAGLE (arXiv 2401.15077) of appendix A.

The idea.  While verifying, the target has encoded all that is committed: its hidden states H are there for
free.  EDD is one layer of the target's own kind that reads H, unchanged, as a prompt before the embeddings
of what it drafts.  Training imitates drafting with a mask of two blocks: a token sees those of its own block
up to itself and the hidden states of the blocks before.  The loss is KL divergence to the target.

    paper                              shape       name here
    T = (t_1 ... t_n)                  (B, T)      ids
    H = (h_1 ... h_n)                  (B, T, D)   hidden: hidden_states[-4], the fourth-to-last layer's
    L                                  int         block: drawn from 5 ... 10 at each step (config.blocks)
    P_d(t_i | t_<i, H), Eq. 2          (B, T, V)   EDD.forward and its head: T and H go in (teacher forcing)
    P_d(t_i | t_{jL:i}, h_<jL), Eq. 3  (T, 2T)     dual_block_mask, Figure 3(a): hidden states, then tokens
    KL(P_t || P_d), Eq. 4              ()          kl
    f (the baselines')                 (B, T, D)   feature: hidden_states[-1], which is normed

Differences from the paper:
 1. Eq. 3 prints h up to j L, which would give t_{jL+1} away; its prose, the official code and this file use
    those strictly before the block: P(t_{i+1} | t_{jL ... i}, h_{<jL}), j = floor(i / L), all counted from 0.
 2. "The 28th layer" of 32 counts from 0: hidden_states[-4] of Hugging Face, where the last one is normed.
 3. With one layer the soft prompt's keys and values depend on (h_i, i) alone: decoding computes each once.
 4. The VDM ("without encoding result") is a one-layer language model.  Its loss is not stated: both are here.
 5. The layer attends to everything, also where the target's slides a window.
 6. A sum of losses is divided by the rows that are learned from, also where a baseline lacks a window's ends.
 7. EAGLE and MEDUSA-1 are the published architectures (checkpoints/convert.py takes their weights), but draft
    any tree.  EAGLE learns without noise.  MEDUSA's head k predicts t_{i+2+k} from f_i (t_{i+1} is the root).
 8. EAGLE's SmoothL1 is a mean over D, so its gradient on a feature falls as 1 / sqrt(D); that of the cross
    entropy does not.  The published balance, 0.1 CE at D = 4096, is 0.1 sqrt(4096 / D) CE at width D.

Alone in a project: this file, a drafter from train.py, a Llama, Mistral or Qwen2 (others: runtime/parts.py).
Greedy chains of five, without a cache for the target:

    import torch, edd
    from types import SimpleNamespace
    from transformers import AutoModelForCausalLM
    model = AutoModelForCausalLM.from_pretrained("my-target")
    drafter, _ = edd.load("my-edd", model)
    ids, seen, layer = torch.tensor([1, 5, 7]), 0, drafter.config.hidden
    with torch.no_grad():
        states = model(ids[None], output_hidden_states=True).hidden_states[layer][0]
        while len(ids) < 30:
            t = len(ids) - 1                                     # committed: all but the last token, the root
            drafter.begin(SimpleNamespace(tokens=ids[seen:t], length=t, hidden={layer: states[seen:t]}))
            chain, seen = ids[-1:], t
            for i in range(5):
                logits = drafter.expand(chain[-1:], [i - 1])     # node i hangs from node i - 1
                chain = torch.cat((chain, logits.argmax(-1)))
            out = model(torch.cat((ids[:-1], chain))[None], output_hidden_states=True)
            states, choice = out.hidden_states[layer][0], out.logits[0, t:].argmax(-1)
            accepted = (chain[1:] == choice[:-1]).long().cumprod(0).sum().item()
            drafter.keep(list(range(min(accepted + 1, 5))))      # the nodes that stay, root first
            ids = torch.cat((ids, choice[:accepted + 1]))

view.tokens (k,), view.hidden[layer] (k, D): what was committed since the last begin(), prompt included;
view.length: all of it.  A tree: expand(tokens (3,), [0, 0, 1]) gives logits (3, V) of two nodes below node 0
and one below node 1, numbered as given to expand since begin(); confidence(...) their calibrated softmax.

    python edd.py           # the demo: training under the mask and decoding give the same logits
    python train.py edd vdm eagle medusa
"""
import copy
import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn
from transformers.models.llama.modeling_llama import rotate_half

HIDDEN = -4                      # appendix B: "the fourth-to-last layer"
BLOCKS = (5, 10)                 # appendix B: block lengths are drawn from this range, both ends included
HEADS = 5                        # MEDUSA's K
DECAY = 0.8                      # MEDUSA: head k's loss has the weight 0.8^k
W_CLS = 0.1                      # EAGLE: weight of the cross entropy beside SmoothL1 ...
PUBLISHED = 4096                 # ... at this width
# What a name means to train.py: Table 3's ablations of training, appendix A's VDM, Table 1's baselines.
VARIANTS = {
    "edd": {}, "edd-ce": {"loss": "ce"}, "edd-fixed": {"blocks": (5, 5)},
    "vdm": {"encoding": False}, "vdm-ce": {"encoding": False, "loss": "ce"},
    "eagle": {"kind": "eagle", "hidden": -1, "loss": "smooth l1 + ce"},
    "medusa": {"kind": "medusa", "hidden": -1, "loss": "ce"},
}

@dataclass
class Config:
    """vocab, width: the target's.  hidden: index into hidden_states, from 1 (the first layer's output) on."""
    vocab: int
    width: int
    hidden: int
    encoding: bool = True            # False: the vanilla draft model (VDM)
    loss: str = "kl"                 # or "ce"
    blocks: tuple = BLOCKS
    kind: str = "edd"                # or "eagle", "medusa", each with its own loss
    heads: int = HEADS               # MEDUSA's K
    bias: bool = True                # of EAGLE's fc: some of the published ones have none

    @classmethod
    def for_target(cls, model, hidden=HIDDEN, **more):
        """hidden: as Python indexes Hugging Face's hidden_states (N_T + 1 entries, first the embeddings)."""
        c = model.config.get_text_config()
        index = hidden if hidden >= 0 else c.num_hidden_layers + 1 + hidden
        if not 1 <= index <= c.num_hidden_layers:
            raise ValueError(f"hidden_states[{hidden}] of the target is no layer's output: it has layers 1 "
                             f"to {c.num_hidden_layers}; pick one with --hidden")
        return cls(c.vocab_size, c.hidden_size, index, **more)

def dual_block_mask(length, block):
    """Figure 3(a) -> (length, 2 * length) bool: what token i sees of hidden states (left) and tokens."""
    of = torch.arange(length) // block                         # (T,): j of each token
    hidden = of[:, None] > of[None, :]                         # h_{<jL}: hidden states of earlier blocks
    tokens = of[:, None] == of[None, :]                        # t_{jL ... i}: its own block, up to itself
    return torch.cat((hidden, tokens.tril()), 1)

def kl(p_target, logits):
    """D_KL(P_t || P_d) (Eq. 4), summed over rows.  p_target (n, V) sums to 1, logits (n, V) -> ()."""
    log_p_draft = logits.float().log_softmax(-1)
    return F.kl_div(log_p_draft, p_target, reduction="sum")    # sum_x P_t(x) log(P_t(x) / P_d(x))

# ---------------------------------------------------------------- the draft model: what training runs
class DraftModel(nn.Module):
    """What EDD and its baselines share.  runtime/parts.py overrides methods for families unlike Llama."""

    def __init__(self, config, model):
        super().__init__()
        self.config = config
        self.target = SimpleNamespace()                        # no module: its parts are not saved with ours
        self.take(model, model.get_decoder())

    def take(self, model, decoder):
        """The target's embedding and head, which get no gradient, whatever their flags say."""
        target = self.target
        target.embed = torch.no_grad()(model.get_input_embeddings().forward)
        head = model.get_output_embeddings().weight.detach()
        target.head = partial(F.linear, weight=head)
        target.rotary = decoder.rotary_emb
        target.like = decoder.norm.weight.detach()             # where ours lies, and of which type

    def own(self, module):
        """A copy of a part of the target, which learns."""
        return copy.deepcopy(module).requires_grad_(True)

    def fresh_layer(self, model):
        """A layer of the class of the target's last, initialised as the target was."""
        decoder = model.get_decoder()
        layer_class = type(decoder.layers[-1])
        layer = layer_class(decoder.config, layer_idx=len(decoder.layers) - 1)
        layer.apply(model._init_weights)
        return layer.to(self.target.like)

    def rows(self, x, position, mask, cache=None):
        """One pass through the layer.  x (B, m, D), position (1, m), mask (m, keys) or None -> (B, m, D)."""
        turn = self.target.rotary(x, position)
        if mask is not None:
            mask = torch.where(mask, 0.0, float("-inf"))       # added to the scores
            mask = mask.to(x.dtype)[None, None]
        return self.layer(x, attention_mask=mask, position_ids=position, past_key_values=cache,
                          position_embeddings=turn)

    def keys_values(self, x, position):
        """What others see of rows x (B, m, D): keys, values (B, H, m, d), without queries, attention, MLP."""
        attention = self.layer.self_attn
        x = self.layer.input_layernorm(x)
        cos, sin = self.target.rotary(x, position)                                     # (1, m, d)
        heads = (-1, attention.head_dim)
        k = attention.k_proj(x).unflatten(-1, heads).transpose(1, 2)                   # (B, H, m, d)
        v = attention.v_proj(x).unflatten(-1, heads).transpose(1, 2)
        k = k * cos[:, None] + rotate_half(k) * sin[:, None]
        return k, v

    def causal(self, x):
        """All positions at once, each seeing those up to itself.  x (B, T, D) -> (B, T, D)."""
        position = torch.arange(x.shape[1], device=x.device)
        mask = position[:, None] >= position[None, :]
        return self.rows(x, position[None], mask)

def cross_entropy(head, x, meant):
    """Summed over rows x (m, D); meant: ids (m,), or distributions (m, V)."""
    return F.cross_entropy(head(x).float(), meant, reduction="sum")

class SoftPrompt:
    """Keys and values (B, H, T, d) of H, in the place of a cache: they come before the tokens' own."""

    def __init__(self, k, v):
        self.k, self.v = k, v

    def update(self, k, v, *args, **kwargs):
        return torch.cat((self.k, k), 2), torch.cat((self.v, v), 2)

class EDD(DraftModel):
    """EDD or VDM: the target's embedding and head, trained on, around one fresh layer."""

    def __init__(self, config, model):
        super().__init__(config, model)
        self.embed = self.own(model.get_input_embeddings())
        self.head = self.own(model.get_output_embeddings())
        self.layer = self.fresh_layer(model)
        self.norm = self.own(model.get_decoder().norm)
        self.norm.apply(model._init_weights)

    def forward(self, ids, hidden, block):
        """ids (B, T), hidden (B, T, D) of the target, block: L -> (B, T, D), which the head reads."""
        T = ids.shape[1]
        tokens = self.embed(ids)                                                       # (B, T, D)
        if not self.config.encoding:
            return self.norm(self.causal(tokens))
        # P_d(T | H), Eq. 2: of the hidden states tokens see keys and values alone
        position = torch.arange(T, device=ids.device)[None]                            # (1, T)
        soft_prompt = SoftPrompt(*self.keys_values(hidden.to(tokens.dtype), position))
        # Eq. 3: which of them, and which tokens
        mask = dual_block_mask(T, block).to(ids.device)                                # (T, 2T)
        x = self.rows(tokens, position, mask, soft_prompt)
        return self.norm(x)

    def divergence(self, x, target_logits):
        """Eq. 4, summed over rows x (m, D)."""
        p_target = target_logits.float().softmax(-1)                                   # (m, V)
        return kl(p_target, self.head(x))

    def loss(self, batch):
        """batch: ids; hidden {k: (B, T, D)}; the target's logits; block: L, or None: drawn by `random`;
        learn (B, T): which rows count, `count` of them; sum(f, learn, *rows): f of these rows, as a sum.
        """
        low, high = self.config.blocks
        block = batch["block"] or int(batch["random"].integers(low, high + 1))
        hidden = batch["hidden"].get(self.config.hidden)                               # None for the VDM
        x = self(batch["ids"], hidden, block)                                          # (B, T, D)
        loss = self.divergence
        meant = batch["logits"]
        if self.config.loss == "ce":
            loss = partial(cross_entropy, self.head)
            meant = batch["ids"].roll(-1, 1)
        total = batch["sum"](loss, batch["learn"], x, meant)
        return total / batch["count"]

# ---------------------------------------------------------------- decoding
class Rows:
    """Preallocated keys and values of one layer, as a transformers layer asks for its cache."""

    def __init__(self):
        self.rows = 0
        self.kept = {}                                         # 0: keys, 1: values, (1, H, rows, d) each

    def reserve(self, rows):
        if rows > self.rows:
            more = max(1024, 2 * rows) - self.rows             # so that growing costs each row a constant
            for i, kept in self.kept.items():
                self.kept[i] = F.pad(kept, (0, 0, 0, more))
            self.rows += more

    def update(self, k, v, *args, **kwargs):
        """Write rows (1, H, m, d) at self.slots (m,) -> the first self.read rows (views)."""
        for i, new in enumerate((k, v)):
            if i not in self.kept:
                self.kept[i] = F.pad(new[:, :, :0], (0, 0, 0, self.rows))
            self.kept[i].index_copy_(2, self.slots, new)
        return [kept[:, :, :self.read] for kept in self.kept.values()]

class Drafter:
    """Decoding with an EDD or a VDM, step by step."""
    temperature = 1.0                # at which its confidence in the target's greedy choice is calibrated

    def __init__(self, model):
        self.model = model.eval()
        self.config = model.config
        self.device = model.target.like.device
        self.needs = {}
        if self.config.encoding:
            self.needs["hidden"] = (self.config.hidden,)
        self.cache = Rows()
        self.reserve = self.cache.reserve
        self.reset()

    def reset(self):
        """Forget the sequence."""
        self.t = 0                       # committed tokens
        self.pending = []                # their rows (k, D) of the layer's input, not in the cache yet

    @torch.no_grad()
    def begin(self, view):
        """A round starts: the rows of the tokens committed since the last one will join its first step."""
        self.t = view.length
        rows = self.prompt(view)                                                       # (k, D)
        self.lines = []                  # lines[i]: node i's ancestors, root first, and itself
        if 0 < len(rows) == self.t:      # a whole prompt, which may be long: by itself it takes no mask
            slots = torch.arange(self.t, device=rows.device)
            self.reserve(self.t)
            self.run(self.t, rows, slots, slots, None)
        else:
            self.pending.append(rows)

    def prompt(self, view):
        """What the layer reads in the place of the committed tokens, (k, D)."""
        if self.config.encoding:
            hidden = view.hidden[self.config.hidden]
            return hidden.to(self.model.embed.weight)
        return self.model.embed(view.tokens.to(self.device))

    @torch.no_grad()
    def expand(self, tokens, parents):
        """One forward over m new nodes.  tokens (m,), parents [m ints], -1 for the root -> logits (m, V)."""
        x = self.model.embed(tokens.to(self.device))                                   # (m, D)
        rows = self.layer_rows(x, parents)
        rows = self.model.norm(rows)                                                   # (m, D)
        return self.model.head(rows)

    def confidence(self, tokens, parents):
        """As expand -> probabilities (m, V) that each token is the target's greedy choice, calibrated."""
        logits = self.expand(tokens, parents).float()
        return (logits / self.temperature).softmax(-1).nan_to_num(0.0)     # zeros for a row of -inf

    def keep(self, path):
        """Drafted rows are forgotten: what was accepted comes back as hidden states in the next view."""

    def grow(self, parents):
        """New nodes below these -> the line of each: its ancestors, root first, and itself."""
        for parent in parents:
            above = self.lines[parent] if parent >= 0 else []
            self.lines.append(above + [len(self.lines)])
        return self.lines[-len(parents):]

    def layer_rows(self, x, parents):
        """The layer's rows of m new nodes, x (m, D) -> (m, D).  Those of pending tokens come before them."""
        lines = self.grow(parents)
        x = torch.cat((*self.pending, x))                                              # (p + m, D)
        self.pending = []
        n = len(x)
        nodes = len(self.lines)
        p = n - len(lines)
        keys = self.t + nodes
        # A lone row behind a chain sees all; a committed one sees all up to its place, which is its position.
        slots = torch.arange(keys - n, keys, device=x.device)                          # (n,)
        position, mask = slots, None
        if n > 1 or len(lines[0]) < nodes:
            mask = torch.arange(keys, device=x.device) <= slots[:, None]               # (n, keys)
            # A node sees the prefix and its own line, which is as long as it is deep.
            row = [i for i, line in enumerate(lines) for _ in line]
            sees = torch.zeros(len(lines), nodes, dtype=torch.bool)
            sees[row, sum(lines, [])] = True
            sees = sees.to(x.device, non_blocking=True)
            mask[p:, self.t:] = sees
            of_nodes = self.t - 1 + sees.sum(1)
            position = torch.cat((slots[:p], of_nodes))
        self.reserve(keys)
        rows = self.run(keys, x, position, slots, mask)[0]
        return rows[p:]

    def run(self, keys, x, position, slots, mask):
        """x (n, D), written at slots (n,), sees by mask (n, keys), None: up to its own -> [rows (n, D)]."""
        self.cache.slots = slots
        self.cache.read = keys
        rows = self.model.rows(x[None], position[None], mask, self.cache)              # (1, n, D)
        return [rows[0]]

# ---------------------------------------------------------------- the baselines: EAGLE and MEDUSA-1
class Eagle(DraftModel):
    """EAGLE: one layer predicts f_i from t_i and f_{i-1}, or, in drafting, its own prediction of that."""

    def __init__(self, config, model):
        super().__init__(config, model)
        width = config.width
        self.fc = nn.Linear(2 * width, width, config.bias).to(self.target.like)
        self.layer = self.fresh_layer(model)
        self.layer.input_layernorm = nn.Identity()             # the first norm is left out

    def inputs(self, ids, before):
        """ids (..., m), before (..., m, D): the feature of the token before each -> (..., m, D)."""
        x = torch.cat((self.target.embed(ids), before), -1)                            # (..., m, 2 D)
        x = x.to(self.fc.weight.dtype)
        return self.fc(x).to(x.dtype)          # under autocast, too, as precise as the weights

    def forward(self, ids, feature):
        """ids (B, T), feature (B, T, D) of the target -> (B, T - 1, D): f_1 ... of t_1 ..., f_0 ..."""
        return self.causal(self.inputs(ids[:, 1:], feature[:, :-1]))

    def loss(self, batch):
        """As EDD's, but the first row has no prediction: SmoothL1(f^_i, f_i) + w_cls CE(P_t, P_d)."""
        width = self.config.width
        weight = W_CLS * (PUBLISHED / width) ** 0.5

        def both(predicted, feature, target_logits):
            p_target = target_logits.float().softmax(-1)                               # (m, V)
            distance = F.smooth_l1_loss(predicted.float(), feature.float(), reduction="sum")
            return distance / width + weight * cross_entropy(self.target.head, predicted, p_target)
        feature = batch["hidden"][self.config.hidden]                                  # (B, T, D)
        predicted = F.pad(self(batch["ids"], feature), (0, 0, 1, 0))
        learn = F.pad(batch["learn"][:, 1:], (1, 0))                                   # (B, T)
        total = batch["sum"](both, learn, predicted, feature, batch["logits"])
        return total / batch["count"]

class EagleDrafter(Drafter):
    """Decoding with EAGLE: committed tokens' rows are made of true features, drafted ones' of predicted."""
    seen = 0                         # tokens whose features have been shown

    def prompt(self, view):
        new = view.hidden[self.config.hidden].to(self.device)                          # (k, D)
        start = view.length - len(new)
        assert start in (0, self.seen), f"EAGLE remembers one feature, and cannot go on from token {start}"
        self.seen = view.length
        # Each token goes with the feature before it: the first of all has none, and so no row.
        self.t -= 1
        tokens = view.tokens.to(self.device)
        if start:
            new = torch.cat((self.features[:1], new))
        else:
            tokens = tokens[1:]
        self.features = new[-1:]               # (1 + nodes, D): of the last committed token, then each node's
        return self.model.inputs(tokens, new[:-1])

    @torch.no_grad()
    def expand(self, tokens, parents):
        """A node needs its parent's prediction: one whose parent comes in this call takes another forward."""
        known = [parent < len(self.lines) for parent in parents]
        if not all(known):
            first = known.index(False)
            before = self.expand(tokens[:first], parents[:first])
            after = self.expand(tokens[first:], parents[first:])
            return torch.cat((before, after))
        feature = self.features[[parent + 1 for parent in parents]]
        x = self.model.inputs(tokens.to(self.device), feature)                         # (m, D)
        rows = self.layer_rows(x, parents)
        self.features = torch.cat((self.features, rows))
        return self.model.target.head(rows)

class Medusa(DraftModel):
    """MEDUSA-1: K heads on the feature of one token.  Each starts as the target's own (W_k, b_k = 0)."""

    def __init__(self, config, model):
        super().__init__(config, model)
        width = config.width
        self.heads, self.w = nn.ModuleList(), nn.ModuleList()
        for _ in range(config.heads):
            w = nn.Linear(width, width).to(self.target.like)
            nn.init.zeros_(w.weight)
            nn.init.zeros_(w.bias)
            self.w.append(w)
            self.heads.append(self.own(model.get_output_embeddings()))

    def forward(self, f):
        """f (..., D) -> f + SiLU(W_k f + b_k), which head k reads, of each k."""
        f = f.to(self.w[0].weight)
        return [f + F.silu(w(f)) for w in self.w]

    def loss(self, batch):
        """As EDD's: sum_k 0.8^k CE(head_k(f_i), t_{i+2+k})."""
        loss = 0
        rows = self(batch["hidden"][self.config.hidden])
        for k, (head, x) in enumerate(zip(self.heads, rows)):
            # t_{i+2+k} counts for row i if it does for the row before its own
            learn = F.pad(batch["learn"], (0, 1 + k))[:, 1 + k:]                       # (B, T)
            following = batch["ids"].roll(-2 - k, 1)
            of_head = partial(cross_entropy, head)
            loss += DECAY ** k * batch["sum"](of_head, learn, x, following)
        return loss / batch["count"]

class MedusaDrafter(Drafter):
    """Decoding with MEDUSA-1: all heads run once a round, on the last committed token's feature."""

    @torch.no_grad()
    def begin(self, view):
        self.lines = []
        last = view.hidden[self.config.hidden][-1]                                     # (D,)
        rows = [head(x) for head, x in zip(self.model.heads, self.model(last))]
        rows.append(torch.full_like(rows[0], float("-inf")))           # beyond the last head: no way on
        self.table = torch.stack(rows)                                                 # (K + 1, V)

    def expand(self, tokens, parents):
        last = self.config.heads
        heads = [min(len(line) - 1, last) for line in self.grow(parents)]    # head d: after a node at depth d
        return self.table[heads]

# What a checkpoint's kind means: the draft model, and what decodes with it.
KINDS = {"edd": (EDD, Drafter), "eagle": (Eagle, EagleDrafter), "medusa": (Medusa, MedusaDrafter)}

def load(folder, model, length=None, kinds=KINDS):
    """Read a checkpoint of train.py for the target `model` -> (Drafter in its dtype, training.json)."""
    from safetensors.torch import load_file
    about = json.loads(Path(folder, "training.json").read_text())
    config = Config(**about["config"])
    c = model.config.get_text_config()
    was = config.vocab, config.width
    now = c.vocab_size, c.hidden_size
    if was != now or config.hidden > c.num_hidden_layers:
        raise ValueError(f"the drafter in {folder} was made for another target (vocabulary and width {was}, "
                         f"against {now}): train one for this target with train.py --target")
    draft_class, drafter_class = kinds[config.kind]
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
    trained = model.head(model(ids[None], hidden, 5))[0].detach()                      # (15, V)
    drafter = Drafter(model)
    view = SimpleNamespace(tokens=ids[:10], length=10, hidden={3: hidden[0, :10]})
    drafter.begin(view)                                        # ten tokens are committed, five are drafted
    drafted = drafter.expand(ids[10:], [-1, 0, 1, 2, 3])
    error = (drafted - trained[10:]).abs().max()
    assert error < 1e-6, error
    print(f"training under the mask = decoding: largest difference {error:.0e}")

if __name__ == "__main__":
    main()
