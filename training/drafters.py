"""Draft models in training: from a name on the command line to a module with loss(batch); saving.

    glide, glide-top, vanilla      GLIDE with --layer and --norm; as in the paper; no glimpse
    glide-l13, edd-h9              reading layer 13 (GLIDE's Figure 7), hidden_states[9] (EDD's 5)
    glide-n2, glide-w256           of 2 layers, of width 256 (GLIDE's Figures 8 and 9)
    longspec, longspec-f768        a layer between the target's embedding and head; its MLP's size
    longspec-top, longspec-vanilla-f768      the same as glide-top and vanilla
    edd-shared, vdm-shared         EDD and VDM between the target's embedding and head
    edd, vdm, eagle, medusa ...    runtime_drafters.VARIANTS
    base, small                    language models, stages of a cascade
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
from safetensors import SafetensorError
from safetensors.torch import save_file

import edd
import glide
from beyond import eagle, longspec, medusa, shared
from runtime.text import UserError, write_atomically
from runtime import targets, load, drafters as runtime_drafters
from training import flags
from verify import Target

SIZES = {"base": (3, 192), "small": (1, 96)}      # language models: layers, width
AHEAD = 64                                        # positions of a drafter beyond --length
# What a name stands for: the file, None for a language model, and settings.
DRAFTERS = {
    "glide": (glide, {}),
    "glide-top": (glide, {"layer": None, "norm": False}),
    "vanilla": (glide, {"glimpse": False}),
    "longspec": (longspec, {"last_norm": True}),
    "longspec-top": (longspec, {"last_norm": True, "layer": None, "norm": False}),
    "longspec-vanilla": (longspec, {"last_norm": True, "glimpse": False}),
}
DRAFTERS |= runtime_drafters.VARIANTS
DRAFTERS |= {name: (None, size) for name, size in SIZES.items()}
# What a letter before a number stands for, in the names of drafters of a file.
NUMBERED = {
    (glide, "l"): "layer",
    (glide, "n"): "layers",
    (glide, "w"): "width",
    (longspec, "f"): "feed_forward",
    (edd, "h"): "hidden",
}
NAMES = f"{' '.join(DRAFTERS)}, glide-lN, glide-nN, glide-wN, longspec-fN, edd-hN"


# ---------------------------------------------------------------- names -> modules
def named(name):
    """What a drafter's name stands for -> (file, settings), or None."""
    numbered = re.fullmatch(r"(.+)-([a-z])(\d+)", name)
    if not numbered:
        return DRAFTERS.get(name)
    base, letter, number = numbered.groups()
    file, settings = DRAFTERS.get(base, (None, {}))
    setting = NUMBERED.get((file, letter))
    if setting and (int(number) or setting == "layer"):  # layers count from 0
        return file, {**settings, setting: int(number)}


def fresh(name, target, a):
    """A draft model for `target` that has learned nothing; a: train.py's flags."""
    file, settings = named(name)
    c = target.config.get_text_config()
    torch.manual_seed(a.seed)                            # each as if it were alone
    if file is None:
        layers, width = settings
        context = targets.context_of(target, c)
        lm = llama(c.vocab_size, layers, width, context, c.eos_token_id)
        return SmallLM(lm.to(a.device), a.loss)
    if file in (edd, shared, eagle, medusa):
        settings = {"hidden": a.hidden, "loss": a.loss, **settings}
        config = file.Config.for_target(target, **settings)
        draft_class, _ = runtime_drafters.KINDS[config.kind]
        return draft_class(config, target).float()
    if file is longspec:
        own = {"layer": a.layer, "norm": a.norm == "yes", "loss": a.loss, "block": a.block}
        settings = {**own, **settings}
        config = runtime_drafters.longspec_config(target, **settings)
        drafter = runtime_drafters.LongSpec.beside(target, config, a.length + AHEAD).float()
        drafter.start_from(target)
        return drafter
    own = {"width": a.width, "layers": a.layers, "layer": a.layer, "norm": a.norm == "yes"}
    own["loss"] = a.loss
    settings = {**own, **settings}
    check_size(settings["width"] or c.hidden_size, c.vocab_size, settings["layers"], a)
    config = runtime_drafters.glide_config(target, block=a.block, **settings)
    drafter = runtime_drafters.Glide.beside(target, config, a.length + AHEAD).float()
    # Embedding and head start as the target's, where the widths agree.
    drafter.start_from(target)
    return drafter


def trained(name, target, a):
    """The draft model that --init has -> (module, its training.json)."""
    file, _ = named(name)
    folder = Path(a.init) / name
    if file is None:
        lm, _ = load.load_target(folder, "float32", a.device, role="the small model")
        return SmallLM(lm, a.loss), load.about_drafter(folder)
    if file in (glide, longspec):
        drafter, about = runtime_drafters.load(glide, folder, target, a.length)
    else:
        drafter, about = runtime_drafters.load(edd, folder, target)
    return drafter.model.float(), about


