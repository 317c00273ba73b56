"""From a name on the command line to a model, a tokenizer, a drafter, a cascade.

    model, tokenizer = load_target("lmsys/vicuna-7b-v1.5", "float16", "cuda")
    same_target(fingerprint(model), about_drafter(Path("my-glide/glide"))["target"])

    setup = Setup("checkpoints/target", "checkpoints")             # what bench.py's Run is, too
    load_drafter(setup, "glide")
    load_cascade(setup, "base", "small", "maxgram", k=(8, 13, 1))

Drafters and trees are named as their functions would be called (runtime/calls.py).  The keywords of
load_drafter and load_cascade are what a user may set: "glide(raw=True)".
"""
import json
import os
from pathlib import Path

import huggingface_hub
import numpy as np
import torch
import transformers

import cascade
import edd
import glide
import maxgram
from beyond import graft
from beyond.words import frequent_words, shorten
from runtime import text as read
from runtime import targets, grams, static as graphs, linear, drafters as runtime_drafters
from runtime.calls import read_call
from runtime.fingerprints import (fingerprint, relation, same_target,
                                  vocabulary_fingerprint)  # noqa: F401
from runtime.stage import Stage
from verify import UserError

GIVE = "give a complete folder or a hub name of a causal language model"

ROOT = Path(__file__).resolve().parent.parent
CHECKPOINTS = ROOT / "checkpoints"
STAND_IN = CHECKPOINTS / "target"                 # the default target
SMOLLM2 = ROOT / "work" / "smollm2"               # a public model: training/smollm2.py gets it

# ---------------------------------------------------------------- models
def check_device(device, spread=False):
    """Refuse a --device that is none, or is not there.  spread: "auto" may be said, too."""
    if spread and device == "auto":
        return
    known = "cpu, cuda, cuda:1 ... or auto" if spread else "cpu, cuda, cuda:1 ..."
    try:
        kind = torch.device(device).type
    except RuntimeError:
        raise UserError(f"--device {device}: say {known}") from None
    if kind not in ("cpu", "cuda"):
        raise UserError(f"--device {device}: say {known}")
    if kind == "cuda" and not torch.cuda.is_available():
        raise UserError(f"--device {device}: no CUDA device is available here; use --device cpu")
    if kind == "cuda" and (torch.device(device).index or 0) >= torch.cuda.device_count():
        raise UserError(f"--device {device}: CUDA devices are counted from 0, and "
                        f"{torch.cuda.device_count()} are here")

def use_device(device):
    """Make a CUDA device the current one: events, streams and graphs are of the current device."""
    if device != "auto" and torch.device(device).type == "cuda":
        torch.cuda.set_device(torch.device(device).index or 0)

def check_writable(flag, path):
    """Refuse a file that could not be written, before anything else is done."""
    path = Path(path)
    there = path.absolute().parent
    if path.is_dir() or not there.is_dir() or not os.access(there, os.W_OK):
        raise UserError(f"{flag} {path}: name a file in a folder that is there and can be "
                        "written to")

def on_hub(name, revision, role):
    """Ask the hub for a model once, without the library's retries -> whether to use local files."""
    errors = huggingface_hub.errors
    try:
        huggingface_hub.model_info(name, revision=revision, timeout=10)
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError):
        at = f" at revision {revision}" if revision else ""
        raise UserError(f"{role}: the hub has no {name}{at}, or shows it to nobody that is not "
                        "logged in (`hf auth login`): check the name") from None
    except errors.HFValidationError:
        raise UserError(f"{role} {name} does not exist: it is no folder, and no name of the "
                        "hub's") from None
    except Exception:                              # no network: what was loaded once is still here
        return True
    return False

def with_weights(model_class, name, **more):
    """A pretrained model whose attention takes a tree's mask: sdpa, or where it has none, eager."""
    try:
        return model_class.from_pretrained(name, attn_implementation="sdpa", **more)
    except ValueError as why:
        if "scaled_dot_product_attention" not in str(why):
            raise
    return model_class.from_pretrained(name, attn_implementation="eager", **more)

def only_special_tokens(model):
    """Leave nothing in a model's generation_config but its special tokens.

    From there generate() takes what its caller leaves open, say a repetition_penalty, num_beams or
    stop_strings; then its output would be another rule's than ours.
    """
    names = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")
    special = {name: getattr(model.generation_config, name) for name in names}
    model.generation_config = transformers.GenerationConfig(**special)

