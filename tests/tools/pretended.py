"""Decoding on a pretended CUDA device: mixed devices fail there, and what would wait is counted.

The idea.  A tensor on the pretended device says "cuda" and holds a tensor of the CPU.  Operations
run on what they hold; one that gets tensors of both kinds raises.  Counted are device-to-host
syncs, host-to-device copies, and forwards of target and drafters, as each embeds its tokens once.
Times mean nothing; kernels, streams and graphs are not pretended.  Needs g++ where torch is a CPU
build, for a device guard that does nothing.  test_device.py runs main() in a forked process, as it
replaces parts of torch.
"""
import collections
import ctypes
import json
import subprocess
import tempfile
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

DEVICE = torch.device("cuda", 0)
READS = {"aten::_local_scalar_dense", "aten::item", "aten::nonzero", "aten::equal",
         "aten::is_nonzero"}
GUARD = """#include <c10/core/impl/DeviceGuardImplInterface.h>
namespace c10 { namespace impl {
C10_REGISTER_GUARD_IMPL(CUDA, NoOpDeviceGuardImpl<DeviceType::CUDA>)
} }
"""
PROMPT = [3, 1, 4, 1, 5]
NEW = 14                                           # tokens that are made
counts = collections.Counter()                     # {"read", "copy" or "forward": how often}

def register_guard():
    """Operations on a tensor that says "cuda" ask for a device guard, which CPU builds have not."""
    torch.cuda._lazy_init = lambda: None
    if torch.version.cuda:
        torch._C._ensureCUDADeviceGuardSet()
        return
    folder, root = Path(tempfile.mkdtemp()), Path(torch.__file__).parent
    (folder / "guard.cpp").write_text(GUARD)
    command = ["g++", "-shared", "-fPIC", "-std=c++20", f"-I{root}/include",
               str(folder / "guard.cpp"), "-o", str(folder / "guard.so"), f"-L{root}/lib", "-lc10"]
    subprocess.run(command, check=True)
    ctypes.CDLL(str(folder / "guard.so"))

class Pretended(torch.Tensor):
    """A tensor on the pretended device.  held: the CPU's tensor."""
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, held):
        made = torch.Tensor._make_wrapper_subclass(
            cls, held.size(), strides=held.stride(), storage_offset=held.storage_offset(),
            dtype=held.dtype, layout=held.layout, device=DEVICE, requires_grad=held.requires_grad)
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return operate(func, args, kwargs or {})

def held(x):
    return x.held if isinstance(x, Pretended) else x

def operate(func, args, kwargs):
    """One operation, on what its tensors hold."""
    name, (flat, _) = func.name(), tree_flatten((args, kwargs))
    there = [x for x in flat if isinstance(x, Pretended)]
    here = [x for x in flat if isinstance(x, torch.Tensor) and not isinstance(x, Pretended)]
    device = kwargs.get("device")
    kind = None if device is None else torch.device(device).type
    moves = name in ("aten::_to_copy", "aten::copy_", "aten::to.device")
    if there and any(x.dim() for x in here) and not moves:
        sides = [f"{x.device.type} {tuple(x.shape)}" for x in flat if isinstance(x, torch.Tensor)]
        raise RuntimeError(f"tensors on two devices in {name}: {', '.join(sides)}")
    if there and (name in READS or name == "aten::_to_copy" and kind == "cpu"):
        counts["read"] += 1
    if name == "aten::embedding":
        counts["forward"] += 1
    if name == "aten::_to_copy" and here and kind == "cuda":
        counts["copy"] += 1
    if name == "aten::copy_" and isinstance(args[0], Pretended) != isinstance(args[1], Pretended):
        counts["copy" if isinstance(args[0], Pretended) else "read"] += 1
    if device is not None:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    out = func(*tree_map(held, args), **tree_map(held, kwargs))
    if name == "aten::_local_scalar_dense":
        return out
    on_device = kind == "cuda" or there and kind != "cpu"
    if name == "aten::copy_":
        on_device = isinstance(args[0], Pretended)

    def wrap(x):
        if not isinstance(x, torch.Tensor) or isinstance(x, Pretended) or not on_device:
            return x
        same = [t for t in there if t.held is x]               # in place: the same tensor
        return same[0] if same else Pretended(x)
    return tree_map(wrap, out)

