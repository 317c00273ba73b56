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
from types import SimpleNamespace

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
    device, dtype = kwargs.get("device"), kwargs.get("dtype")
    for given in rest:
        names_device = isinstance(given, (str, torch.device))
        device = given if names_device else getattr(given, "device", device)
        dtype = given if isinstance(given, torch.dtype) else getattr(given, "dtype", dtype)
    kind = x.device.type if device is None else torch.device(device).type
    value = held(x) if dtype is None else held(x).to(dtype)
    if kind == "cuda":
        if not isinstance(x, Pretended):
            counts["copy"] += 1
        return x if value is held(x) and isinstance(x, Pretended) else Pretended(value.clone())
    if isinstance(x, Pretended):
        counts["read"] += 1
        value = value.clone()
    return value

to = torch.nn.Module.to

def move_module(module, device="cuda", dtype=None):
    """Module.to: parameters and buffers, tied ones once."""
    if isinstance(device, torch.Tensor):
        device, dtype = device.device, device.dtype
    if torch.device(device).type != "cuda":
        return to(module, device, dtype)
    moved = {}
    for part in module.modules():
        for name, x in [*part._parameters.items(), *part._buffers.items()]:
            kept = part._parameters if name in part._parameters else part._buffers
            if x is None or isinstance(x, Pretended):
                continue
            if id(x) not in moved:
                new = x.detach()
                if dtype is not None and x.is_floating_point():
                    new = new.to(dtype)
                new = Pretended(new)
                if kept is part._parameters:
                    new = torch.nn.Parameter(new, requires_grad=False)
                moved[id(x)] = x, new
            kept[name] = moved[id(x)][1]
    return module

def pretend():
    register_guard()
    torch.nn.Module.to = move_module
    plain = torch.Generator
    torch.Generator = type("Generator", (), {"__new__": lambda cls, device="cpu": plain("cpu")})

# ---------------------------------------------------------------- some decodings
def decodings():
    """[(name, what makes a drafter for a model, what makes its builder, rule)]"""
    from conftest import random_drafter, tiny

    import cape
    import cascade
    import maxgram
    import pct
    import verify
    from beyond import graft

    def neural(kind):
        def make(model):
            drafter = random_drafter(tiny("llama").float(), kind)
            drafter.model.to(model.device, torch.float32)
            return type(drafter)(drafter.model)
        return make

    def cascades(model):
        stages = [tiny("llama", seed=seed).float().to(model.device) for seed in (1, 2)]
        return cascade.Cascade([verify.Target(stage) for stage in stages], gram=maxgram.MaxGram())

    def mixtures(model):
        return graft.Mixture(neural("edd")(model), maxgram.MaxGram())

    def always(build, **settings):
        return lambda drafter: partial(build, **settings)

    greedy, sampled = verify.Rule(), verify.Rule(0.8)
    return [("glide x chain", neural("glide"), always(cape.chain), greedy),
            ("glide x cape, sampled", neural("glide"), always(cape.cape), sampled),
            ("edd x eagle2", neural("edd"), always(pct.eagle2, total=15, depth=4), greedy),
            ("cascade", cascades, lambda drafter: drafter.chain, greedy),
            ("mixture x graft", mixtures,
             lambda drafter: graft.Graft(drafter, 0.1, 0.01, 0.0, depth=3), greedy),
            ("edd x pct, static", neural("edd"), always(pct.pct, cost=0.1, depth=5), greedy)]

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

    def generate(*given):
        first, *rounds = verify.rounds.__wrapped__(*given)
        tokens = sum((one.new for one in rounds), first.new)
        return SimpleNamespace(tokens=tokens, rounds=rounds)
    here, there, prompt = tiny("llama").float(), tiny("llama").float(), [3, 1, 4, 1, 5]
    for name, make, builder, rule in decodings():
        target, drafter = verify.Target(here), make(here)
        expected = generate(target, drafter, builder(drafter), prompt, NEW, rule)
        with Functions(), Operations():
            there.to("cuda")
            target, drafter = verify.Target(there), make(there)
            assert target.device.type == "cuda"
            if name.endswith("static"):
                target, drafter = [static(x, record=False) for x in (target, drafter)]
            target.prefill = partial(after_prefill, target.prefill)
            found = generate(target, drafter, builder(drafter), prompt, NEW, rule)
        row = {"name": name, "tokens": found.tokens, "expected": expected.tokens,
               "rounds": len(found.rounds)}
        row |= {what: counts[what] for what in ("read", "copy", "forward")}
        print(json.dumps(row), file=out, flush=True)