def place_of(name, role="the target"):
    """A folder or a hub name as it is; "smollm2": the folder that training/smollm2.py made."""
    if Path(name).exists():
        return name
    if str(name) == "smollm2":
        if not SMOLLM2.exists():
            raise UserError(f"{role} smollm2 is not here yet: run "
                            "`python training/smollm2.py` once")
        return SMOLLM2
    # A hub name is OWNER/NAME.
    if str(name).count("/") != 1 or Path(name).is_absolute():
        raise UserError(f"{role} {name} does not exist: {GIVE}")
    return name

def load_target(name, dtype, device, encoder_decoder=False, role="the target", revision=None,
                trust=False):
    """(model, tokenizer) as transformers loads them.  UserError where it cannot.

    name: a folder, a hub name, or "smollm2".
    device "auto": spread over what there is, by accelerate.  encoder_decoder: T5 may come too.
    role: what the model is called in an error.  trust: run the model's own code, too.
    """
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    name, give = place_of(name, role), GIVE
    if device == "auto" and not transformers.utils.is_accelerate_available():
        raise UserError("--device auto needs accelerate: pip install accelerate")
    local = not Path(name).exists() and on_hub(name, revision, role)
    more = {"revision": revision, "trust_remote_code": trust, "local_files_only": local}
    try:
        config = transformers.AutoConfig.from_pretrained(name, **more)
        if config.is_encoder_decoder and not encoder_decoder:
            raise UserError("it is an encoder-decoder model")
        model_class = transformers.AutoModelForCausalLM
        if config.is_encoder_decoder:
            model_class = transformers.AutoModelForSeq2SeqLM
        tokenizer = transformers.AutoTokenizer.from_pretrained(name, **more)
        # Quantised weights are placed while they are loaded; so are those of a spread model.
        placed = device == "auto" or getattr(config, "quantization_config", None)
        if placed:
            more["device_map"] = "auto" if device == "auto" else {"": device}
        model = with_weights(model_class, name, dtype=dtype, **more)
        if not placed:
            model = model.to(device)
    except Exception as why:
        reason = f"{type(why).__name__}: {read.first_line(why)}"
        if isinstance(why.__cause__, huggingface_hub.errors.GatedRepoError):
            reason = "it is gated"
            give = f"accept its terms on huggingface.co/{name}, and `hf auth login`"
        elif local and isinstance(why, OSError):
            reason = "the hub cannot be reached, and it was not loaded before"
        raise UserError(f"{role} {name} cannot be loaded ({reason}): {give}") from None
    only_special_tokens(model)
    linear.pack(model)
    return model.eval(), tokenizer

# ---------------------------------------------------------------- a target and what goes with it
class Setup:
    """A target, loaded, and all that one needs to know to load drafters beside it.

    model, tokenizer: transformers' own; target: its verify.Target; checkpoint: drafters' folder.
    stages {name: model}: of all cascades, loaded once; notes: sentences for the reader.
    graphs: CUDA graphs; rows: fewest tokens of a forward of the target; trust: run models' code.
    """
    def __init__(self, name, checkpoint, dtype="float32", device="cpu", revision=None, trust=False,
                 graphs=False, rows=1):
        use_device(device)
        self.checkpoint, self.graphs = checkpoint, graphs
        self.dtype, self.device, self.trust = dtype, device, trust
        self.stages, self.notes = {}, []
        self.model, self.tokenizer = self.load(name, revision=revision)
        self.eos = self.model.generation_config.eos_token_id
        self.target = self.wrap(self.model, rows=rows)
        self.cuda = self.target.device.type == "cuda"

    def load(self, name, role="the target", revision=None):
        """A language model -> (model, tokenizer)"""
        return load_target(name, self.dtype, self.device, True, role, revision, self.trust)

    def wrap(self, model, capacity=None, vocab=None, rows=1):
        """A model as a verify.Target."""
        target = targets.any_target(model, capacity, vocab)
        if self.graphs or rows > 1:
            graphs.static(target, rows, record=self.graphs)
        return target

# ---------------------------------------------------------------- trained drafters
def about_drafter(folder):
    """What train.py wrote about the drafter in a folder: its training.json."""
    damaged = UserError(f"the drafter in {folder} is damaged: train or copy it again")
    try:
        about = json.loads((folder / "training.json").read_text())
        temperature = float(about.get("validation", {}).get("temperature", 1.0))
        probe = about.get("target", {}).get("probe", {})
        weights = list(probe.values()) if isinstance(probe, dict) else []
        numbers = np.isfinite(np.array(weights, dtype=float)).all()
        about["kind"]
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        raise damaged from None
    if not numbers or not 0 < temperature < np.inf:
        raise damaged
    return about

