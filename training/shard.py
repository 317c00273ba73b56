"""A target spread over the processes of torchrun's job (FSDP2): none ever holds all weights.

    torchrun --nproc-per-node 8 train.py glide --shard-target --target meta-llama/Llama-3.1-70B ...

The model is built without weights (on PyTorch's meta device), and cut: each decoder layer is a
unit, the root with the embedding, the last norm and the head is one, too.  Then each process reads
its rows of each matrix, and no others, from the files.  A forward brings a layer's rows together,
uses them, and forgets them again.  The root's weights stay whole on each process after the first
forward, since drafters call the embedding, the norm and the head by themselves.
"""
from pathlib import Path

import huggingface_hub
import torch
import torch.distributed as dist
import transformers
from safetensors import safe_open
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from runtime.load import only_special_tokens
from training.frozen import layers_of
from verify import UserError

KINDS_OF_FILES = ("model*.safetensors", "pytorch_model*.bin")


def weights_in(folder):
    """Yield (name, rows) of all weights in the files; rows[a:b] reads these rows alone."""
    paths = sorted(folder.glob(KINDS_OF_FILES[0]))
    for path in paths:
        with safe_open(path, "pt") as file:
            for name in file.keys():
                yield name, file.get_slice(name)
    for path in [] if paths else sorted(folder.glob(KINDS_OF_FILES[1])):
        yield from torch.load(path, map_location="cpu", mmap=True, weights_only=True).items()


@torch.no_grad()
def fill(model, folder):
    """Read the rows of each weight that this process keeps -> names of weights that no file has."""
    rank, processes = dist.get_rank(), dist.get_world_size()
    weights = model.state_dict(keep_vars=True)
    found = set()
    for name, rows in weights_in(folder):
        if name not in weights:
            continue                                     # older files hold rotary tables, too
        weight = weights[name]
        local, first = weight, 0
        if hasattr(weight, "to_local"):             # FSDP2 cuts the first axis, as torch.chunk does
            local = weight.to_local()
            first = rank * -(-weight.shape[0] // processes)
        if len(local):
            local.copy_(rows[first:first + len(local)])
        found.add(id(weight))
    return [name for name, weight in weights.items() if id(weight) not in found]


def spread(name, dtype, device, revision=None, trust=False):
    """The target `name`, cut and filled -> model.  dtype "auto": as its weights are stored."""
    folder = Path(name)
    if not folder.exists():
        patterns = [*KINDS_OF_FILES, "*.json", "*.py"]
        folder = huggingface_hub.snapshot_download(name, revision=revision, allow_patterns=patterns)
        folder = Path(folder)
    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=trust)
    if getattr(config, "quantization_config", None):
        raise UserError(f"--shard-target: {name} is quantised, and cannot be cut: leave the flag "
                        "out")
    dtype = (config.dtype or torch.float32) if dtype == "auto" else getattr(torch, dtype)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype,
                                                              trust_remote_code=trust)
    model.eval().requires_grad_(False)
    mesh = init_device_mesh(torch.device(device).type, (dist.get_world_size(),))
    for layer in layers_of(model):
        fully_shard(layer, mesh=mesh)
    # The root last: layers below it let go of their weights after a forward, roots do not.
    fully_shard(model, mesh=mesh)
    model.to_empty(device=device)
    for module in model.modules():
        if list(module.buffers(recurse=False)):          # rotary tables are in no file
            model._init_weights(module)
    missing = fill(model, folder)
    if missing:
        raise UserError(f"--shard-target: the files of {name} have no weight called {missing[0]}: "
                        "leave the flag out")
    # Its end-of-text tokens may be others than config.json's.
    if (folder / "generation_config.json").exists():
        model.generation_config = transformers.GenerationConfig.from_pretrained(folder)
    only_special_tokens(model)
    with torch.no_grad():
        model(torch.zeros(1, 1, dtype=torch.long, device=device), use_cache=False)
    return model
