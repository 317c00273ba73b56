"""EDD: the effective draft decoder, which takes the target for an encoder and its hidden states for a soft prompt.

Effective Draft Decoder with Pruned Candidate Tree (ACL 2025), section 3.1, Figures 2 and 3(a), appendix B; its baselines VDM,
MEDUSA-1 (arXiv 2401.10774) and EAGLE (arXiv 2401.15077) of appendix A.

The idea.  While verifying, the target has encoded all that is committed: its hidden states H are there for free.  EDD is
one layer of the target's own architecture that reads H, unchanged, as a prompt in front of the embeddings of the tokens it
drafts.  Training imitates drafting with a mask of two blocks: a token sees the tokens of its own block up to itself and the
hidden states of the blocks before.  The loss is KL divergence to the target, whose probabilities the same forward gives.

    paper                shape        name here
    T = (t_1 ... t_n)    (B, T)       ids
    H = (h_1 ... h_n)    (B, T, D)    hidden: of the target's fourth-to-last layer, hidden_states[-4] (config.hidden)
    L                    int          block: length of a block, drawn from 5 ... 10 at each step of training (config.blocks)
    mask of Figure 3a    (T, 2T)      dual_block_mask(T, L): hidden states first, tokens after them
    P_t, P_d             (B, T, V)    softmax of batch["logits"], of logits
    f (the baselines')   (B, T, D)    feature: the last layer's hidden states after the final norm, what the LM head reads

Differences from the paper:
 1. Eq. 3 prints h up to j L; its prose and the official code use the hidden states strictly before the block, and so does
    this file: P(t_{i+1} | t_{jL ... i}, h_{< jL}) with j = floor(i / L), all counted from 0.  h_{jL} would give t_{jL+1} away.
 2. "The 28th layer" of 32 counts from 0: Hugging Face's hidden_states[-4].  hidden_states[-1] has gone through the final norm
    there; here it is the last layer's output before it, as for every other layer.
 3. With one layer the keys and values of the soft prompt depend on (h_i, i) alone: decoding computes each once, when its token
    is committed.  Drafted rows are forgotten after the round: their tokens come back as hidden states.
 4. The VDM ("without encoding result") has the embeddings of the committed tokens where EDD has their hidden states, which is an
    ordinary one-layer language model.  Its loss is not stated: cross entropy and KL are both here.
 5. The layer attends to everything, also where the target's own slides a window.
 6. KL is over all tokens of a window (the official code: the response's), since the stand-in's text has no turns.
 7. EAGLE predicts f_i from t_i and f_{i-1}, or its own prediction of it where t_{i-1} is drafted.  Its recipe's noise on the
    features of training is left out, and so is its fixed tree, as MEDUSA's is: they draft any.
 8. MEDUSA-1: head k = 0 ... 4 predicts t_{i+2+k} from f_i (the target itself says t_{i+1}, the root): a node's distribution is
    that of its depth's head, whatever its path.

    python edd.py           # the demo: training under the mask and step-by-step decoding give the same logits
    python train.py edd vdm eagle medusa
"""
import copy
import json
from dataclasses import dataclass
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
# What a name means to train.py; Table 3's ablations of training and appendix A's VDM.  edd-h9 reads hidden_states[9] (Figure 5).
VARIANTS = {"edd": {}, "edd-ce": {"loss": "ce"}, "edd-fixed": {"blocks": (5, 5)},
            "vdm": {"encoding": False}, "vdm-ce": {"encoding": False, "loss": "ce"},
            "eagle": {"kind": "eagle", "loss": "smooth l1 + ce"}, "medusa": {"kind": "medusa", "loss": "ce"}}


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

    @classmethod
    def for_target(cls, model, hidden=HIDDEN, **more):
        """hidden: as Python indexes Hugging Face's hidden_states (N_T + 1 entries, the first one the embeddings)."""
        c = model.config.get_text_config()
        hidden = hidden if more.get("kind", "edd") == "edd" else -1            # the baselines read the last layer
        index = hidden if hidden >= 0 else c.num_hidden_layers + 1 + hidden
        if not 1 <= index <= c.num_hidden_layers:
            raise ValueError(f"hidden_states[{hidden}] of the target is no layer's output: it has layers 1 to {c.num_hidden_layers}; pick one with --hidden")
        return cls(c.vocab_size, c.hidden_size, index, **more)


