"""EAGLE-3 (arXiv 2503.01840), with the papers' trees: the target's hidden states of three layers.

The idea.  EDD drafts from one layer's hidden states.  EAGLE-3 maps those of a low, a middle and a
high layer to one state, by a linear map.  For drafted tokens its own output takes the place of that
state.  It was trained on that, too ("training-time test").  It is one layer, whose attention reads
token and state side by side.  Its head has only the most frequent tokens, the draft vocabulary.

    paper, official code                    shape         name here
    l, m, h: three layers' hidden states    (k, 3 D)      view.hidden of Drafter.layers
    g = fc(l, m, h); a, its own output      (1 + n, D)    Drafter.features, as in eagle.py
    e: the target's embedding of a token    (m, D)        Eagle3.embed
    [e, g or a]                             (m, 2 D)      Eagle3.inputs
    draft vocabulary                        (V_d,)        Eagle3.words: i + d2t[i] for each i

Published weights are read as weights alone, no code: fc, midlayer.*, norm, lm_head, d2t, t2d, and
embed_tokens where a draft is narrower than its target (yuhuili/EAGLE3-* and their like).

Differences from the official code:
 1. It drafts any tree.  A node needs its parent's output, so a node whose parent comes in the same
    call takes another forward.
 2. Tokens outside the draft vocabulary get -inf: no tree has them, no drawn chain samples them.
 3. As there, an entry stands at the position of its state, one before its token's.  The entries of
    drafted tokens are forgotten after a round; committed tokens get entries of the target's states.
 4. Published configurations count layers in two ways (SGLang, pull request 25454).  Where the first
    id is 1, id i is the output of layer i, from 0: hidden_states[i + 1].  Else hidden_states[i].
 5. As in vLLM, norm_before_residual starts the residual stream at the normed state.

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
from beyond import eagle
from verify import UserError

FILES = ["model.safetensors", "pytorch_model.bin", "config.json"]


# ---------------------------------------------------------------- the draft model
class Midlayer(nn.Module):
    """A Llama layer whose attention reads token and state, 2 D wide.

    The residual stream starts at the state; with config.norm_before_residual at the normed one.
    """

    def __init__(self, config):
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.norm_before_residual = getattr(config, "norm_before_residual", False)
        self.self_attn = modeling_llama.LlamaAttention(config, layer_idx=0)
        for name in ("q_proj", "k_proj", "v_proj"):
            own = getattr(self.self_attn, name)
            wide = nn.Linear(2 * width, own.out_features, bias=own.bias is not None)
            setattr(self.self_attn, name, wide)
        self.mlp = modeling_llama.LlamaMLP(config)
        self.input_layernorm = modeling_llama.LlamaRMSNorm(width, eps)
        self.hidden_norm = modeling_llama.LlamaRMSNorm(width, eps)
        self.post_attention_layernorm = modeling_llama.LlamaRMSNorm(width, eps)

    def attention_input(self, embedded, state):
        """embedded, state (1, m, D) -> (1, m, 2 D)"""
        return torch.cat((self.input_layernorm(embedded), self.hidden_norm(state)), -1)

    def forward(self, embedded, state, **attention):
        """embedded, state (1, m, D) -> (1, m, D)"""
        both = self.attention_input(embedded, state)
        if self.norm_before_residual:
            state = self.hidden_norm(state)
        state = state + self.self_attn(both, **attention)[0]
        return state + self.mlp(self.post_attention_layernorm(state))


class Eagle3(nn.Module):
    """The draft model; its parameters and buffers are named as the published ones.

    config: a LlamaConfig with draft_vocab_size; width, vocab: the target's; own: has it embeddings?
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
        self.words = torch.arange(len(self.d2t), device=device) + self.d2t     # (V_d,)
        # Made after the weights got their type: its frequencies stay in float32, as transformers'.
        self.rotary = modeling_llama.LlamaRotaryEmbedding(self.config).to(device)
        return self.eval()

    def inputs(self, tokens, states):
        """tokens (m,), states (m, D) -> (m, 2 D)"""
        embedded = self.embed[0](tokens).to(states)                            # (m, D)
        return torch.cat((embedded, states), -1)

    def keys_values(self, x, position):
        """The KV entries of x (1, m, 2 D) at position (1, m) -> k, v (1, H, m, d)"""
        both = self.midlayer.attention_input(*x.split(self.width, -1))
        cos, sin = self.rotary(x, position)
        return edd.keys_values(self.midlayer.self_attn, both, cos, sin)

    def run_layer(self, x, position, mask, cache=None):
        """As edd.DraftModel.run_layer.  x (1, m, 2 D) -> (1, m, D), which it feeds back"""
        embedded, state = x.split(self.width, -1)
        if mask is not None:
            mask = torch.where(mask, 0.0, float("-inf")).to(x.dtype)[None, None]
        cos_sin = self.rotary(x, position)
        return self.midlayer(embedded, state, position_embeddings=cos_sin, attention_mask=mask,
                             past_key_values=cache)

    def logits(self, x):
        """x (m, D) -> (m, V): -inf outside the draft vocabulary."""
        found = self.lm_head(self.norm(x))                                     # (m, V_d)
        logits = found.new_full((len(x), self.vocab), float("-inf"))
        return logits.index_copy(1, self.words, found)


# ---------------------------------------------------------------- decoding
class Drafter(eagle.Drafter):
    """Decoding with EAGLE-3: as with EAGLE, but a feature is a map of three hidden states."""

    def __init__(self, model, layers):
        self.model, self.layers = model, layers
        self.device = model.fc.weight.device
        self.needs = {"hidden": layers}
        self.cache = edd.Cache()
        self.reserve = self.cache.reserve
        self.reset()

    def new_features(self, view):
        """fc(l, m, h) of newly committed tokens -> (k, D)"""
        three = [view.hidden[layer].to(self.model.fc.weight) for layer in self.layers]
        return self.model.fc(torch.cat(three, -1))


