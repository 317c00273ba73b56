"""Optimisers: AdamW, and Muon for hidden matrices, also for several in one weight (q, k, v)."""
import torch

# Weights in which matrices of one size stand one above the other: GLIDE's own, Phi-3's.
FUSED = {"qkv": 3, "up": 2, "gate_up_proj": 2}


def matrices_in(name, weight, owner):
    """Rows of each matrix in a weight.  name: of its module, a child of `owner`."""
    rows = weight.shape[0]
    if name == "qkv_proj" and hasattr(owner, "num_key_value_heads"):
        # Phi-3's: there may be fewer heads of k and v than of q.
        kv = owner.num_key_value_heads * owner.head_dim
        return [rows - 2 * kv, kv, kv]
    count = FUSED.get(name, 1)
    return [rows // count] * count


class Muon(torch.optim.Muon):
    """PyTorch's Muon, which makes the update of each matrix orthogonal, also within one weight."""

    def __init__(self, weights, **more):
        """weights: [(weight, rows of each matrix in it)]"""
        self.weights = weights
        self.views = []
        for weight, sizes in weights:
            # Views: what changes them changes the weight.
            for view in weight.detach().split(sizes):
                self.views.append(torch.nn.Parameter(view))
        super().__init__(self.views, **more)

    def step(self):
        views = iter(self.views)
        for weight, sizes in self.weights:
            grads = [None] * len(sizes)
            if weight.grad is not None:
                grads = weight.grad.split(sizes)
            for grad in grads:
                next(views).grad = grad
        super().step()

    def zero_grad(self):
        super().zero_grad()
        for weight, _ in self.weights:
            weight.grad = None


def optimizers(models, kind):
    """AdamW with GLIDE's betas; kind "muon": hidden matrices by Muon, the rest by AdamW.

    models: a ModuleDict of drafters by their names.
    """
    owners = dict(models.named_modules())
    hidden, rest = [], []
    for name, weight in models.named_parameters():
        layer, _, _ = name.rpartition(".")
        owner, _, layer = layer.rpartition(".")
        _, _, place = name.partition(".")                # in its drafter, which may have any name
        is_hidden = weight.ndim == 2 and "embed" not in place and "head" not in place
        if kind == "muon" and is_hidden:
            sizes = matrices_in(layer, weight, owners[owner])
            hidden.append((weight, sizes))
        else:
            rest.append(weight)
    found = []
    if rest:
        found.append(torch.optim.AdamW(rest, betas=(0.9, 0.95), weight_decay=0.01))
    if hidden:
        found.append(Muon(hidden, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"))
    return found
