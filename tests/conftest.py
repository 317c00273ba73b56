"""Tiny targets of the real classes, with random weights in float64, and plain decoding without anything of ours."""
import os
import sys
import threading
from functools import lru_cache
from pathlib import Path

import pytest
import torch
import transformers
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM, Qwen2Config, Qwen2ForCausalLM

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "figures")]
torch.set_num_threads(1)
tqdm.monitor_interval = 0         # no thread whose lock a forked test could inherit, held
tqdm.set_lock(threading.RLock())  # tqdm's own is one of all processes: a child that is killed would keep it for ever

LONG = int(os.environ.get("LONG") or 0)          # 1: everything; more: so many cases of test_random.py

CONTEXT, VOCAB = 40, 12
SIZES = dict(vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
             max_position_embeddings=CONTEXT, eos_token_id=None, bos_token_id=None, pad_token_id=None)
CLASSES = {"llama": (LlamaForCausalLM, LlamaConfig, dict(num_key_value_heads=4)),
    "llama-eager": (LlamaForCausalLM, LlamaConfig, dict(num_key_value_heads=2, attn_implementation="eager")),
    "mistral": (MistralForCausalLM, MistralConfig, dict(num_key_value_heads=2, sliding_window=9)),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, dict(num_key_value_heads=2)),
    "qwen2-mixed": (Qwen2ForCausalLM, Qwen2Config, dict(num_key_value_heads=2, use_sliding_window=True, sliding_window=7, max_window_layers=1)),
}

def tiny(name, seed=0, **more):
    """A random model of the class, with weights large enough that its distributions are far from uniform."""
    model_class, config_class, own = CLASSES[name]
    torch.manual_seed(seed)
    model = model_class(config_class(**{**SIZES, **own, **more})).double().eval()
    for p in model.parameters():
        if p.ndim == 2:
            torch.nn.init.normal_(p, std=0.25)
    return model

# The same one for all tests that ask for it: nobody changes it.
shared = lru_cache(maxsize=None)(tiny)

def target_of(model, capacity=None):
    """verify.Target, or what stands in its place where layers have a sliding window."""
    import verify
    from runtime import targets
    return (targets.AnyTarget if getattr(model.config, "sliding_window", None) else verify.Target)(model, capacity)

def weighty(make, seed):
    """The draft model that make() gives, with weights large enough that every part matters."""
    torch.manual_seed(seed)
    draft_model = make()
    for p in draft_model.parameters():
        if p.ndim == 2:
            torch.nn.init.normal_(p, std=0.3)
    return draft_model.eval()

def random_glide(model, layers=1, glimpse=True, length=64, **more):
    """A random GLIDE, or vanilla, for a tiny target of any family, float64."""
    from runtime import drafters as runtime_drafters
    config = runtime_drafters.glide_config(model, 24, layers, glimpse, **more)
    return weighty(lambda: runtime_drafters.Glide.for_target(model, config, length), 1)

def random_edd(model, seed=1, **more):
    """A random EDD by its settings."""
    import edd
    return weighty(lambda: edd.EDD(edd.Config.for_target(model, **{"hidden": 2, **more}), model), seed)

def random_named(model, name, seed=1, **more):
    """A random draft model by its name on the command line: one of runtime_drafters.VARIANTS, of the classes that stand alone."""
    import edd
    from beyond import eagle, medusa
    from runtime import drafters as runtime_drafters
    config = runtime_drafters.config_of(name, model, **{"hidden": 2, **more})
    draft_class = {"edd": edd.EDD, "eagle": eagle.Eagle, "medusa": medusa.Medusa}[config.kind]
    return weighty(lambda: draft_class(config, model), seed)

def random_drafter(model, name, **more):
    """What decodes with a random draft model: "glide", "glide 2" (two layers), "vanilla", or one of runtime_drafters.VARIANTS."""
    import glide
    from runtime import drafters as runtime_drafters
    if name.startswith(("glide", "vanilla")):
        return glide.Drafter(random_glide(model, 2 if name.endswith("2") else 1, name.startswith("glide"), **more))
    draft_model = random_named(model, name, **more)
    return runtime_drafters.KINDS[draft_model.config.kind][1](draft_model)

def family(name, std=0.25, **more):
    """A tiny random model of another class of transformers', by the sizes that its configuration knows.

    Its experts run in a loop, as grouped kernels know no float64.
    """
    model_class = getattr(transformers, name)
    config = model_class.config_class(**{**SIZES, **more})
    config._experts_implementation = "eager"
    torch.manual_seed(0)
    model = model_class(config).double().eval()
    for p in model.parameters():
        if p.ndim >= 2:
            torch.nn.init.normal_(p, std=std)
    return model

@torch.no_grad()
def plain(model, ids, new):
    """Greedy decoding by the model's own forward over the whole text: no cache, no mask of ours -> the new ids."""
    ids = list(ids)
    for _ in range(new):
        ids.append(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax().item())
    return ids[-new:]

@pytest.fixture(scope="session", params=list(CLASSES))
def model(request):
    """Each class, one after the other."""
    return shared(request.param)

@pytest.fixture(scope="session")
def llama():
    return shared("llama")