def dual_block_mask(length, block):
    """Figure 3(a) -> (length, 2 * length) bool: what the row of token i sees of hidden states k (first half) and tokens k (second).

    Hidden states of earlier blocks; tokens of its own block up to itself.
    """
    place = torch.arange(length)
    of = place // block
    hidden = of[:, None] > of[None, :]                                        # k < j L
    tokens = (of[:, None] == of[None, :]) & (place[:, None] >= place[None, :])    # j L <= k <= i
    return torch.cat((hidden, tokens), 1)


def kl(p_target, logits):
    """D_KL(P_t || P_d) = sum_x P_t(x) log(P_t(x) / P_d(x))  (Eq. 4), mean over positions.  (..., V) each -> ()."""
    p = p_target.flatten(0, -2)
    return F.cross_entropy(logits.flatten(0, -2).float(), p) + torch.special.entr(p).sum(-1).mean().neg()


def p_target(batch):
    """P_t of the frozen forward, (B, T, V): computed once a step for all drafters."""
    if "p_target" not in batch:
        batch["p_target"] = batch["logits"].float().softmax(-1)
    return batch["p_target"]


class Rows:
    """Preallocated keys and values of one layer, in the shape in which a transformers layer asks for its cache."""

    def __init__(self):
        self.length, self.keys, self.values = 0, None, None

    def update(self, k, v, *args, **kwargs):
        """Write rows (1, H, m, d) behind the first `length`; return all rows up to them (views).  The caller moves `length`."""
        end = self.length + k.shape[2]
        if self.keys is None or self.keys.shape[2] < end:
            old, size = (self.keys, self.values), (*k.shape[:2], max(1024, 2 * end), k.shape[3])
            self.keys, self.values = k.new_zeros(size), v.new_zeros(size)
            if old[0] is not None:
                self.keys[:, :, :old[0].shape[2]], self.values[:, :, :old[1].shape[2]] = old
        keys, values = self.keys[:, :, :end], self.values[:, :, :end]
        keys[:, :, self.length:], values[:, :, self.length:] = k, v
        return keys, values


class DraftModel(nn.Module):
    """A draft model over all positions at once: what training runs.  `model` is the target, whose parts and classes it is built of."""

    def __init__(self, config, model):
        super().__init__()
        decoder = model.get_decoder()
        if not getattr(decoder, "layers", None) or getattr(decoder, "rotary_emb", None) is None or not hasattr(decoder, "norm"):
            raise ValueError(f"EDD takes one layer of a decoder with layers, norm and rotary_emb (Llama, Mistral, Qwen and their kin); "
                             f"{type(model).__name__} is built otherwise")
        # The target's own weights, out of the gradient's reach; in a namespace, so neither trained nor saved.
        embed, norm, head = (copy.deepcopy(part, {id(p): nn.Parameter(p.detach(), requires_grad=False) for p in part.parameters()})
                             for part in (model.get_input_embeddings(), decoder.norm, model.get_output_embeddings()))
        self.config, self.target = config, SimpleNamespace(embed=embed, norm=norm, head=lambda f: head(f.to(embed.weight.dtype)))

    def add_layer(self, decoder):
        """One fresh layer of the target's own class, with its rotary embedding."""
        c = copy.deepcopy(decoder.config)
        c.num_hidden_layers, c._attn_implementation = 1, "sdpa"
        if getattr(c, "layer_types", None):
            c.layer_types = c.layer_types[-1:]
        self.layer, self.rotary = type(decoder.layers[-1])(c, layer_idx=0), copy.deepcopy(decoder.rotary_emb)
        self.kind = {"layer_type": c.layer_types[0]} if "layer_type" in signature(self.rotary.forward).parameters else {}
        for p in self.layer.parameters():
            if p.ndim == 2:
                nn.init.normal_(p, std=0.02)
        self.layer.to(decoder.device, decoder.dtype)

    def rows(self, x, position, mask, cache=None):
        """One pass through the layer.  x (B, m, D), position (1, m), mask (m, keys) bool or None -> (B, m, D)."""
        turn = self.rotary(x, position, **self.kind)
        out = self.layer(x, attention_mask=None if mask is None else mask[None, None], position_ids=position, past_key_values=cache,
                         use_cache=cache is not None, position_embeddings=turn)
        return out[0] if isinstance(out, tuple) else out

    def causal(self, x):
        """All positions at once, each seeing those up to itself.  x (B, T, D) -> (B, T, D)."""
        place = torch.arange(x.shape[1], device=x.device)
        return self.rows(x, place[None], place[:, None] >= place[None, :])


