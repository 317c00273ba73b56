"""Draft models for train.py: from a name on the command line to a module with loss(batch).

    glide, vanilla          GLIDE by --layer and --norm; the same without the glimpse (Figure 4)
    glide-top               GLIDE as in the paper: it reads the top layer, without a norm
    glide-l13               GLIDE that reads layer 13 (Figure 7)
    glide-n2, glide-w256    GLIDE with 2 layers, or of width 256 (Figures 8 and 9)
    glide-l13-nonorm, glide-top-norm      -norm and -nonorm decide what else --norm decides
    edd, edd-top, vdm ...   edd.VARIANTS; edd-h9 reads hidden_states[9] (EDD, Figure 5)
    eagle, medusa           the baselines of the EDD paper
    glide-shared, edd-shared ...          between the target's tables (beyond/shared.py);
                                          glide-shared-f768 has an MLP of 768
    base, small             language models of three layers and one: stages of a cascade

All of one run learn from the same forwards of the target.
"""
import json
import os
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import save_file

import edd
import glide
from beyond import eagle, medusa, shared
from runtime import drafters as families
from runtime import load
from runtime.targets import any_target
from runtime.text import write_atomically
from verify import Target, UserError

AHEAD = 64                                        # positions of a drafter beyond --length
# What a name stands for: a family of draft models, and settings.
DRAFTERS = {
    "glide": ("glide", {}),
    "glide-top": ("glide", {"layer": None, "norm": False}),
    "vanilla": ("glide", {"glimpse": False}),
    "base": ("language model", {"layers": 3, "width": 192}),
    "small": ("language model", {"layers": 1, "width": 96}),
}
for family, variants in (
    ("edd", edd.VARIANTS),
    ("eagle", eagle.VARIANTS),
    ("medusa", medusa.VARIANTS),
    ("glide-shared", shared.GLIDE_VARIANTS),
    ("edd-shared", shared.EDD_VARIANTS),
):
    for name, settings in variants.items():
        DRAFTERS[name] = family, settings
# What "-l13" at the end of a name stands for: the setting of a family that 13 is.
NUMBERS = {
    "glide": {"l": "layer", "n": "layers", "w": "width"},
    "glide-shared": {"l": "layer", "f": "feed_forward"},
    "edd": {"h": "hidden"},
    "edd-shared": {"h": "hidden"},
}
NAMES = f"{' '.join(DRAFTERS)}, glide-lN, glide-nN, glide-wN, glide-shared-fN, edd-hN"

# ---------------------------------------------------------------- names -> modules
def named(name):
    """A drafter's name -> (family, settings).  UserError where it stands for nothing."""
    base, found = name, {}
    while base not in DRAFTERS:
        base, _, suffix = base.rpartition("-")
        numbered = re.fullmatch(r"([a-z])(\d+)", suffix)
        if suffix in ("norm", "nonorm"):
            found.setdefault("norm", suffix == "norm")
        elif numbered:
            found.setdefault(numbered[1], int(numbered[2]))
        else:
            raise UserError(f"cannot train {name}: name drafters among {NAMES}")
    family, settings = DRAFTERS[base]
    settings = dict(settings)
    for suffix, value in found.items():
        known = NUMBERS.get(family, {})
        if family.startswith("glide"):
            known = {**known, "norm": "norm"}
        if suffix not in known:
            raise UserError(f"cannot train {name}: {base} has no variants -{suffix}")
        settings[known[suffix]] = value
    return family, settings

def start(name, target, fingerprint, tokens, a):
    """The draft model that training starts with -> (module, training.json of --init or None).

    fingerprint: the target's.  tokens: the text to learn from, in which --words are counted.
    """
    family, settings = named(name)
    is_shared = family.endswith("shared")
    if not is_shared and (a.loss == "lk" or a.words):
        flag = "--words" if a.words else "--loss lk"
        raise UserError(f"{flag} serves drafters between the target's tables alone, and {name} is "
                        "none: leave it out, or train glide-shared, edd-shared ...")
    try:
        if a.init:
            return trained(name, target, fingerprint, a)
        module = fresh(family, settings, target, a)
    except ValueError as why:
        raise UserError(f"{name}: {why}") from None
    if a.words:
        eos = target.generation_config.eos_token_id
        eos = eos[0] if isinstance(eos, list) else eos
        learned = torch.from_numpy(tokens[tokens >= 0].astype("i8"))
        words = shared.frequent_words(learned, a.words, module.config.vocab, eos)
        module.choose_words(words)
    return module, None

