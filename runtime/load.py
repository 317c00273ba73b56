"""From a name on the command line to a model, a tokenizer, a drafter or a cascade.

    loaded = Loaded("checkpoints/target", "checkpoints")    # a target, and where its drafters lie
    load_drafter(loaded, "glide")                           # a trained drafter
    load_cascade(loaded, "base", "small", "maxgram", k=(8, 13, 1))
    load_mixture(loaded, "edd", "maxgram")                  # a drafter mixed with Max-Gram

Drafters are named as these functions would be called (runtime/calls.py), by their keywords.
"""
import hashlib
import json
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
import transformers

import glide
from beyond.graft import Mixture
from cascade import Cascade
from maxgram import MaxGram, N
from runtime import families, linear
from runtime.calls import read_call
from runtime.program import UserError, first_line
from runtime.static import static
from runtime.targets import any_target, with_source

ROOT = Path(__file__).resolve().parent.parent
CHECKPOINTS = ROOT / "checkpoints"
STAND_IN = CHECKPOINTS / "target"                 # the default target
SMOLLM2 = ROOT / "work" / "smollm2"               # a public model: training/smollm2.py fetches it

# ---------------------------------------------------------------- language models
@contextmanager
def loading(name):
    """Yield the folder or hub name that transformers takes; its errors become a UserError."""
    source = SMOLLM2 if str(name) == "smollm2" else name
    if source is SMOLLM2 and not source.exists():
        raise UserError("smollm2 does not exist yet: python training/smollm2.py fetches it")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        yield source
    except torch.OutOfMemoryError:
        raise
    except Exception as why:                       # many libraries read its files
        raise UserError(f"{name} cannot be loaded ({first_line(why)}): give a complete folder, or "
                        "the hub name of a language model") from why

def load_tokenizer(name, trust=False):
    """Load a tokenizer.  Arguments: as of load_target."""
    with loading(name) as source:
        return transformers.AutoTokenizer.from_pretrained(source, trust_remote_code=trust)

