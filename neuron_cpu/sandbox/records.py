"""Recorded programs as plain data, so that only a stranger's own process runs a stranger's code.

Entries of the instruction table, types and generations go by their names. The reader checks a
program as the recorder does: by every entry's own rules, then whole.
"""

import functools
import math
from enum import Enum
from types import SimpleNamespace, UnionType
from typing import Any, NamedTuple, Union, get_args, get_origin, get_type_hints

from ..core import Program
from ..core.check import verify
from ..core.device import dtypes
from ..core.device.pause import without_garbage_collection
from ..core.device.spec import CORE, GENERATIONS, NeuronCore, using
from ..core.instructions import ranks, tensor_engine
from ..core.instructions.entry import TABLE, OpSpec
from ..core.program.attributes import Attrs
from ..core.program.placement import Tile, scaled, share_ground
from ..core.program.program import Instruction
from ..core.program.storage import Frame, Loop, Source, Storage
from ..core.program.view import View
from ..plain import Form

_ENTRIES = tensor_engine, ranks  # not imported by either language, and in the table
# What no record says, as whoever takes one makes it (`_complete`); of a Program, and of its parts.
_APART = frozenset(
    ("function", "macs", "plans", "direct_allocation", "mixed_placement", "open_values")
    + ("written_by_both", "unwritten_at", "names", "result_form")
)
_MADE = {
    Storage: "id role mutable birth followers producer watcher groups initial parts ground "
    "size free_size tiles tile_bytes on_chip",
    View: "oob paxis",
    Tile: "block partitions stop storage",
    Frame: "depth",
    Loop: "id",
}
_MEMORIES = "hbm", "shared_hbm", "sbuf", "psum"
_CLASSES = (Attrs, Enum, Frame, Instruction, Loop, Source, Storage, Tile, View, tuple)
_MOST_LOOPS = 100  # around each other
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
    {kind: frozenset(names.split()) for kind, names in _MADE.items()},
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


class Asked(NamedTuple):
    """What a kernel was traced for.

    Attributes:
        inputs: shape and type of each tensor.
        grid: of the launch.
    """

    inputs: tuple[tuple[tuple[int, ...], str], ...]
    grid: tuple[int, ...]


@without_garbage_collection()
def program(content: dict[str, Any], asked: Asked | None = None, trusted: bool = False) -> Program:
    """The program of a dictionary, checked; an NkiError where the device would refuse it.

    Each field is made here from others, or held against the table of instructions, the memory
    model, or what was asked for. What stays is what the author of a kernel chooses.

    Args:
        asked: what the kernel was traced for; nothing is held against that where None.
        trusted: whoever calls has written it, so that nothing is checked again.

    Raises:
        ValueError, TypeError, LookupError, AttributeError: it is no program, or another one.
    """
    fields = content["program"]
    kernel: Any = SimpleNamespace(skips_middle_end=fields["skips_middle_end"])
    made = Program("", (), kernel)
    if set(fields) != set(vars(made)) - _APART:
        raise ValueError("no program")
    vars(made).update(fields)
    for instruction in made:
        if type(instruction.attrs) is not instruction.op.attrs:
            raise TypeError(f"{instruction.op.name} with {type(instruction.attrs).__name__}")
    for attrs in {id(i.attrs): i.attrs for i in made}.values():
        for name in ("_key", "_in_group"):  # what they remember of themselves is not taken
            object.__setattr__(attrs, name, None)
    _complete(made)
    if not trusted:
        with using(made.core):
            _check_whole(made, asked)
            _check_memory(made)
            _check_loops(made)
            for view in {id(v): v for i in made for _, v in i.accesses()}.values():
                _check_view(view)
            legal: set[tuple] = set()
            for instruction in made:
                _check_instruction(instruction)
                instruction.op.check(instruction, legal)
            verify.verify(made)
    return made


def _refuse_unless(true: bool, what: str) -> None:
    if not true:
        raise ValueError(what)


