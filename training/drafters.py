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
import copy
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
from beyond import shared
from runtime import drafters as families
from runtime import load
from runtime.targets import any_target
from runtime.text import write_atomically
from verify import Target, UserError

AHEAD = 64                                        # positions of a drafter beyond --length
LANGUAGE_MODELS = {
    "base": {"layers": 3, "width": 192},
    "small": {"layers": 1, "width": 96},
}
# What a name stands for: settings of its Config
SETTINGS = {
    "glide": {},
    "glide-top": {"layer": None, "norm": False},
    "vanilla": {"glimpse": False},
    **families.VARIANTS,
    **LANGUAGE_MODELS,
}
# What "-l13" at the end of a name stands for: the setting of this class that 13 is.
NUMBERS = {
    families.Glide: {"l": "layer", "n": "layers", "w": "width"},
    families.GlideShared: {"l": "layer", "f": "feed_forward"},
    families.EDD: {"h": "hidden"},
    families.EDDShared: {"h": "hidden"},
}
NAMES = f"{' '.join(SETTINGS)}, glide-lN, glide-nN, glide-wN, glide-shared-fN, edd-hN"

# ---------------------------------------------------------------- names -> modules
def named(name):
    """A drafter's name -> (class of its draft model, settings of its Config).

    The class is None for a language model.  UserError where the name stands for nothing.
    """
    base, found = name, {}
    while base not in SETTINGS:
        base, _, suffix = base.rpartition("-")
        numbered = re.fullmatch(r"([a-z])(\d+)", suffix)
        if suffix in ("norm", "nonorm"):
            found.setdefault("norm", suffix == "norm")
        elif numbered:
            found.setdefault(numbered[1], int(numbered[2]))
        else:
            raise UserError(f"cannot train {name}: name drafters among {NAMES}")
    settings = dict(SETTINGS[base])
    if base in LANGUAGE_MODELS:
        draft_class, known = None, {}
    else:
        draft_class, _ = families.KINDS[families.kind_of(base)]
        known = dict(NUMBERS.get(draft_class, {}))
        if issubclass(draft_class, glide.Glide):
            known["norm"] = "norm"
    for suffix, value in found.items():
        if suffix not in known:
            raise UserError(f"cannot train {name}: {base} has no variants -{suffix}")
        settings[known[suffix]] = value
    return draft_class, settings

def start(name, target, fingerprint, tokens, a):
    """The draft model that training starts with -> (module, training.json of --init or None).

    fingerprint: the target's.  tokens: the text to learn from, in which --words are counted.
    """
    draft_class, settings = named(name)
    is_shared = draft_class is not None and issubclass(draft_class, shared.BetweenTables)
    if not is_shared and (a.loss == "lk" or a.words):
        flag = "--words" if a.words else "--loss lk"
        raise UserError(f"{flag} serves drafters between the target's tables alone, and {name} is "
                        "none: leave it out, or train glide-shared, edd-shared ...")
    try:
        if a.init:
            return trained(name, target, fingerprint, a)
        module = fresh(draft_class, settings, target, a)
    except ValueError as why:
        raise UserError(f"{name}: {why}") from None
    if a.words:
        eos = target.generation_config.eos_token_id
        eos = eos[0] if isinstance(eos, list) else eos
        learned = torch.from_numpy(tokens[tokens >= 0].astype("i8"))
        words = shared.frequent_words(learned, a.words, module.config.vocab, eos)
        module.choose_words(words)
    return module, None

def fresh(draft_class, settings, target, a):
    """A draft model that has learned nothing."""
    torch.manual_seed(a.seed)                     # the same whatever else the run trains
    if draft_class is None:
        return SmallLM(language_model(target, **settings).to(target.device), a.loss)
    is_glide = issubclass(draft_class, glide.Glide)
    flags = {"loss": a.loss}
    if is_glide:
        flags |= {"layer": a.layer, "norm": a.norm == "yes", "block": a.block}
    else:
        flags |= {"hidden": a.hidden}
    if issubclass(draft_class, shared.BetweenTables):
        flags |= {"words": a.words or 0}
    if draft_class is families.Glide:
        flags |= {"width": a.width, "layers": a.layers}
        config = families.glide_config(target, **{**flags, **settings})
    else:
        config = draft_class.config_class.for_target(target, **{**flags, **settings})
    if not is_glide:
        return draft_class(config, target).float()
    module = draft_class.for_target(target, config, a.length + AHEAD).float()
    if draft_class is families.Glide and a.tables == "target":
        module.start_from(target)                 # the tables, where the widths agree
    return module

def trained(name, target, fingerprint, a):
    """The draft model of --init -> (module, its training.json)."""
    draft_class, settings = named(name)
    folder = Path(a.init) / name
    if draft_class is None:
        lm, _ = load.load_target(folder, "float32", a.device, role="the small model")
        module, before = SmallLM(lm), load.about_drafter(folder)
    else:
        drafter, before = families.load(folder, target, a.length)
        module = drafter.model.float()
    if not load.fits(before["target"], fingerprint):
        raise UserError(f"--init: the drafter {name} in {a.init} was made for another target")
    module.config.loss = settings.get("loss", a.loss)
    return module, before

def kind_of(name):
    """What training.json calls the kind of a drafter: what it is loaded by."""
    named(name)                                   # refuses what it does not know
    return name if name in LANGUAGE_MODELS else families.kind_of(name)

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

    def loss_of(self, x, labels):
        """Summed over n tokens.  x (n, D).  labels: the target's logits (n, V);
        with the loss "ce" the next tokens (n,).
        """
        logits = self.lm.lm_head(x)
        if self.config.loss == "ce":
            return F.cross_entropy(logits.float(), labels, reduction="sum")
        return edd.kl(labels, logits)

    def loss(self, batch):
        """The mean over the loss mask; see train.py for the batch."""
        out = self.lm.model(input_ids=batch["ids"], use_cache=False)
        x = out.last_hidden_state                                            # (B, T, D)
        next_tokens = batch["ids"].roll(-1, 1)
        labels = next_tokens if self.config.loss == "ce" else batch["logits"]
        return batch["sum"](self.loss_of, batch["learn"], x, labels) / batch["count"]

# ---------------------------------------------------------------- modules -> folders
def save(folder, module, tokenizer, about):
    """Save a draft model: its weights in bfloat16, and training.json, a dict of how it was made."""
    if isinstance(module, SmallLM):
        save_language_model(folder, module.lm, tokenizer, about)
        return
    about = {"config": vars(module.config), **about}
    weights = in_bfloat16(module)
    write_atomically(folder / "model.safetensors",
                     lambda part: save_file(weights, part, {"format": "pt"}))
    about = json.dumps(about, indent=1) + "\n"
    write_atomically(folder / "training.json", lambda part: part.write_text(about))

def save_language_model(folder, lm, tokenizer, about):
    """Save a language model in bfloat16, with its tokenizer and training.json, whole or not at all."""
    part = folder.with_name(folder.name + ".part")
    copy.deepcopy(lm).to(torch.bfloat16).save_pretrained(part)
    tokenizer.save_pretrained(part)
    (part / "training.json").write_text(json.dumps(about, indent=1) + "\n")
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(part, folder)

def in_bfloat16(module):
    """The weights of a module, on the CPU; integers (a list of words) stay what they are."""
    found = {}
    for name, weight in module.state_dict().items():
        dtype = torch.bfloat16 if weight.is_floating_point() else weight.dtype
        found[name] = weight.to("cpu", dtype).contiguous()
    return found