def load_target(name, dtype, device, trust=False):
    """Load a language model -> (model, tokenizer), as transformers has them.

    name: a folder, a hub name, or "smollm2".  device: "auto" spreads it over all devices, by
    accelerate.  trust: whether to run code that comes with the model.
    """
    tokenizer = load_tokenizer(name, trust)
    with loading(name) as source:
        config = transformers.AutoConfig.from_pretrained(source, trust_remote_code=trust)
        model_class = transformers.AutoModelForCausalLM
        if config.is_encoder_decoder:
            model_class = transformers.AutoModelForSeq2SeqLM
        # Quantised weights are placed while they are loaded; so are those of a spread model.
        is_quantised = bool(getattr(config, "quantization_config", None))
        placed = {"device_map": device} if device == "auto" or is_quantised else {}
        model, found = model_class.from_pretrained(
            source, dtype=dtype, output_loading_info=True, trust_remote_code=trust, **placed)
        missing = sorted(found["missing_keys"])    # transformers fills them with random numbers
        if missing and not is_quantised:
            raise ValueError(f"its files lack {len(missing)} weights, {missing[0]} for example")
        if str(device).startswith("cuda:"):
            torch.cuda.set_device(device)
        if not placed:
            model = model.to(device)
    if config.is_encoder_decoder and getattr(config, "num_decoder_layers", None):
        # By the encoder's number generate() counts the layers of the decoder's cache, up to 5.23.
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
    eos                 the id or the ids that end a text, None where none does
    stages              {name: language model} of all cascades, loaded once
    notes               sentences for the reader
    """
    def __init__(self, name, checkpoint, dtype="float32", device="cpu", trust=False, graphs=False):
        self.checkpoint, self.graphs = Path(checkpoint), graphs
        self.dtype, self.device, self.trust = dtype, device, trust
        self.stages, self.notes = {}, []
        self.model, self.tokenizer = load_target(name, dtype, device, trust)
        self.eos = self.model.generation_config.eos_token_id
        self.target = self.wrap(self.model)

    def wrap(self, model, vocab=None):
        """A model as a verify.Target."""
        target = any_target(model, vocab)
        return static(target) if self.graphs else target

    def drafter(self, call):
        """The drafter that a Call of drafter_calls names."""
        try:
            return call.function(self, *(call.words or [call.name]), **call.settings)
        except ValueError as why:                  # of files, of settings
            raise UserError(f"{call.label}: {first_line(why)}") from why

def drafter_calls(texts, checkpoint):
    """Drafters as the command line names them -> [Call], without loading one."""
    found = dict.fromkeys(drafters_in(checkpoint), load_drafter)
    found |= {"maxgram": load_cascade, "cascade": load_cascade, "mixture": load_mixture}
    return [read_call(text, found, f"drafter in {checkpoint}") for text in texts]

# ---------------------------------------------------------------- fingerprints
PROBES = 32              # weights of a model in its fingerprint

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
    matrices = [(name, p) for name, p in model.named_parameters()
                if p.ndim == 2 and type(p) is torch.nn.Parameter and not p.is_meta
                and p.is_floating_point() and p.dtype.itemsize > 1]
    for i in range(PROBES if matrices else 0):
        # Evenly over all matrices, the first and the last among them
        name, matrix = matrices[round(i * (len(matrices) - 1) / (PROBES - 1))]
        weight = matrix[len(matrix) // 3, matrix.shape[1] // 2].item()
        about["probe"][name] = float(f"{weight:.5g}")
    if tokenizer is not None:
        about["vocabulary"] = vocabulary_fingerprint(tokenizer)
    return about

def difference(made_for, model, tokenizer=None):
    """What keeps a drafter for a target of a fingerprint from serving a model -> text, or None.

    It also serves a copy whose weights were rounded to 4 bits, or lightly tuned.
    """
    here = fingerprint(model, tokenizer)
    for key, there in made_for.items():
        if key != "probe" and there != here.get(key, there):
            return f"its {key} was {there}, and here it is {here[key]}"
    if glide.has_other_weights(model, made_for["probe"]):
        return "its weights were others"

# ---------------------------------------------------------------- trained drafters
def drafters_in(checkpoint):
    """{name: folder} of the trained drafters in a folder of folders, or in the folder of one."""
    top = Path(checkpoint)
    if (top / "training.json").exists():
        about, _ = families.about_drafter(top)
        return {about["kind"]: top}
    folders = [path.parent for path in sorted(top.glob("*/training.json"))]
    # A folder with a config.json is a language model's, a stage of a cascade.
    return {folder.name.replace("_", "-"): folder for folder in folders
            if not (folder / "config.json").exists()}

def load_drafter(loaded, name, temperature=None):
    """A trained drafter of the checkpoint.

    temperature: of its calibration; None: the one that training fitted; 1: raw confidences.
    """
    folder = drafters_in(loaded.checkpoint)[name]
    # Checked first: a drafter for another target may read layers that this one does not have.
    about, _ = families.about_drafter(folder)
    differs = difference(about["target"], loaded.model, loaded.tokenizer)
    if differs:
        raise UserError(f"the drafter was made for another target: train one for this ({differs})")
    drafter, _ = families.load(folder, loaded.model)
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
        model, tokenizer = load_target(source, loaded.dtype, loaded.device, loaded.trust)
        # Vocabularies may be padded to different sizes, but an id must mean one token in both.
        of_stage = {i: token for token, i in tokenizer.get_vocab().items()}
        for token, i in loaded.tokenizer.get_vocab().items():
            if of_stage.get(i, token) != token:
                raise UserError(f"{name} has another tokenizer than the target: take a model of "
                                "the target's family")
        linear.pack(model, beside=loaded.model)
        loaded.stages[name] = model
    return loaded.wrap(loaded.stages[name], loaded.target.vocab)

def table2(k, models, gram):
    """Table 2's k -> the matrix K of Algorithm 1; the top of cascade.py has an example.

    k: k_11 for one model, (k_11, k_12, k_22) for two, (k_11, k_12, k_13, k_22, k_23, k_33) for
    three.  models: how many there are.  gram: whether Max-Gram is the last stage.
    """
    counts = np.ravel(k)
    wanted = models * (models + 1) // 2
    if len(counts) != wanted:
        raise UserError(f"k={k!r}: {models} model(s) take {wanted} number(s)")
    totals = np.zeros((models, models), int)
    totals[np.triu_indices(models)] = counts
    # A total includes the one before it in its row; K has the differences.
    K = np.diff(totals, prepend=0)
    if gram:
        K = np.pad(K, (0, 1))
        K[:, -1] = N
    return K.tolist()

def load_cascade(loaded, *names, k=None, lenience=1.0):
    """Algorithm 1 of Cascade Speculative Drafting; maxgram alone is a cascade without a model.

    names: folders of the checkpoint, other folders or hub names of language models, the largest
    first; and maxgram, which is the last stage.  k: Table 2's k11, or (k11, k12, k22).
    """
    models = [name for name in names if name != "maxgram"]
    gram, _ = load_gram(loaded) if "maxgram" in names else (None, None)
    K = None if k is None else table2(k, len(models), gram is not None)
    stages = [stage_of(loaded, name) for name in models]
    cascade = Cascade(stages, K, lenience, gram, loaded.target.vocab)
    return with_source(cascade, loaded.target)

# ---------------------------------------------------------------- Max-Gram
def load_gram(loaded):
    """Max-Gram with the bigram.json of the checkpoint, if it has one.

    training/bigram.py wrote it; or it is one of the paper's public files, a list by token id.
    Returns a MaxGram, and {name of a drafter: weights of graft.Mixture} from the same file.
    """
    path = loaded.checkpoint / "bigram.json"
    found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    found = found if isinstance(found, dict) else {"bigram": found}
    vocabulary = vocabulary_fingerprint(loaded.tokenizer)
    is_other = found.get("fingerprint", vocabulary) != vocabulary
    if is_other or max(found["bigram"], default=0) >= loaded.target.config.vocab_size:
        loaded.notes.append(f"no bigram: {path} is of another vocabulary: write one with "
                            "training/bigram.py")
        found = {"bigram": []}
    weights = {name: fit["weights"] for name, fit in found.get("agreement", {}).items()}
    return MaxGram(found["bigram"], found.get("confidence")), weights

def load_mixture(loaded, *names):
    """A drafter of the checkpoint mixed with Max-Gram, for any tree: mixture(edd, maxgram)."""
    name, *rest = names
    if rest != ["maxgram"] or name not in drafters_in(loaded.checkpoint):
        raise UserError("name one drafter of the checkpoint, then maxgram: mixture(edd, maxgram)")
    gram, agreement = load_gram(loaded)
    return Mixture(load_drafter(loaded, name), gram, agreement.get(name))
