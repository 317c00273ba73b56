"""What train.py trains: from a call on its command line to a draft model, and to a folder.

    calls = calls_of(["top=glide(norm=False)", "edd"])       # {name of its folder: Call}
    module, _ = start(calls["top"], target, fingerprint, length=512, tokens=ids)
    save("my-drafters/top", module, tokenizer, about)        # about: a dict, for training.json

The functions in RECIPES are the drafters that train.py knows, and their keywords are the settings.
"""
import copy
import inspect
import json
import re
from collections import namedtuple
from types import SimpleNamespace

import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import save_file

from beyond import shared
from edd import BLOCKS, HIDDEN, kl
from glide import TREE_POSITIONS
from runtime import families, load
from runtime.calls import read_call
from runtime.errors import UserError
from runtime.program import folder_atomically
from runtime.provenance import commit
from runtime.targets import context_of
from verify import Target

# What a draft model is built with beside its settings
#   length   int: the longest piece of text
#   tokens   (n,): the ids to learn from, those of prompts as ~id, in which `words` are counted
Options = namedtuple("Options", "length tokens")

# ---------------------------------------------------------------- the drafters
def new(kind, target, options, words=None, **settings):
    """A draft model with new weights, in float32.  kind: a key of families.KINDS."""
    config_class, _, _ = families.KINDS[kind]
    config = config_class.for_target(target, **settings)
    if words is not None:
        eos = target.generation_config.eos_token_id
        eos = eos[0] if isinstance(eos, list) else eos
        learned = torch.from_numpy(options.tokens[options.tokens >= 0].astype("i8"))
        words = shared.frequent_words(learned, words, config.vocab, eos)
    # Drafted tokens may lie beyond the longest text.
    length = options.length + TREE_POSITIONS
    return families.new(kind, config, target, length, words).float()

def glide(target, options, layer=None, norm=True, layers=1, width=None, block=5, loss="kl",
          tables="target"):
    """GLIDE (GLIDE, 4.1).

    layer: the target's layer that its last layer reads; None: the top one, as in the paper.  norm:
    a norm before the glimpse, which the paper does not have.  tables: "target", or "random" as in
    the paper: how embedding and LM head begin.
    """
    return with_tables(target, tables, new("glide", target, options, layer=layer, norm=norm,
                                           layers=layers, width=width, block=block, loss=loss))

def vanilla(target, options, layers=1, width=None, loss="kl", tables="target"):
    """GLIDE without the glimpse (GLIDE, Figure 4)."""
    return with_tables(target, tables, new("vanilla", target, options, glimpse=False,
                                           layers=layers, width=width, loss=loss))

def with_tables(target, tables, model):
    """A Glide, with the target's embedding and head as its own where the widths agree."""
    if tables not in ("target", "random"):
        raise ValueError(f'tables={tables!r}: choose "target" or "random"')
    if tables == "target":
        model.start_from(families.embedding_of(target), families.head_of(target))
    return model

def edd(target, options, hidden=HIDDEN, loss="kl", blocks=BLOCKS):
    """EDD (EDD, 3.1).

    hidden: which hidden_states it reads; -4: the fourth-to-last, as there.  blocks: the range of L.
    """
    low, high = blocks
    if not 1 <= low <= high:
        raise ValueError(f"blocks={blocks!r}: give the shortest and the longest block, as (5, 10)")
    return new("edd", target, options, hidden=hidden, loss=loss, blocks=(low, high))

def vdm(target, options, loss="kl"):
    """The vanilla draft model (EDD, appendix A)."""
    return new("vdm", target, options, hidden=-1, encoding=False, loss=loss)

def eagle(target, options):
    """EAGLE-1 (EDD, Table 1)."""
    return new("eagle", target, options)

def medusa(target, options, heads=5):
    """MEDUSA-1 (EDD, Table 1)."""
    return new("medusa", target, options, heads=heads)

def glide_shared(target, options, layer=None, feed_forward=None, words=None, loss="kl",
                 norm=True):
    """GLIDE between the target's own embedding and head (beyond/shared.py).

    words: the most frequent tokens of the text, so many, are learned and drafted alone.
    norm: a norm before the glimpse, which the paper does not have.
    """
    return new("glide-shared", target, options, words, layer=layer, feed_forward=feed_forward,
               loss=loss, norm=norm)

def vanilla_shared(target, options, feed_forward=None, words=None, loss="kl"):
    """GLIDE without the glimpse, between the target's own embedding and head."""
    return new("vanilla-shared", target, options, words, feed_forward=feed_forward, loss=loss,
               glimpse=False)

def edd_shared(target, options, hidden=HIDDEN, words=None, loss="kl"):
    """EDD between the target's own embedding and head."""
    return new("edd-shared", target, options, words, hidden=hidden, loss=loss)

def vdm_shared(target, options, words=None, loss="kl"):
    """The vanilla draft model between the target's own embedding and head."""
    return new("vdm-shared", target, options, words, hidden=-1, encoding=False, loss=loss)

def base(target, options, layers=3, width=192, loss="kl"):
    """A language model: the larger stage of a cascade (Cascade, 5)."""
    return SmallLM(language_model(target, layers, width), loss)