def setting(module):
    """A draft model's config as training.json has it."""
    return json.loads(json.dumps(vars(module.config)))


def check_size(width, vocab, layers, a):
    """Refuse a GLIDE that cannot fit: 16 bytes a weight, with gradient and moments."""
    weights = 2 * vocab * width + 12 * layers * width ** 2
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if a.device.startswith("cuda"):
        memory = torch.cuda.mem_get_info(a.device)[1]
    if 16 * weights > memory:
        raise UserError(f"--width {width}: a drafter of {weights / 1e9:.1f} billion weights needs "
                        f"{16 * weights >> 30} GiB to train, and there are {memory >> 30}")


def begun(name, target, mine, a):
    """-> a draft model, fresh or from --init, and how that was made.

    mine: the target's fingerprint.
    """
    try:
        if not a.init:
            return fresh(name, target, a), None
        module, before = trained(name, target, a)
        given = flags.given_by_user(a)
        wanted = setting(fresh(name, target, a)) if given else {}
    except ValueError as why:
        raise UserError(str(why)) from None
    if load.relation(before["target"], mine) == "another":
        raise UserError(f"--init: the drafter {name} in {a.init} was made for another target")
    # --init fixes the architecture: a flag that asks for another would do nothing.
    found = setting(module)
    for flag in given:
        key = flags.ARCHITECTURE[flag]
        if wanted.get(key) != found.get(key):
            raise UserError(f"--init: the drafter {name} in {a.init} was not made with --{flag} "
                            f"{getattr(a, flag)}: leave that out, or train without --init")
    return module, before


def kind_of(name, before):
    """What training.json calls a drafter; before: that of --init's drafter, or None."""
    if before:
        return before.get("kind", name)
    return "glide" if name.startswith("glide") else name


# ---------------------------------------------------------------- language models
def llama(vocab, layers, width, context, eos=0):
    """A fresh Llama: heads of 32, an MLP of 8/3 the width in steps of 64, tied embeddings."""
    heads = max(1, width // 32)
    config = transformers.LlamaConfig(
        vocab_size=vocab,
        hidden_size=width,
        intermediate_size=round(width * 8 / 3 / 64) * 64,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=context,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=eos,
        pad_token_id=None)
    return transformers.LlamaForCausalLM(config)


class SmallLM(torch.nn.Module):
    """A language model that learns as drafters do: by KL to the target, or by cross entropy."""

    def __init__(self, lm, loss="kl"):
        super().__init__()
        self.lm = lm
        self.config = SimpleNamespace(loss=loss)

    def loss(self, batch):
        """D_KL(P_t || P), or the cross entropy of the next token: the mean over the loss mask."""
        def divergence(x, target_logits):
            p_target = target_logits.float().softmax(-1)
            return edd.kl(p_target, self.lm.lm_head(x))

        def cross_entropy(x, following):
            return F.cross_entropy(self.lm.lm_head(x).float(), following, reduction="sum")
        out = self.lm.model(input_ids=batch["ids"], use_cache=False)
        x = out.last_hidden_state                                            # (B, T, D)
        loss, labels = divergence, batch["logits"]
        if self.config.loss == "ce":
            loss, labels = cross_entropy, batch["ids"].roll(-1, 1)
        return batch["sum"](loss, batch["learn"], x, labels) / batch["count"]

    def drafter(self):
        return load.Stage(Target(self.lm))


# ---------------------------------------------------------------- modules -> folders
def save(folder, module, tokenizer, about):
    """A trained draft model in a folder, in bfloat16, with training.json: how it was made."""
    if isinstance(module, SmallLM):
        save_lm(folder, module.lm, tokenizer, about)
        return
    weights = {}
    for name, weight in module.state_dict().items():
        weights[name] = weight.to("cpu", torch.bfloat16).contiguous()
    about = {"config": vars(module.config), **about}
    text = json.dumps(about, indent=1) + "\n"
    write_atomically(folder / "model.safetensors",
                     lambda part: save_file(weights, part, {"format": "pt"}))
    write_atomically(folder / "training.json", lambda part: part.write_text(text))


def save_lm(folder, model, tokenizer, about):
    """A language model as Hugging Face saves it, in bfloat16, and training.json, file by file."""
    folder, part = Path(folder), Path(f"{folder}.part")
    try:
        copy.deepcopy(model).to("cpu", torch.bfloat16).save_pretrained(part)
        tokenizer.save_pretrained(part)
        (part / "training.json").write_text(json.dumps(about, indent=1) + "\n")
        folder.mkdir(parents=True, exist_ok=True)
        for file in part.iterdir():
            if file.is_dir():                    # say of several chat templates
                shutil.rmtree(folder / file.name, ignore_errors=True)
            os.replace(file, folder / file.name)
    except (OSError, SafetensorError) as why:
        why = f"{folder} cannot be written ({why}): what was there is still there"
        raise UserError(why) from None
    finally:
        shutil.rmtree(part, ignore_errors=True)
