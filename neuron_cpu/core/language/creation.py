"""``nl.ndarray`` and its kin: tensors in SBUF, PSUM and HBM, and constants."""

import functools
import linecache
import math
import re
from typing import Any

import numpy as np

from ..device import written
from ..device.dtypes import DType, Shape, to_dtype
from ..device.errors import refuse, warn
from ..device.release import BLOCK_AXES_DEPRECATED, ZEROS_IN_SHARED_HBM_REFUSED, since
from ..device.spec import CORE, GEN2
from ..program import trace
from ..program.accumulation import Groups
from ..program.index import is_integer
from ..program.view import View, called
from . import copies
from .types import sbuf

_MEANT = {"hbm": "shared_hbm", "shared_hbm": "shared_hbm", "dram": "shared_hbm", "psum": "psum"}
HBM_FILL_BYTES = 2048  # a partition of the tile that fills HBM; such rows move at full rate


class par_dim(int):
    """``nl.par_dim(n)`` marks the partition axis in a shape with block axes before it."""


_ASSIGNED = re.compile(r"^\s*([A-Za-z_]\w*)\s*=[^=;][^;]*$")  # of several, none is known


def name_at(source: Any) -> str:
    """The variable that a creation is assigned to, for messages and reports."""
    return "" if source is None else _assigned(linecache.getline(source.file, source.line))


@functools.lru_cache(1 << 12)
def _assigned(line: str) -> str:
    match = _ASSIGNED.match(line)
    return match.group(1) if match else ""


def no_sizes(given: Any) -> str:
    """What to write instead of a shape that is none."""
    sizes = given if isinstance(given, (tuple, list)) else (given,)
    if all(isinstance(one, (int, float)) for one in sizes):
        if (text := (written.arguments()[0] or [""])[0]).endswith(".size"):
            return f"write {text.removesuffix('size')}shape"
        if not isinstance(given, (tuple, list)):
            return f"write a tuple, ({given}, n) of partitions and columns"
        if 0 in sizes:
            return "write sizes of 1 or more, or leave the step out in which one is not"
        return "compute them from shapes of tensors, with // for a whole number"
    if tile := next((called(one) for one in sizes if isinstance(one, View)), ""):
        axis = "[0] or another of its sizes" * isinstance(given, (tuple, list))
        return f"write {tile}.shape{axis}"
    return "give the shape first, a tuple of whole numbers: nl.ndarray((128, 64), dtype, buffer)"


def _shape(shape: Any) -> tuple[Shape, int]:
    sizes = shape if isinstance(shape, (tuple, list)) else (shape,)
    marked = [a for a, s in enumerate(sizes) if type(s) is par_dim]
    for s in sizes:
        if not (type(s) is int or is_integer(s)) or s < 1:
            raise refuse(
                "sim_shape",
                f"tensor shape {tuple(sizes)!r} has axis {s!r}, expected positive integers known "
                f"while tracing; {no_sizes(sizes)}",
            )
    return tuple(map(int, sizes)), (marked[0] if marked else 0)


def tiled(shape: Shape, most: int) -> str:
    """What to do with a tile of too many partitions: its axes may be in the wrong order."""
    before = {"load": "", "load_transpose2d": ":, ", "transpose": ":, "}.get(written.function())
    blocks, stop = f"range({-(-shape[0] // most)})", f"(k + 1) * {most}"
    if before is not None:
        stop = f"min({stop}, {shape[0]})" if shape[0] % most else stop
        part = f"nl.{written.function()}({written.arguments()[0][0]}[{before}k * {most}:{stop}])"
        return f"tile the partition axis: {part} in a loop over k of {blocks}"
    turned = ", or make it ({1}, {0}) where axis 0 is to be the free one".format(*shape[:2])
    tile = f"make it {(most, *shape[1:])} and loop over {blocks}, for rows i * {most} and more"
    tile += ", give it buffer=nl.shared_hbm where it is what the kernel returns"
    return f"tile the partition axis: {tile}" + (
        turned if len(shape) == 2 and shape[1] <= most else ""
    )


