"""What train.py trains: from a call on its command line to a draft model, and to a folder.

    calls = calls_of(["top=glide(norm=False)", "edd"])       # {name of its folder: Call}
    module = new(calls["top"], target, length=512, tokens=ids)
    save("my-drafters/top", module, tokenizer, about)        # about: a dict, for training.json

The functions in RECIPES are the drafters that train.py knows, and their keywords are the settings.
"""
import copy
import json
import re
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import save_file

from beyond import shared
from beyond.stage import Stage
from edd import BLOCKS, HIDDEN, kl
from runtime import families
from runtime.calls import read_call
from runtime.errors import UserError
from runtime.provenance import commit
from runtime.targets import context_of
from verify import Target

# ---------------------------------------------------------------- the drafters
def built(kind, target, text, words=None, **settings):
    """A draft model with new weights, in float32.  kind: a key of families.KINDS.

    text (n,): the ids to learn from, those of prompts as ~id, in which `words` are counted.
    """
    config_class, _, _ = families.KINDS[kind]
    config = config_class.for_target(target, **settings)
    if words is not None:
        eos = target.generation_config.eos_token_id
        eos = eos[0] if isinstance(eos, list) else eos
        learned = torch.from_numpy(text[text >= 0].astype("i8"))
        words = shared.frequent_words(learned, words, config.vocab, eos)
    return families.new(kind, config, target, words).float()

def glide(target, text, layer=None, norm=True, layers=1, width=None, block=5, loss="kl",
          tables="target"):
    """GLIDE (GLIDE, 4.1).

    layer: the target's layer that its last layer reads; None: the top one, as in the paper.  norm:
    a norm before the glimpse, which the paper does not have.  tables: "target", or "random" as in
    the paper: how embedding and LM head begin.
    """
    return with_tables(target, tables, built("glide", target, text, layer=layer, norm=norm,
                                             layers=layers, width=width, block=block, loss=loss))

def vanilla(target, text, layers=1, width=None, loss="kl", tables="target"):
    """GLIDE without the glimpse (GLIDE, Figure 4)."""
    return with_tables(target, tables, built("vanilla", target, text, glimpse=False,
                                             layers=layers, width=width, loss=loss))

def with_tables(target, tables, model):
    """A Glide, whose embedding and head start as the target's where the widths agree."""
    if tables not in ("target", "random"):
        raise ValueError(f'tables={tables!r}: choose "target" or "random"')
    if tables == "target":
        for own, copy_of in ((model.embed, families.embedding_of), (model.head, families.head_of)):
            weight = copy_of(target).weight
            if own.weight.shape == weight.shape:
                own.weight.data.copy_(weight)
    return model

def edd(target, text, hidden=HIDDEN, loss="kl", blocks=BLOCKS):
    """EDD (EDD, 3.1).

    hidden: which hidden_states it reads; -4: the fourth-to-last, as there.  blocks: the range of L.
    """
    return built("edd", target, text, hidden=hidden, loss=loss, blocks=blocks)

def vdm(target, text, loss="kl"):
    """The vanilla draft model (EDD, appendix A)."""
    return built("vdm", target, text, hidden=-1, encoding=False, loss=loss)

def eagle(target, text):
    """EAGLE-1 (EDD, Table 1)."""
    return built("eagle", target, text)

def medusa(target, text, heads=5):
    """MEDUSA-1 (EDD, Table 1)."""
    return built("medusa", target, text, heads=heads)

def glide_shared(target, text, layer=None, feed_forward=None, words=None, loss="kl", norm=True):
    """GLIDE between the target's own embedding and head (beyond/shared.py).

    words: the most frequent tokens of the text, so many, are learned and drafted alone.
    """
    return built("glide-shared", target, text, words, layer=layer, feed_forward=feed_forward,
                 loss=loss, norm=norm)

def vanilla_shared(target, text, feed_forward=None, words=None, loss="kl"):
    """GLIDE without the glimpse, between the target's own embedding and head."""
    return built("vanilla-shared", target, text, words, feed_forward=feed_forward, loss=loss,
                 glimpse=False)

def edd_shared(target, text, hidden=HIDDEN, words=None, loss="kl"):
    """EDD between the target's own embedding and head."""
    return built("edd-shared", target, text, words, hidden=hidden, loss=loss)

def vdm_shared(target, text, words=None, loss="kl"):
    """The vanilla draft model between the target's own embedding and head."""
    return built("vdm-shared", target, text, words, hidden=-1, encoding=False, loss=loss)

