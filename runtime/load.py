"""From a name on the command line to a model, a tokenizer, a drafter or a cascade.

    loaded = Loaded("checkpoints/target", "checkpoints")    # a target, and where its drafters lie
    load_drafter(loaded, "glide")                           # a trained drafter
    load_cascade(loaded, "base", "small", "maxgram", k=(8, 13, 1))
    load_mixture(loaded, "edd", "maxgram")                  # a drafter mixed with Max-Gram

Drafters are named as these functions would be called (runtime/calls.py), by their keywords.
"""
import hashlib
import json
import math
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors import SafetensorError

from beyond.graft import Mixture
from beyond.stage import Stage
from cascade import Cascade
from maxgram import MaxGram, N
from runtime import families, linear
from runtime.calls import read_call
from runtime.errors import UserError
from runtime.program import first_line
from runtime.static import static
from runtime.targets import any_target, with_source

ROOT = Path(__file__).resolve().parent.parent
CHECKPOINTS = ROOT / "checkpoints"
STAND_IN = CHECKPOINTS / "target"                 # the default target
SMOLLM2 = ROOT / "work" / "smollm2"               # a public model: training/smollm2.py fetches it

# ---------------------------------------------------------------- language models
@contextmanager
def loading(role, name):
    """Within it, what transformers or a library below it raises becomes a UserError."""
    try:
        yield
    except (UserError, torch.OutOfMemoryError):
        raise
    except Exception as why:                       # many libraries read its files
        raise UserError(f"{role} {name} cannot be loaded ({first_line(why)}): give a complete "
                        "folder, or the hub name of a language model") from None

