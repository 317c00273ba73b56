"""From a name on the command line to a model, a tokenizer, a drafter or a cascade.

    setup = Setup("checkpoints/target", "checkpoints")   # target, tokenizer, where drafters lie
    load_drafter(setup, "glide")                         # a trained drafter
    load_cascade(setup, "base", "small", "maxgram", k=(8, 13, 1))
    load_mixture(setup, "edd", "maxgram")                # a drafter mixed with Max-Gram

Drafters are named as their functions would be called (runtime/calls.py): the keywords of
load_cascade and load_mixture are what a user may set.
"""
import hashlib
import json
from pathlib import Path

import huggingface_hub
import numpy as np
import torch
import transformers
from safetensors import SafetensorError

import cascade
from beyond.graft import Mixture
from maxgram import MaxGram
from runtime import drafters, linear
from runtime.static import static
from runtime.targets import any_target
from runtime.text import first_line
from verify import UserError

ROOT = Path(__file__).resolve().parent.parent
CHECKPOINTS = ROOT / "checkpoints"
STAND_IN = CHECKPOINTS / "target"                 # the default target
SMOLLM2 = ROOT / "work" / "smollm2"               # a public model: training/smollm2.py fetches it

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
        raise UserError(f"{role}: the hub has no {name}, or shows it only to users who are logged "
                        "in (`hf auth login`): check its name and revision") from None
    except Exception:                              # whatever a missing network raises
        return True
    return False

def load_target(name, dtype, device, role="the target", revision=None, trust=False):
    """Load a language model -> (model, tokenizer), as transformers has them.

    name: a folder, a hub name, or "smollm2".  device: "auto" spreads it over all devices, by
    accelerate.  role: what a UserError calls the model.  trust: whether to run code that comes with
    the model.
    """
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    use_device(device)
    if str(name) == "smollm2" and SMOLLM2.exists():
        name = SMOLLM2
    is_here = Path(name).exists()
    if not is_here and (str(name).count("/") != 1 or Path(name).is_absolute()):
        raise UserError(f"{role} {name} does not exist: give a folder, a hub name of a causal "
                        "language model, or smollm2, which training/smollm2.py fetches")
    offline = not is_here and is_offline(name, revision, role)
    more = {"revision": revision, "trust_remote_code": trust, "local_files_only": offline}
    try:
        config = transformers.AutoConfig.from_pretrained(name, **more)
        tokenizer = transformers.AutoTokenizer.from_pretrained(name, **more)
        model_class = transformers.AutoModelForCausalLM
        if config.is_encoder_decoder:
            model_class = transformers.AutoModelForSeq2SeqLM
        # Quantised weights are placed while they are loaded; so are those of a spread model.
        if device == "auto" or getattr(config, "quantization_config", None):
            more["device_map"] = "auto" if device == "auto" else {"": device}
        model = model_class.from_pretrained(name, dtype=dtype, **more)
        if "device_map" not in more:
            model = model.to(device)
        if config.is_encoder_decoder and getattr(config, "num_decoder_layers", None):
            # By this generate() counts the layers of the decoder's cache, in transformers 5.17 and
            # 5.23.  The encoder, which has this number of layers, has its own configuration.
            model.config.num_layers = config.num_decoder_layers
    except (OSError, ValueError, LookupError, ImportError, SafetensorError) as why:
        reason = first_line(why)
        if offline:
            reason = "the hub cannot be reached, and it was not loaded before"
        raise UserError(f"{role} {name} cannot be loaded ({reason}): give a complete folder or a "
                        "hub name of a causal language model") from None
    # generate() would take all else from there, too, say a repetition_penalty: another rule.
    names = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")
    special = {name: getattr(model.generation_config, name) for name in names}
    model.generation_config = transformers.GenerationConfig(**special)
    linear.pack(model)
    return model.eval(), tokenizer

class Setup:
    """A target, loaded, and what is needed to load drafters for it.

    model, tokenizer    transformers' own
    target              the model as a verify.Target.  cuda: whether it is on a GPU
    eos                 the ids that end a text
    stages              {name: language model} of all cascades, loaded once
    notes               sentences for the reader
    """
    def __init__(self, name, checkpoint, dtype="float32", device="cpu", revision=None, trust=False,
                 graphs=False):
        self.checkpoint, self.graphs = checkpoint, graphs
        self.dtype, self.device, self.trust = dtype, device, trust
        self.stages, self.notes = {}, []
        self.model, self.tokenizer = self.load(name, "the target", revision)
        self.eos = self.model.generation_config.eos_token_id
        self.target = self.wrap(self.model)
        self.cuda = self.target.device.type == "cuda"

    def load(self, name, role, revision=None):
        """A language model -> (model, tokenizer)"""
        return load_target(name, self.dtype, self.device, role, revision, self.trust)

    def wrap(self, model, capacity=None, vocab=None):
        """A model as a verify.Target."""
        target = any_target(model, capacity, vocab)
        return static(target) if self.graphs else target

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

