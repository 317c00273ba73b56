"""EAGLE-3 (arXiv 2503.01840), driven by the papers' trees: the target's encoding result, of three layers.

The idea.  EDD drafts from one layer's hidden states.  EAGLE-3 maps those of a low, a middle and a high layer
to one state, by a linear map.  Where the target has not been yet, its own output takes the place of that
state; it was trained on that, too ("training-time test").  It is one layer, whose attention reads token and
state side by side.  Its head knows only the most frequent words, the draft vocabulary.

    paper, official code                    shape         name here
    l, m, h: three layers' hidden states    (k, 3 D)      view.hidden of Drafter.layers
    g = fc(l, m, h); a, its own output      (1 + n, D)    Drafter.states: of node i's parent, parents[i] + 1
    e: the target's embedding of a token    (m, D)        Eagle3.embed
    [e, g or a]                             (m, 2 D)      Eagle3.inputs
    draft vocabulary                        (V_d,)        Eagle3.words: the target's id i + d2t[i] of each i

Published weights are read as weights alone: fc, midlayer.*, norm, lm_head, d2t, t2d, and embed_tokens where a
draft is narrower than its target (yuhuili/EAGLE3-*, and what is built like them).

Differences from the official code:
 1. It drafts any tree, in the place of EAGLE-2's.  A node needs its parent's output: one whose parent comes
    in the same call takes another forward.
 2. Words beyond the draft vocabulary get -inf: no tree has them, and a drawn chain never draws them.
 3. As there, a row stands at the position of its state, one before its token's.  Drafted rows are forgotten
    after a round; committed tokens get rows of the target's states, in the next round's first forward.

    python bench.py --target meta-llama/Llama-3.1-8B-Instruct --tree chain cape pct \\
        --drafter "eagle3(yuhuili/EAGLE3-LLaMA3.1-Instruct-8B)"
"""
import json
from pathlib import Path

import huggingface_hub
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama import modeling_llama

import edd
from data.read import first_line
from verify import UserError

FILES = ["model.safetensors", "pytorch_model.bin", "config.json"]


# ---------------------------------------------------------------- the draft model
class Midlayer(nn.Module):
    """A Llama layer whose attention reads token and state, 2 D wide; the residual stream is the state."""

    def __init__(self, config):
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = modeling_llama.LlamaAttention(config, layer_idx=0)
        for name in ("q_proj", "k_proj", "v_proj"):
            own = getattr(self.self_attn, name)
            wide = nn.Linear(2 * width, own.out_features, bias=own.bias is not None)
            setattr(self.self_attn, name, wide)
        self.mlp = modeling_llama.LlamaMLP(config)
        self.input_layernorm = modeling_llama.LlamaRMSNorm(width, eps)
        self.hidden_norm = modeling_llama.LlamaRMSNorm(width, eps)
        self.post_attention_layernorm = modeling_llama.LlamaRMSNorm(width, eps)

    def forward(self, embedded, state, **attention):
        """embedded, state (1, m, D) -> (1, m, D)"""
        both = torch.cat((self.input_layernorm(embedded), self.hidden_norm(state)), -1)        # (1, m, 2 D)
        state = state + self.self_attn(both, **attention)[0]
        return state + self.mlp(self.post_attention_layernorm(state))


class Eagle3(nn.Module):
    """The draft model; its parameters and buffers are named as the published ones.

    config: a LlamaConfig with draft_vocab_size; width, vocab: the target's; own: has it its own embeddings?
    """

    def __init__(self, config, width, vocab, own=False):
        super().__init__()
        self.config, self.width, self.vocab = config, config.hidden_size, vocab
        self.fc = nn.Linear(3 * width, self.width, bias=False)
        self.midlayer = Midlayer(config)
        self.norm = modeling_llama.LlamaRMSNorm(self.width, config.rms_norm_eps)
        self.lm_head = nn.Linear(self.width, config.draft_vocab_size, bias=False)
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.long))
        self.register_buffer("t2d", torch.ones(vocab, dtype=torch.bool))
        if own:
            self.embed_tokens = nn.Embedding(vocab, self.width)

    def ready(self, embed):
        """After the weights are in place.  embed: the target's embedding -> self"""
        device = self.d2t.device
        # In a list the target's is no part of this module.
        self.embed = [getattr(self, "embed_tokens", embed)]
        self.words = torch.arange(len(self.d2t), device=device) + self.d2t             # (V_d,)
        # Made after the weights got their type: its frequencies stay in float32, as transformers has them.
        self.rotary = modeling_llama.LlamaRotaryEmbedding(self.config).to(device)
        return self.eval()

    def inputs(self, tokens, states):
        """tokens (m,), states (m, D) -> (m, 2 D)"""
        embedded = self.embed[0](tokens).to(states)                                    # (m, D)
        return torch.cat((embedded, states), -1)

    def rows(self, x, position, mask, cache=None):
        """x (1, m, 2 D), position (1, m), mask (m, keys) bool or None -> (1, m, D), what it feeds back."""
        embedded, state = x.split(self.width, -1)
        if mask is not None:
            mask = torch.where(mask, 0.0, float("-inf")).to(x.dtype)[None, None]
        turn = self.rotary(x, position)
        return self.midlayer(embedded, state, position_embeddings=turn, attention_mask=mask,
                             past_key_values=cache)

    def head(self, rows):
        """rows (m, D) -> logits (m, V): -inf beyond the draft vocabulary."""
        found = self.lm_head(self.norm(rows))                                          # (m, V_d)
        logits = found.new_full((len(rows), self.vocab), float("-inf"))
        return logits.index_copy(1, self.words, found)


