"""From a name on the command line to a model, a tokenizer, a drafter or a cascade.

    setup = Setup("checkpoints/target", "checkpoints")   # a target, and where its drafters lie
    load_drafter(setup, "glide")                         # a trained drafter
    load_cascade(setup, "base", "small", "maxgram", k=(8, 13, 1))
    load_mixture(setup, "edd", "maxgram")                # a drafter mixed with Max-Gram

Drafters are named as their functions would be called (runtime/calls.py): the keywords of these
functions are what a user may set.
"""
import hashlib
import json
import math
import re
from pathlib import Path

import huggingface_hub
import numpy as np
import torch
import transformers
from safetensors import SafetensorError
from transformers.utils import find_adapter_config_file

from beyond.graft import Mixture
from cascade import Cascade
from maxgram import MaxGram, N
from runtime import families, linear
from runtime.errors import UserError
from runtime.program import first_line
from runtime.static import static
from runtime.targets import any_target

ROOT = Path(__file__).resolve().parent.parent
CHECKPOINTS = ROOT / "checkpoints"
STAND_IN = CHECKPOINTS / "target"                 # the default target
SMOLLM2 = ROOT / "work" / "smollm2"               # a public model: training/smollm2.py fetches it

HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")     # with or without an owner: gpt2

# ---------------------------------------------------------------- language models
def use_device(device):
    """Refuse a --device that is not here; make a CUDA device the current one."""
    known = ["cpu", "auto"]
    if torch.cuda.is_available():
        known += ["cuda", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
    if str(device) not in known:
        raise UserError(f"--device {device} is not here: choose {', '.join(known)}")
    if str(device).startswith("cuda:"):
        torch.cuda.set_device(device)

def is_offline(name, revision, role):
    """Ask the hub for a model once -> True where the hub cannot be reached.

    transformers would retry for every file.  A UserError where the hub has no such model.
    """
    errors = huggingface_hub.errors
    try:
        huggingface_hub.model_info(name, revision=revision, timeout=10)
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, errors.HFValidationError):
        raise UserError(f"{role} {name} does not exist: no folder has this name, and the hub has "
                        "no such model, or shows it only to users who are logged in "
                        "(`hf auth login`): check its name and revision") from None
    except Exception:                              # whatever a missing network raises
        return True
    return False