def fits(a, b):
    """Whether a drafter for a target of fingerprint a serves one of fingerprint b.

    It serves the model that it was trained for, and one of the same architecture and vocabulary
    whose weights were rounded to 4 bits (the relative difference ||a - b|| / ||b|| is .08 to .16
    then) or lightly tuned.  Between models that were trained from different seeds it is some 1.4.
    """
    probe_a, probe_b = a.get("probe", {}), b.get("probe", {})
    for key in a.keys() & b.keys():
        if key != "probe" and a[key] != b[key]:
            return False
    names = [name for name in probe_a if name in probe_b]
    if not names:
        return False
    of_a = np.array([probe_a[name] for name in names])
    of_b = np.array([probe_b[name] for name in names])
    difference = np.linalg.norm(of_a - of_b) / max(np.linalg.norm(of_b), 1e-30)
    return bool(difference < NEAR)

# ---------------------------------------------------------------- trained drafters
def about_drafter(folder):
    """The training.json of a drafter -> dict with "kind", "target" and "validation"."""
    try:
        about = json.loads((Path(folder) / "training.json").read_text())
        assert "kind" in about
        return {"target": {}, "validation": {}} | about
    except (OSError, ValueError, TypeError, AssertionError):
        raise UserError(f"the drafter in {folder} is damaged: train or copy it again") from None

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

def load_drafter(setup, name):
    """A trained drafter of the checkpoint."""
    folder = drafters_in(setup.checkpoint)[name]
    about = about_drafter(folder)
    # Checked first: a drafter for another target may read layers that this one does not have.
    if not fits(about["target"], fingerprint(setup.model, setup.tokenizer)):
        raise UserError(f"the drafter in {folder} was made for another target: train one for this")
    try:
        drafter, _ = drafters.load(folder, setup.model)
    except (ValueError, LookupError, TypeError, SafetensorError) as why:
        raise UserError(f"the drafter in {folder} cannot be loaded: {first_line(why)}") from None
    linear.pack(drafter.model, beside=setup.model)
    return static(drafter) if setup.graphs else drafter

# ---------------------------------------------------------------- language models that draft
def stage_of(setup, name):
    """A language model with the target's tokenizer, by name, loaded once."""
    if name in setup.stages:
        return setup.stages[name]
    folder = Path(setup.checkpoint) / name
    source = folder if (folder / "config.json").exists() else name
    model, tokenizer = setup.load(source, "the stage")
    # Vocabularies may be padded to different sizes, but an id must mean the same token in both.
    of_stage = {i: token for token, i in tokenizer.get_vocab().items()}
    for token, i in setup.tokenizer.get_vocab().items():
        if of_stage.get(i, token) != token:
            raise UserError(f"{name} has another tokenizer than the target: token {i} is "
                            f"{of_stage[i]!r} there, {token!r} here; take a model of the target's "
                            "family")
    linear.pack(model, beside=setup.model)
    setup.stages[name] = model
    return model

def load_cascade(setup, *names, k=None, lenience=1.0, matching=True, bigram=None):
    """Algorithm 1 of Cascade Speculative Drafting; Max-Gram alone is a cascade without a model.

    names: folders of the checkpoint, other folders or hub names of language models, the largest
    first; maxgram last.  k: Table 2's k11, or (k11, k12, k22).  matching: False lets Max-Gram
    predict by its bigram alone.  bigram: a file, in place of the checkpoint's.
    """
    neural = [name for name in names if name != "maxgram"]
    if "maxgram" in names[:-1]:
        raise UserError(f"cascade({', '.join(names)}): name the largest model first, maxgram last")
    K = None
    if k is not None:
        counts = list(k) if isinstance(k, (tuple, list)) else [k]
        K = cascade.table2(counts, len(neural), "maxgram" in names)
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
    drafter = cascade.Cascade(stages, K, lenience, gram, setup.target.vocab)
    # For SWI: a stage costs its share of the target's weights.
    drafter.names, drafter.costs = list(names), weights
    return drafter

