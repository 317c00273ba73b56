"""What train.py trains: from a call on its command line to a draft model, and to a folder.

    calls = calls_of(["top=glide(norm=False)", "edd"])       # {name of its folder: Call}
    module = new(calls["top"], target, length=512, tokens=ids)
    save("my-drafters/top", module, tokenizer, about)        # about: a dict, for training.json
"""
import copy
import inspect
import json
from functools import partial
from types import SimpleNamespace

import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import save_file

from beyond import shared
from cascade import Cascade
from edd import BLOCKS, HIDDEN, kl
from runtime import families
from runtime.calls import read_call
from runtime.program import UserError
from runtime.provenance import commit
from runtime.targets import context_of
from training import evaluate
from verify import Target

# ---------------------------------------------------------------- language models
def stage(target, tokens, layers, width, loss="kl"):
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
    return SmallLM(transformers.LlamaForCausalLM(config).to(target.device), loss)

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

# ---------------------------------------------------------------- the drafters
def recipe(kind, fixed={}, **defaults):
    """A function (target, tokens, **settings) -> draft model with new weights, in float32.

    kind: a key of families.KINDS.  fixed: settings of its Config.  defaults: those that the command
    line may give, with their defaults.
    """
    def build(target, tokens, **given):
        settings = {**fixed, **defaults, **given}
        tables, count = settings.pop("tables", None), settings.pop("words", None)
        if tables not in (None, "target", "random"):
            raise ValueError(f'tables={tables!r}: choose "target" or "random"')
        config_class, _ = families.KINDS[kind]
        config = config_class.for_target(target, **settings)
        words = None if count is None else frequent_words(target, tokens, count)
        module = families.new(config, target, words).float()
        if tables == "target":
            start_from(module, target)
        return module

    # What runtime/calls.py reads
    build.__signature__ = inspect.Signature([
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=value)
        for name, value in defaults.items()])
    return build

def frequent_words(target, tokens, count):
    """The `count` most frequent of the tokens that are learned, and the end of text -> (count,)"""
    eos = target.generation_config.eos_token_id
    eos = eos[0] if isinstance(eos, list) else eos
    learned = torch.from_numpy(tokens[tokens >= 0].astype("i8"))
    return shared.frequent_words(learned, count, target.config.get_text_config().vocab_size, eos)

def start_from(module, target):
    """Let a GLIDE's embedding and head start as the target's, where the widths agree."""
    for own, copy_of in ((module.embed, families.embedding_of), (module.head, families.head_of)):
        weight = copy_of(target).weight
        if own.weight.shape == weight.shape:
            own.weight.data.copy_(weight)

VANILLA = {"glimpse": False}
VDM = {"hidden": -1, "encoding": False}

# Settings, beside those of the paper in the file of each drafter:
#   layer     the target's layer that GLIDE's last layer reads; None: the top one, as in the paper
#   norm      whether a norm precedes the glimpse, which the paper does not have
#   tables    "target", or "random" as in the paper: how GLIDE's embedding and LM head begin
#   hidden    which of the hidden_states EDD reads; -4: the fourth-to-last, as in the paper
#   words     how many tokens, the most frequent of the text, are learned and drafted alone
RECIPES = {
    # GLIDE (GLIDE, 4.1), and without the glimpse (Figure 4)
    "glide": recipe("glide", layer=None, norm=True, layers=1, width=None, block=5, loss="kl",
                    tables="target"),
    "vanilla": recipe("vanilla", VANILLA, layers=1, width=None, loss="kl", tables="target"),
    # EDD (EDD, 3.1), and the vanilla draft model (appendix A)
    "edd": recipe("edd", hidden=HIDDEN, loss="kl", blocks=BLOCKS),
    "vdm": recipe("vdm", VDM, loss="kl"),
    # The baselines of EDD's Table 1: EAGLE-1, MEDUSA-1
    "eagle": recipe("eagle"),
    "medusa": recipe("medusa", heads=5),
    # Between the target's own embedding and head (beyond/shared.py)
    "glide-shared": recipe("glide-shared", layer=None, feed_forward=None, words=None, loss="kl",
                           norm=True),
    "vanilla-shared": recipe("vanilla-shared", VANILLA, feed_forward=None, words=None, loss="kl"),
    "edd-shared": recipe("edd-shared", hidden=HIDDEN, words=None, loss="kl"),
    "vdm-shared": recipe("vdm-shared", VDM, words=None, loss="kl"),
    # Language models: the stages of a cascade (Cascade, 5)
    "base": partial(stage, layers=3, width=192),
    "small": partial(stage, layers=1, width=96),
}

# ---------------------------------------------------------------- from a call to a folder
def calls_of(given):
    """["top=glide(norm=False)", "edd"] -> {"top": Call, "edd": Call}, by the names of folders"""
    calls = {}
    for text in given:
        name, equals, rest = text.partition("=")
        is_named = equals and "(" not in name
        call = read_call(rest if is_named else text, RECIPES, "drafter")
        name = name.strip() if is_named else call.name
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
        return Cascade([Target(module.lm)], K=[[evaluate.CHAIN]])
    _, drafter_class = families.KINDS[kind]
    return drafter_class(module)

def save(folder, module, tokenizer, about):
    """Save a draft model, its weights in bfloat16.  about: a dict of how it was made."""
    if isinstance(module, SmallLM):
        copy.deepcopy(module.lm).to(torch.bfloat16).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return save_about(folder, about)
    weights = {}
    for name, weight in module.state_dict().items():
        if weight.is_floating_point():                                 # a list of words is not
            weight = weight.to(torch.bfloat16)
        weights[name] = weight.cpu()
    save_weights(folder, module, weights, about)

def save_weights(folder, module, weights, about):
    """Save weights {name: tensor} as those of a draft model."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: weight.contiguous() for name, weight in weights.items()}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    save_about(folder, {"config": vars(module.config), **about})

def save_about(folder, about):
    """Write training.json, by which a folder is known as a drafter's: it comes last."""
    about = json.dumps({"commit": commit(), **about}, indent=1)
    (folder / "training.json").write_text(about + "\n")