def source_of(name, role, revision, trust):
    """Where a name leads -> (folder or hub name, arguments of transformers' from_pretrained)."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if str(name) == "smollm2":
        name = SMOLLM2
        if not SMOLLM2.exists():
            raise UserError("smollm2 does not exist yet: python training/smollm2.py fetches it")
    offline = False
    if not Path(name).exists():
        if not HUB_NAME.fullmatch(str(name)):
            raise UserError(f"{role} {name} does not exist: give a folder, a hub name, or smollm2")
        offline = is_offline(str(name), revision, role)
    return name, {"revision": revision, "trust_remote_code": trust, "local_files_only": offline}

def not_loaded(name, role, why, offline):
    """The UserError for a model or a tokenizer that transformers does not load."""
    reason = first_line(why)
    if offline:
        return UserError(f"{role} {name} does not exist: no folder has this name, the hub cannot "
                         "be reached, and it was not loaded before")
    return UserError(f"{role} {name} cannot be loaded ({reason}): give a complete folder or a hub "
                     "name of a causal language model")

def load_tokenizer(name, role="the tokenizer", revision=None, trust=False):
    """Load a tokenizer.  Arguments: as of load_target."""
    name, more = source_of(name, role, revision, trust)
    try:
        return transformers.AutoTokenizer.from_pretrained(name, **more)
    except Exception as why:                       # many libraries read its files
        raise not_loaded(name, role, why, more["local_files_only"]) from None

def load_target(name, dtype, device, role="the target", revision=None, trust=False):
    """Load a language model -> (model, tokenizer), as transformers has them.

    name: a folder, a hub name, or "smollm2".  device: "auto" spreads it over all devices, by
    accelerate.  role: what a UserError calls the model.  trust: whether to run code that comes with
    the model.
    """
    use_device(device)
    name, more = source_of(name, role, revision, trust)
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(name, **more)
        config = transformers.AutoConfig.from_pretrained(name, **more)
        model_class = transformers.AutoModelForCausalLM
        if config.is_encoder_decoder:
            model_class = transformers.AutoModelForSeq2SeqLM
        adapter = find_adapter_config_file(
            name, revision=revision, local_files_only=more["local_files_only"])
        if adapter is not None:
            raise ValueError("an adapter lies beside it: merge it first, by peft's "
                             "merge_and_unload().save_pretrained(folder)")
        # Quantised weights are placed while they are loaded; so are those of a spread model.
        is_quantised = bool(getattr(config, "quantization_config", None))
        placed = {}
        if device == "auto" or is_quantised:
            placed["device_map"] = "auto" if device == "auto" else {"": device}
        model, found = model_class.from_pretrained(
            name, dtype=dtype, output_loading_info=True, ignore_mismatched_sizes=True, **placed,
            **more)
        # transformers fills both with random numbers.
        missing = sorted(found["missing_keys"])
        mismatched = sorted(str(weight[0]) for weight in found["mismatched_keys"])
        if missing and not is_quantised:
            raise ValueError(f"its files lack {len(missing)} weights, {missing[0]} for example")
        if mismatched:
            raise ValueError(f"{len(mismatched)} weights have other shapes than config.json says, "
                             f"{mismatched[0]} for example")
    except torch.OutOfMemoryError:
        raise
    except Exception as why:                       # many libraries read its files
        raise not_loaded(name, role, why, more["local_files_only"]) from None
    if not placed:
        model = model.to(device)
    if config.is_encoder_decoder and getattr(config, "num_decoder_layers", None):
        # By this generate() counts the layers of the decoder's cache, in transformers 5.17 and
        # 5.23.  The encoder, which has this number of layers, has its own configuration.
        model.config.num_layers = config.num_decoder_layers
    # generate() would take all else from there, too, say a repetition_penalty: another rule.
    names = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")
    special = {name: getattr(model.generation_config, name) for name in names}
    model.generation_config = transformers.GenerationConfig(**special)
    linear.pack(model)
    return model.eval(), tokenizer

class Setup:
    """A target, loaded, and what is needed to load drafters for it.

    model, tokenizer    transformers' own
    target              the model as a verify.Target
    eos                 the ids that end a text, or None
    stages              {name: language model} of all cascades, loaded once
    notes               sentences for the reader
    """
    def __init__(self, name, checkpoint, dtype="float32", device="cpu", revision=None, trust=False,
                 graphs=False):
        self.checkpoint, self.graphs = Path(checkpoint), graphs
        self.dtype, self.device, self.trust = dtype, device, trust
        self.stages, self.notes = {}, []
        self.model, self.tokenizer = self.load(name, "the target", revision)
        self.eos = self.model.generation_config.eos_token_id
        self.target = self.wrap(self.model)

    def load(self, name, role, revision=None):
        """A language model -> (model, tokenizer)"""
        return load_target(name, self.dtype, self.device, role, revision, self.trust)

    def wrap(self, model, capacity=None, vocab=None):
        """A model as a verify.Target."""
        target = any_target(model, capacity, vocab)
        return static(target) if self.graphs else target

    def drafter(self, call):
        """The drafter that a Call (runtime/calls.py) names."""
        return call.function(self, *(call.words or [call.name]), **call.settings)

# ---------------------------------------------------------------- fingerprints
PROBES = 32              # weights of a model in its fingerprint
NEAR = 0.25              # the relative difference up to which a drafter serves another model

def vocabulary_fingerprint(tokenizer):
    """16 hex digits of a hash of all tokens and their ids."""
    tokens = json.dumps(sorted(tokenizer.get_vocab().items()))
    return hashlib.sha256(tokens.encode()).hexdigest()[:16]

def fingerprint(model, tokenizer=None):
    """What identifies a target: {"class", sizes, "probe": {name: weight}, "vocabulary"}."""
    about = {"class": type(model).__name__, "probe": {}}
    for name in ("vocab_size", "hidden_size", "num_hidden_layers"):
        about[name] = getattr(model.config.get_text_config(), name)
    # Matrices of which a weight can be read: neither quantised nor offloaded
    matrices = []
    for name, p in model.named_parameters():
        as_stored = p.is_floating_point() and not hasattr(p, "__tensor_flatten__")
        if p.ndim == 2 and as_stored and not p.is_meta:
            matrices.append((name, p))
    last = len(matrices) - 1
    for i in range(PROBES if matrices else 0):
        # Evenly over all matrices, the first and the last among them
        name, matrix = matrices[round(i * last / (PROBES - 1))]
        height, width = matrix.shape
        weight = matrix[height // 3, width // 2]
        about["probe"][name] = float(f"{weight.item():.5g}")
    if tokenizer is not None:
        about["vocabulary"] = vocabulary_fingerprint(tokenizer)
    return about

def difference(a, b):
    """What keeps a drafter for a target of fingerprint a from serving one of b -> text, or None.

    It serves the model that it was trained for, and one of the same architecture and vocabulary
    whose weights were rounded to 4 bits (the relative difference ||a - b|| / ||b|| is .08 to .16
    then) or lightly tuned.  Between models that were trained from different seeds it is some 1.4.
    """
    for key in a:
        if key not in ("probe", "vocabulary") and a[key] != b.get(key, a[key]):
            return f"its {key} was {a[key]}, and here it is {b[key]}"
    if a.get("vocabulary", "") != b.get("vocabulary", a.get("vocabulary", "")):
        return "its tokenizer had other tokens (tokens that were added to it count, too)"
    probe_a, probe_b = a.get("probe", {}), b.get("probe", {})
    names = [name for name in probe_a if name in probe_b]
    if not names:
        return "none of its weights can be compared"
    of_a = np.array([probe_a[name] for name in names])
    of_b = np.array([probe_b[name] for name in names])
    apart = np.linalg.norm(of_a - of_b) / max(np.linalg.norm(of_b), 1e-30)
    return None if apart < NEAR else f"its weights differ by {apart:.0%}"

def fits(a, b):
    """Whether a drafter for a target of fingerprint a serves one of fingerprint b."""
    return difference(a, b) is None

# ---------------------------------------------------------------- trained drafters
def about_drafter(folder):
    """The training.json of a drafter -> dict with "kind", "target" and "validation"."""
    try:
        about = json.loads((Path(folder) / "training.json").read_text())
        about = {"target": {}, "validation": {}} | about
        temperature = about["validation"].get("temperature", 1.0)
        assert type(temperature) in (int, float) and 0 < temperature < math.inf, (
            f"its temperature is {temperature}")
        assert "kind" in about, "its kind is missing"
        return about
    except (OSError, ValueError, TypeError, AttributeError, AssertionError) as why:
        raise UserError(f"the drafter in {folder} is damaged ({first_line(why)} in training.json): "
                        "train or copy it again") from None

def drafters_in(checkpoint):
    """{name: folder} of the trained drafters in a folder of folders, or in the folder of one."""
    top = Path(checkpoint)
    if (top / "training.json").exists():
        return {about_drafter(top)["kind"]: top}
    found = {}
    for path in sorted(top.glob("*/training.json")):
        # A folder with a config.json is a language model's, a stage of a cascade.
        if not (path.parent / "config.json").exists():
            found[path.parent.name.replace("_", "-")] = path.parent
    return found

def calibrated(drafter, temperature):
    """Set a drafter's calibration temperature, if one is given; 1: its raw confidences."""
    if temperature is None:
        return drafter
    if type(temperature) not in (int, float) or not 0 < temperature < 100:
        raise UserError(f"temperature={temperature!r}: a calibration temperature is a number above "
                        "0, and 1 leaves confidences as the drafter gives them")
    drafter.temperature = temperature
    return drafter

