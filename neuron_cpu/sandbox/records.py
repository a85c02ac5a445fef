"""Recorded programs as plain data, so that only a stranger's own process runs a stranger's code.

Entries of the instruction table, types and generations go by their names. The reader checks a
program as the recorder does: by every entry's own rules, then whole.
"""

import math
from enum import Enum
from types import SimpleNamespace
from typing import Any

from ..core import Program
from ..core.check import verify
from ..core.device import dtypes
from ..core.device.pause import without_garbage_collection
from ..core.device.spec import GENERATIONS, NeuronCore, using
from ..core.instructions import microscaling, ranks
from ..core.instructions.entry import TABLE, OpSpec
from ..core.program.attributes import Attrs
from ..core.program.placement import Tile
from ..core.program.program import Instruction
from ..core.program.storage import Frame, Loop, Source, Storage
from ..core.program.view import View
from ..plain import Form

_ENTRIES = microscaling, ranks  # not imported by either language, and in the table
_APART = frozenset({"function", "macs", "plans"})  # made anew by whoever takes a program
_CLASSES = (Attrs, Enum, Frame, Instruction, Loop, Source, Storage, Tile, View, tuple)
_TYPES = {made.name: made for made in (*dtypes.ALL, *dtypes.LATER)}


def _is_of_a_program(kind: type) -> bool:
    return kind.__module__.startswith("neuron_cpu.core.") and issubclass(kind, _CLASSES)


_FORM = Form(
    _is_of_a_program,
    {
        "entry": (OpSpec, TABLE),
        "type": (dtypes.DType, _TYPES),
        "generation": (NeuronCore, GENERATIONS),
    },
)


@without_garbage_collection()
def dumped(content: dict[str, Any]) -> bytes:
    """A dictionary of words and programs."""
    return _FORM.dumps(
        {
            name: {k: v for k, v in vars(value).items() if k not in _APART}
            if isinstance(value, Program)
            else value
            for name, value in content.items()
        }
    )


@without_garbage_collection()
def loaded(data: bytes) -> dict[str, Any]:
    """Read the data of `dumped`; `program` then makes programs of their fields.

    Raises:
        ValueError: bytes of another origin.
    """
    content = _FORM.loads(data)
    if not isinstance(content, dict):
        raise ValueError("no dictionary")
    return content


@without_garbage_collection()
def program(content: dict[str, Any], trusted: bool = False) -> Program:
    """The program of a dictionary, checked; an NkiError where the device would refuse it.

    Args:
        trusted: whoever calls has written it, so that nothing is checked again.
    """
    fields = content["program"]
    made = Program("", (), SimpleNamespace(skips_middle_end=fields["skips_middle_end"]))
    if set(fields) != set(vars(made)) - _APART:
        raise ValueError("no program")
    vars(made).update(fields)
    for instruction in made:
        if type(instruction.attrs) is not instruction.op.attrs:
            raise TypeError(f"{instruction.op.name} with {type(instruction.attrs).__name__}")
    for attrs in {id(i.attrs): i.attrs for i in made}.values():
        for name in ("_key", "_in_group"):  # what they remember of themselves is not taken
            object.__setattr__(attrs, name, None)
    if not trusted:
        _check_memory(made)
        for view in {id(v): v for i in made for _, v in i.accesses()}.values():
            _check_inside(view)
        with using(made.core):
            for instruction in made:
                instruction.op.check(instruction)
            verify.verify(made)
    return made


def _check_memory(made: Program) -> None:
    """Checks beyond single instructions: every storage is listed once with its true size, types of
    the same bytes are one memory, and cores are those of the grid."""
    known = set(made.storages)
    touched = {*made.inputs, *made.outputs, *(v.storage for i in made for _, v in i.accesses())}
    grounds = {storage.memory for storage in known}
    apart = [alias for alias, base in made.aliases if alias.memory is not base.memory]
    if not touched <= known or len({s.id for s in known}) < len(made.storages) or apart:
        raise ValueError("storages of another program")
    for storage in known | grounds:
        whole = all(type(length) is int and length > 0 for length in storage.shape)
        if not whole or math.prod(storage.shape) != storage.size:
            raise ValueError(f"{storage.label()} of another size")
        if storage.address:  # tiles are as large as the tensor says
            places = [(tile.partition, tile.start, tile.core) for tile in storage.address]
            storage.address = [Tile(storage, n, *place) for n, place in enumerate(places)]
    if made.cores != 1 and (made.core.number < 3 or made.grid[:1] != (made.cores,)):
        raise ValueError(f"{made.cores} cores, expected those of the grid")


def _check_inside(view: View) -> None:
    first = last = view.offset
    for size, stride in zip(view.shape, view.strides, strict=True):
        first += min(0, (size - 1) * stride)
        last += max(0, (size - 1) * stride)
    if view.by_data is None and not 0 <= first <= last < view.storage.size:
        raise IndexError(f"{view.storage.label()} has no elements {first} to {last}")
