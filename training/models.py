"""What train.py trains: from a call on its command line to a draft model, and to a folder.

    calls = calls_of(["top=glide(norm=False)", "edd"])       # {name of its folder: Call}
    module = new(calls["top"], target, length=512, tokens=ids)
    save("my-drafters/top", module, tokenizer, about)        # about: a dict, for training.json
"""
import json
import re
from datetime import date
from functools import partial
from types import SimpleNamespace

import torch
import transformers
from safetensors.torch import save_model

import edd
from beyond import shared
from cascade import Cascade
from runtime import families
from runtime.calls import read_call
from runtime.program import UserError
from runtime.provenance import commit
from runtime.targets import context_of
from training import evaluate
from verify import Target

# ---------------------------------------------------------------- language models
class SmallLM(torch.nn.Module):
    """A Llama for the target's vocabulary that learns as drafters do, by KL or cross entropy."""

    def __init__(self, target, tokens, layers, width, loss):
        """Random weights, heads of 32, tied embeddings.  tokens: as of draft_model, not used."""
        super().__init__()
        c = target.config.get_text_config()
        config = transformers.LlamaConfig(
            vocab_size=c.vocab_size,
            hidden_size=width,
            intermediate_size=round(width * 8 / 3 / 64) * 64,
            num_hidden_layers=layers,
            num_attention_heads=max(1, width // 32),
            max_position_embeddings=context_of(c),
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=c.eos_token_id)
        self.lm = transformers.LlamaForCausalLM(config).to(target.device)
        self.head = partial(self.lm.lm_head)   # a function: no second name of its weights
        self.config = SimpleNamespace(loss=loss, hidden=None)

    terms, loss_of = edd.EDD.terms, edd.EDD.loss_of

    def forward(self, ids, hidden, block):
        """As edd.EDD.forward, by the ids (B, T) alone -> (B, T, D)"""
        return self.lm.model(input_ids=ids, use_cache=False).last_hidden_state

# ---------------------------------------------------------------- the drafters
def draft_model(kind, target, tokens, **settings):
    """A draft model with new weights, in float32.

    kind: a key of families.KINDS.  tokens: as of new().  settings: tables, words (see below), and
    those of its Config.
    """
    tables, words = settings.pop("tables", None), settings.pop("words", None)
    config_class, _ = families.KINDS[kind]
    config = config_class.for_target(target, **settings)
    if words is not None:
        learned = torch.from_numpy(tokens[tokens >= 0].astype("i8"))
        ends = target.generation_config.eos_token_id
        words = shared.frequent_words(learned, words, config.vocab, ends)
    module = families.new(config, target, words).float()
    if tables == "target":
        copies = families.embedding_of(target), families.head_of(target)
        for own, copied in zip((module.embed, module.head), copies):
            if own.weight.shape == copied.weight.shape:
                own.weight.data.copy_(copied.weight)
    return module

# Settings, beside those of the paper in the file of each drafter:
#   layer     the target's layer that GLIDE's last layer reads; None: the top one, as in the paper
#   norm      whether a norm precedes the glimpse, which the paper does not have
#   tables    "target", or "random" as in the paper: how GLIDE's embedding and LM head begin
#   hidden    which of the hidden_states EDD reads; -4: the fourth-to-last, as in the paper
#   words     how many tokens, the most frequent of the text, are learned and drafted alone
RECIPES = {
    # GLIDE (GLIDE, 4.1), and without the glimpse (Figure 4)
    "glide": partial(draft_model, "glide", layer=None, norm=True, layers=1, width=None, block=5,
                     loss="kl", tables="target"),
    "vanilla": partial(draft_model, "vanilla", glimpse=False, layers=1, width=None, loss="kl",
                       tables="target"),
    # EDD (EDD, 3.1), and the vanilla draft model (appendix A)
    "edd": partial(draft_model, "edd", hidden=edd.HIDDEN, loss="kl", blocks=edd.BLOCKS),
    "vdm": partial(draft_model, "vdm", hidden=-1, encoding=False, loss="kl"),
    # The baselines of EDD's Table 1: EAGLE-1, MEDUSA-1
    "eagle": partial(draft_model, "eagle"),
    "medusa": partial(draft_model, "medusa", heads=5),
    # Between the target's own embedding and head (beyond/shared.py)
    "glide-shared": partial(draft_model, "glide-shared", layer=None, norm=True, feed_forward=None,
                            words=None),
    "vanilla-shared": partial(draft_model, "vanilla-shared", glimpse=False, feed_forward=None,
                              words=None),
    "edd-shared": partial(draft_model, "edd-shared", hidden=edd.HIDDEN, words=None),
    "vdm-shared": partial(draft_model, "vdm-shared", hidden=-1, encoding=False, words=None),
    # Language models: the stages of a cascade (Cascade, 5)
    "base": partial(SmallLM, layers=3, width=192, loss="kl"),
    "small": partial(SmallLM, layers=1, width=96, loss="kl"),
}
# The values of settings that are words, the default first
CHOICES = {"loss": ("kl", "ce"), "tables": ("target", "random")}

# ---------------------------------------------------------------- from a call to a folder
def calls_of(given):
    """["top=glide(norm=False)", "edd"] -> {"top": Call, "edd": Call}, by the names of folders"""
    calls = {}
    for text in given:
        name, text = re.fullmatch(r"(?:([\w.-]+) *=)?(.*)", text).groups()
        call = read_call(text, RECIPES, "drafter")
        name = name or call.name
        if name in calls:
            raise UserError(f"two drafters are called {name}: name one of them, say "
                            f'"{name}-2={call.label}"')
        calls[name] = call
    return calls

def new(call, target, length, tokens):
    """The draft model of a Call of RECIPES, with new weights.

    length: the longest piece of text.  tokens (n,): those to learn from, as of train.py.
    """
    context = context_of(target.config.get_text_config())
    if length > context:
        raise UserError(f"--length {length} is more than the target's context of {context}")
    for name, choices in CHOICES.items():
        if call.settings.get(name, choices[0]) not in choices:
            raise UserError(f"{call.label}: choose {name}={' or '.join(map(repr, choices))}")
    try:
        return call.function(target, tokens, **call.settings)
    except (ValueError, TypeError) as why:
        raise UserError(f"{call.label}: {why}") from None

def drafter_of(kind, module):
    """What decodes with a draft model of a kind, by the contract of a drafter in verify.py."""
    if isinstance(module, SmallLM):
        return Cascade([Target(module.lm)], K=[[evaluate.CHAIN]])
    _, drafter_class = families.KINDS[kind]
    return drafter_class(module)

def save(folder, module, tokenizer, about):
    """Save a draft model in its own precision.  about: a dict of how it was made."""
    if isinstance(module, SmallLM):
        module.lm.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    else:
        folder.mkdir(parents=True, exist_ok=True)
        save_model(module, folder / "model.safetensors", {"format": "pt"})
        about = {"config": vars(module.config), **about}
    # By training.json a folder is known as a drafter's: it comes last.
    about = {"commit": commit(), "date": date.today().isoformat(), **about}
    (folder / "training.json").write_text(json.dumps(about, indent=1) + "\n")
