"""Muon for matrices, of which a weight may hold several.

Muon (Jordan et al. 2024) replaces the update of a matrix by the nearest orthogonal matrix,
approximately.  This is torch.optim.Muon but for two things.  glide.py stacks matrices in one weight
(queries, keys and values; gate and up), and each of them is a matrix of its own here.  PyTorch's
computes in bfloat16, which many CPUs only imitate.  Here autocast decides, as for the drafters.
"""
import math

import torch

MOMENTUM = 0.95
COEFFICIENTS = (3.4445, -4.7750, 2.0315)       # of the Newton-Schulz iteration
ITERATIONS = 5

def orthogonalized(update):
    """Updates (count, rows, columns) -> the same with all singular values near 1.

    The Newton-Schulz iteration X <- a X + b (X X^T) X + c (X X^T)^2 X brings them there.
    """
    a, b, c = COEFFICIENTS
    x = update.float()
    is_tall = x.shape[1] > x.shape[2]
    if is_tall:                                        # then X X^T would be the larger product
        x = x.mT
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)     # no singular value is above 1
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        polynomial = b * gram + c * gram @ gram
        x = a * x + polynomial @ x
    return x.mT if is_tall else x

class Muon(torch.optim.Optimizer):
    """Muon, where a weight may hold several matrices, one below the other."""

    def __init__(self, weights, weight_decay):
        """weights: [(weight, number of matrices in it)].  Who steps sets the learning rate."""
        groups = [{"params": [weight], "count": count} for weight, count in weights]
        super().__init__(groups, {"lr": 0.0, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            [weight] = group["params"]
            if weight.grad is None:
                continue
            lr, state = group["lr"], self.state[weight]
            if not state:
                state["momentum"] = torch.zeros_like(weight)
            # Nesterov momentum
            momentum = state["momentum"].lerp_(weight.grad, 1 - MOMENTUM)
            update = weight.grad.lerp(momentum, MOMENTUM)                  # (all rows, columns)
            matrices = update.unflatten(0, (group["count"], -1))           # (count, rows, columns)
            update = orthogonalized(matrices).flatten(0, 1).to(weight)
            # The root mean square of its entries becomes 0.2, about that of an AdamW update
            rms = 0.2 * math.sqrt(max(matrices.shape[1:]))
            weight.mul_(1 - lr * group["weight_decay"])
            weight.sub_(update, alpha=lr * rms)
