"""EDD: the effective draft decoder, whose soft prompt is what the target has encoded.

Effective Draft Decoder with Pruned Candidate Tree (ACL 2025), section 3.1, Figures 2 and 3(a), appendix B;
its baselines VDM, MEDUSA-1 (arXiv 2401.10774) and EAGLE (arXiv 2401.15077) of appendix A.

The idea.  While verifying, the target has encoded all that is committed: its hidden states H are there for
free.  EDD is one layer of the target's own kind that reads H, unchanged, as a prompt before the embeddings
of what it drafts.  Training imitates drafting with a mask of two blocks: a token sees those of its own block
up to itself and the hidden states of the blocks before.  The loss is KL divergence to the target.

    paper                  shape        name here
    T = (t_1 ... t_n)      (B, T)       ids
    H = (h_1 ... h_n)      (B, T, D)    hidden: hidden_states[-4], the fourth-to-last layer's (config.hidden)
    L                      int          block: drawn from 5 ... 10 at each step of training (config.blocks)
    mask of Figure 3(a)    (T, 2T)      dual_block_mask(T, L): hidden states first, tokens after them
    P_t, P_d               (B, T, V)    softmax of batch["logits"], of logits
    f (the baselines')     (B, T, D)    feature: the last layer's hidden states after the final norm

The equations, in the paper's order, are where the code is:
    Eq. 1  P(T) = prod_i P(t_i | t_<i)                     the target itself: verify.Target.forward
    Eq. 2  P_d(T|H) = prod_i P_d(t_i | t_<i, H)            EDD.forward: T and H both go in (teacher forcing)
    Eq. 3  ... = prod_i P_d(t_i | t_{jL:i}, h_{<jL})       dual_block_mask
    Eq. 4  KL(P_t || P_d)                                  kl

Differences from the paper:
 1. Eq. 3 prints h up to j L, which would give t_{jL+1} away; its prose, the official code and this file use
    those strictly before the block: P(t_{i+1} | t_{jL ... i}, h_{<jL}), j = floor(i / L), all counted from 0.
 2. "The 28th layer" of 32 counts from 0: hidden_states[-4] of Hugging Face (here no layer's are normed).
 3. With one layer the soft prompt's keys and values depend on (h_i, i) alone: decoding computes each once.
 4. The VDM ("without encoding result") is a one-layer language model.  Its loss is not stated: both are here.
 5. The layer attends to everything, also where the target's slides a window.  Scales and caps are as there.
 6. A sum of losses is divided by the rows that are learned from, also where a baseline lacks a window's ends.
 7. EAGLE and MEDUSA-1 are the published architectures (checkpoints/convert.py takes their weights), but draft
    any tree.  EAGLE learns without noise.  MEDUSA's head k predicts t_{i+2+k} from f_i (t_{i+1} is the root).

    python edd.py           # the demo: training under the mask and decoding give the same logits
    python train.py edd vdm eagle medusa
"""
import copy
import json
from dataclasses import dataclass
from functools import partial
from inspect import signature
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

