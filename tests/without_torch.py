"""Tests of the simulator where no PyTorch is installed: those that only trace; others are skipped.

`pytest -p tests.without_torch --confcutdir=tests/core tests/core`, for a Python that PyTorch has no
CPU build for here. Kernels are traced, verified, lowered, scheduled and reported as ever, because
none of that computes: tensors on PyTorch's device "meta" have a shape and a type alone. Whatever
else a test asks of PyTorch skips it, and so this says nothing about results.
"""

from __future__ import annotations

import importlib.machinery
import math
import subprocess
import sys
import types

import pytest

from tests.warned import pytest_pyfunc_call  # noqa: F401 - a hook

REASON = "computes with PyTorch, which is not installed"
SIZES = {
    **dict.fromkeys(("bool", "uint8", "int8", "float8_e4m3fn", "float8_e5m2"), 1),
    **dict.fromkeys(("float16", "bfloat16", "int16", "uint16"), 2),
    **dict.fromkeys(("float32", "int32", "uint32"), 4),
    **dict.fromkeys(("float64", "int64", "uint64"), 8),
}


class DType:
    """A type: its name and how large an element is."""

    def __init__(self, name):
        self.name, self.itemsize = name, SIZES[name]
        self.is_floating_point = "float" in name

    def __repr__(self):
        return f"torch.{self.name}"


run_any = subprocess.run
_imported = False
DTYPES = {name: DType(name) for name in SIZES}


class Tensor:
    """A tensor of the device "meta"."""

    def __init__(self, shape, dtype):
        self.shape, self.dtype = shape, dtype
        self.device = types.SimpleNamespace(type="meta")
        self.is_meta, self.requires_grad, self.ndim = True, False, len(shape)

    def numel(self):
        return math.prod(self.shape)

    def __getattr__(self, name):
        return _compute() if not name.startswith("__") else _missing(name)


class Name:
    """A function or class of PyTorch that a table may hold; a call of it skips the test."""

    def __init__(self, path, *bases_and_names):
        if bases_and_names:  # a class is derived from it
            _compute()
        self.__name__ = self.__qualname__ = path

    def __getattr__(self, name):
        return _missing(name) if name.startswith("__") else Name(f"{self.__name__}.{name}")

    def __call__(self, *_, **__):
        _compute()


class Module(types.ModuleType):
    """`torch` or a module of it: every name is there, none can compute."""

    __path__: list[str] = []

    def __getattr__(self, name):
        if name.startswith("__"):
            _missing(name)
        made = Name(f"{self.__name__}.{name}")
        setattr(self, name, made)
        return made


def _compute():
    if not _imported:
        raise ImportError("The simulator asks PyTorch while it is imported; answer it here.")
    pytest.skip(REASON)  # of a test: where a file of tests computes while it is imported it fails


def _missing(name):
    raise AttributeError(name)


def empty(*shape, dtype=DTYPES["float32"], device="cpu"):
    """The one thing that is made here: a shape and a type."""
    if device != "meta":
        _compute()
    sizes = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
    return Tensor(tuple(sizes), dtype)


def inference_mode(_):
    """A decorator: called, as what follows is, while the simulator is imported."""
    return lambda function: function


BACKENDS = types.SimpleNamespace(
    mkldnn=types.SimpleNamespace(is_available=lambda: False),
    quantized=types.SimpleNamespace(supported_engines=()),
)


def run(command, *rest, **named):
    """`subprocess.run`: a Python that a test starts has none of these names, and skips it."""
    if not isinstance(command, str) and command[0] == sys.executable:
        _compute()
    return run_any(command, *rest, **named)


def _install():
    subprocess.run = run
    torch = Module("torch")
    vars(torch).update(DTYPES, dtype=DType, Tensor=Tensor)
    vars(torch).update(empty=empty, inference_mode=inference_mode, backends=BACKENDS)
    torch._C = Module("torch._C")
    torch._C._dynamo = None
    torch.__spec__ = importlib.machinery.ModuleSpec("torch", None)  # as one that is found
    sys.modules["torch"] = torch
    for name in (
        "nn",
        "nn.functional",
        "overrides",
        "distributed",
        "utils",
        "utils._python_dispatch",
    ):
        sys.modules[f"torch.{name}"] = Module(f"torch.{name}")
    for name in ("TorchFunctionMode", "TorchDispatchMode"):  # classes are made of them
        for module in ("overrides", "utils._python_dispatch"):
            setattr(sys.modules[f"torch.{module}"], name, object)


_install()

import neuron_cpu  # noqa: E402

neuron_cpu.ensure_sdk()
import neuron_cpu.core  # noqa: E402

_imported = True