def small(target, options, layers=1, width=96, loss="kl"):
    """A language model: the smaller stage of a cascade (Cascade, 5)."""
    return SmallLM(language_model(target, layers, width), loss)

RECIPES = {
    "glide": glide, "vanilla": vanilla, "edd": edd, "vdm": vdm, "eagle": eagle, "medusa": medusa,
    "glide-shared": glide_shared, "vanilla-shared": vanilla_shared, "edd-shared": edd_shared,
    "vdm-shared": vdm_shared, "base": base, "small": small}

def described(name):
    """A drafter, its settings with their defaults, and what it is: two lines of train.py --help."""
    function = RECIPES[name]
    settings = [f"{key}={parameter.default!r}"
                for key, parameter in inspect.signature(function).parameters.items()
                if parameter.default is not parameter.empty]
    return f"  {name}({', '.join(settings)})\n      {function.__doc__.splitlines()[0]}"

HELP = "drafters, with the settings of each:\n" + "\n".join(map(described, RECIPES))

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

# ---------------------------------------------------------------- where a run starts
def start(call, target, fingerprint, length, tokens, folder=None):
    """The draft model that training starts with -> (module, training.json of `folder` or None).

    call: a runtime.calls.Call of RECIPES.  length, tokens: see Options.  folder: a trained drafter
    to start from.
    """
    context = context_of(target.config.get_text_config())
    if length > context:
        raise UserError(f"--length {length} is more than the target's context of {context}")
    options = Options(length, tokens)
    losses = ("kl", "lk") if call.name.endswith("-shared") else ("kl", "ce")
    loss = call.settings.get("loss", "kl")
    if loss not in losses:
        raise UserError(f"{call.label}: it learns by the loss {' or '.join(losses)}")
    if folder is not None:
        return trained(call, target, fingerprint, options, folder)
    try:
        return call.function(target, options, **call.settings), None
    except (ValueError, TypeError) as why:
        raise UserError(f"{call.label}: {why}") from None

def trained(call, target, fingerprint, options, folder):
    """A trained draft model -> (module, its training.json)."""
    if call.settings.keys() - {"loss"}:
        raise UserError(f"{call.label}: --init fixes the architecture, so only loss may be given")
    if not folder.is_dir():
        raise UserError(f"--init: there is no {folder}: name the drafters as they are named there")
    about = load.about_drafter(folder)
    # Checked first: a drafter for another target may read layers that this one does not have.
    differs = load.difference(about["target"], fingerprint)
    if about["kind"] != call.name:
        differs = f"it is a {about['kind']}"
    if differs:
        raise UserError(f"--init: the drafter in {folder} does not serve as {call.name} here: "
                        f"{differs}")
    if call.name in ("base", "small"):
        lm, _ = load.load_target(folder, "float32", target.device, role="the small model")
        module = SmallLM(copy.deepcopy(lm))      # a copy is not packed for inference
    else:
        try:
            drafter, _ = families.load(folder, target, options.length)
        except (ValueError, LookupError, TypeError) as why:
            raise UserError(f"--init: {why}") from None
        module = drafter.model.float()
    module.config.loss = call.settings.get("loss", module.config.loss)
    return module, about

# ---------------------------------------------------------------- what a draft model needs
def drafter_of(kind, module):
    """What decodes with a draft model of a kind, by the contract of a drafter in verify.py."""
    if isinstance(module, SmallLM):
        return load.Stage(Target(module.lm))
    _, _, drafter_class = families.KINDS[kind]
    return drafter_class(module)

def words_learned(modules):
    """Of which words these draft models learn the target's logits.

    A list of token ids; slice(None): of all; None: no one learns from logits.  Only drafters of
    beyond/shared.py have a list.  Raises UserError where they have several.
    """
    lists = [words_of(module) for module in modules if module.config.loss in ("kl", "lk")]
    if any(words != lists[0] for words in lists):
        raise UserError("drafters that are trained together must have the same `words`: train the "
                        "others in a run of their own")
    return lists[0] if lists else None

def words_of(module):
    """The list of token ids that a draft model learns alone, or slice(None): it learns all."""
    between = getattr(module, "between", None)
    return slice(None) if between is None or between.words is None else between.words.tolist()

# ---------------------------------------------------------------- where a run ends
def save(folder, module, tokenizer, about):
    """Save a draft model: its weights in bfloat16, and training.json.

    about: a dict of how it was made, to which the commit of this code is added, and the config.
    """
    about = {"commit": commit(), **about}
    with folder_atomically(folder, last="training.json") as part:
        if isinstance(module, SmallLM):
            copy.deepcopy(module.lm).to(torch.bfloat16).save_pretrained(part)
            tokenizer.save_pretrained(part)
        else:
            about = {"config": vars(module.config), **about}
            weights = {}
            for name, weight in module.state_dict().items():
                if weight.is_floating_point():                         # a list of words is not
                    weight = weight.to(torch.bfloat16)
                weights[name] = weight.cpu().contiguous()
            save_file(weights, part / "model.safetensors", {"format": "pt"})
        (part / "training.json").write_text(json.dumps(about, indent=1) + "\n")