def load_drafter(setup, name, temperature=None):
    """A trained drafter of the checkpoint.

    temperature: of its calibration; None: the one that training fitted.
    """
    folder = drafters_in(setup.checkpoint)[name]
    about = about_drafter(folder)
    if about["kind"] not in families.KINDS:
        raise UserError(f"the drafter in {folder} is a {about['kind']!r}, which is no kind of "
                        f"drafter: there are {', '.join(families.KINDS)}")
    # Checked first: a drafter for another target may read layers that this one does not have.
    differs = difference(about["target"], fingerprint(setup.model, setup.tokenizer))
    if differs:
        raise UserError(f"the drafter in {folder} was made for another target: train one for this "
                        f"({differs})")
    try:
        drafter, _ = families.load(folder, setup.model)
    except (ValueError, LookupError, TypeError, AssertionError, RuntimeError,
            SafetensorError) as why:
        raise UserError(f"the drafter in {folder} cannot be loaded: {first_line(why)}") from None
    if not all(weight.isfinite().all() for weight in drafter.model.parameters()):
        raise UserError(f"the drafter in {folder} is damaged: it has weights that are not finite")
    linear.pack(drafter.model, beside=setup.model)
    drafter = calibrated(drafter, temperature)
    return static(drafter) if setup.graphs else drafter