def base(target, text, layers=3, width=192, loss="kl"):
    """A language model: the larger stage of a cascade (Cascade, 5)."""
    return SmallLM(language_model(target, layers, width), loss)

def small(target, text, layers=1, width=96, loss="kl"):
    """A language model: the smaller stage of a cascade (Cascade, 5)."""
    return SmallLM(language_model(target, layers, width), loss)

RECIPES = {
    "glide": glide, "vanilla": vanilla, "edd": edd, "vdm": vdm, "eagle": eagle, "medusa": medusa,
    "glide-shared": glide_shared, "vanilla-shared": vanilla_shared, "edd-shared": edd_shared,
    "vdm-shared": vdm_shared, "base": base, "small": small}

def calls_of(given):
    """["top=glide(norm=False)", "edd"] -> {"top": Call, "edd": Call}, by the names of folders"""
    calls = {}
    for text in given:
        name, equals, rest = text.partition("=")
        is_named = equals and "(" not in name
        call = read_call(rest if is_named else text, RECIPES, "drafter")
        name = name.strip() if is_named else call.name
        if not re.fullmatch(r"\w[\w.-]*", name):
            raise UserError(f"{text}: {name!r} cannot be the name of a folder, my-{call.name} can")
        if name in calls:
            raise UserError(f"two drafters are called {name}: name one of them, say "
                            f'"{name}-2={call.label}"')
        calls[name] = call
    return calls

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
        max_position_embeddings=context_of(c),
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=c.eos_token_id,
        pad_token_id=None)
    return transformers.LlamaForCausalLM(config).to(target.device)

class SmallLM(torch.nn.Module):
    """A language model that learns as drafters do: by KL to the target, or by cross entropy."""

    def __init__(self, lm, loss="kl"):
        super().__init__()
        self.lm = lm
        self.config = SimpleNamespace(loss=loss)

    def terms(self, batch, block):
        """As glide.Glide.terms."""
        x = self.lm.model(input_ids=batch.ids, use_cache=False).last_hidden_state    # (B, T, D)
        labels = batch.ids.roll(-1, 1) if self.config.loss == "ce" else batch.logits
        return [(x, labels, None)]

    def loss_of(self, x, labels):
        """As glide.Glide.loss_of."""
        logits = self.lm.lm_head(x)
        if self.config.loss == "ce":
            return F.cross_entropy(logits.float(), labels, reduction="sum")
        return kl(labels, logits)

# ---------------------------------------------------------------- from a call to a folder
def new(call, target, length, tokens):
    """The draft model of a Call of RECIPES, with new weights.

    length: the longest piece of text.  tokens: the text, as in built.
    """
    context = context_of(target.config.get_text_config())
    if length > context:
        raise UserError(f"--length {length} is more than the target's context of {context}")
    losses = ("kl", "lk") if call.name.endswith("-shared") else ("kl", "ce")
    if call.settings.get("loss", "kl") not in losses:
        raise UserError(f"{call.label}: it learns by the loss {' or '.join(losses)}")
    try:
        return call.function(target, tokens, **call.settings)
    except (ValueError, TypeError) as why:
        raise UserError(f"{call.label}: {why}") from None

def drafter_of(kind, module):
    """What decodes with a draft model of a kind, by the contract of a drafter in verify.py."""
    if isinstance(module, SmallLM):
        return Stage(Target(module.lm))
    _, _, drafter_class = families.KINDS[kind]
    return drafter_class(module)

@contextmanager
def checkpoint(folder, about):
    """Yield the folder of a checkpoint, to write weights there.  training.json comes last: a folder
    that has it is complete.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "training.json").unlink(missing_ok=True)
    yield folder
    about = json.dumps({"commit": commit(), **about}, indent=1)
    (folder / "training.json").write_text(about + "\n")

def save(folder, module, tokenizer, about):
    """Save a draft model, its weights in bfloat16.  about: a dict of how it was made."""
    if isinstance(module, SmallLM):
        with checkpoint(folder, about) as folder:
            copy.deepcopy(module.lm).to(torch.bfloat16).save_pretrained(folder)
            tokenizer.save_pretrained(folder)
        return
    weights = {}
    for name, weight in module.state_dict().items():
        if weight.is_floating_point():                                 # a list of words is not
            weight = weight.to(torch.bfloat16)
        weights[name] = weight.cpu().contiguous()
    with checkpoint(folder, {"config": vars(module.config), **about}) as folder:
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
