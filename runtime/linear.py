"""Faster products on a CPU: a copy of each weight in oneDNN's blocked layout.

    pack(model)                              # each nn.Linear of it; same results, up to rounding

Verification multiplies a few rows, one for each node, by all weights of the target.  F.linear (MKL)
is slow for few rows.  oneDNN, which comes with PyTorch, is not, if the weight lies in blocks.  All
methods of bench.py gain alike: plain decoding, transformers' own, drafters, the prefill.

A packed model is for inference.  Its weights must not be written to, because the blocks are a copy
of them.  A copied or pickled module has no blocks, and with gradients F.linear computes, as before.
"""
import torch
from torch import nn

CACHE = 32 << 20         # bytes of weights that stay in a CPU's cache; there blocks gain nothing
LARGEST = 8 << 30        # bytes of weights of which a copy is made
ROWS = 16                # blocks for so many rows serve all numbers; those for one row do not
# Where oneDNN is known to be faster: on CPUs with AVX, for weights of these dtypes
IS_FAST = "AVX" in torch.backends.cpu.get_cpu_capability() and torch.backends.mkldnn.is_available()
DTYPES = [torch.float32]
if IS_FAST and torch.cpu._is_avx512_bf16_supported():
    DTYPES.append(torch.bfloat16)

class PackedLinear(nn.Linear):
    """An nn.Linear with blocks, a copy of its weight."""
    blocks = None

    def forward(self, x):
        """x (..., in) -> (..., out)"""
        if self.blocks is None or torch.is_grad_enabled():
            return super().forward(x)
        return torch.ops.mkldnn._linear_pointwise(x, self.blocks, self.bias, "none", [], "")

    def __getstate__(self):
        """What a copy gets: not the blocks, as its weight may be another one soon."""
        return {**self.__dict__, "blocks": None}

def pack(model, beside=None):
    """Give blocks to the linear modules of a model, if its weights exceed a CPU's cache.

    beside: a model that takes turns with this one, so that both evict each other's weights.
    """
    own = sum(weight.nbytes for weight in model.parameters())
    others = sum(weight.nbytes for weight in beside.parameters()) if beside else 0
    if not IS_FAST or own + others <= CACHE or own > LARGEST:
        return
    for module in model.modules():
        is_plain = type(module) in (nn.Linear, PackedLinear) and module.weight.device.type == "cpu"
        if is_plain and module.weight.dtype in DTYPES and getattr(module, "blocks", None) is None:
            weight = module.weight.detach()
            module.blocks = torch.ops.mkldnn._reorder_linear_weight(weight, ROWS)
            module.__class__ = PackedLinear