class Operations(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return operate(func, args, kwargs or {})

class Functions(TorchFunctionMode):
    """What must be caught before it reaches C++."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs, first = dict(kwargs or {}), args[0] if args else None
        if func is torch.Tensor.to:
            return move(first, args[1:], kwargs)
        if func in (torch.Tensor.tolist, torch.Tensor.item) and isinstance(first, Pretended):
            counts["read"] += 1
            return func(first.held)
        if func is torch.tensor and torch.device(kwargs.get("device") or "cpu").type == "cuda":
            del kwargs["device"]
            made = torch.tensor(*args, **kwargs)
            if made.numel():
                counts["copy"] += 1
            return Pretended(made)
        indexed = func in (torch.Tensor.__getitem__, torch.Tensor.__setitem__)
        if indexed and isinstance(first, Pretended):
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            if any(isinstance(i, list) for i in index):
                counts["copy"] += 1
                index = tuple(Pretended(torch.tensor(i)) if isinstance(i, list) else i
                              for i in index)
            args = (first, index, *args[2:])
        if func is F.scaled_dot_product_attention:
            tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
            if any(isinstance(x, Pretended) for x in tensors):
                assert all(isinstance(x, Pretended) for x in tensors), "attention over two devices"
                named = {name: held(x) for name, x in kwargs.items()}
                return Pretended(func(*map(held, args), **named))
        return func(*args, **kwargs)

def move(x, rest, kwargs):
    """Tensor.to"""
    device, dtype, _, _ = torch._C._nn._parse_to(*rest, **kwargs)
    kind = x.device.type if device is None else device.type
    is_there = isinstance(x, Pretended)
    value = held(x) if dtype is None else held(x).to(dtype)
    if kind == "cpu":
        counts["read"] += is_there
        return value.clone() if is_there else value
    counts["copy"] += not is_there
    return x if is_there and value is x.held else Pretended(value.clone())

def pretend():
    register_guard()
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    plain = torch.Generator
    torch.Generator = type("Generator", (), {"__new__": lambda cls, device="cpu": plain("cpu")})

# ---------------------------------------------------------------- some decodings
def neural(kind, model):
    """A random drafter for a model, the same on both devices."""
    from conftest import random_drafter, tiny
    drafter = random_drafter(tiny("llama").float(), kind)
    drafter.model.to(model.device, torch.float32)
    return type(drafter)(drafter.model)

def decodings():
    """[(name, what makes a drafter for a model and its builder, rule)]"""
    import cape
    import pct
    import verify
    from beyond import graft
    from cascade import Cascade
    from conftest import tiny
    from maxgram import MaxGram

    def of(kind, build, **settings):
        return lambda model: (neural(kind, model), partial(build, **settings))

    def cascade(model):
        stages = [tiny("llama", seed=seed).float().to(model.device) for seed in (1, 2)]
        drafter = Cascade([verify.Target(stage) for stage in stages], gram=MaxGram())
        return drafter, drafter.chain

    def mixture(model):
        drafter = graft.Mixture(neural("edd", model), MaxGram())
        return drafter, graft.Graft(drafter, 0.1, 0.01, 0.0, depth=3)
    greedy = verify.Rule()
    return [("glide x chain", of("glide", cape.chain), greedy),
            ("glide x cape, sampled", of("glide", cape.cape), verify.Rule(0.8)),
            ("edd x eagle2", of("edd", pct.eagle2, total=15, depth=4), greedy),
            ("cascade", cascade, greedy),
            ("mixture x graft", mixture, greedy),
            ("edd x pct, static", of("edd", pct.pct, cost=0.1, depth=5), greedy)]

def after_prefill(prefill, *given):
    """Only from here on is counted."""
    found = prefill(*given)
    counts.clear()
    return found

@torch.no_grad()
def main(out):
    """Decode here and there, a JSON line to `out` for each decoding.

    Without inference mode, which wrapped tensors do not know.
    """
    pretend()
    from conftest import tiny

    import verify
    from runtime.static import static

    def generate(target, drafter, build, rule):
        first, *rounds = verify.rounds.__wrapped__(target, drafter, build, PROMPT, NEW, rule)
        tokens = sum((one.new for one in rounds), first.new)
        return tokens, len(rounds)
    here, there = tiny("llama").float(), tiny("llama").float()
    for name, make, rule in decodings():
        expected, _ = generate(verify.Target(here), *make(here), rule)
        with Functions(), Operations():
            there.to("cuda")
            target, (drafter, build) = verify.Target(there), make(there)
            assert target.device.type == "cuda"
            if name.endswith("static"):
                target, drafter = [static(x, record=False) for x in (target, drafter)]
            target.prefill = partial(after_prefill, target.prefill)
            tokens, rounds = generate(target, drafter, build, rule)
        row = {"name": name, "tokens": tokens, "expected": expected, "rounds": rounds, **counts}
        print(json.dumps(row), file=out, flush=True)
