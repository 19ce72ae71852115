"""Tensors without values on a CUDA device that isn't there, and what the host would wait for.

torch's ``FakeTensorMode`` knows the device of every tensor and refuses operations that mix them, but a CPU build has
nothing that autograd could ask for a stream. ``device.cpp`` is that, and must be loaded before torch is imported: so
:func:`load` comes first, in a process of its own.
"""

import ctypes
import importlib.util
import shutil
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

COMPILER = shutil.which("g++")


def load():
    """Compile the device (about a second) and load it. torch must not be imported yet."""
    assert "torch" not in sys.modules, "torch has looked for CUDA already"
    spec = importlib.util.find_spec("torch")
    torch = Path(spec.origin).parent
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder, "device.so")
        flags = ["-O0", "-std=c++20", "-shared", "-fPIC", f"-I{torch / 'include'}", f"-L{torch / 'lib'}"]
        source = Path(__file__).with_name("device.cpp")
        subprocess.run([COMPILER, *flags, source, "-lc10", "-ltorch_cpu", "-o", library], check=True)
        for name in ("libc10.so", "libtorch_cpu.so"):
            ctypes.CDLL(str(torch / "lib" / name), ctypes.RTLD_GLOBAL)
        ctypes.CDLL(str(library))


def watch(waiting, *, answer=True):
    """A context in which ``torch.device("cuda")`` has tensors without values.

    Args:
        waiting: takes what would wait: ``{"what", "where", "line"}``, the operation, the innermost file that is ours or
            transformers', and its line of code.
        answer: what the host reads where it asks the device for a bool. Whole numbers are 0, others 1.
    """
    from contextlib import contextmanager

    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    aten = torch.ops.aten

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            kwargs = kwargs or {}
            tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
            on_device = any(x.is_cuda for x in tensors)
            if func is aten._local_scalar_dense.default:
                if on_device:
                    self.note("the host reads a number")
                if args[0].dtype is torch.bool:
                    return answer and on_device
                return 1.0 if args[0].is_floating_point() else 0
            if func is aten.is_pinned.default:
                return getattr(args[0], "is_pinned_here", False)
            if func in (aten.nonzero.default, aten.masked_select.default, aten._unique2.default) and on_device:
                self.note(f"{func} has a shape that depends on values")
            result = func(*args, **kwargs)
            if func in (aten._to_copy.default, aten.copy_.default):
                source, target = (args[0], result) if func is aten._to_copy.default else (args[1], args[0])
                waits = not (kwargs.get("non_blocking") or (len(args) > 2 and args[2]))
                if source.device.type != target.device.type and waits:
                    self.note(f"a copy from {source.device.type} to {target.device.type} that blocks")
            return result

        def note(self, what):
            frames = traceback.extract_stack()
            ours = [f for f in frames if "/cuboid/" in f.filename or "/transformers/" in f.filename]
            frame = ours[-1] if ours else frames[-2]
            parts = Path(frame.filename).parts
            root = max(i for i, part in enumerate(parts) if part in ("cuboid", "transformers") or i == 0)
            waiting.append({"what": what, "where": "/".join(parts[root:]), "line": frame.line})

    @contextmanager
    def watching():
        with FakeTensorMode(allow_non_fake_inputs=True), Watch():
            yield

    return watching()