class Stage:
    """A language model that drafts trees, by the contract at the top of verify.py.

    In a cascade a model writes chains.  Here it reads the whole tree at each depth, with the mask
    and the positions of its nodes, as the target does.  Its cache holds committed tokens only.
    """
    needs = {}
    temperature = 1.0                              # the calibration temperature

    def __init__(self, target):
        """target: the language model as a verify.Target, with the target's vocabulary size."""
        self.target = target
        self.reset()

    def reset(self):
        """Forget the sequence."""
        self.target.reset()
        self.text, self.unread = [], []

    def begin(self, view):
        """A round starts.  Newly committed tokens are read together with its first nodes."""
        self.text += view.ids
        self.unread += view.ids
        self.tokens, self.parents = [], []
        if len(self.unread) == len(self.text) < self.target.capacity:
            self.target.sync(self.text)            # a prompt, which may be long
            self.unread = []

    def expand(self, tokens, parents):
        """tokens (m,), parents [m] -> logits (m, V); -inf where the model's context is full."""
        self.tokens += tokens.tolist()
        self.parents += parents
        if len(self.text) + len(self.tokens) > self.target.capacity:
            return torch.full((len(parents), self.target.vocab), -torch.inf, device=tokens.device)
        # The k unread tokens are a chain, and the tree hangs from its last one.
        k = len(self.unread)
        chain = list(range(-1, k - 1))
        tree = [k + parent if parent >= 0 else k - 1 for parent in self.parents]
        nodes = torch.tensor(self.unread + self.tokens)
        logits = self.target.forward(nodes, torch.tensor(chain + tree))        # (k + nodes, V)
        self.target.commit(list(range(k)), self.unread)
        self.unread = []
        return logits[-len(parents):].to(tokens.device)

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
        bigram, confidence = found["bigram"], found.get("confidence")
        assert all(type(token) is int and token >= 0 for token in bigram), "its bigram"
        fits = found.get("agreement", {})
        agreement = {name: fit["weights"] for name, fit in fits.items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, AssertionError) as why:
        raise UserError(f"the bigram file {path} cannot be read ({type(why).__name__}: "
                        f"{first_line(why)}): write one with training/bigram.py") from None
    of_another = vocabulary is not None and found.get("fingerprint", vocabulary) != vocabulary
    if of_another or len(bigram) > vocab or max(bigram, default=0) >= vocab:
        raise UserError(f"{path} is a bigram of another vocabulary than the target's {vocab} "
                        "tokens: write one with training/bigram.py")
    bigram = bigram + [0] * (vocab - len(bigram))                      # 0: unknown
    return {"bigram": bigram, "confidence": confidence, "agreement": agreement}

def load_gram(setup, bigram=None):
    """Max-Gram with the bigram of a file, or else of the checkpoint's, if it has one.

    gram.agreement: the weights of graft.Mixture that the file has, by the drafter's name.
    """
    path = Path(str(bigram or Path(setup.checkpoint) / "bigram.json"))
    found = {}
    if bigram or path.exists():
        vocabulary = vocabulary_fingerprint(setup.tokenizer)
        try:
            found = read_gram(path, setup.target.config.vocab_size, vocabulary)
        except UserError as why:
            if bigram:
                raise
            # The checkpoint's is a default: another target does without.
            setup.notes.append(f"no bigram: {why}")
    gram = MaxGram(found.get("bigram"), found.get("confidence"))
    gram.agreement = found.get("agreement", {})
    return gram

def load_mixture(setup, *names, bigram=None):
    """A neural drafter mixed with Max-Gram, for any tree: mixture(edd, maxgram).

    names: a drafter of the checkpoint, or a language model, as a cascade takes it; then maxgram.
    bigram: a file, in place of the checkpoint's.
    """
    name, *rest = names
    if rest != ["maxgram"] or name == "maxgram":
        raise UserError(f"mixture({', '.join(names)}): name one drafter of trees, or one language "
                        "model, then maxgram")
    if name in drafters_in(setup.checkpoint):
        drafter = load_drafter(setup, name)
    else:
        model = stage_of(setup, name)
        drafter = Stage(setup.wrap(model, setup.target.context, setup.target.vocab))
        folder = Path(setup.checkpoint) / name
        if (folder / "training.json").exists():
            drafter.temperature = about_drafter(folder)["validation"].get("temperature", 1.0)
    gram = load_gram(setup, bigram)
    return Mixture(drafter, gram, gram.agreement.get(name))

# ---------------------------------------------------------------- all of them
def loaders(checkpoint):
    """{name of a drafter: the function that loads it}, as read_call takes them."""
    found = dict.fromkeys(drafters_in(checkpoint), load_drafter)
    return found | {"maxgram": load_cascade, "cascade": load_cascade, "mixture": load_mixture}

def called(setup, call):
    """The drafter that a Call names."""
    try:
        return call.function(setup, *(call.words or [call.name]), **call.settings)
    except TypeError as why:
        raise UserError(f"--drafter {call.label}: {why}") from None