class EDD(DraftModel):
    """EDD or VDM: the target's embedding and head, trained on, around one layer."""

    def __init__(self, config, model):
        super().__init__(config, model)
        # Embedding and head are the target's, to be trained on; the layer and the norm behind it are fresh.
        self.embed, self.head = copy.deepcopy(model.get_input_embeddings()), copy.deepcopy(model.get_output_embeddings())
        self.add_layer(model.get_decoder())
        self.norm = copy.deepcopy(self.layer.input_layernorm)
        self.requires_grad_(True)

    def forward(self, ids, hidden, block):
        """ids (B, T), hidden (B, T, D) of the target, block: L -> logits (B, T, V): row i predicts token i + 1."""
        T, place = ids.shape[1], torch.arange(ids.shape[1], device=ids.device)[None]
        x = self.embed(ids)
        if not self.config.encoding:                                   # hidden states and all blocks away: causal attention
            return self.head(self.norm(self.causal(x)))
        mask = torch.zeros(2 * T, 2 * T, dtype=torch.bool)
        mask[T:] = dual_block_mask(T, block)
        mask.fill_diagonal_(True)                                      # rows of the prompt are keys only; what they see is not read
        x = self.rows(torch.cat((hidden.to(x.dtype), x), 1), place.repeat(1, 2), mask.to(ids.device))
        return self.head(self.norm(x[:, T:]))

    def loss(self, batch):
        """batch: ids (B, T), logits (B, T, V) and hidden {index: (B, T, D)} of the frozen target; block: L, or None: drawn
        by batch["random"], a numpy generator.  -> (loss, logits (B, T, V))."""
        low, high = self.config.blocks
        block = batch["block"] or int(batch["random"].integers(low, high + 1))
        logits = self(batch["ids"], batch["hidden"].get(self.config.hidden), block)
        if self.config.loss == "ce":
            return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), batch["ids"][:, 1:].flatten()), logits
        return kl(p_target(batch), logits), logits


class Eagle(DraftModel):
    """EAGLE: one layer that predicts the target's next feature."""

    def __init__(self, config, model):
        super().__init__(config, model)
        self.fc = nn.Linear(2 * config.width, config.width).to(model.device, model.dtype)
        self.add_layer(model.get_decoder())

    def inputs(self, ids, before):
        """ids (..., m), before (..., m, D): the feature of the token before each -> (..., m, D)."""
        x = torch.cat((self.target.embed(ids), before), -1).to(self.fc.weight.dtype)
        return self.fc(x).to(x.dtype)                                  # the residual stream stays as precise as the weights

    def forward(self, ids, feature):
        """ids (B, T), feature (B, T, D) of the target -> the predicted features (B, T, D); before the first token: zeros."""
        return self.causal(self.inputs(ids, F.pad(feature, (0, 0, 1, -1))))

    def loss(self, batch):
        """As EDD's.  SmoothL1(f^_i, f_i) + w_cls CE(P_t, softmax(head(f^_i)))"""
        feature = self.target.norm(batch["hidden"][self.config.hidden])
        predicted = self(batch["ids"], feature)
        logits = self.target.head(predicted)
        return F.smooth_l1_loss(predicted.float(), feature.float()) + W_CLS * F.cross_entropy(
            logits.flatten(0, 1).float(), p_target(batch).flatten(0, 1)), logits


class Medusa(DraftModel):
    """MEDUSA-1: K heads on the feature of one token.  Each starts as the target's own, which predicts t_{i+1}, with W_k = 0."""

    def __init__(self, config, model):
        super().__init__(config, model)
        self.heads = nn.ModuleList(copy.deepcopy(model.get_output_embeddings()) for _ in range(config.heads))
        self.w = nn.ParameterList(torch.zeros(config.width, config.width, device=model.device, dtype=model.dtype) for _ in range(config.heads))
        self.requires_grad_(True)

    def forward(self, hidden):
        """hidden (..., D) of the last layer -> a list of K logits (..., V): head_k(f + SiLU(W_k f))."""
        f = self.target.norm(hidden).to(self.w[0].dtype)
        return [head(f + F.silu(F.linear(f, w))) for head, w in zip(self.heads, self.w)]

    def loss(self, batch):
        """As EDD's, with head 0's logits, shifted so that row i predicts t_{i+1}, from f_{i-1}.  sum_k 0.8^k CE(head_k(f_i), t_{i+2+k})"""
        ids, found = batch["ids"], self(batch["hidden"][self.config.hidden])
        return sum(DECAY ** k * F.cross_entropy(logits[:, :-2 - k].flatten(0, 1).float(), ids[:, 2 + k:].flatten())
                   for k, logits in enumerate(found) if 2 + k < ids.shape[1]), found[0].roll(1, 1)


