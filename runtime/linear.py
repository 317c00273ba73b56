"""Faster products on a CPU: a copy of each weight in oneDNN's blocked layout.

    pack(model)                              # each nn.Linear of it; same results, up to rounding

Verification multiplies a few rows, one for each node, by all weights of the target.  F.linear (MKL)
is slow for few rows; oneDNN, which comes with PyTorch, is not, if the weight lies in blocks.  One
weight of 1536 x 576 in float32 that is not in the cache, on one core with AVX-512, in microseconds:

    rows                    1     2     4     8    16    32    64
    F.linear              227   510   470   370   490   790  1780
    oneDNN, blocks        113   114   123   156   203   440   720

All arms of bench.py gain alike: plain decoding, transformers' own, drafters, the prefill.  Nothing
is timed, so the same command gives the same tokens.  A packed model is for inference: it must not
be written to, since the blocks are a copy.  With gradients F.linear computes, as before.
"""
import platform

import torch
from torch import nn

CACHE = 32 << 20         # bytes of weights that stay in a CPU's cache; there blocks gain nothing
LARGEST = 8 << 30        # bytes of weights of which a copy is made
SMALLEST = 1 << 16       # elements of a weight that is worth it
ROWS = 16                # blocks for so many rows serve all numbers; those for one row do not

class PackedLinear(nn.Linear):
    """An nn.Linear with blocks, a copy of its weight."""
    def forward(self, x):
        """x (..., in) -> (..., out)"""
        if torch.is_grad_enabled():
            return super().forward(x)
        return torch.ops.mkldnn._linear_pointwise(x, self.blocks, self.bias, "none", [], "")

def can_pack(module):
    """Whether a module is a plain nn.Linear on a CPU whose products oneDNN is known to do faster."""
    if type(module) is not nn.Linear or module.weight.numel() < SMALLEST:
        return False
    if platform.machine() not in ("x86_64", "AMD64") or not torch.backends.mkldnn.is_available():
        return False
    dtypes = {torch.float32}
    if torch.cpu._is_avx512_bf16_supported():
        dtypes.add(torch.bfloat16)
    return module.weight.device.type == "cpu" and module.weight.dtype in dtypes

def pack(model, beside=None):
    """Give blocks to the linear modules of a model, if its weights exceed a CPU's cache.

    beside: a model that takes turns with this one, so that both evict each other's weights.
    """
    sizes = []
    for each in (model, beside or nn.Identity()):
        linears = [module for module in each.modules() if isinstance(module, nn.Linear)]
        sizes.append(sum(module.weight.nbytes for module in linears))
    if sum(sizes) <= CACHE or sizes[0] > LARGEST:
        return
    for module in filter(can_pack, list(model.modules())):
        weight = module.weight.detach()
        module.blocks = torch.ops.mkldnn._reorder_linear_weight(weight, ROWS)
        module.__class__ = PackedLinear
