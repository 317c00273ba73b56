"""Tiny targets of the real classes, with random weights in float64, and plain decoding without anything of ours."""
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM, Qwen2Config, Qwen2ForCausalLM

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
torch.set_num_threads(1)

CONTEXT, VOCAB = 40, 12
SIZES = dict(vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
             max_position_embeddings=CONTEXT, eos_token_id=None, bos_token_id=None, pad_token_id=None)
CLASSES = {
    "llama": (LlamaForCausalLM, LlamaConfig, dict(num_key_value_heads=4)),
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


@torch.no_grad()
def plain(model, ids, new):
    """Greedy decoding by the model's own forward over the whole text: no cache, no mask of ours -> the new ids."""
    ids = list(ids)
    for _ in range(new):
        ids.append(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax().item())
    return ids[-new:]


@pytest.fixture(scope="session", params=list(CLASSES))
def model(request):
    return tiny(request.param)


@pytest.fixture(scope="session")
def llama():
    return tiny("llama")