class Drafter:
    """Decoding with an EDD or a VDM, step by step: a round costs the rows of the newly committed and of the drafted tokens.

    The loop in verify.py calls reset(), begin(view), expand(tokens, parents), keep(tokens); `needs` says what it reads.
    """

    def __init__(self, model):
        self.model, self.config = model.eval(), model.config
        self.needs = {"hidden": (model.config.hidden,)} if model.config.encoding else {}
        self.cache = Rows()
        self.reset()

    def reset(self):
        """Forget the sequence."""
        self.t = 0

    def begin(self, view):
        """A round starts: the target has committed view.tokens since the last; the soft prompt grows by their hidden states."""
        self.start = view.length - view.tokens.shape[0]
        self.pending, self.t = self.prompt(view), view.length             # (p, D): of the positions from `start` on
        self.lines, self.is_chain = [], True             # of each node: itself and the nodes above it, root first

    def prompt(self, view):
        """What the layer reads in the place of the committed tokens, (p, D)."""
        return view.hidden[self.config.hidden].to(self.model.norm.weight.dtype) if self.config.encoding else self.model.embed(view.tokens)

    def expand(self, tokens, parents):
        """One forward over m new nodes.  tokens (m,), parents [m ints], -1 for the root -> probabilities (m, V)."""
        return self.model.head(self.model.norm(self.rows(self.model.embed(tokens), parents))).float().softmax(-1)

    def rows(self, x, parents):
        """The layer's rows of m new nodes, x (m, D) -> (m, D), after those of the prompt, if there are new ones."""
        p, m, before, device = self.pending.shape[0], len(parents), len(self.lines), x.device
        for i, parent in enumerate(parents, before):
            self.is_chain &= parent == i - 1
            self.lines.append((self.lines[parent] if parent >= 0 else []) + [i])
        end = self.t + before + m
        self.cache.length = self.start if p else self.t + before
        position = torch.arange(end - m - p, end) if self.is_chain else torch.tensor(
            [*range(self.start, self.start + p), *(self.t + len(line) - 1 for line in self.lines[before:])])
        mask = None
        if p + m > 1 or not self.is_chain:
            mask = torch.ones(p + m, end, dtype=torch.bool)            # rows of the prompt are keys only: any mask will do
            mask[p:, self.t:] = False
            mask[[p + i for i in range(m) for _ in self.lines[before + i]],
                 [self.t + node for line in self.lines[before:] for node in line]] = True
            mask = mask.to(device)
        x = self.model.rows(torch.cat((self.pending, x) if p else (x,))[None], position.to(device)[None], mask, self.cache)
        self.pending = self.pending[:0]
        return x[0, p:]

    def keep(self, tokens):
        """Drafted rows are forgotten: what was accepted comes back as hidden states in the next view."""


class EagleDrafter(Drafter):
    """Decoding with EAGLE: rows of committed tokens are made of true features, those of drafted tokens of predicted ones."""

    def prompt(self, view):
        assert self.start in (0, self.t), f"EAGLE remembers the feature of token {self.t - 1} alone, and cannot go on from token {self.start}"
        new = self.model.target.norm(view.hidden[self.config.hidden])
        known = torch.cat((self.features[:1] if self.start else torch.zeros_like(new[:1]), new))
        self.features = known[-1:]                       # (1 + nodes, D): of the last committed token, then each node's prediction
        return self.model.inputs(view.tokens, known[:-1])

    def expand(self, tokens, parents):
        """A node needs its parent's prediction: a call that has both takes as many forwards as layers."""
        end = next((i for i, parent in enumerate(parents) if parent >= len(self.lines)), len(parents))
        x = self.rows(self.model.inputs(tokens[:end], self.features[[parent + 1 for parent in parents[:end]]]), parents[:end])
        self.features = torch.cat((self.features, x))
        probs = self.model.target.head(x).float().softmax(-1)
        return probs if end == len(parents) else torch.cat((probs, self.expand(tokens[end:], parents[end:])))


