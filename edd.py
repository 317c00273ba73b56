"""EDD: the effective draft decoder, which takes the target for an encoder and its hidden states for a soft prompt.

Effective Draft Decoder with Pruned Candidate Tree (ACL 2025), section 3.1, Figures 2 and 3(a), appendix B; VDM of appendix A.

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

    python edd.py           # the demo: training under the mask and step-by-step decoding give the same logits
    python train.py edd vdm
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
# What a name means to train.py; Table 3's ablations of training and appendix A's VDM.  edd-h9 reads hidden_states[9] (Figure 5).
VARIANTS = {"edd": {}, "edd-ce": {"loss": "ce"}, "edd-fixed": {"blocks": (5, 5)},
            "vdm": {"encoding": False}, "vdm-ce": {"encoding": False, "loss": "ce"}}


@dataclass
class Config:
    """vocab, width: the target's.  hidden: index into hidden_states, from 1 (the first layer's output) on."""
    vocab: int
    width: int
    hidden: int
    encoding: bool = True            # False: the vanilla draft model (VDM)
    loss: str = "kl"                 # or "ce"
    blocks: tuple = BLOCKS

    @classmethod
    def for_target(cls, model, hidden=HIDDEN, **more):
        """hidden: as Python indexes Hugging Face's hidden_states (N_T + 1 entries, the first one the embeddings)."""
        c = model.config.get_text_config()
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


class EDD(nn.Module):
    """The draft model over all positions at once: what training runs.  `model` is the target, whose classes it is built of."""

    def __init__(self, config, model):
        super().__init__()
        self.config = config
        decoder = model.get_decoder()
        blocks, rotary = getattr(decoder, "layers", None), getattr(decoder, "rotary_emb", None)
        if not blocks or rotary is None or not hasattr(decoder, "norm"):
            raise ValueError(f"EDD takes one layer of a decoder with layers, norm and rotary_emb (Llama, Mistral, Qwen and their kin); "
                             f"{type(model).__name__} is built otherwise")
        c = copy.deepcopy(decoder.config)
        c.num_hidden_layers, c._attn_implementation = 1, "sdpa"
        if getattr(c, "layer_types", None):
            c.layer_types = c.layer_types[-1:]
        # Embedding and head are the target's, to be trained on; the layer and the norm behind it are fresh.
        self.embed, self.head = copy.deepcopy(model.get_input_embeddings()), copy.deepcopy(model.get_output_embeddings())
        self.layer, self.rotary = type(blocks[-1])(c, layer_idx=0), copy.deepcopy(rotary)
        self.norm = copy.deepcopy(self.layer.input_layernorm)
        self.kind = {"layer_type": c.layer_types[0]} if "layer_type" in signature(rotary.forward).parameters else {}
        for p in self.layer.parameters():
            if p.ndim == 2:
                nn.init.normal_(p, std=0.02)
        self.layer.to(model.device, model.dtype), self.norm.to(model.device, model.dtype)
        self.requires_grad_(True)

    def rows(self, x, position, mask, cache=None):
        """One pass through the layer.  x (B, m, D), position (1, m), mask (m, keys) bool or None -> (B, m, D)."""
        turn = self.rotary(x, position, **self.kind)
        out = self.layer(x, attention_mask=None if mask is None else mask[None, None], position_ids=position, past_key_values=cache,
                         use_cache=cache is not None, position_embeddings=turn)
        return out[0] if isinstance(out, tuple) else out

    def forward(self, ids, hidden, block):
        """ids (B, T), hidden (B, T, D) of the target, block: L -> logits (B, T, V): row i predicts token i + 1."""
        T, place = ids.shape[1], torch.arange(ids.shape[1], device=ids.device)[None]
        x = self.embed(ids)
        if not self.config.encoding:                                   # hidden states and all blocks away: causal attention
            return self.head(self.norm(self.rows(x, place, torch.ones(T, T, dtype=torch.bool, device=ids.device).tril())))
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
        new = view.hidden[self.config.hidden].to(self.model.norm.weight.dtype) if self.config.encoding else self.model.embed(view.tokens)
        self.pending, self.start, self.t = new, view.length - new.shape[0], view.length           # (p, D), their first position
        self.lines, self.is_chain = [], True             # of each node: itself and the nodes above it, root first

    def expand(self, tokens, parents):
        """One forward over m new nodes.  tokens (m,), parents [m ints], -1 for the root -> probabilities (m, V)."""
        p, m, before, device = self.pending.shape[0], len(parents), len(self.lines), tokens.device
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
        x = self.model.embed(tokens)
        x = self.model.rows(torch.cat((self.pending, x) if p else (x,))[None], position.to(device)[None], mask, self.cache)
        self.pending = self.pending[:0]
        return self.model.head(self.model.norm(x[0, p:])).float().softmax(-1)

    def keep(self, tokens):
        """Drafted rows are forgotten: what was accepted comes back as hidden states in the next view."""


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
        weights = load_file(folder / "model.safetensors")
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as why:
        raise ValueError(f"the drafter in {folder} is damaged ({type(why).__name__}: {str(why).splitlines()[0][:100]}); "
                         "train or copy it again") from None
    if (config.vocab, config.width) != (c.vocab_size, c.hidden_size) or config.hidden > c.num_hidden_layers:
        raise ValueError(f"the drafter in {folder} was made for another target (vocabulary {config.vocab}, width {config.width}, against "
                         f"{c.vocab_size} and {c.hidden_size}): train one for this target with train.py --target")
    draft_model = EDD(config, model)
    try:
        draft_model.load_state_dict(weights)
    except RuntimeError as why:
        raise ValueError(f"the drafter in {folder} is damaged ({str(why).splitlines()[-1].strip()[:100]}); train or copy it again") from None
    return Drafter(draft_model), about


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