def _check_on_chip(shape: Shape, paxis: int, dt: DType, kind: str) -> None:
    if len(shape) < 2 or len(shape) - paxis < 2:
        raise refuse(
            "sim_rank",
            f"Insufficient rank: {kind} tensor of shape {shape}, expected a partition axis and at "
            "least one free axis; add an axis of 1",
        )
    if shape[paxis] > GEN2.partitions:
        raise refuse(
            "err_num_partition_exceed_arch_limit",
            f"Size of partition dimension {shape[paxis]} exceeds architecture limitation of "
            f"{GEN2.partitions} for {kind} tensor of shape {shape}; "
            f"{tiled(shape[paxis:], GEN2.partitions)}",
        )
    free = dt.itemsize * math.prod(shape[paxis + 1 :])
    # trn2's compiler lets one tile have all banks (a public kernel's [128, 4096] of fp32 ran)
    most = GEN2.psum_bank_bytes * (GEN2.psum_banks if CORE.number > 2 else 1)
    if kind == "psum" and free > most:
        raise refuse(
            "err_size_of_dimension_exceed_arch_limit",
            f"psum tile of shape {shape} {dt} needs {free} bytes per partition, expected at most "
            f"{most}; split the free axis into blocks",
        )


def ndarray(shape: Any, dtype: Any, *, buffer: Any = None, name: str = "", **other: Any) -> View:
    """An uninitialised tensor in ``buffer`` (default SBUF)."""
    if words := [f"{word}=" for word in other if word != "lazy_initialization"]:  # as AWS's have it
        warn(
            "sim_ignored_keyword",
            f"nl.ndarray got {', '.join(words)}, expected shape, dtype, "
            "buffer= and name=: its **kwargs swallows the rest; name the memory with buffer=",
        )
    tracer = trace.current("nl.ndarray")
    sizes, paxis = _shape(shape)
    dt = to_dtype(dtype)
    where = sbuf if buffer is None else buffer
    kind = getattr(where, "kind", None)
    if kind is None:
        raise refuse(
            "sim_buffer",
            f"buffer {buffer!r}, expected nl.sbuf, nl.psum, nl.hbm, nl.shared_hbm or an ncc "
            f"allocation; write buffer=nl.{_MEANT.get(str(buffer).lower(), 'sbuf')}",
        )
    if kind == "shared_hbm" and not tracer.at_kernel_level():
        raise refuse(
            "err_shared_hbm_must_in_kernel_level",
            f"shared_hbm tensor of shape {sizes} is created in a loop, branch or called function, "
            "expected the kernel's own top level; create it first and pass it down",
        )
    if kind in ("sbuf", "psum"):
        _check_on_chip(sizes, paxis, dt, kind)
        if paxis and since(BLOCK_AXES_DEPRECATED):
            warn(
                "err_leading_dimension_of_tensor_must_be_partition",
                f"{kind} tensor of shape {sizes} has {paxis} block axes before its partition axis, "
                "which SDK 2.23 deprecates and later ones refuse; put the blocks on a free axis",
            )
    # Every instance of a grid creates its outputs; they are the first instance's tensors.
    if kind == "shared_hbm":
        made = tracer.shared_storage(sizes, dt)
    else:
        made = tracer.storage(sizes, dt, kind, "local", name)
    made.source = tracer.place()
    made.name = name or name_at(made.source)
    made.lay_out(paxis if kind in ("sbuf", "psum") else 0)
    place = getattr(where, "place", None)
    if place is not None:
        if kind == "psum":  # no initial value is possible: its first matmul overwrites
            made.groups = Groups(made.size, zeroed=False)
        place(made)
    return tracer.whole(made)