class MedusaDrafter(Drafter):
    """Decoding with MEDUSA-1: all heads run once a round, on the last committed token's feature."""

    def begin(self, view):
        rows = torch.stack(self.model(view.hidden[self.config.hidden][-1])).float().softmax(-1)     # (K, V)
        self.table, self.depths = F.pad(rows, (0, 0, 0, 1)), []                                     # beyond the last head: zeros

    def expand(self, tokens, parents):
        for parent in parents:
            self.depths.append(self.depths[parent] + 1 if parent >= 0 else 0)
        return self.table[[min(depth, self.config.heads) for depth in self.depths[-len(parents):]]]


KINDS = {"edd": (EDD, Drafter), "eagle": (Eagle, EagleDrafter), "medusa": (Medusa, MedusaDrafter)}     # draft model, what decodes with it


def load(folder, model, length=None):
    """Read a checkpoint made by train.py for the target `model` -> (Drafter in the model's dtype, what training.json says).

    Raises ValueError, in one sentence, where the folder is missing, broken, or made for a target of another shape.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file
    folder, c = Path(folder), model.config.get_text_config()
    if missing := [name for name in ("training.json", "model.safetensors") if not (folder / name).is_file()]:
        raise ValueError(f"no drafter in {folder}: {missing[0]} is missing; train one with train.py or name its folder with "
                         "--checkpoint")
    try:
        about = json.loads((folder / "training.json").read_text())
        config = Config(**{**about["config"], "blocks": tuple(about["config"]["blocks"])})
        draft_class, drafter_class = KINDS[config.kind]
        weights = load_file(folder / "model.safetensors")
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as why:
        raise ValueError(f"the drafter in {folder} is damaged ({type(why).__name__}: {str(why).splitlines()[0][:100]}); "
                         "train or copy it again") from None
    if (config.vocab, config.width) != (c.vocab_size, c.hidden_size) or config.hidden > c.num_hidden_layers:
        raise ValueError(f"the drafter in {folder} was made for another target (vocabulary {config.vocab}, width {config.width}, against "
                         f"{c.vocab_size} and {c.hidden_size}): train one for this target with train.py --target")
    draft_model = draft_class(config, model)
    try:
        draft_model.load_state_dict(weights)
    except RuntimeError as why:
        raise ValueError(f"the drafter in {folder} is damaged ({str(why).splitlines()[-1].strip()[:100]}); train or copy it again") from None
    drafter = drafter_class(draft_model)
    drafter.temperature = about.get("validation", {}).get("temperature", 1.0)
    return drafter, about


def main():
    """On fifteen tokens in blocks of five: training under the dual-block mask equals decoding with a growing soft prompt."""
    from transformers import LlamaConfig, LlamaForCausalLM
    torch.manual_seed(0)
    target = LlamaForCausalLM(LlamaConfig(vocab_size=20, hidden_size=16, intermediate_size=32, num_hidden_layers=6, num_attention_heads=4,
                                          num_key_value_heads=2, max_position_embeddings=64)).double().eval()
    ids = torch.randint(20, (1, 15))
    for encoding in (True, False):
        model = EDD(Config.for_target(target, encoding=encoding), target)
        for p in model.parameters():
            p.data.normal_(0, 0.3)
        with torch.no_grad():
            hidden = target(ids, output_hidden_states=True).hidden_states[-4]
            trained = model(ids, hidden, 5).softmax(-1)[0]
            drafter, worst = Drafter(model), 0
            for t in (5, 10):
                drafter.begin(SimpleNamespace(tokens=ids[0, t - 5:t], length=t, hidden={3: hidden[0, t - 5:t]}))
                for i in range(5):
                    row = drafter.expand(ids[0, t + i:t + i + 1], [i - 1])[0]
                    worst = max(worst, (row - trained[t + i]).abs().max().item())
        assert worst < 1e-6, f"decoding differs from training by {worst}"
        print(f"{'EDD' if encoding else 'VDM'}: decoding equals training under the dual-block mask: largest difference {worst:.1e}")


if __name__ == "__main__":
    main()