HIDDEN = -4                      # appendix B: "the fourth-to-last layer"
BLOCKS = (5, 10)                 # appendix B: block lengths are drawn from this range, both ends included
HEADS, DECAY = 5, 0.8            # MEDUSA: heads, and the weight 0.8^k of head k's loss
W_CLS = 0.1                      # EAGLE: weight of the cross entropy beside SmoothL1
# What a name means to train.py: Table 3's ablations of training, appendix A's VDM, Table 1's baselines.
VARIANTS = {
    "edd": {}, "edd-ce": {"loss": "ce"}, "edd-fixed": {"blocks": (5, 5)},
    "vdm": {"encoding": False}, "vdm-ce": {"encoding": False, "loss": "ce"},
    "eagle": {"kind": "eagle", "loss": "smooth l1 + ce"}, "medusa": {"kind": "medusa", "loss": "ce"},
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
        if more.get("kind", "edd") != "edd":
            hidden = -1                                        # the baselines read the last layer
        index = hidden if hidden >= 0 else c.num_hidden_layers + 1 + hidden
        if not 1 <= index <= c.num_hidden_layers:
            raise ValueError(f"hidden_states[{hidden}] of the target is no layer's output: it has layers 1 "
                             f"to {c.num_hidden_layers}; pick one with --hidden")
        return cls(c.vocab_size, c.hidden_size, index, **more)

def dual_block_mask(length, block):
    """Figure 3(a) -> (length, 2 * length) bool: what token i sees of hidden states (left) and tokens."""
    place = torch.arange(length)
    of = place // block                                        # (T,): j of each token
    # h_{<jL}: hidden states of earlier blocks
    hidden = of[:, None] > of[None, :]
    # t_{jL ... i}: tokens of its own block, up to itself
    same_block = of[:, None] == of[None, :]
    not_later = place[:, None] >= place[None, :]
    return torch.cat((hidden, same_block & not_later), 1)

def kl(p_target, logits):
    """D_KL(P_t || P_d) (Eq. 4), summed over rows.  p_target (n, V) sums to 1, logits (n, V) -> ()."""
    log_p_draft = logits.float().log_softmax(-1)                                       # (n, V)
    # sum_x P_t(x) log(P_t(x) / P_d(x))
    return F.kl_div(log_p_draft, p_target, reduction="sum")

# ---------------------------------------------------------------- draft models: what training runs
def factor(ours, targets, what):
    """The number c of targets = c ours, up to rounding; ValueError where there is none."""
    share = targets.cpu().double() / ours.cpu().double()       # (Apple's GPUs know no double)
    c = share.nanmedian()
    off = (share / c - 1).abs().nanmedian()        # in half precision a token may go to another expert
    if not off < torch.finfo(ours.dtype).eps ** 0.5:
        raise ValueError(f"its {what} are made otherwise")
    return c.item()

class Part:
    """A part of the target, called with what may be of another type than `like`, or lie elsewhere."""
    def __init__(self, module, like):
        self.module, self.like = module, like

    def __call__(self, x):
        return self.module(x.to(self.like)).to(x.device)

def own_copy(module):
    """A copy without what accelerate hangs on a module to bring inputs, and weights that are not there."""
    hook = getattr(module, "_hf_hook", None)
    twin = copy.deepcopy(module, {id(hook): hook})
    vars(twin).pop("forward", None)
    return twin.to_empty(device="cpu") if any(p.is_meta for p in twin.parameters()) else twin

class DraftModel(nn.Module):
    """What EDD and its baselines share: the target's parts, and one fresh layer of its class."""
    def __init__(self, config, model):
        super().__init__()
        self.config = config
        model.requires_grad_(False)                            # the target is frozen from here on
        try:
            self.study(model, model.get_decoder())
        except (AttributeError, LookupError, TypeError, ValueError) as why:
            raise ValueError("EDD takes a layer of a decoder with layers, norm, rotary_emb, used as Llama's; "
                             f"{type(model).__name__} is built otherwise ({why})") from None

    @torch.no_grad()
    def study(self, model, decoder):
        """Take the target's parts; run it once for its scales, and to prove that it uses them as we do."""
        self.rotary, self.rotary_kind = own_copy(decoder.rotary_emb), {}
        if "layer_type" in signature(self.rotary.forward).parameters:
            self.rotary_kind = {"layer_type": decoder.config.layer_types[-1]}
        # hidden_states: what each layer and the norm read
        states, hooks = [], []
        for part in (*decoder.layers, decoder.norm):
            hooks.append(part.register_forward_pre_hook(lambda part, args: states.append(args[0])))
        # (Weights on "meta" are brought by accelerate, and so are the ids.)
        ids = torch.arange(4, device="cpu" if model.device.type == "meta" else model.device)[None]
        logits = model(ids, use_cache=False).logits
        for hook in hooks:
            hook.remove()
        states = states[-len(hooks):]                          # (some norm the embeddings, too)
        # Ours lies where the states lie that it reads, and is of their type: weights may be quantised.
        self.like = states[self.config.hidden]
        # In a namespace the target's parts are not saved with ours.
        target = self.target = SimpleNamespace()
        target.embed = Part(model.get_input_embeddings(), ids)
        target.norm = Part(decoder.norm, states[-1])
        target.head = Part(model.get_output_embeddings(), target.norm(states[-1]))
        # x = scale embed(t)
        self.embed_scale = factor(target.embed(ids), states[0], "embeddings")
        # logits = cap tanh(scale head(norm(h)) / cap)
        self.cap = getattr(decoder.config, "final_logit_softcapping", None)
        if self.cap:
            logits = self.cap * torch.atanh(logits / self.cap)
        self.logit_scale = factor(target.head(target.head.like), logits, "logits")
        # The last layer, run as ours will be
        self.layer = decoder.layers[-1]
        factor(self.causal(states[-2]), states[-1], "last layer")
        del self.layer
        self.rotary.to(self.like.device)

    def logits(self, head, feature):
        """What `head` says of features (..., D), scaled and capped as the target's own are -> (..., V)."""
        logits = head(feature * self.logit_scale)
        if self.cap:
            logits = self.cap * torch.tanh(logits / self.cap)
        return logits

    def predict(self, batch):
        """batch: train.frozen_forward's -> logits (B, T, V): row i for token i + 1."""
        head, x = self.read(batch)
        return self.logits(head, x)

    def cross_entropy(self, head, x, meant):
        """Summed over rows x (m, D); meant: ids (m,), or distributions (m, V)."""
        return F.cross_entropy(self.logits(head, x).float(), meant, reduction="sum")

    def own_head(self):
        """A head that learns, and starts as the target's: what that says of unit vectors, less its bias."""
        units = torch.eye(self.config.width + 1, self.config.width).to(self.like)      # (D + 1, D)
        said = self.target.head(units).to(self.like)                                   # (D + 1, V)
        head = nn.Linear(*said[1:].shape, device="meta")
        head.weight = nn.Parameter((said[:-1] - said[-1]).T.contiguous())
        has_bias = getattr(self.target.head.module, "bias", None) is not None
        head.bias = nn.Parameter(said[-1]) if has_bias else None
        return head

    def add_layer(self, model):
        """One fresh layer, of the class of the target's last, initialised as the target was."""
        decoder = model.get_decoder()
        index = len(decoder.layers) - 1
        layer = type(decoder.layers[index])(decoder.config, layer_idx=index)
        self.layer = layer.apply(model._init_weights).to(self.like.device, self.like.dtype)

    def rows(self, x, position, mask, cache=None):
        """One pass through the layer.  x (B, m, D), position (1, m), mask (m, keys) or None -> (B, m, D)."""
        turn = self.rotary(x, position, **self.rotary_kind)
        if mask is not None:
            # Added to the scores, as every kind of attention takes it: 0 where a row may look, else -inf
            mask = torch.where(mask, 0.0, float("-inf")).to(x.dtype)[None, None]
        return self.layer(x, attention_mask=mask, position_ids=position, past_key_values=cache,
                          position_embeddings=turn)

    def causal(self, x):
        """All positions at once, each seeing those up to itself.  x (B, T, D) -> (B, T, D)."""
        place = torch.arange(x.shape[1], device=x.device)
        mask = place[:, None] >= place[None, :]
        return self.rows(x, place[None], mask)

class EDD(DraftModel):
    """EDD or VDM: the target's embedding and head, trained on, around one layer."""
    def __init__(self, config, model):
        super().__init__(config, model)
        # Embedding (times its scale) and head start as the target's; the layer and its norm are fresh.
        ids = torch.arange(config.vocab, device=self.like.device)
        table = self.target.embed(ids) * self.embed_scale                              # (V, D)
        self.embed = nn.Embedding.from_pretrained(table.to(self.like), freeze=False)
        self.head = self.own_head()
        self.add_layer(model)
        self.norm = own_copy(self.target.norm.module).apply(model._init_weights)
        self.norm.to(self.like.device, self.like.dtype)
        self.requires_grad_(True)

    def encode(self, ids, hidden, block):
        """ids (B, T), hidden (B, T, D) of the target, block: L -> (B, T, D), which the head reads."""
        T, device = ids.shape[1], ids.device
        tokens = self.embed(ids)                                                       # (B, T, D)
        if not self.config.encoding:
            return self.norm(self.causal(tokens))
        # P_d(T | H), Eq. 2: both go in, hidden states first, each at its own position
        x = torch.cat((hidden.to(tokens.dtype), tokens), 1)                            # (B, 2T, D)
        place = torch.arange(T, device=device)[None].repeat(1, 2)
        # Eq. 3: what a token sees.  Hidden states are keys only; that each sees itself makes no difference.
        mask = torch.eye(2 * T, dtype=torch.bool)
        mask[T:] = dual_block_mask(T, block)
        x = self.rows(x, place, mask.to(device))                                       # (B, 2T, D)
        return self.norm(x[:, T:])

    def forward(self, ids, hidden, block):
        """As encode -> logits (B, T, V): row i for token i + 1."""
        return self.logits(self.head, self.encode(ids, hidden, block))

    def read(self, batch):
        """-> head, (B, T, D) which it reads.  batch has block: L, or None: drawn by "random"."""
        low, high = self.config.blocks
        block = batch["block"] or int(batch["random"].integers(low, high + 1))
        # The VDM reads no hidden states.
        return self.head, self.encode(batch["ids"], batch["hidden"].get(self.config.hidden), block)

    def loss(self, batch):
        """KL, or the cross entropy of the next token: the mean over the rows that learn (B, T) chooses."""
        def divergence(x, target_logits):
            return kl(target_logits.float().softmax(-1), self.logits(self.head, x))
        loss, meant = divergence, batch["logits"]
        if self.config.loss == "ce":
            loss, meant = partial(self.cross_entropy, self.head), batch["ids"].roll(-1, 1)
        return batch["sum"](loss, batch["learn"], self.read(batch)[1], meant) / batch["count"]

class Eagle(DraftModel):
    """EAGLE: one layer predicts f_i from t_i and f_{i-1}, or, in drafting, its own prediction of that."""
    def __init__(self, config, model):
        super().__init__(config, model)
        width = config.width
        self.fc = nn.Linear(2 * width, width, config.bias).to(self.like.device, self.like.dtype)
        self.add_layer(model)
        self.layer.input_layernorm = nn.Identity()             # the first norm is left out

    def inputs(self, ids, before):
        """ids (..., m), before (..., m, D): the feature of the token before each -> (..., m, D)."""
        tokens = self.target.embed(ids) * self.embed_scale
        x = torch.cat((tokens, before), -1).to(self.fc.weight.dtype)                   # (..., m, 2 D)
        return self.fc(x).to(x.dtype)              # the residual stream stays as precise as the weights

    def forward(self, ids, feature):
        """ids (B, T), feature (B, T, D) of the target -> (B, T - 1, D): f_1 ... of t_1 ..., f_0 ..."""
        return self.causal(self.inputs(ids[:, 1:], feature[:, :-1]))

    def read(self, batch):
        """-> head, f^ (B, T, D): of the first token there is none, but zeros."""
        feature = self.target.norm(batch["hidden"][self.config.hidden])
        return self.target.head, F.pad(self(batch["ids"], feature), (0, 0, 1, 0))

    def loss(self, batch):
        """As EDD's, but for the first row.  SmoothL1(f^_i, f_i) + w_cls CE(P_t, softmax(head(f^_i)))"""
        def both(predicted_feature, hidden, target_logits):
            feature = self.target.norm(hidden)
            difference = F.smooth_l1_loss(predicted_feature.float(), feature.float(), reduction="none")
            p_target = target_logits.float().softmax(-1)                               # (m, V)
            classification = self.cross_entropy(self.target.head, predicted_feature, p_target)
            return difference.mean(-1).sum() + W_CLS * classification
        learn = F.pad(batch["learn"][:, 1:], (1, 0))           # (B, T): the first has no prediction
        hidden = batch["hidden"][self.config.hidden]
        return batch["sum"](both, learn, self.read(batch)[1], hidden, batch["logits"]) / batch["count"]

class Medusa(DraftModel):
    """MEDUSA-1: K heads on the feature of one token.  Each starts as the target's own (W_k, b_k = 0)."""
    def __init__(self, config, model):
        super().__init__(config, model)
        head, w = self.own_head(), nn.Linear(config.width, config.width)
        w.to(self.like.device, self.like.dtype)
        for p in w.parameters():
            nn.init.zeros_(p)
        self.heads = nn.ModuleList(copy.deepcopy(head) for _ in range(config.heads))
        self.w = nn.ModuleList(copy.deepcopy(w) for _ in range(config.heads))

    def changed(self, hidden):
        """hidden (..., D) of the last layer -> f + SiLU(W_k f + b_k) of each head, (..., D)."""
        f = self.target.norm(hidden).to(self.w[0].weight.dtype)                        # (..., D)
        return [f + F.silu(w(f)) for w in self.w]

    def forward(self, hidden):
        """hidden (..., D) of the last layer -> a list of K logits (..., V)."""
        return [self.logits(head, x) for head, x in zip(self.heads, self.changed(hidden))]

    def read(self, batch):
        """Head 0, shifted so that row i predicts t_{i+1}, from f_{i-1}."""
        return self.heads[0], self.changed(batch["hidden"][self.config.hidden])[0].roll(1, 1)

    def loss(self, batch):
        """As EDD's.  sum_k 0.8^k CE(head_k(f_i), t_{i+2+k})"""
        loss = 0
        for k, x in enumerate(self.changed(batch["hidden"][self.config.hidden])):
            # t_{i+2+k} counts for row i if it does for the row before its own
            learn = F.pad(batch["learn"], (0, 1 + k))[:, 1 + k:]                       # (B, T)
            following = batch["ids"].roll(-2 - k, 1)
            of_head = partial(self.cross_entropy, self.heads[k])
            loss += DECAY ** k * batch["sum"](of_head, learn, x, following)
        return loss / batch["count"]

# ---------------------------------------------------------------- drafters: decoding with them
class Rows:
    """Preallocated keys and values of one layer, as a transformers layer asks for its cache."""
    def __init__(self):
        self.length, self.rows, self.kept = 0, 0, {}           # kept: 0: keys, 1: values
        self.slots, self.read = None, None                     # of a padded forward, as verify.TreeCache's

    def reserve(self, rows):
        """Have room for so many rows -> how many there are.  What is there stays."""
        if rows > self.rows:
            more = max(1024, 2 * rows) - self.rows
            self.kept = {i: F.pad(kept, (0, 0, 0, more)) for i, kept in self.kept.items()}
            self.rows += more
        return self.rows

    def update(self, k, v, *args, **kwargs):
        """Write rows (1, H, m, d) behind the first `length`, which the caller sets -> all rows (views)."""
        end = self.read or self.length + k.shape[2]
        self.reserve(end)
        for i, new in enumerate((k, v)):
            if i not in self.kept:
                self.kept[i] = new.new_zeros(*new.shape[:2], self.rows, new.shape[3])
            if self.read:
                self.kept[i].index_copy_(2, self.slots, new)
            else:
                self.kept[i][:, :, self.length:end] = new
        return [rows[:, :, :end] for rows in self.kept.values()]

def direct(run, reserve, keys, numbers, *tensors):
    """Run a forward: have room for so many keys, then run(keys, numbers, *tensors)."""
    reserve(keys)
    return run(keys, numbers, *tensors)

class Drafter:
    """Decoding with an EDD or a VDM, step by step.  Its contract is verify.py's."""
    temperature = 1.0                # at which its confidence in the target's greedy choice is calibrated
    def __init__(self, model):
        self.model, self.config, self.device = model.eval(), model.config, model.like.device
        self.call = direct               # on CUDA verify.py puts its Static in this place
        self.needs = {"hidden": (model.config.hidden,)} if model.config.encoding else {}
        self.cache = Rows()
        self.reset()

    def reset(self):
        """Forget the sequence."""
        self.t, self.pending = 0, []     # pending: rows (k, D) of the layer's input, not in the cache yet

    def begin(self, view):
        """A round starts: the rows of the tokens committed since the last one will join its first step."""
        self.t = view.length
        self.pending.append(self.prompt(view))
        self.lines = []                  # of each node of the round: the nodes from the root down to it

    def prompt(self, view):
        """What the layer reads in the place of the committed tokens, (k, D)."""
        if self.config.encoding:
            return view.hidden[self.config.hidden].to(self.model.embed.weight.dtype)
        return self.model.embed(view.tokens)

    def expand(self, tokens, parents):
        """One forward over m new nodes.  tokens (m,), parents [m ints], -1 for the root -> logits (m, V)."""
        x = self.model.embed(tokens)                                                   # (m, D)
        rows = self.model.norm(self.layer_rows(x, parents))                            # (m, D)
        return self.model.logits(self.model.head, rows)

    def keep(self, path):
        """Drafted rows are forgotten: what was accepted comes back as hidden states in the next view."""

    def layer_rows(self, x, parents):
        """The layer's rows of m new nodes, x (m, D) -> (m, D).  Those of pending tokens come before them."""
        before, m = len(self.lines), len(parents)
        for parent in parents:
            above = self.lines[parent] if parent >= 0 else []
            self.lines.append(above + [len(self.lines)])
        x = torch.cat((*self.pending, x))                                              # (p + m, D)
        n, p, self.pending = len(x), len(x) - m, []
        inputs, start = [x], self.t + before - p
        if len(self.lines[-1]) < before + m:
            # In a tree a node sees of the nodes its own line, which is as long as it is deep
            sees = torch.zeros(n, before + m, dtype=torch.bool)
            for i, line in enumerate(self.lines[before:]):
                sees[p + i, line] = True
            inputs.append(sees.to(x.device, non_blocking=True))
        self.cache.length = start
        call = self.call if self.cache.kept else direct        # the first of all says what rows look like
        return call(self.run, self.cache.reserve, start + n, [self.t, start, p], *inputs)[0][p:]

    def run(self, keys, numbers, x, sees=None):
        """x (n, D): p pending rows, then nodes, in the cache from slot `start` on -> [rows (n, D)]

        sees (n, nodes): of a tree.  numbers: t, start, p; ints, or tensors () where shapes are padded.
        """
        n, (t, start, p) = len(x), numbers
        static = torch.is_tensor(t)
        number = torch.arange(n, device=x.device)
        key = torch.arange(keys, device=x.device)
        slots = start + number
        # In a chain a row's place in the cache is its position, and it sees all up to it
        position, mask = slots, None     # a lone row sees all that is there, and a node behind a whole prompt
        if static or sees is not None or n > p + 1 or 0 < start < keys - 1:
            mask = key <= slots[:, None]                                               # (n, keys)
        if sees is not None:
            columns = t + torch.arange(sees.shape[1], device=x.device)
            line = (key < t).repeat(n, 1).index_copy(1, columns, sees)
            mask = torch.where((number >= p)[:, None], line, mask)
            position = torch.where(number >= p, t + sees.sum(1) - 1, slots)
        if static:
            self.cache.slots, self.cache.read = slots, keys
        rows = self.model.rows(x[None], position[None], mask, self.cache)              # (1, n, D)
        self.cache.read = None
        return [rows[0]]

class EagleDrafter(Drafter):
    """Decoding with EAGLE: committed tokens' rows are made of true features, drafted ones' of predicted."""
    seen = 0                         # tokens whose features have been shown
    def prompt(self, view):
        new = self.model.target.norm(view.hidden[self.config.hidden])                  # (k, D)
        start = view.length - len(new)
        assert start in (0, self.seen), f"EAGLE remembers one feature, and cannot go on from token {start}"
        self.seen = view.length
        # Each token goes with the feature before it: the first of all has none, and so no row.
        self.t -= 1
        tokens = view.tokens[1:]
        if start:
            tokens, new = view.tokens, torch.cat((self.features[:1], new))
        self.features = new[-1:]               # (1 + nodes, D): of the last committed token, then each node's
        return self.model.inputs(tokens, new[:-1])

    def expand(self, tokens, parents):
        """A node needs its parent's prediction: one whose parent comes in this call takes another forward."""
        logits, done = [], 0
        while done < len(parents):
            known, end = len(self.lines), done
            while end < len(parents) and parents[end] < known:
                end += 1
            feature = self.features[[parent + 1 for parent in parents[done:end]]]
            x = self.model.inputs(tokens[done:end], feature)                           # (nodes, D)
            rows = self.layer_rows(x, parents[done:end])
            self.features = torch.cat((self.features, rows))
            logits.append(self.model.logits(self.model.target.head, rows))
            done = end
        return torch.cat(logits)

class MedusaDrafter(Drafter):
    """Decoding with MEDUSA-1: all heads run once a round, on the last committed token's feature."""
    def begin(self, view):
        last = view.hidden[self.config.hidden][-1]                                     # (D,)
        rows = torch.stack(self.model(last))                                           # (K, V)
        # Beyond the last head it cannot go on: a row of -inf.
        self.table = F.pad(rows, (0, 0, 0, 1), value=float("-inf"))
        self.depths = []

    def expand(self, tokens, parents):
        for parent in parents:
            self.depths.append(self.depths[parent] + 1 if parent >= 0 else 0)
        new = self.depths[-len(parents):]                      # head d: what comes after a node at depth d
        rows = [min(depth, self.config.heads) for depth in new]
        return self.table[rows]

# What a checkpoint's kind means: the draft model, and what decodes with it.
KINDS = {"edd": (EDD, Drafter), "eagle": (Eagle, EagleDrafter), "medusa": (Medusa, MedusaDrafter)}

def load(folder, model, length=None):
    """Read a checkpoint of train.py for the target `model` -> (Drafter in its dtype, training.json)."""
    from safetensors.torch import load_file
    folder, c = Path(folder), model.config.get_text_config()
    for name in ("training.json", "model.safetensors"):
        if not (folder / name).is_file():
            raise ValueError(f"no drafter in {folder}: {name} is missing; train one with train.py or name "
                             "its folder with --checkpoint")
    try:
        about = json.loads((folder / "training.json").read_text())
        config = Config(**about["config"])
        config.blocks = tuple(config.blocks)
        draft_class, drafter_class = KINDS[config.kind]
        was, now = (config.vocab, config.width), (c.vocab_size, c.hidden_size)
        if was != now or config.hidden > c.num_hidden_layers:
            raise ValueError(f"the drafter in {folder} was made for another target (vocabulary and width "
                             f"{was}, against {now}): train one for this target with train.py --target")
        draft_model = draft_class(config, model)
        draft_model.load_state_dict(load_file(folder / "model.safetensors"))
    except Exception as why:
        if type(why) is ValueError:                            # another target
            raise
        reason = f"{type(why).__name__}: {str(why).splitlines()[-1].strip()[:100]}"
        raise ValueError(f"the drafter in {folder} is damaged ({reason}); train or copy it again") from None
    drafter = drafter_class(draft_model)
    drafter.temperature = about.get("validation", {}).get("temperature", 1.0)
    return drafter, about

def main():
    """On fifteen tokens in blocks of five: training under the mask equals decoding."""
    from transformers import LlamaConfig, LlamaForCausalLM
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=20, hidden_size=16, intermediate_size=32, num_hidden_layers=6,
                         num_attention_heads=4)
    target = LlamaForCausalLM(config).double().eval()
    ids = torch.randint(20, (1, 15))
    model = EDD(Config.for_target(target), target)
    drafter, worst = Drafter(model), 0
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(0, 0.3)
        hidden = target(ids, output_hidden_states=True).hidden_states[-4]
        trained = model(ids, hidden, 5)[0]                                             # (15, V)
        for t in (5, 10):
            new = slice(t - 5, t)
            view = SimpleNamespace(tokens=ids[0, new], length=t, hidden={3: hidden[0, new]})
            drafter.begin(view)
            drafted = drafter.expand(ids[0, t:t + 5], [-1, 0, 1, 2, 3])
            worst = max(worst, (drafted - trained[t:t + 5]).abs().max())
    assert worst < 1e-6, f"decoding differs from training by {worst}"
    print(f"training under the mask = decoding: largest difference {worst:.0e}")

if __name__ == "__main__":
    main()