# ---------------------------------------------------------------- loading
def layers_of(config, layers):
    """Which hidden_states of a target of `layers` layers it reads: the official code's by default.

    Raises ValueError where the configuration names others than three outputs of layers.
    """
    name = "eagle_aux_hidden_state_layer_ids"
    ids = config.get(name) or (config.get("eagle_config") or {}).get(name)
    if not ids:
        return [2, layers // 2, layers - 3]
    whole = isinstance(ids, list) and all(type(i) is int for i in ids)
    if not whole or len(ids) != 3:
        raise ValueError(f"{name} is {ids}, not three layers")
    # Difference 4.  The last of hidden_states is normed, and EAGLE-3 reads none that is.
    found = [i + 1 for i in ids] if ids[0] == 1 else ids
    if min(found) < 1 or max(found) >= layers:
        raise ValueError(f"{name} is {ids}, and the target has {layers} layers")
    return found


def llama_config(config, draft_vocab):
    """config.json, a dict -> LlamaConfig

    Raises ValueError where a size is no number, or the sizes of its heads do not divide.
    """
    for name in ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim"):
        size = config.get(name)
        if size is not None and type(size) is not int:
            raise ValueError(f"{name} is {size!r}, not a number")
    heads = config.get("num_attention_heads", 32)
    key_heads = config.get("num_key_value_heads") or heads
    if heads < 1 or key_heads < 1 or heads % key_heads:
        raise ValueError(f"{heads} attention heads cannot share {key_heads} key heads evenly")
    width = config.get("hidden_size", 4096)
    if not config.get("head_dim") and width % heads:
        raise ValueError(f"a width of {width} does not divide into {heads} heads")
    llama = LlamaConfig.from_dict({**config, "draft_vocab_size": draft_vocab})
    llama._attn_implementation = "sdpa"
    return llama


def complete(weights, vocab):
    """Add the tables of the draft vocabulary that follow from others.  vocab: the target's.

    Raises ValueError where d2t names tokens that the target has not.
    """
    rows = len(weights.get("lm_head.weight", ()))
    if "d2t" not in weights and "t2d" not in weights:
        if rows and rows != vocab:
            raise ValueError(f"lm_head has {rows} tokens, and d2t, which says which, is missing")
        # A draft vocabulary that is the target's needs no translation.
        weights["d2t"] = torch.zeros(rows, dtype=torch.long)
        weights["t2d"] = torch.ones(rows, dtype=torch.bool)
    if "d2t" in weights and "t2d" not in weights:
        words = weights["d2t"] + torch.arange(len(weights["d2t"]))             # (V_d,)
        if len(words) and (words.min() < 0 or words.max() >= vocab):
            raise ValueError(f"d2t names tokens from {words.min()} to {words.max()}")
        weights["t2d"] = torch.zeros(vocab, dtype=torch.bool)
        weights["t2d"][words] = True


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
    words = weights["d2t"] + torch.arange(len(weights["d2t"]))                 # (V_d,)
    known = weights["t2d"].bool().nonzero()[:, 0]
    if words.sort().values.tolist() != known.tolist():
        return "d2t and t2d name different words"


def first_line(why):
    """The first line of an exception's message."""
    return str(why).partition("\n")[0][:150]


def read(folder):
    """-> config.json, a dict, and the weights, {name: tensor}"""
    config = json.loads((folder / "config.json").read_text())
    if (folder / FILES[0]).exists():
        weights = load_file(folder / FILES[0])
    else:
        weights = torch.load(folder / FILES[1], map_location="cpu", weights_only=True)
    # Saved rotary frequencies follow from the configuration.
    weights = {name: x for name, x in weights.items() if not name.endswith("inv_freq")}
    return config, weights


def load(name, target_model, revision=None, local_files_only=False):
    """A published EAGLE-3, by hub name or folder -> Drafter.

    Raises UserError, in one sentence, that names the first thing which does not fit the target.
    """
    folder = Path(name)
    try:
        if not folder.exists():
            folder = huggingface_hub.snapshot_download(
                name, revision=revision, allow_patterns=FILES, local_files_only=local_files_only)
        config, weights = read(Path(folder))
    except Exception as why:
        reason = f"{type(why).__name__}: {first_line(why)}"
        raise UserError(f"eagle3({name}) cannot be read ({reason}): give a hub name, or a folder "
                        "with config.json and weights") from None
    target, embed = target_model.config.get_text_config(), target_model.get_input_embeddings()
    draft_vocab = len(weights.get("lm_head.weight", ())) or target.vocab_size
    reason = None
    try:
        layers = layers_of(config, target.num_hidden_layers)
        llama = llama_config(config, draft_vocab)
        complete(weights, target.vocab_size)
        # On no device: the weights bring their memory.
        with torch.device("meta"):
            own = "embed_tokens.weight" in weights
            model = Eagle3(llama, target.hidden_size, target.vocab_size, own)
        reason = first_misfit(model, weights)
    except Exception as why:
        reason = first_line(why)
    if reason:
        raise UserError(f"eagle3({name}) does not fit a target of {target.vocab_size} words and "
                        f"width {target.hidden_size}: {reason}; take the one made for this target")
    model.load_state_dict(weights, assign=True)
    token = torch.zeros(1, dtype=torch.long, device=embed.weight.device)
    # Weights of the target may be quantised: its rows say the type.
    with torch.no_grad():
        model = model.to(embed(token))
    return Drafter(model.ready(embed), layers)