# ---------------------------------------------------------------- language models that draft
def stage_of(setup, name):
    """A language model with the target's tokenizer, by name -> a verify.Target.

    It is loaded once, but each cascade gets a KV cache of its own.
    """
    if name not in setup.stages:
        folder = setup.checkpoint / name
        source = folder if (folder / "config.json").exists() else name
        model, tokenizer = setup.load(source, "the stage")
        # Vocabularies may be padded to different sizes, but an id must mean one token in both.
        of_stage = {i: token for token, i in tokenizer.get_vocab().items()}
        for token, i in setup.tokenizer.get_vocab().items():
            if of_stage.get(i, token) != token:
                raise UserError(f"{name} has another tokenizer than the target: token {i} is "
                                f"{of_stage[i]!r} there, {token!r} here; take a model of the "
                                "target's family")
        linear.pack(model, beside=setup.model)
        setup.stages[name] = model
    return setup.wrap(setup.stages[name], setup.target.context, setup.target.vocab)

def table2(k, models, gram):
    """Table 2's k -> the matrix K of Algorithm 1; the top of cascade.py has an example.

    k: k_11 for one model, (k_11, k_12, k_22) for two, (k_11, k_12, k_13, k_22, k_23, k_33) for
    three.  models: how many there are.  gram: whether Max-Gram is the last stage.
    Where k_12 = k_11 the second model drafts for the first one only.
    """
    counts = list(k) if isinstance(k, (tuple, list)) else [k]
    wanted = models * (models + 1) // 2
    if len(counts) != wanted or any(type(count) is not int for count in counts):
        raise UserError(f"k={k!r}: {models} model(s) take {wanted} whole number(s)")
    last_column = [N] if gram else []
    K = []
    for r in range(models):
        # A total includes the one before it in its row; K has the differences.
        totals = counts[:models - r]
        counts = counts[models - r:]
        added = [after - before for before, after in zip([0, *totals], totals)]
        K.append([0] * r + added + last_column)
    if gram:
        K.append([0] * models + last_column)
    return K

def load_cascade(setup, *names, k=None, lenience=1.0, matching=True, bigram=None):
    """Algorithm 1 of Cascade Speculative Drafting; Max-Gram alone is a cascade without a model.

    names: folders of the checkpoint, other folders or hub names of language models, the largest
    first; maxgram last.  k: Table 2's k11, or (k11, k12, k22).  matching: False lets Max-Gram
    predict by its bigram alone.  bigram: a file, in place of the checkpoint's.
    """
    if "maxgram" in names[:-1]:
        raise UserError(f"cascade({', '.join(names)}): name the largest model first, maxgram last")
    models = [name for name in names if name != "maxgram"]
    gram = None
    if "maxgram" in names:
        gram, _ = load_gram(setup, bigram, matching)
    K = None if k is None else table2(k, len(models), gram is not None)
    stages = [stage_of(setup, name) for name in models]
    sizes = [stage.model.num_parameters() / setup.model.num_parameters() for stage in stages]
    try:
        return Cascade(stages, K, lenience, gram, setup.target.vocab, names, sizes)
    except (AssertionError, TypeError) as why:
        raise UserError(f"cascade({', '.join(names)}): {first_line(why)}") from None