def fresh(family, settings, target, a):
    """A draft model that has learned nothing."""
    torch.manual_seed(a.seed)                     # the same whatever else the run trains
    if family == "language model":
        return SmallLM(language_model(target, **settings).to(target.device), a.loss)
    draft_class, _ = families.KINDS[family]
    flags = {"loss": a.loss}
    if family.startswith("glide"):
        flags |= {"layer": a.layer, "norm": a.norm == "yes", "block": a.block}
    else:
        flags |= {"hidden": a.hidden}
    if family.endswith("shared"):
        flags |= {"words": a.words or 0}
    if family == "glide":
        flags |= {"width": a.width, "layers": a.layers}
        config = families.glide_config(target, **{**flags, **settings})
    else:
        config = draft_class.config_class.for_target(target, **{**flags, **settings})
    if not issubclass(draft_class, glide.Glide):
        return draft_class(config, target).float()
    module = draft_class.for_target(target, config, a.length + AHEAD).float()
    if family == "glide":
        module.start_from(target)                 # the tables, where the widths agree
    return module

def trained(name, target, fingerprint, a):
    """The draft model of --init -> (module, its training.json)."""
    family, settings = named(name)
    folder = Path(a.init) / name
    if family == "language model":
        lm, _ = load.load_target(folder, "float32", a.device, role="the small model")
        module, before = SmallLM(lm), load.about_drafter(folder)
    else:
        drafter, before = families.load(folder, target, a.length)
        module = drafter.model.float()
    if load.relation(before["target"], fingerprint) == "another":
        raise UserError(f"--init: the drafter {name} in {a.init} was made for another target")
    module.config.loss = settings.get("loss", a.loss)
    return module, before

def kind_of(name):
    """What training.json calls the kind of a drafter: what it is loaded by."""
    family, _ = named(name)
    return name if family == "language model" else families.kind_of(name)

def drafter_of(module):
    """What decodes with a draft model, by the contract of a drafter in verify.py."""
    if isinstance(module, SmallLM):
        return load.Stage(Target(module.lm))
    return families.drafter_of(module)

# ---------------------------------------------------------------- language models
def language_model(target, layers, width):
    """A Llama with random weights, for the target's vocabulary: heads of 32, tied embeddings."""
    c = target.config.get_text_config()
    heads = max(1, width // 32)
    config = transformers.LlamaConfig(
        vocab_size=c.vocab_size,
        hidden_size=width,
        intermediate_size=round(width * 8 / 3 / 64) * 64,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=any_target(target).capacity,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=c.eos_token_id,
        pad_token_id=None)
    return transformers.LlamaForCausalLM(config)

class SmallLM(torch.nn.Module):
    """A language model that learns as drafters do: by KL to the target, or by cross entropy."""

    def __init__(self, lm, loss="kl"):
        super().__init__()
        self.lm = lm
        self.config = SimpleNamespace(loss=loss)

    def divergence(self, x, target_logits):
        """D_KL(P_t || P), summed over n tokens.  x (n, D), target_logits (n, V) -> ()"""
        p_target = target_logits.float().softmax(-1)
        return edd.kl(p_target, self.lm.lm_head(x))

    def cross_entropy(self, x, labels):
        """Of the next token, summed over n tokens.  x (n, D), labels (n,) -> ()"""
        return F.cross_entropy(self.lm.lm_head(x).float(), labels, reduction="sum")

    def loss(self, batch):
        """The mean over the loss mask; see train.py for the batch."""
        out = self.lm.model(input_ids=batch["ids"], use_cache=False)
        x = out.last_hidden_state                                            # (B, T, D)
        loss, labels = self.divergence, batch["logits"]
        if self.config.loss == "ce":
            loss, labels = self.cross_entropy, batch["ids"].roll(-1, 1)
        return batch["sum"](loss, batch["learn"], x, labels) / batch["count"]

# ---------------------------------------------------------------- modules -> folders
def save(folder, module, tokenizer, about):
    """Save a draft model: its weights in bfloat16, and training.json, a dict of how it was made."""
    if isinstance(module, SmallLM):
        save_language_model(folder, module.lm, tokenizer)
    else:
        about = {"config": vars(module.config), **about}
        weights = in_bfloat16(module)
        write_atomically(folder / "model.safetensors",
                         lambda part: save_file(weights, part, {"format": "pt"}))
    about = json.dumps(about, indent=1) + "\n"
    write_atomically(folder / "training.json", lambda part: part.write_text(about))

def in_bfloat16(module):
    """The weights of a module, on the CPU; integers (a list of words) stay what they are."""
    found = {}
    for name, weight in module.state_dict().items():
        dtype = torch.bfloat16 if weight.is_floating_point() else weight.dtype
        found[name] = weight.to("cpu", dtype).contiguous()
    return found

def save_language_model(folder, lm, tokenizer):
    """Save a language model as transformers does: the whole folder, or nothing."""
    part = Path(f"{folder}.part")
    lm.save_pretrained(part, state_dict=in_bfloat16(lm))
    tokenizer.save_pretrained(part)
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(part, folder)