def source_of(name):
    """A folder or hub name, as transformers takes it."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if str(name) != "smollm2":
        return name
    if not SMOLLM2.exists():
        raise UserError("smollm2 does not exist yet: python training/smollm2.py fetches it")
    return SMOLLM2

def load_tokenizer(name, role="the tokenizer", trust=False):
    """Load a tokenizer.  Arguments: as of load_target."""
    with loading(role, name):
        return transformers.AutoTokenizer.from_pretrained(source_of(name), trust_remote_code=trust)

def load_target(name, dtype, device, role="the target", trust=False):
    """Load a language model -> (model, tokenizer), as transformers has them.

    name: a folder, a hub name, or "smollm2".  device: "auto" spreads it over all devices, by
    accelerate.  role: what a UserError calls the model.  trust: whether to run code that comes with
    the model.
    """
    tokenizer = load_tokenizer(name, role, trust)
    hub = {"trust_remote_code": trust}
    with loading(role, name):
        source = source_of(name)
        config = transformers.AutoConfig.from_pretrained(source, **hub)
        model_class = transformers.AutoModelForCausalLM
        if config.is_encoder_decoder:
            model_class = transformers.AutoModelForSeq2SeqLM
        # Quantised weights are placed while they are loaded; so are those of a spread model.
        is_quantised = bool(getattr(config, "quantization_config", None))
        placed = {}
        if device == "auto" or is_quantised:
            placed["device_map"] = "auto" if device == "auto" else {"": device}
        model, found = model_class.from_pretrained(
            source, dtype=dtype, output_loading_info=True, **placed, **hub)
        missing = sorted(found["missing_keys"])    # transformers fills them with random numbers
        if missing and not is_quantised:
            raise ValueError(f"its files lack {len(missing)} weights, {missing[0]} for example")
        if str(device).startswith("cuda:"):
            torch.cuda.set_device(device)
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

class Loaded:
    """A target, and what is needed to load drafters for it.

    model, tokenizer    transformers' own
    target              the model as a verify.Target for any family
    eos                 the id or the ids that end a text, () where none does
    stages              {name: language model} of all cascades, loaded once
    notes               sentences for the reader
    """
    def __init__(self, name, checkpoint, dtype="float32", device="cpu", trust=False, graphs=False):
        self.checkpoint, self.graphs = Path(checkpoint), graphs
        self.dtype, self.device, self.trust = dtype, device, trust
        self.stages, self.notes = {}, []
        self.model, self.tokenizer = self.load(name, "the target")
        eos = self.model.generation_config.eos_token_id
        self.eos = () if eos is None else eos
        self.target = self.wrap(self.model)

    def load(self, name, role):
        """A language model -> (model, tokenizer)"""
        return load_target(name, self.dtype, self.device, role, trust=self.trust)

    def wrap(self, model, capacity=None, vocab=None):
        """A model as a verify.Target."""
        target = any_target(model, capacity, vocab)
        return static(target) if self.graphs else target

    def drafter(self, call):
        """The drafter that a Call of drafter_calls names."""
        return call.function(self, *(call.words or [call.name]), **call.settings)

def drafter_calls(texts, checkpoint):
    """Drafters as the command line names them -> [Call], without loading one."""
    found = dict.fromkeys(drafters_in(checkpoint), load_drafter)
    found |= {"maxgram": load_maxgram, "cascade": load_cascade, "mixture": load_mixture}
    for text in texts:
        if (Path(checkpoint) / text / "config.json").exists():
            raise UserError(f'{text} is a language model: write --drafter "cascade({text})"')
    return [read_call(text, found, f"drafter in {checkpoint}") for text in texts]

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
    # Matrices of which a weight can be read.  Offloaded ones cannot; a number that is stored in 8
    # bits or less is not the weight, but has a scale elsewhere.
    matrices = []
    for name, p in model.named_parameters():
        as_stored = p.is_floating_point() and p.element_size() > 1
        if p.ndim == 2 and as_stored and not p.is_meta and not hasattr(p, "__tensor_flatten__"):
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

# ---------------------------------------------------------------- trained drafters
def about_drafter(folder):
    """The training.json of a drafter -> dict with "kind", "target" and "validation"."""
    try:
        about = json.loads((Path(folder) / "training.json").read_text())
        about = {"target": {}, "validation": {}} | about
        if not 0 < about["validation"].get("temperature", 1.0) < math.inf or "kind" not in about:
            raise ValueError("its kind is missing, or its temperature is no number above 0")
        return about
    except (OSError, ValueError, TypeError, AttributeError) as why:
        raise UserError(f"the drafter in {folder} is damaged ({first_line(why)} in training.json): "
                        "train or copy it again") from None

def drafters_in(checkpoint):
    """{name: folder} of the trained drafters in a folder of folders, or in the folder of one."""
    top = Path(checkpoint)
    if not top.is_dir():
        raise UserError(f"the folder {checkpoint}, in which drafters should lie, does not exist")
    if (top / "training.json").exists():
        return {about_drafter(top)["kind"]: top}
    found = {}
    for path in sorted(top.glob("*/training.json")):
        # A folder with a config.json is a language model's, a stage of a cascade.
        if not (path.parent / "config.json").exists():
            found[path.parent.name.replace("_", "-")] = path.parent
    return found

def load_drafter(loaded, name, temperature=None):
    """A trained drafter of the checkpoint.

    temperature: of its calibration; None: the one that training fitted; 1: raw confidences.
    """
    folder = drafters_in(loaded.checkpoint)[name]
    about = about_drafter(folder)
    # Checked first: a drafter for another target may read layers that this one does not have.
    differs = difference(about["target"], fingerprint(loaded.model, loaded.tokenizer))
    if differs:
        raise UserError(f"the drafter in {folder} was made for another target: train one for this "
                        f"({differs})")
    try:
        drafter, _ = families.load(folder, loaded.model)
    except (ValueError, OSError, LookupError, TypeError, RuntimeError, SafetensorError) as why:
        raise UserError(f"the drafter in {folder} cannot be loaded: {first_line(why)}") from None
    linear.pack(drafter.model, beside=loaded.model)
    if temperature is not None:
        drafter.temperature = temperature
    return static(drafter) if loaded.graphs else drafter

# ---------------------------------------------------------------- language models that draft
def stage_of(loaded, name):
    """A language model with the target's tokenizer, by name -> a verify.Target.

    It is loaded once, but each cascade gets a KV cache of its own.
    """
    if name not in loaded.stages:
        folder = loaded.checkpoint / name
        source = folder if (folder / "config.json").exists() else name
        if "/" not in name and name != "smollm2" and not Path(source).exists():
            raise UserError(f"there is no drafter called {name} in {loaded.checkpoint} (a hub name "
                            "has an owner: openai-community/gpt2)")
        model, tokenizer = loaded.load(source, "the stage")
        # Vocabularies may be padded to different sizes, but an id must mean one token in both.
        of_stage = {i: token for token, i in tokenizer.get_vocab().items()}
        for token, i in loaded.tokenizer.get_vocab().items():
            if of_stage.get(i, token) != token:
                raise UserError(f"{name} has another tokenizer than the target: token {i} is "
                                f"{of_stage[i]!r} there, {token!r} here; take a model of the "
                                "target's family")
        linear.pack(model, beside=loaded.model)
        loaded.stages[name] = model
    return loaded.wrap(loaded.stages[name], loaded.target.context, loaded.target.vocab)

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

def load_cascade(loaded, *names, k=None, lenience=1.0, bigram=None):
    """Algorithm 1 of Cascade Speculative Drafting; Max-Gram alone is a cascade without a model.

    names: folders of the checkpoint, other folders or hub names of language models, the largest
    first; maxgram last.  k: Table 2's k11, or (k11, k12, k22).  bigram: a file, in place of
    the checkpoint's.
    """
    if "maxgram" in names[:-1]:
        raise UserError(f"cascade({', '.join(names)}): name the largest model first, maxgram last")
    models = [name for name in names if name != "maxgram"]
    gram = None
    if "maxgram" in names:
        gram, _ = load_gram(loaded, bigram)
    K = None if k is None else table2(k, len(models), gram is not None)
    stages = [stage_of(loaded, name) for name in models]
    try:
        cascade = Cascade(stages, K, lenience, gram, loaded.target.vocab)
        return with_source(cascade, loaded.target)
    except ValueError as why:
        raise UserError(f"cascade({', '.join(names)}): {first_line(why)}") from None

# ---------------------------------------------------------------- Max-Gram
def load_maxgram(loaded, name, bigram=None):
    """Max-Gram alone: a cascade without models.  Settings: as of load_cascade."""
    return load_cascade(loaded, name, bigram=bigram)

def read_gram(path, vocab, vocabulary):
    """Read a bigram file -> {"bigram": list (vocab,), "confidence": list or None, "agreement": {}}

    training/bigram.py wrote it; or it is one of the paper's public files, a list by token id, which
    may be shorter.  "agreement" has the weights of graft.Mixture for some drafters.  vocabulary:
    the fingerprint that the file's must equal, if it has one.
    """
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
        found = found if isinstance(found, dict) else {"bigram": found}
        bigram = found["bigram"]
        if found.get("fingerprint", vocabulary) != vocabulary:
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

def load_gram(loaded, path=None):
    """Max-Gram with the bigram of a file, or else of the checkpoint's, if it has one.

    Returns a MaxGram, and {name of a drafter: weights of graft.Mixture} from the same file.
    """
    default = loaded.checkpoint / "bigram.json"
    found = {}
    if path is not None or default.exists():
        vocabulary = vocabulary_fingerprint(loaded.tokenizer)
        try:
            found = read_gram(path or default, loaded.target.config.vocab_size, vocabulary)
        except UserError as why:
            if path is not None:
                raise
            # The checkpoint's is a default: another target does without.
            loaded.notes.append(f"no bigram: {why}")
    gram = MaxGram(found.get("bigram"), found.get("confidence"))
    return gram, found.get("agreement", {})

def load_mixture(loaded, *names, bigram=None, temperature=None):
    """A neural drafter mixed with Max-Gram, for any tree: mixture(edd, maxgram).

    names: a drafter of the checkpoint, or a language model, as a cascade takes it; then maxgram.
    bigram: a file, in place of the checkpoint's.  temperature: as of load_drafter.
    """
    name, *rest = names
    if rest != ["maxgram"] or name == "maxgram":
        raise UserError(f"mixture({', '.join(names)}): name one drafter of trees, or one language "
                        "model, then maxgram")
    if name in drafters_in(loaded.checkpoint):
        drafter = load_drafter(loaded, name, temperature)
    else:
        folder = loaded.checkpoint / name
        if temperature is None and (folder / "training.json").exists():
            temperature = about_drafter(folder)["validation"].get("temperature")
        drafter = Stage(stage_of(loaded, name), temperature or 1.0)
    gram, agreement = load_gram(loaded, bigram)
    return Mixture(drafter, gram, agreement.get(name))

