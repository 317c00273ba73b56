"""Optimizers: AdamW, and Muon for the hidden matrices of the draft models.

Muon makes the update of a matrix orthogonal.  glide.py stacks matrices in one weight (queries, keys
and values; gate and up): each of them is a matrix of its own for Muon.
"""
import torch

# The names of modules whose weight holds several matrices of one size, and how many
STACKED = {"qkv": 3, "up": 2}

class StackedMuon(torch.optim.Muon):
    """PyTorch's Muon, where a weight may hold several matrices."""

    def __init__(self, weights, **settings):
        """weights: [(weight, number of matrices in it)]"""
        self.weights = weights
        views = []
        for weight, count in weights:
            # A view shares its memory with the weight: updating it updates the weight.
            for view in weight.detach().chunk(count):
                views.append(torch.nn.Parameter(view))
        self.views = views
        super().__init__(views, **settings)

    def step(self):
        views = iter(self.views)
        for weight, count in self.weights:
            grads = [None] * count
            if weight.grad is not None:
                grads = weight.grad.chunk(count)
            for grad in grads:
                next(views).grad = grad
        super().step()

    def zero_grad(self):
        super().zero_grad()
        for weight, _ in self.weights:
            weight.grad = None

def optimizers(drafters, kind):
    """The optimizers of draft models {name: module} -> a list; train.py sets their learning rates.

    kind "adamw": AdamW for everything, with GLIDE's betas.  kind "muon": Muon for hidden matrices,
    AdamW for embeddings, heads, norms and biases.
    """
    hidden, others = [], []
    named = [pair for module in drafters.values() for pair in module.named_parameters()]
    for name, weight in named:
        modules = name.split(".")[:-1]
        is_table = any("embed" in module or "head" in module for module in modules)
        if kind == "muon" and weight.ndim == 2 and not is_table:
            hidden.append((weight, STACKED.get(modules[-1], 1)))
        else:
            others.append(weight)
    found = [torch.optim.AdamW(others, betas=(0.9, 0.95), weight_decay=0.01)] if others else []
    if hidden:
        found.append(StackedMuon(hidden, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"))
    return found