def kind_of(folder):
    """Which kind of drafter a folder holds: glide, vanilla, edd ..."""
    return about_drafter(folder)["kind"]

def drafters_in(checkpoint):
    """{name: folder} of the trained drafters in a folder of folders, or in the folder of one."""
    top = Path(checkpoint)
    if (top / "training.json").exists():
        return {kind_of(top): top}
    found = {}
    for path in sorted(top.glob("*/training.json")):
        # A folder with a config is a language model's, which is a stage of a cascade.
        if not (path.parent / "config.json").exists():
            found[path.parent.name.replace("_", "-")] = path.parent
    return found

def load_drafter(setup, name, raw=False, words=None):
    """A trained drafter of the checkpoint.

    raw: its confidence as it is, without temperature.
    words: so many of the most frequent tokens alone are drafted (beyond/words.py), 0: all; None:
    those that it has learned (train.py --words), or all.
    """
    folder = drafters_in(setup.checkpoint)[name]
    about = about_drafter(folder)
    # Asked first: another target's drafter may read layers that are not there.
    related = relation(about.get("target", {}), fingerprint(setup.model, setup.tokenizer))
    if related == "another":
        raise UserError(f"the drafter in {folder} was made for another target: train one for this")
    if related == "a relative":
        setup.notes.append(f"{name} was trained for a relative of this target "
                           "(rounded otherwise, or tuned)")
    module = glide if about["kind"].startswith(("glide", "vanilla", "longspec")) else edd
    try:
        drafter, _ = runtime_drafters.load(module, folder, setup.model)
    except ValueError as why:
        raise UserError(str(why)) from None
    check_drafter(drafter, folder)
    if words is None:
        words = about.get("words")                   # those it has learned
    if words:
        path = Path(setup.checkpoint) / "words.json"
        vocabulary = vocabulary_fingerprint(setup.tokenizer)
        shorten(drafter.model, frequent_words(path, words, vocabulary))
    linear.pack(drafter.model, beside=setup.model)
    if raw:
        drafter.temperature = 1.0
    if setup.graphs:
        graphs.static(drafter)
    return drafter

def check_drafter(drafter, folder):
    """Refuse weights that are not finite, and heads of GLIDE's that do not divide its width."""
    sound = all(weights.isfinite().all() for weights in drafter.model.parameters())
    if isinstance(drafter, glide.Drafter):
        sound = sound and drafter.config.width % drafter.config.heads == 0
    if not sound:
        raise UserError(f"the drafter in {folder} is damaged: train or copy it again")

# ---------------------------------------------------------------- cascades
def load_cascade(setup, *names, k=None, lenience=1.0, costs=None, stop="own", matching=True,
                 bigram=None):
    """Algorithm 1 of Cascade Speculative Drafting; Max-Gram alone is a cascade without a model.

    names: folders of the checkpoint, other folders or hub names of language models, the largest
    first, maxgram last.  k: Table 2's k11, or (k11, k12, k22).  costs: of one run of each model,
    where the target's is 1.  stop: when a stage has added enough (cascade.py).
    matching: False: Max-Gram by its bigram alone.  bigram: a file, in place of the checkpoint's.
    """
    neural = [name for name in names if name != "maxgram"]
    misplaced = "maxgram" in names[:-1] or len(set(names)) < len(names)
    if misplaced or costs and len(costs) != len(neural):
        raise UserError(f"cascade({', '.join(names)}): name every stage once, the largest first, "
                        "maxgram last; give a cost for each model, or none")
    numbers = all(isinstance(cost, (int, float)) and 0 <= cost < np.inf for cost in costs or [])
    if not numbers:
        raise UserError(f"cascade({', '.join(names)}): costs={costs}: a cost is a number from 0 "
                        "on, where one run of the target costs 1")
    if isinstance(k, int):
        k = [k]
    K = None if k is None else cascade.table2(k, len(neural), "maxgram" in names)
    gram = None
    if "maxgram" in names:
        gram = load_gram(setup, bigram)
        gram.matching = matching
    stages, weights = [], []
    for name in neural:
        model = stage_of(setup, name)
        # Each cascade gets caches of its own.
        stages.append(setup.wrap(model, setup.target.context, setup.target.vocab))
        weights.append(model.num_parameters() / setup.model.num_parameters())
    drafter = cascade.Cascade(stages, K, lenience, gram, setup.target.vocab, stop)
    # For SWI: a stage costs its share of the target's weights, or what is given.
    drafter.names, drafter.costs = list(names), {"ms": weights}
    if costs:
        drafter.costs["given"] = costs
    return drafter

