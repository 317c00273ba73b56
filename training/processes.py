"""train.py in several processes, as torchrun starts them; in a single one these do nothing.

    with joined("cuda") as device:               this process's own device
        summed(modules, values, device)          gradients and numbers, over all processes
"""
import os
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

def rank_and_world():
    """The number of this process, and how many there are, as torchrun says."""
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))

@contextmanager
def joined(device):
    """Under torchrun, be one of its processes -> this process's own device."""
    _, world = rank_and_world()
    if world == 1:
        yield device
        return
    if device == "cuda":
        device = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(device)
    backend = "nccl" if device.startswith("cuda") else "gloo"
    # The first process may prepare the data for long, while the others wait.
    dist.init_process_group(backend, timeout=timedelta(hours=3))
    try:
        yield device
    finally:
        dist.destroy_process_group()

def summed(modules, values, device):
    """Add up gradients and numbers over all processes, once a step -> the sums of the numbers.

    modules: {name: draft model}, whose gradients are replaced by their sums.
    """
    values = torch.stack([torch.as_tensor(x, dtype=torch.float64, device=device) for x in values])
    if dist.is_initialized():
        dist.all_reduce(values)
        for p in [p for module in modules.values() for p in module.parameters()]:
            # A process without a piece of text has no gradient; all must take part.
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            dist.all_reduce(p.grad)
    return values.tolist()

def barrier():
    """Wait until all processes are here."""
    if dist.is_initialized():
        dist.barrier()