# --- made from other fields -----------------------------------------------------------------------
def _complete(made: Program) -> None:
    """Set what a record does not say: it follows from what it does say."""
    made.direct_allocation = any(s.address is not None for s in made.storages)
    made.mixed_placement, made.open_values = made.today and made.direct_allocation, made.today
    made.written_by_both, made.unwritten_at, made.names = set(), set(), {}
    made.result_form = (None,) * len(made.outputs) if len(made.outputs) > 1 else None
    for number, storage in enumerate(made.storages):
        storage.id = number
        storage.lay_out(storage.paxis)
        storage.birth = storage.followers = 0
        storage.producer = storage.watcher = storage.groups = storage.ground = None
        storage.initial, storage.parts = None, ()
        if storage.address is not None:  # tiles are as large as the tensor says
            places = [(tile.partition, tile.start, tile.core) for tile in storage.address]
            storage.address = [Tile(storage, n, *place) for n, place in enumerate(places)]
    bases = dict(made.aliases)
    written = {bases.get(view.storage, view.storage) for i in made for view in i.dst}
    for storage in made.storages:
        of = bases.get(storage, storage)
        storage.role = _role(made, of)
        stays = of in made.outputs or (made.today and of in written)
        storage.mutable = stays and of in made.inputs
    for base in dict.fromkeys(bases.values()):
        share_ground(base, [alias for alias, of in made.aliases if of is base])
    for view in {id(v): v for i in made for _, v in i.accesses()}.values():
        view.oob, view.paxis = None, 0  # bounds are checked here, and operands are tiles
        view._blocks = view._form = None
    frames = [s.frame for s in made.storages] + [i.frame for i in made]
    loops: dict[Loop, int] = {}
    for frame in dict.fromkeys(frames):
        path: list[Frame] = []
        while frame is not None and len(path) <= _MOST_LOOPS:
            path.append(frame)
            frame = frame.parent
        for depth, one in enumerate(reversed(path), 1):
            one.depth, one.loop.id = depth, loops.setdefault(one.loop, len(loops))


def _role(made: Program, storage: Storage) -> str:
    if storage in made.inputs:
        return "input"
    if storage.data is not None:
        return "const"
    return "output" if storage.buffer == "shared_hbm" else "local"


# --- held against what was asked for --------------------------------------------------------------
def _check_whole(made: Program, asked: Asked | None) -> None:
    """The types of a program's own fields, and arguments, results and grid."""
    flags = "returns", "copies", "for_values", "today", "in_order", "skips_middle_end"
    _refuse_unless(all(type(getattr(made, name)) is bool for name in flags), "no program")
    _refuse_unless(all(type(one) is Instruction for one in made), "no instructions")
    _refuse_unless(all(type(one) is str for one in (made.name, *made.warnings)), "no words")
    parts = {id(i): i for i in made}
    _refuse_unless(len(parts) == len(made), "an instruction that stands twice")
    _refuse_unless(all({id(a), id(b)} <= set(parts) for a, b in made.edges), "edges of others")
    if made.today and (made.in_order or made.skips_middle_end):
        raise ValueError("orders to a compiler that the language does not give")
    if made.copies and not made.grid:
        raise ValueError("copies without a grid")
    whole = all(type(n) is int and n > 0 for n in made.grid)
    _refuse_unless(whole and type(made.cores) is int, "a grid of no sizes")
    if made.cores != 1 and (made.core.number < 3 or made.grid[:1] != (made.cores,)):
        raise ValueError(f"{made.cores} cores, expected those of the grid")
    if asked is not None:
        got = tuple((tuple(s.shape), s.dtype.name) for s in made.inputs)
        _refuse_unless(got == asked.inputs, f"arguments {got}, expected {asked.inputs}")
        _refuse_unless(made.grid == asked.grid, f"grid {made.grid}, expected {asked.grid}")
    sizes = [math.prod(shape) for shape in made.output_shapes]
    if sizes != [s.size for s in made.outputs] or any(0 in one for one in made.output_shapes):
        raise ValueError("results of another size")


