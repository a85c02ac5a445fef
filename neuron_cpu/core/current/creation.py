"""Tensors of ``nki.language``: ``ndarray`` and its kin, constants, loads and stores."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..device.dtypes import DType, to_dtype
from ..device.errors import refuse
from ..device.spec import CORE
from ..instructions.arguments import number, whole, wholes
from ..language.creation import name_at
from ..program import trace
from ..program.accumulation import Groups
from ..program.index import is_integer
from ..program.placement import Tile
from ..program.storage import Storage
from .copies import memset
from .operands import tensor
from .selection import affine_select
from .tensor import NkiTensor
from .transfers import dma_copy
from .types import MemoryRegion, element_type, region, sbuf

PSUM_BYTES = 16 * 1024  # a tensor in PSUM may take all banks of a partition


def new(shape: Sequence[int], dt: DType, buffer: MemoryRegion, name: str = "") -> Any:
    """An uninitialised tensor, checked."""
    tracer = trace.current("nl.ndarray")
    sizes: tuple[int, ...] = ()
    if isinstance(shape, (list, tuple)) and all(map(is_integer, shape)):
        sizes = tuple([int(s) for s in shape])
    if not sizes or min(sizes) < 1:
        raise refuse(
            "sim_shape", f"tensor shape {shape!r}, expected positive integers known while building"
        )
    kind = buffer.value
    if kind in ("sbuf", "psum"):
        _check_on_chip(sizes, dt, kind)
    if kind == "shared_hbm":
        made = tracer.shared_storage(sizes, dt)
    else:
        made = tracer.storage(sizes, dt, kind)
    if kind == "psum":  # no initial value: the first product of a region overwrites
        made.groups = Groups(made.size, zeroed=False)
    made.source = tracer.place()
    made.name = name or name_at(made.source)
    return tracer.whole(made)


def _check_on_chip(shape: tuple[int, ...], dt: DType, kind: str) -> None:
    if len(shape) < 2:
        raise refuse(
            "sim_rank",
            f"Insufficient rank: {kind} tensor of shape {shape}, expected at least 2 axes",
        )
    if shape[0] > CORE.partitions:
        raise refuse(
            "err_num_partition_exceed_arch_limit",
            f"{kind} tensor of shape {shape}: partition dimension {shape[0]} exceeds maximum "
            f"{CORE.partitions}; tile the partition axis",
        )
    size = int(np.prod(shape[1:])) * dt.itemsize
    if kind == "psum" and size > PSUM_BYTES:
        raise refuse(
            "err_size_of_dimension_exceed_arch_limit",
            f"psum tensor of shape {shape} {dt} needs {size} bytes per partition, expected at "
            f"most {PSUM_BYTES}",
        )


def ndarray(
    shape: Any, dtype: Any, buffer: MemoryRegion = sbuf, name: str = "", address: Any = None
) -> Any:
    """An uninitialised tensor; ``address`` (partition, byte) fixes its place on chip."""
    made = new(shape, element_type(dtype), region(buffer), name)
    if address is not None:
        _place(made.storage, address)
    return made


def _place(storage: Storage, address: Any) -> None:
    """Put a tensor where the kernel wants it.

    The free offset counts bytes: the migration text says elements, but its own example, the
    published parser and AWS's library, which devices ran, pass bytes.
    """
    given = wholes(address, "address")
    partition, byte = given if len(given) == 2 else (-1, -1)
    legal = CORE.start_partitions(storage.shape[0])
    limit = PSUM_BYTES if storage.buffer == "psum" else CORE.sbuf_usable_bytes
    wrong = ""
    if not storage.on_chip:
        wrong = "a tensor in SBUF or PSUM"
    elif partition not in legal:
        wrong = f"partition {' or '.join(map(str, legal))}"
    elif byte < 0 or byte + storage.tile_bytes > limit:
        wrong = f"bytes 0 to {limit}"
    elif storage.buffer == "psum" and byte % CORE.psum_bank_bytes:
        wrong = f"the start of a bank, a multiple of {CORE.psum_bank_bytes}"
    if wrong:
        raise refuse(
            "sim_allocation_address",
            f"{storage.label()} at address {tuple(address)}, expected {wrong}",
        )
    tracer = trace.current("nl.ndarray")
    program = tracer.program
    core = tracer.grid_index[0] if program.cores > 1 else 0
    storage.address = [Tile(storage, 0, partition, byte, core)]
    program.direct_allocation = program.mixed_placement = True


# --- with content ---------------------------------------------------------------------------------
def full(
    shape: Any, fill_value: Any, dtype: Any, buffer: MemoryRegion = sbuf, name: str = ""
) -> Any:
    """A tensor of one value in any memory."""
    made = ndarray(shape, dtype, buffer, name)
    value = number(fill_value)
    if made.on_chip:
        memset(made, value)
        return made
    _fill_hbm(made, value)
    return made


def _fill_hbm(made: Any, value: Any) -> None:
    """HBM is written from a tile, as many rows at a time as there are partitions."""
    rows = made.shape[0] if made.ndim > 1 else 1
    table = made.reshape((rows, made.size // rows))
    tile = new((min(rows, CORE.partitions), table.shape[1]), made.dt, sbuf)
    memset(tile, value)
    for start in range(0, rows, CORE.partitions):
        stop = min(rows, start + CORE.partitions)
        dma_copy(table[start:stop, :], tile[0 : stop - start, :])


def zeros(shape: Any, dtype: Any, buffer: MemoryRegion = sbuf, name: str = "") -> Any:
    """A tensor of zeros."""
    return full(shape, 0, dtype, buffer, name)


def ones(shape: Any, dtype: Any, buffer: MemoryRegion = sbuf, name: str = "") -> Any:
    """A tensor of ones."""
    return full(shape, 1, dtype, buffer, name)


def _like(x: Any, dtype: Any, buffer: Any) -> tuple[Any, Any, Any]:
    like = tensor(x, "nl function")
    where = like.buffer if buffer is None else buffer  # type: ignore[attr-defined]
    return x.shape, (x.dtype if dtype is None else dtype), where


def zeros_like(x: Any, dtype: Any = None, buffer: Any = None, name: str = "") -> Any:
    """Zeros in the shape, type and memory of ``x``."""
    return zeros(*_like(x, dtype, buffer), name=name)


def empty_like(x: Any, dtype: Any = None, buffer: Any = None, name: str = "") -> Any:
    """An uninitialised tensor in the shape, type and memory of ``x``."""
    return ndarray(*_like(x, dtype, buffer), name=name)


def _of_file(path: str | Path) -> Any:
    try:
        return np.load(path)
    except (OSError, ValueError) as error:
        raise refuse(
            "sim_constant",
            f"nl.shared_constant of the file {str(path)!r}: {error}, expected the path of a .npy "
            "file",
        ) from None


def shared_constant(constant: Any) -> Any:
    """A numpy array (or the path of a .npy file) as an HBM tensor that the program brings along."""
    tracer = trace.current("nl.shared_constant")
    values = _of_file(constant) if isinstance(constant, (str, Path)) else constant
    if not isinstance(values, np.ndarray) or not values.ndim:
        raise refuse(
            "sim_constant",
            f"nl.shared_constant of {type(values).__name__}, expected a numpy array of at least "
            "one axis or the path of a .npy file",
        )
    try:
        dt = to_dtype(values.dtype)
    except TypeError as error:
        raise refuse("sim_constant", f"nl.shared_constant of an array: {error}") from None
    made = tracer.storage(values.shape, dt, "shared_hbm", "const")
    made.data, made.frame, made.source = values, None, tracer.place()
    made.name = name_at(made.source) or "constant"
    return tracer.whole(made)


def shared_identity_matrix(n: int, dtype: Any = "uint8", dst: Any = None) -> Any:
    """The identity (n, n) in SBUF; one for each type and size of a kernel."""
    tracer = trace.current("nl.shared_identity_matrix")
    if dst is None:
        kept = tracer.identities
        n = whole(n, "size of nl.shared_identity_matrix")
        key = (n, element_type(dtype).name, tracer.grid_index)
        if key in kept:
            return kept[key]
        dst = kept[key] = new((n, n), element_type(dtype), sbuf, "identity")
        dst.storage.frame = None
    tensor(dst, "nl.shared_identity_matrix")
    ones_tile = new((n, n), dst.dt, sbuf)
    memset(ones_tile, 1 if dst.dt.is_int else 1.0)
    affine_select(dst, [[-1, n]], 1, ones_tile, 0.0)
    return dst


# --- between HBM and SBUF -------------------------------------------------------------------------
def load(src: Any, dtype: Any = None) -> Any:
    """An HBM region as a new SBUF tile of the same shape."""
    source = tensor(src, "nl.load")
    if source.on_chip:
        raise refuse("err_unsupported_memory", f"nl.load of {source.label()}, expected HBM")
    dt = source.dt if dtype is None else element_type(dtype)
    shape = source.shape if source.ndim > 1 else (1, *source.shape)
    made = new(shape, dt, sbuf)
    dma_copy(made, source)
    return made


def store(dst: Any, value: Any) -> None:
    """An SBUF tile to an HBM region with as many elements."""
    target, source = tensor(dst, "nl.store"), tensor(value, "nl.store")
    if target.on_chip or source.storage.buffer != "sbuf":
        raise refuse(
            "err_unsupported_memory",
            f"nl.store of {source.label()} to {target.label()}, expected SBUF to HBM; copy PSUM "
            "to SBUF first",
        )
    dma_copy(target, source)


def load_transpose2d(src: Any, dtype: Any = None) -> Any:
    """An HBM region (F, P) as a new SBUF tile (P, F)."""
    source: NkiTensor = tensor(src, "nl.load_transpose2d")  # type: ignore[assignment]
    dt = source.dt if dtype is None else element_type(dtype)
    if source.ndim != 2:
        raise refuse(
            "sim_rank", f"nl.load_transpose2d of {source.label()}, expected 2 axes; slice it"
        )
    rows, columns = source.shape
    made = new((columns, rows), dt, sbuf)
    dma_copy(made, source.permute((1, 0)))
    return made
