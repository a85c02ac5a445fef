"""Recorded programs as plain data, so that no process but a stranger's own runs a stranger's code.

The form is pickle's without its reach. Entries of the instruction table, types and generations go
by their names, arrays as bytes. Classes are those that a program consists of, and no function is
called. What arrives is checked as the recorder checks it: by every entry's own rules, then whole.
"""

import io
import pickle
import sys
from enum import Enum
from types import SimpleNamespace
from typing import Any

import numpy as np

from ..core import Program
from ..core.check import verify
from ..core.current.tensor import NkiTensor
from ..core.device import dtypes
from ..core.device.spec import GENERATIONS, NeuronCore, using
from ..core.instructions import microscaling, ranks
from ..core.instructions.entry import TABLE, OpSpec
from ..core.language.tensor import Tensor
from ..core.program.attributes import Attrs
from ..core.program.program import Instruction
from ..core.program.storage import Frame, Loop, Source, Storage
from ..core.program.view import View

_ENTRIES = microscaling, ranks  # not imported by either language, and in the table
_APART = frozenset({"function", "macs", "plans"})  # made anew by whoever takes a program
_CLASSES = (Attrs, Enum, Frame, Instruction, Loop, Source, Storage, Tensor, NkiTensor, View)
_TYPES = {made.name: made for made in (*dtypes.ALL, *dtypes.LATER)}


class _Writer(pickle.Pickler):
    def persistent_id(self, value: Any) -> Any:
        for kind, of in (("entry", OpSpec), ("type", dtypes.DType), ("generation", NeuronCore)):
            if isinstance(value, of):
                return kind, value.name
        if isinstance(value, np.ndarray):
            return "array", value.dtype.name, value.shape, value.tobytes()
        return None


class _Reader(pickle.Unpickler):
    def persistent_load(self, pid: Any) -> Any:
        kind, name, *rest = pid
        if kind == "array":
            shape, data = rest
            return np.frombuffer(data, np.dtype(name)).reshape(shape)
        return {"entry": TABLE, "type": _TYPES, "generation": GENERATIONS}[kind][name]

    def find_class(self, module: str, name: str) -> Any:
        found = getattr(sys.modules.get(module), name, None)  # nothing is imported
        own = isinstance(found, type) and found.__module__.startswith("neuron_cpu.core.")
        if own and issubclass(found, (*_CLASSES, tuple)):
            return found
        raise pickle.UnpicklingError(f"{module}.{name} is no part of a program")


def dumped(content: Any) -> bytes:
    """A dictionary of words and programs."""
    for program in content.values():
        for instruction in program if isinstance(program, Program) else ():
            _forget_keys(instruction.attrs)
    plain = {
        name: {k: v for k, v in vars(value).items() if k not in _APART}
        if isinstance(value, Program)
        else value
        for name, value in content.items()
    }
    written = io.BytesIO()
    _Writer(written, pickle.HIGHEST_PROTOCOL).dump(plain)
    return written.getvalue()


def loaded(data: bytes) -> dict[str, Any]:
    """What `dumped` took; programs are still to be made of their fields by `program`.

    Raises whatever bytes of another origin lead to.
    """
    content = _Reader(io.BytesIO(data)).load()
    if not isinstance(content, dict):
        raise pickle.UnpicklingError("no dictionary")
    return content


def program(content: dict[str, Any]) -> Program:
    """The program of a dictionary, checked; an NkiError where the device would refuse it."""
    fields = content["program"]
    made = Program("", (), SimpleNamespace(skips_middle_end=fields["skips_middle_end"]))
    if set(fields) != set(vars(made)) - _APART:
        raise pickle.UnpicklingError("no program")
    vars(made).update(fields)
    with using(made.core):
        for instruction in made:
            if type(instruction.attrs) is not instruction.op.attrs:
                raise TypeError(f"{instruction.op.name} with {type(instruction.attrs).__name__}")
            _forget_keys(instruction.attrs)
            for _, view in instruction.accesses():
                _check_inside(view)
            instruction.op.check(instruction)
        verify.verify(made)
    return made


def _check_inside(view: View) -> None:
    reach = [(size - 1) * stride for size, stride in zip(view.shape, view.strides, strict=True)]
    last = view.offset + sum(part for part in reach if part > 0)
    first = view.offset + sum(part for part in reach if part < 0)
    if view.by_data is None and not 0 <= first <= last < view.storage.size:
        raise IndexError(f"{view.storage.label()} has no elements {first} to {last}")


def _forget_keys(attrs: Attrs) -> None:
    """What attributes remember of themselves is not taken from others."""
    for name in ("_key", "_in_group"):
        object.__setattr__(attrs, name, None)