def full(
    shape: Any, fill_value: Any, dtype: Any, *, buffer: Any = None, name: str = "", **kw: Any
) -> View:
    """A tensor filled with a constant (a PSUM tile of zeros costs nothing: see nl.zeros)."""
    tensor = ndarray(shape, dtype, buffer=buffer, name=name, **kw)
    storage = tensor.storage
    if storage.address is not None:
        raise refuse(
            "err_tensor_creation_on_scratchpad_with_init_value_not_allowed",
            f"{storage.label()} is allocated directly and has an initial value, expected "
            "nl.ndarray; write it with nisa.memset",
        )
    if storage.buffer == "shared_hbm" and not since(ZEROS_IN_SHARED_HBM_REFUSED):
        _fill_hbm(tensor, fill_value)
        return tensor
    if not storage.on_chip:
        raise refuse(
            "err_hbm_tensor_with_init_value_not_supported",
            f"{storage.label()} in HBM has an initial value, expected nl.ndarray; store the "
            "constant with nl.store(tensor, value)",
        )
    # Zeros of PSUM cost nothing until somebody reads them: program/accumulation.py.
    if storage.buffer == "psum" and fill_value == 0:
        storage.groups = storage.watcher = Groups(storage.size, zeroed=True)
        machine = trace.current("nl.zeros").machine
        if machine is not None:  # eager: nobody knows yet what will be read
            machine.run(copies.initial_fill(storage))
        return tensor
    for number in range(storage.tiles):  # an instruction has one tile, however many blocks
        copies.fill(View.block(storage, number), fill_value)
    return tensor


def _fill_hbm(tensor: View, value: Any) -> None:
    """Constants into HBM, as SDK 2.21 compiled them: a filled tile, stored over all rows.

    Rows of the tensor are its last axis; the tile is as wide as the axis, up to 2 KiB a partition.
    """
    width = tensor.shape[-1]
    rows = tensor.reshape((tensor.size // width, width))
    columns = min(width, HBM_FILL_BYTES // tensor.dt.itemsize)
    height = min(GEN2.partitions, rows.shape[0])
    tile = ndarray((height, columns), tensor.dtype)
    copies.fill(tile, value)
    for top in range(0, rows.shape[0], height):
        count = min(height, rows.shape[0] - top)
        for left in range(0, width, columns):
            wide = min(columns, width - left)
            part = (slice(0, count), slice(0, wide))
            target = rows.slice_box((slice(top, top + count), slice(left, left + wide)))
            copies.move(target, tile.slice_box(part))


def zeros(shape: Any, dtype: Any, *, buffer: Any = None, name: str = "", **kw: Any) -> View:
    """A tensor of zeros; in PSUM the idiom that starts a matmul accumulation group."""
    return full(shape, 0, dtype, buffer=buffer, name=name, **kw)


def ones(shape: Any, dtype: Any, *, buffer: Any = None, name: str = "", **kw: Any) -> View:
    """A tensor of ones."""
    return full(shape, 1, dtype, buffer=buffer, name=name, **kw)


def zeros_like(a: View, dtype: Any = None, *, buffer: Any = None, name: str = "") -> View:
    """Zeros with the shape (and type) of ``a``."""
    return zeros(a.shape, a.dtype if dtype is None else dtype, buffer=buffer, name=name)


def empty_like(a: View, dtype: Any = None, *, buffer: Any = None, name: str = "") -> View:
    """An uninitialised tensor with the shape (and type) of ``a`` (SDK 2.22)."""
    return ndarray(a.shape, a.dtype if dtype is None else dtype, buffer=buffer, name=name)


def shared_constant(constant: Any, dtype: Any = None, **_: Any) -> View:
    """A numpy array as a constant in HBM; load it before use."""
    tracer = trace.current("nl.shared_constant")
    data = np.asarray(constant)
    dt = to_dtype(data.dtype if dtype is None else dtype)
    made = tracer.storage(data.shape, dt, "hbm", "const", "constant")
    made.frame = None  # one constant, in whatever loop it is asked for
    made.data = data.astype(dt.numpy)
    return tracer.whole(made)


def shared_identity_matrix(n: int, dtype: Any = np.uint8, **_: Any) -> View:
    """The n x n identity as a constant in HBM."""
    return shared_constant(np.eye(int(n)), dtype)
