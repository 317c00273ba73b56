"""train.py in several processes, as torchrun starts them; in a single one these do nothing.

    device = join("cuda")       this process's own device; leave() at the end
    summed, sum_gradients       over all processes
"""
import os
from datetime import timedelta

import torch
import torch.distributed as dist

def rank_and_world():
    """The number of this process, and how many there are, as torchrun says."""
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))

def join(device):
    """Under torchrun, join the other processes -> this process's own device."""
    _, world = rank_and_world()
    if world == 1:
        return device
    if device == "cuda":
        device = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(device)
    backend = "nccl" if device.startswith("cuda") else "gloo"
    # The first process may prepare the data for long, while the others wait.
    dist.init_process_group(backend, timeout=timedelta(hours=3))
    return device

def summed(values, device):
    """The sum of each number over all processes -> floats."""
    values = torch.stack([torch.as_tensor(x, dtype=torch.float64, device=device) for x in values])
    if dist.is_initialized():
        dist.all_reduce(values)
    return values.tolist()

def sum_gradients(drafters):
    """Add up the gradients of all processes, once a step."""
    for module in drafters.values() if dist.is_initialized() else ():
        for p in module.parameters():
            # A process without a piece of text has no gradient; all must take part.
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            dist.all_reduce(p.grad)

def barrier():
    """Wait until all processes are here."""
    if dist.is_initialized():
        dist.barrier()

def leave():
    """End what join() began."""
    if dist.is_initialized():
        dist.destroy_process_group()