# ---------------------------------------------------------------- decoding
class Drafter(edd.Drafter):
    """Decoding with EAGLE-3: rows, masks and positions are kept as EDD's."""

    def __init__(self, model, layers):
        self.model, self.layers = model, layers
        self.device = model.fc.weight.device
        self.needs = {"hidden": layers}
        self.cache = edd.Rows()
        self.reserve = self.cache.reserve
        self.reset()

    def prompt(self, view):
        """What the layer reads of the committed tokens, (k, 2 D): each beside the state before it."""
        three = [view.hidden[layer].to(self.model.fc.weight) for layer in self.layers]
        new = self.model.fc(torch.cat(three, -1))                                      # (k, D)
        tokens = view.tokens.to(self.device)
        # The first token of all has no state before it, and so no row.
        self.t = view.length - 1
        if view.length > len(new):
            new = torch.cat((self.states[:1], new))
        else:
            tokens = tokens[1:]
        self.states = new[-1:]
        return self.model.inputs(tokens, new[:-1])

    @torch.no_grad()
    def expand(self, tokens, parents):
        """One forward, if no parent is in the same call.  tokens (m,), parents [m ints] -> logits (m, V)"""
        logits, tokens = [], tokens.to(self.device)
        while parents:
            # The first nodes whose parents' states are known
            nodes = len(self.states) - 1
            known = [parent < nodes for parent in parents] + [False]
            count = known.index(False)
            above = self.states[[parent + 1 for parent in parents[:count]]]            # (count, D)
            x = self.model.inputs(tokens[:count], above)                               # (count, 2 D)
            rows = self.layer_rows(x, parents[:count])                                 # (count, D)
            self.states = torch.cat((self.states, rows))
            logits.append(self.model.head(rows))
            tokens, parents = tokens[count:], parents[count:]
        return torch.cat(logits)


# ---------------------------------------------------------------- loading
def layers_of(config, layers):
    """Which hidden_states of a target of so many layers it reads: the official code's, if config says no."""
    said = config.get("eagle_config") or {}
    outputs = said.get("eagle_aux_hidden_state_layer_ids")
    if outputs:
        # SGLang counts layers from 0; hidden_states[0] are the embeddings.
        return [layer + 1 for layer in outputs]
    return [2, layers // 2, layers - 3]


def first_misfit(model, weights):
    """The first of the published weights that does not fit, as words, or None."""
    wanted = [*model.named_parameters(), *model.named_buffers()]
    wanted = {name: tuple(x.shape) for name, x in wanted}
    for name, shape in wanted.items():
        if name not in weights:
            return f"{name} is missing"
        found = tuple(weights[name].shape)
        if found != shape:
            return f"{name} is {found}, not {shape}"
    for name in weights:
        if name not in wanted:
            return f"{name} has no place in an EAGLE-3"
    words = weights["d2t"] + torch.arange(len(weights["d2t"]))                         # (V_d,)
    known = weights["t2d"].bool().nonzero()[:, 0]
    if words.sort().values.tolist() != known.tolist():
        return "d2t and t2d name different words"


def read(folder):
    """-> config.json, a dict, and the weights, {name: tensor}"""
    config = json.loads((folder / "config.json").read_text())
    if (folder / FILES[0]).exists():
        weights = load_file(folder / FILES[0])
    else:
        weights = torch.load(folder / FILES[1], map_location="cpu", weights_only=True)
    # Saved rotary frequencies follow from the configuration.
    weights = {name: x for name, x in weights.items() if not name.endswith("inv_freq")}
    # A draft vocabulary that is the target's needs no translation.
    vocab = len(weights.get("lm_head.weight", ()))
    if "d2t" not in weights:
        weights["d2t"] = torch.zeros(vocab, dtype=torch.long)
        weights["t2d"] = torch.ones(vocab, dtype=torch.bool)
    return config, weights


def load(name, target_model, revision=None, local_files_only=False):
    """A published EAGLE-3, by hub name or folder -> Drafter.

    Raises UserError, in one sentence, that names the first thing which does not fit the target.
    """
    folder = Path(name)
    try:
        if not folder.exists():
            folder = huggingface_hub.snapshot_download(name, revision=revision, allow_patterns=FILES,
                                                       local_files_only=local_files_only)
        config, weights = read(Path(folder))
    except Exception as why:
        reason = f"{type(why).__name__}: {first_line(why)}"
        raise UserError(f"eagle3({name}) cannot be read ({reason}): give a hub name, or a folder with "
                        "config.json and weights") from None
    target, embed = target_model.config.get_text_config(), target_model.get_input_embeddings()
    draft_vocab = len(weights.get("lm_head.weight", ())) or target.vocab_size
    llama = LlamaConfig.from_dict({**config, "draft_vocab_size": draft_vocab})
    llama._attn_implementation = "sdpa"
    # On no device: the weights bring their memory.
    with torch.device("meta"):
        model = Eagle3(llama, target.hidden_size, target.vocab_size, "embed_tokens.weight" in weights)
    reason = first_misfit(model, weights)
    if reason:
        raise UserError(f"eagle3({name}) does not fit a target of {target.vocab_size} words and width "
                        f"{target.hidden_size}: {reason}; take the one that was made for this target")
    model.load_state_dict(weights, assign=True)
    token = torch.zeros(1, dtype=torch.long, device=embed.weight.device)
    # Weights of the target may be quantised: its rows say the type.
    with torch.no_grad():
        model = model.to(embed(token))
    return Drafter(model.ready(embed), layers_of(config, target.num_hidden_layers))
