"""Muon for weights in which several matrices stand side by side (q, k, v; gate, up)."""
import torch


class Muon(torch.optim.Muon):
    """PyTorch's, which makes the update of each matrix orthogonal; those of one weight each by itself."""

    def __init__(self, weights, **more):
        """weights: [(weight, how many matrices it holds)]"""
        self.weights, self.views = weights, []
        for weight, n in weights:
            # Views: what changes them changes the weight.
            self.views += [torch.nn.Parameter(view) for view in weight.detach().chunk(n)]
        super().__init__(self.views, **more)

    def step(self):
        views = iter(self.views)
        for weight, n in self.weights:
            grads = [None] * n if weight.grad is None else weight.grad.chunk(n)
            for grad in grads:
                next(views).grad = grad
        super().step()

    def zero_grad(self):
        super().zero_grad()
        for weight, _ in self.weights:
            weight.grad = None