# --- held against the memory model ----------------------------------------------------------------
def _check_memory(made: Program) -> None:
    """Every storage is listed once and can be where it says; types of the same bytes are one memory
    (`retyping`)."""
    known = set(made.storages)
    touched = {*made.inputs, *made.outputs, *(v.storage for i in made for _, v in i.accesses())}
    if not touched <= known or len(known) < len(made.storages):
        raise ValueError("storages of another program")
    for storage in known:
        _check_storage(storage, storage in made.inputs)
    bases = [base for _, base in made.aliases]
    for alias, base in made.aliases:
        same = alias.buffer == base.buffer and alias.frame is base.frame and alias not in bases
        if not same or alias.shape != scaled(base, alias.dtype) or alias in made.inputs:
            raise ValueError("storages of another memory")
        data = [None if s.data is None else s.data.tobytes() for s in (alias, base)]
        if data[0] != data[1] or len({a for a, _ in made.aliases}) < len(made.aliases):
            raise ValueError("storages of another memory")


def _check_storage(storage: Storage, is_input: bool) -> None:
    whole = all(type(length) is int and length > 0 for length in storage.shape)
    if not whole or not storage.shape or math.prod(storage.shape) != storage.size:
        raise ValueError(f"{storage.label()} of another size")
    axes = range(len(storage.shape)) if storage.on_chip else (0,)
    if type(storage.paxis) is not int or storage.paxis not in axes:
        raise ValueError(f"{storage.label()} with partitions on axis {storage.paxis}")
    if storage.on_chip and storage.shape[storage.paxis] > CORE.partitions:
        raise ValueError(f"{storage.label()} with more partitions than {CORE.partitions}")
    if is_input and storage.buffer != "hbm" or storage.buffer not in _MEMORIES:
        raise ValueError(f"{storage.label()} in {storage.buffer}")
    if storage.data is not None and (storage.on_chip or storage.data.size != storage.size):
        raise ValueError(f"{storage.label()} with other data")
    if storage.data is not None and storage.data.dtype.itemsize != storage.dtype.itemsize:
        raise ValueError(f"{storage.label()} with other data")
    for tile in storage.address or ():
        numbers = tile.partition, tile.start, tile.core
        if any(type(n) is not int or n < 0 for n in numbers):
            raise ValueError(f"{storage.label()} at no place")
    if storage.address is not None and len(storage.address) != storage.tiles:
        raise ValueError(f"{storage.label()} at {len(storage.address)} places")


def _check_view(view: View) -> None:
    """The elements lie inside of the tensor, and are as large as the tensor's."""
    storage, numbers = view.storage, (view.offset, *view.shape, *view.strides)
    if any(type(n) is not int for n in numbers) or any(n < 1 for n in view.shape):
        raise ValueError(f"{storage.label()} has no such elements")
    if view.dt.itemsize != storage.dtype.itemsize:
        raise ValueError(f"{storage.label()} read as {view.dt}")
    first = last = view.offset
    for size, stride in zip(view.shape, view.strides, strict=True):
        first += min(0, (size - 1) * stride)
        last += max(0, (size - 1) * stride)
    if view.by_data is not None:
        index, stride, length, (low, high) = view.by_data
        if not isinstance(index, View) or index.dt.is_float or index.by_data is not None:
            raise ValueError(f"{storage.label()} with rows that no integers choose")
        rows = -low, length - 1 - high  # between which the data's have to be when it runs
        if any(type(n) is not int for n in (stride, length, low, high)) or rows[0] > rows[1]:
            raise ValueError(f"{storage.label()} has no such rows")
        first, last = first + min(n * stride for n in rows), last + max(n * stride for n in rows)
    if not 0 <= first <= last < storage.size:
        raise IndexError(f"{storage.label()} has no elements {first} to {last}")