def stage_of(setup, name):
    """A language model by name, loaded once."""
    if name not in setup.stages:
        setup.stages[name] = load_stage(setup, name)
    return setup.stages[name]

def load_stage(setup, name):
    """A language model with the target's tokenizer."""
    folder = Path(setup.checkpoint) / name
    source = str(folder) if (folder / "config.json").exists() else name
    model, tokenizer = setup.load(source, role="the stage")
    if model.config.is_encoder_decoder != setup.model.config.is_encoder_decoder:
        raise UserError(f"{name} is another kind of model than the target: one has an encoder")
    # Vocabularies may be padded otherwise; what an id means must be the same.
    mine = {i: token for token, i in setup.tokenizer.get_vocab().items()}
    its = {i: token for token, i in tokenizer.get_vocab().items()}
    for i in sorted(mine.keys() & its.keys()):
        if mine[i] != its[i]:
            raise UserError(f"{name} has another tokenizer than the target: token {i} is "
                            f"{its[i]!r} there, {mine[i]!r} here; take a model of the target's "
                            "family")
    linear.pack(model, beside=setup.model)
    if model.num_parameters() >= setup.model.num_parameters():
        setup.notes.append(f"{name} is no smaller than the target, and will slow it down")
    return model

def load_gram(setup, bigram=None):
    """Max-Gram with the bigram of the file `bigram`, or of the checkpoint where it has one."""
    path = bigram_path(setup, bigram)
    if not bigram and not path.exists():
        return maxgram.MaxGram()
    vocab = setup.target.config.vocab_size
    fingerprinted = vocabulary_fingerprint(setup.tokenizer)
    try:
        return maxgram.MaxGram(*grams.read_bigram(path, vocab, fingerprinted))
    except ValueError as why:
        if bigram:
            raise UserError(f"bigram={bigram!r}: {why}") from None
        # The checkpoint's is a default: another target goes without one.
        setup.notes.append(f"no bigram: {why}")
        return maxgram.MaxGram()

def bigram_path(setup, bigram=None):
    """The file `bigram`, or the checkpoint's."""
    return Path(bigram or Path(setup.checkpoint) / "bigram.json")

# ---------------------------------------------------------------- a drafter beside Max-Gram
def load_beside(setup, *names, bigram=None):
    """A neural drafter beside Max-Gram, for any tree: beside(edd, maxgram).

    names: a drafter, as --drafter takes it, or a language model, as a cascade does; then maxgram.
    bigram: a file of it, in place of the checkpoint's.
    """
    inner, *rest = names
    name = inner.partition("(")[0].replace("_", "-")
    if rest != ["maxgram"] or name in ("maxgram", "cascade", "beside"):
        raise UserError(f"beside({', '.join(names)}): name one drafter of trees, or one language "
                        "model, then maxgram")
    known = loaders(setup.checkpoint)
    if name in known:
        drafter = called(setup, read_call(inner, known, "drafter"))
    else:
        model = stage_of(setup, inner)
        drafter = Stage(setup.wrap(model, setup.target.context, setup.target.vocab))
        folder = Path(setup.checkpoint) / inner
        if (folder / "training.json").exists():
            validation = about_drafter(folder).get("validation", {})
            drafter.temperature = validation.get("temperature", 1.0)
    path = bigram_path(setup, bigram)
    return graft.Beside(drafter, load_gram(setup, bigram), grams.read_agreement(path, name))

# ---------------------------------------------------------------- all of them
def loaders(checkpoint):
    """{name of a drafter: the function that loads it}, as read_call takes them."""
    found = dict.fromkeys(drafters_in(checkpoint), load_drafter)
    return found | {"maxgram": load_cascade, "cascade": load_cascade, "beside": load_beside}

def called(setup, call):
    """The drafter that a Call names."""
    try:
        return call.function(setup, *(call.words or [call.name]), **call.settings)
    except TypeError as why:
        raise UserError(f"--drafter {call.label}: {why}") from None