class Stage:
    """A language model that drafts trees, by the contract at the top of verify.py.

    In a cascade a model writes chains.  Here it reads the whole tree at each depth, with the mask
    and the positions of its nodes, as the target does.  Its cache holds committed tokens only.
    """
    needs = {}

    def __init__(self, target, temperature=1.0):
        """target: the language model as a verify.Target, with the target's vocabulary size.

        temperature: the calibration temperature.
        """
        self.target, self.temperature = target, temperature

    def reset(self, probs, source=None):
        """Start a new sequence."""
        self.probs = probs
        self.target.reset()
        self.text, self.unread = [], []

    def begin(self, view, root):
        """A round starts.  Newly committed tokens are read together with its first nodes."""
        self.text += view.ids
        self.unread += view.ids
        self.tokens, self.parents = [], []
        if len(self.unread) == len(self.text) < self.target.capacity:
            self.target.align(self.text)            # a prompt, which may be long
            self.unread = []

    def expand(self, tokens, parents):
        """As in the contract; no prediction where the model's context is full."""
        self.tokens += tokens.tolist()
        self.parents += parents
        if len(self.text) + len(self.tokens) > self.target.capacity:
            return torch.zeros(len(parents), self.target.vocab, device=tokens.device)
        # The k unread tokens are a chain, and the tree hangs from its last one.
        k = len(self.unread)
        chain = list(range(-1, k - 1))
        tree = [k + parent if parent >= 0 else k - 1 for parent in self.parents]
        nodes = torch.tensor(self.unread + self.tokens)
        logits, states = self.target.forward(nodes, torch.tensor(chain + tree))   # (k + nodes, V)
        self.target.commit(list(range(k)), self.unread, states)
        self.unread = []
        return self.probs(logits[-len(parents):].to(tokens.device), self.temperature)

    def keep(self, path):
        """Nothing to do: accepted tokens come back in the next view."""

# ---------------------------------------------------------------- Max-Gram
def read_gram(path, vocab, vocabulary=None):
    """Read a bigram file -> {"bigram": list (vocab,), "confidence": list or None, "agreement": {}}

    The file holds these three, written by training/bigram.py; or it is one of the paper's public
    files, a list by token id, which may be shorter.  "agreement" has the weights of graft.Mixture
    for some drafters.  vocabulary: the fingerprint that the file's must equal, if it has one.
    """
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
        found = found if isinstance(found, dict) else {"bigram": found}
        bigram = found["bigram"]
        if vocabulary and found.get("fingerprint", vocabulary) != vocabulary:
            raise ValueError("it is of another vocabulary")
        if len(bigram) > vocab or not all(token in range(vocab) for token in bigram):
            raise ValueError(f"it is no list of at most {vocab} token ids")
        fits = found.get("agreement", {})
        agreement = {name: fit["weights"] for name, fit in fits.items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as why:
        raise UserError(f"the bigram file {path} does not serve this target ({first_line(why)}): "
                        "write one with training/bigram.py") from None
    bigram = bigram + [0] * (vocab - len(bigram))                      # 0: unknown
    return {"bigram": bigram, "confidence": found.get("confidence"), "agreement": agreement}

def load_gram(setup, path=None, matching=True):
    """Max-Gram with the bigram of a file, or else of the checkpoint's, if it has one.

    Returns a MaxGram, and {name of a drafter: weights of graft.Mixture} from the same file.
    """
    default = setup.checkpoint / "bigram.json"
    found = {}
    if path is not None or default.exists():
        vocabulary = vocabulary_fingerprint(setup.tokenizer)
        try:
            found = read_gram(str(path or default), setup.target.config.vocab_size, vocabulary)
        except UserError as why:
            if path is not None:
                raise
            # The checkpoint's is a default: another target does without.
            setup.notes.append(f"no bigram: {why}")
    gram = MaxGram(found.get("bigram"), found.get("confidence"), matching)
    return gram, found.get("agreement", {})

def load_mixture(setup, *names, bigram=None, temperature=None):
    """A neural drafter mixed with Max-Gram, for any tree: mixture(edd, maxgram).

    names: a drafter of the checkpoint, or a language model, as a cascade takes it; then maxgram.
    bigram: a file, in place of the checkpoint's.  temperature: of the drafter's calibration; None:
    the one that training fitted.
    """
    name, *rest = names
    if rest != ["maxgram"] or name == "maxgram":
        raise UserError(f"mixture({', '.join(names)}): name one drafter of trees, or one language "
                        "model, then maxgram")
    if name in drafters_in(setup.checkpoint):
        drafter = load_drafter(setup, name, temperature)
    else:
        drafter = Stage(stage_of(setup, name))
        folder = setup.checkpoint / name
        if (folder / "training.json").exists():
            drafter.temperature = about_drafter(folder)["validation"].get("temperature", 1.0)
        calibrated(drafter, temperature)
    gram, agreement = load_gram(setup, bigram)
    return Mixture(drafter, gram, agreement.get(name))

# ---------------------------------------------------------------- all of them
def loaders(checkpoint):
    """{name of a drafter: the function that loads it}, as read_call takes them."""
    found = dict.fromkeys(drafters_in(checkpoint), load_drafter)
    return found | {"maxgram": load_cascade, "cascade": load_cascade, "mixture": load_mixture}