# --- held against the order of loops --------------------------------------------------------------
def _check_loops(made: Program) -> None:
    """Iterations follow each other as the statements of a kernel do."""
    path: list[Frame] = []
    grid = math.prod(made.grid)
    for frame in (instruction.frame for instruction in made):
        own = [] if frame is None else frame.path()
        common = 0
        while common < min(len(path), len(own)) and path[common] is own[common]:
            common += 1
        for depth, one in enumerate(own[common:], common):
            loop, before = one.loop, path[depth] if depth < len(path) else None
            outer = depth == 0 and loop.n == grid
            kinds = () if made.today else ("affine", "sequential")  # today's are Python's own
            if loop.kind not in kinds and not (loop.kind == "grid" and outer):
                raise ValueError(f"a loop of kind {loop.kind}")
            if type(one.i) is not int or type(loop.n) is not int or not 0 <= one.i < loop.n:
                raise ValueError(f"iteration {one.i} of {loop.n}")
            later = depth == common and before is not None and before.loop is loop
            if later and before.i >= one.i:  # type: ignore[union-attr]
                raise ValueError("iterations out of order")
        path = own


# --- held against the table of instructions -------------------------------------------------------
def _check_instruction(instruction: Instruction) -> None:
    """Constants that the entry has, of the types that they have there, and flags that fit."""
    op, attrs, (first, *more) = instruction.op, instruction.attrs, instruction.dst
    said = op.misfit(instruction) or _other_type(attrs)
    mask = attrs.mask
    if not said and mask is not None and (mask.dtype != bool or mask.shape != first.shape):
        said = f"a mask of shape {mask.shape}, expected {first.shape}"
    if not said and (attrs.start or attrs.accumulate) and not (op.multiplies or op.is_dma):
        said = "a sum that it has not"
    if not said and attrs.start and (attrs.accumulate or not op.multiplies):
        said = "a sum that begins and goes on"
    if not said and attrs.raw and op.is_copy and instruction.src[0].dt is not first.dt:
        said = "raw elements of another type"
    sizes = [math.prod(view.shape) for view in (*instruction.src[:1], first)]
    if not said and op.is_copy and len(set(sizes)) > 1:
        said = f"{sizes[0]} elements for {sizes[1]}"
    if not said and attrs.bits and any(view.dt.is_float for view in instruction.src):
        said = "bits of numbers"
    if not said and attrs.skip and not op.is_dma:
        said = "rows that it leaves out"
    if not said and not 0 <= attrs.reduce_axes < max(1, len(first.shape)):
        said = f"{attrs.reduce_axes} axes that it reduces"
    if not said and bool(attrs.reduce_axes) is not bool(more) and op.flow == "elementwise":
        said = f"{attrs.reduce_axes} axes that it reduces"
    _refuse_unless(not said, f"{op.name} with {said}")


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    return {name: hint for name, hint in get_type_hints(kind).items() if name[0] != "_"}


def _other_type(attrs: Attrs) -> str:
    kind: Any = type(attrs)
    for name, hint in _hints(kind).items():
        if not _fits(getattr(attrs, name), hint):
            return f"{name} {getattr(attrs, name)!r:.80}, expected {hint}"
    return ""


def _fits(value: Any, hint: Any) -> bool:
    """Whether a constant is of an annotated type; a whole number may stand for another one."""
    kind, parts = get_origin(hint), get_args(hint)
    if hint is Any:
        return type(value) in (bool, int, float)
    if kind in (Union, UnionType):
        return any(_fits(value, one) for one in parts)
    if kind is tuple:
        if type(value) is not tuple:
            return False
        several = parts[:1] * len(value) if parts[-1:] == (...,) else parts
        return len(value) == len(several) and all(map(_fits, value, several))
    if hint is float:
        return type(value) in (int, float)
    if hint is None:
        return value is None
    return isinstance(value, hint) and (hint is not int or type(value) is int)
