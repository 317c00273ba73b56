"""Tiny targets of the real classes with random weights, plain decoding by them, and drafters."""
import copy
import random
import sys
import threading
from functools import lru_cache
from pathlib import Path

import pytest
import torch
import transformers
from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "figures")]
torch.set_num_threads(1)
tqdm.monitor_interval = 0          # no thread whose lock a forked test could inherit, held
# tqdm's own lock is one of all processes: a child that is killed would keep it for ever.
tqdm.set_lock(threading.RLock())

CONTEXT, VOCAB = 40, 12
SIZES = dict(
    vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=3,
    num_attention_heads=4, max_position_embeddings=CONTEXT, eos_token_id=None, bos_token_id=None,
    pad_token_id=None)
GROUPED = dict(num_key_value_heads=2)
MIXED = dict(use_sliding_window=True, sliding_window=7, max_window_layers=1)
CLASSES = {
    "llama": ("LlamaForCausalLM", {}),
    "llama-eager": ("LlamaForCausalLM", {**GROUPED, "attn_implementation": "eager"}),
    "mistral": ("MistralForCausalLM", {**GROUPED, "sliding_window": 3}),
    "qwen2": ("Qwen2ForCausalLM", GROUPED),
    "qwen2-mixed": ("Qwen2ForCausalLM", {**GROUPED, **MIXED}),
}

# ---------------------------------------------------------------- targets
def tiny(name, seed=0, **more):
    """A random model of a key of CLASSES or of a class of transformers, in float64.

    Its distributions are far from uniform.  Its experts run in a loop, as grouped kernels know no
    float64.
    """
    name, own = CLASSES.get(name, (name, {}))
    model_class = getattr(transformers, name)
    config = model_class.config_class(**{**SIZES, **own, **more})
    config._experts_implementation = "eager"
    torch.manual_seed(seed)
    model = model_class(config).double().eval()
    for p in model.parameters():
        if p.ndim >= 2:
            torch.nn.init.normal_(p, std=0.25)
    return model

def relative(model, noise, seed):
    """A model of the same class whose choices mostly agree with `model`'s."""
    torch.manual_seed(seed)
    other = copy.deepcopy(model)
    for w in other.state_dict().values():
        w += noise * torch.randn_like(w) * (w.ndim == 2)
    return other

# The same one for all tests that ask for it: nobody changes it.
shared = lru_cache(maxsize=None)(tiny)

@pytest.fixture(scope="session")
def llama():
    return shared("llama")

# ---------------------------------------------------------------- the oracle
@torch.no_grad()
def plain(model, ids, new):
    """Greedy decoding by the model's own forward over the whole text, without cache and mask.

    Returns the new ids: the oracle of all that is lossless.
    """
    ids = list(ids)
    for _ in range(new):
        ids.append(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax().item())
    return ids[-new:]

# ---------------------------------------------------------------- drafters
class Positional:
    """A drafter that knows positions alone: at(position) -> the logits (V,) of the token there."""
    needs = {}
    temperature = 1.0

    def __init__(self, at):
        self.at = at

    def reset(self, probs):
        self.probs = probs

    def begin(self, view, root):
        self.length, self.depth = view.length, []

    def expand(self, tokens, parents):
        logits = []
        for parent in parents:
            depth = self.depth[parent] + 1 if parent >= 0 else 0
            self.depth.append(depth)
            logits.append(self.at(self.length + depth + 1))
        return self.probs(torch.stack(logits), self.temperature)

    def keep(self, path):
        """Nodes of its own, the root first; none where expand was not called."""
        assert path == sorted(set(path)) and path[:1] == list(range(min(1, len(self.depth))))
        assert all(node < len(self.depth) for node in path)

def noisy(vocab=VOCAB):
    """A drafter with another prediction at each position."""
    def at(position):
        rng = random.Random(position)
        return torch.tensor([rng.uniform(-3, 0) for _ in range(vocab)])
    return Positional(at)

def reciting(text, vocab=VOCAB):
    """A drafter that recites a text, and is wrong at each third position."""
    def at(position):
        token = text[position] if position < len(text) else 0
        p = torch.full((vocab,), 0.1 / vocab)
        p[(token + (position % 3 == 0)) % vocab] += 0.9
        return p.log()
    return Positional(at)

def weighty(draft_model, seed=1):
    """The draft model, with weights large enough that every part matters, in float64."""
    torch.manual_seed(seed)
    for p in draft_model.parameters():
        if p.ndim == 2:
            torch.nn.init.normal_(p, std=0.3)
    return draft_model.double().eval()

# Settings of kinds, for targets of three layers
SETTINGS = {
    "glide": {"width": 24},
    "glide 2": {"width": 24, "layers": 2},
    "vanilla": {"width": 24, "glimpse": False},
    "vanilla-shared": {"glimpse": False},
    "edd": {"hidden": 2},
    "vdm": {"hidden": 2, "encoding": False},
    "edd-shared": {"hidden": 2},
    "vdm-shared": {"hidden": 2, "encoding": False},
}

def random_draft_model(model, kind, words=None, **more):
    """A random draft model for a tiny target: a key of SETTINGS or of families.KINDS."""
    from runtime import families
    name = kind.split()[0]
    config_class, _ = families.KINDS[name]
    config = config_class.for_target(model, **{**SETTINGS.get(kind, {}), **more})
    return weighty(families.new(config, model, words))

def random_drafter(model, kind, **more):
    """What decodes with a random draft model of such a kind."""
    from runtime import families
    _, drafter_class = families.KINDS[kind.split()[0]]
    return drafter_class(random_draft_model(model, kind, **more))

# ---------------------------------------------------------------- models in files
@pytest.fixture(scope="session")
def small(tmp_path_factory):
    """A folder with a tiny random target, random drafters of the real classes and two language
    models as stages of a cascade; a file of three prompts, and one of a chat of two turns."""
    from helpers import TEXT, save, save_drafter, tokenizer_of, write_rows
    folder = tmp_path_factory.mktemp("small")
    drafters, tokenizer = folder / "drafters", tokenizer_of(TEXT * 100)
    sizes = {"vocab_size": 300, "max_position_embeddings": 64}
    model = tiny("llama", **sizes).float()
    save(folder / "model", model, tokenizer)
    for layers, name, vocab in ((2, "base", 300), (1, "small", 304)):      # one is padded
        sizes["vocab_size"] = vocab
        stage = tiny("llama", seed=layers, num_hidden_layers=layers, **sizes).float()
        save(drafters / name, stage, tokenizer)
    for kind in ("glide", "edd"):
        draft_model = random_draft_model(model, kind).float()
        save_drafter(drafters / kind, kind, draft_model, model, tokenizer, 0.5)
    write_rows(folder / "prompts.jsonl", [{"prompt": "def add("}, {"prompt": "return a + b"},
                                          {"question": "1 + 1?", "answer": "2"}])
    write_rows(folder / "chat.jsonl", [{"turns": ["a", "b"], "category": "chat"}, {"prompt": "c"}])
    return folder
