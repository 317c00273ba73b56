"""Products of few rows on a CPU: a copy of each weight in oneDNN's blocked layout.

    pack(model)                              # each nn.Linear of it; same results, up to rounding
    pack(drafter.model, beside=model)
    python figures/walltime.py costs --target smollm2 --device cpu --dtype float32

Verification multiplies a few rows, one a node, by all weights of the target.  The weights are read
once however few the rows are, so on a device that waits for memory many rows cost what one costs.
On a CPU they do not: F.linear (MKL) is slow for few rows, and speculation seems to gain less than
it does.  oneDNN, which PyTorch brings along, keeps to the memory's speed where the weight lies in
blocks that suit its loops.  One weight of 1536 x 576 in float32 that is not in the cache, on one
core of an AMD EPYC with AVX-512, in microseconds:

    rows                    1     2     4     8    16    32    64
    F.linear              227   510   470   370   490   790  1780
    (W @ x.T).T           218   148   163   332   530   850  1830
    oneDNN, blocks        113   114   123   156   203   440   720

All arms gain by it alike: plain decoding, transformers' own, drafters, the forward of the prompt.

The rule.  A model gets blocks where its weights, together with those of the model that it takes
turns with, exceed a CPU's cache.  Within the cache they gain nothing up to some 40 rows, as oneDNN
takes longer to begin.  Nothing is timed at load: a choice by timing could differ between two runs,
would round differently, and the same command should give the same tokens.

Left alone are weights on another device, quantised ones, small ones, and those of other types than
float32 and (where the CPU has instructions for it) bfloat16; models so large that a copy might not
fit into memory; whatever needs a gradient.  No parameter is added and no name changes.  A copied
module has no blocks, and those of a weight that is trained or written to are no longer used.
"""
import platform

import torch
from torch import nn

CACHE = 32 << 20         # bytes of weights that stay in a CPU's cache from one forward to the next
LARGEST = 8 << 30        # bytes of weights of which a copy is made
SMALLEST = 1 << 16       # elements of a weight that is worth it
LIKELY_ROWS = 16         # blocks for so many rows serve all numbers; those for one row do not

class Blocks:
    """A copy of a weight in oneDNN's layout, and what it is a copy of."""

    def __init__(self, weight):
        self.tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), LIKELY_ROWS)
        self.weight = weight
        self.state = self.state_of(weight)

    @staticmethod
    def state_of(weight):
        """What differs once the weight is written to or moved."""
        return weight._version, weight.data_ptr(), weight.dtype

    def are_of(self, weight):
        """Whether this is a copy of the weight as it is now."""
        return weight is self.weight and self.state == self.state_of(weight)

    def __reduce__(self):
        """In a copied or pickled module there is None in the place of this."""
        return type(None), ()

class PackedLinear(nn.Linear):
    """An nn.Linear that may have blocks."""
    blocks = None

    def forward(self, x):
        """x (..., in) -> (..., out)"""
        training = torch.is_grad_enabled()
        if training and self.weight.requires_grad:
            self.blocks = None                   # fused optimisers write without a trace
        blocks = self.blocks
        if blocks is None or training or torch.compiler.is_compiling():
            return super().forward(x)
        if torch.is_autocast_enabled("cpu"):     # computes in another type than the blocks'
            return super().forward(x)
        if not blocks.are_of(self.weight):
            return super().forward(x)
        return torch.ops.mkldnn._linear_pointwise(x, blocks.tensor, self.bias, "none", [], "")

def can_pack(weight):
    """Whether products with this weight are known to be faster by oneDNN."""
    if weight.device.type != "cpu" or weight.is_inference() or weight.numel() < SMALLEST:
        return False
    if hasattr(weight, "__tensor_flatten__"):                # torchao: quantised
        return False
    if platform.machine() not in ("x86_64", "AMD64") or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.bfloat16:
        return torch.cpu._is_avx512_bf16_supported()
    return weight.dtype == torch.float32

def linears(model):
    """Modules of class nn.Linear; subclasses, say quantised ones, compute something else."""
    found = []
    for module in model.modules():
        if type(module) is nn.Linear or isinstance(module, PackedLinear):
            found.append(module)
    return found

def bytes_of(modules):
    """Bytes of their weights; one that two modules share is read twice, and counts twice."""
    return sum(module.weight.numel() * module.weight.element_size() for module in modules)

def pack(model, beside=None):
    """Give blocks to the linear modules of a model, if its weights exceed the cache.

    beside: a model that takes turns with this one, and evicts its weights from the cache.
    """
    modules = [module for module in linears(model) if can_pack(module.weight)]
    own = bytes_of(modules)
    others = 0 if beside is None else bytes_of(linears(beside))
    if own + others <= CACHE or own > LARGEST:
        return
    for module in modules:
        if type(module) is nn.Linear:
            module.__class__ = PackedLinear
        module.blocks = Blocks(module.weight)

def unpack(model):
    """Take the blocks away."""
    for module in linears(model):
        if isinstance(module, PackedLinear):
            module.blocks = None

def is_packed(model):
    """Whether any of its modules has blocks."""
    return any(getattr(module, "blocks", None) is not None for module in model.modules())
