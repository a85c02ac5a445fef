"""Direct allocation: tensors that the kernel places itself (``neuronxcc.nki.compiler``).

A buffer made by ``ncc.sbuf.alloc`` and friends gives every tile of a tensor (one per index of its
block axes) an address: first partition and byte in SBUF, bank in PSUM. Rules: aws-neuron-sdk
v2.21.1, general/nki/nki_direct_allocation_guide.rst. Tiles may share memory as long as nobody reads
what another tile has overwritten; ``check/undefined.py`` follows that write by write.
"""

import inspect
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ..device.dtypes import Shape
from ..device.errors import refuse
from ..device.spec import GEN2
from ..program import trace
from ..program.placement import Tile
from ..program.storage import Storage
from .types import BY_KIND

AddressFunction = Callable[..., Shape]


def by_keyword(function: AddressFunction) -> AddressFunction:
    """Pass the arguments by the names of the guide where the function has them.

    ``functools.partial`` objects that fix a first parameter by name can be called only so.
    """
    try:
        inspect.signature(function).bind(idx=(), pdim_size=0, fdim_size=0)
    except TypeError:
        return function
    return lambda idx, pdim_size, fdim_size: function(
        idx=idx, pdim_size=pdim_size, fdim_size=fdim_size
    )


class Placed:
    """A buffer object with explicit addresses, for ``buffer=`` of the creation functions."""

    def __init__(self, kind: str, function: AddressFunction) -> None:
        self.kind, self.function = kind, by_keyword(function)

    def __repr__(self) -> str:
        return f"ncc.{self.kind}.alloc(...)"

    def place(self, storage: Storage) -> None:
        """Ask the address function for every tile of ``storage`` and check the answers.

        Raises:
            NkiError: an address outside of the memory, misaligned, or at an illegal partition.
        """
        program = trace.current("ncc allocation").program
        if getattr(program.function, "nki_auto_alloc", False):
            return
        # From here on every on-chip tensor needs an address; check/verify.py looks at the end.
        program.direct_allocation = True
        storage.address = [
            self._tile(storage, number, got)
            for number, got in enumerate(self._first_answers(storage))
        ]

    def _first_answers(self, storage: Storage) -> list[Shape]:
        """Addresses of all tiles, as the loop's first iteration got them.

        A device compiler traces the body of a loop once, so a Python counter that the body advances
        gives every iteration the addresses of the first. Tensors are told apart by the loops and
        lines that create them and by their number there.
        """
        placed = trace.current("ncc allocation").placed
        loops = [] if storage.frame is None else storage.frame.path()
        where = (*(frame.loop.source for frame in loops), storage.source)
        here = placed.setdefault((where, tuple(frame.i for frame in loops)), [])
        first = placed.setdefault((where, (0,) * len(loops)), here)
        if here is first or len(here) == len(first):  # a branch that the first did not take
            here.append(self._answers(storage))
        else:
            here.append(first[len(here)])
        return here[-1]

    def _answers(self, storage: Storage) -> list[Shape]:
        """The address function's answer for every tile."""
        partitions = storage.shape[storage.paxis]
        return [
            tuple(int(v) for v in self.function(index, partitions, storage.tile_bytes))
            for index in itertools.product(*[range(s) for s in storage.shape[: storage.paxis]])
        ]

    def _tile(self, storage: Storage, number: int, got: Shape) -> Tile:
        partitions = storage.shape[storage.paxis]
        size = storage.tile_bytes
        if self.kind == "psum":
            return _psum_tile(storage, number, got)
        partition, byte = got
        if partition not in GEN2.start_partitions(partitions):
            raise refuse(
                "sim_allocation_partition",
                f"{storage.label()} is allocated from partition {partition}, expected one of "
                f"{GEN2.start_partitions(partitions)} for {partitions} partitions; begin at 0",
            )
        if byte < 0 or byte + size > GEN2.sbuf_usable_bytes or byte % GEN2.sbuf_align_bytes:
            raise refuse(
                "sim_allocation_address",
                f"{storage.label()} is allocated at bytes {byte} to {byte + size} of its "
                f"partitions, expected a multiple of {GEN2.sbuf_align_bytes} inside 0 to "
                f"{GEN2.sbuf_usable_bytes}: the last 16 KiB are the compiler's; begin lower",
            )
        return Tile(storage, number, partition, byte)


def _psum_tile(storage: Storage, number: int, got: Shape) -> Tile:
    bank, partition, byte = got
    if not 0 <= bank < GEN2.psum_banks or partition or byte:
        raise refuse(
            "sim_allocation_address",
            f"{storage.label()} is allocated at (bank, partition, byte) = {got}, expected a bank "
            f"from 0 to {GEN2.psum_banks - 1} and zeros: SDK 2.21 places PSUM tiles by bank only; "
            "give the bank alone",
        )
    return Tile(storage, number, 0, bank * GEN2.psum_bank_bytes)


def _wrapped(index: Shape, sizes: Shape) -> int:
    """Block index modulo the physical tiles of each axis, in row-major order.

    Axes that ``sizes`` does not name have one physical tile.
    """
    full = (1,) * (len(index) - len(sizes)) + tuple(sizes)
    number = 0
    for i, size in zip(index, full, strict=True):
        number = number * size + i % size
    return number


class _Memory:
    """The common base of ``ncc.sbuf`` and ``ncc.psum``."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def alloc(self, func: AddressFunction) -> Placed:
        """Addresses from ``func(block index, partitions, bytes per partition)``."""
        return Placed(self.kind, func)

    def auto_alloc(self) -> Any:
        """The buffer that the compiler places tensors in, ``nl.sbuf`` or ``nl.psum``."""
        return BY_KIND[self.kind]


class _Sbuf(_Memory):
    """``ncc.sbuf``: addresses are (first partition, byte)."""

    def mod_alloc(
        self,
        *,
        base_addr: int,
        base_partition: int = 0,
        num_par_tiles: Any = (),
        num_free_tiles: Any = (),
    ) -> Placed:
        """Physical tiles in rows along partitions and bytes, block indices taken modulo."""
        par, free = _sizes(num_par_tiles), _sizes(num_free_tiles)

        def address(index: Shape, partitions: int, size: int) -> Shape:
            row, column = _wrapped(index, par), _wrapped(index, free)
            return base_partition + row * partitions, base_addr + column * size

        return self.alloc(address)


class _Psum(_Memory):
    """``ncc.psum``: addresses are (bank, first partition, byte), the last two 0."""

    def mod_alloc(
        self,
        *,
        base_bank: int,
        base_addr: int = 0,
        base_partition: int = 0,
        num_bank_tiles: Any = (),
        num_par_tiles: Any = (),
        num_free_tiles: Any = (),
    ) -> Placed:
        """Banks from ``base_bank`` on, block indices taken modulo ``num_bank_tiles``."""
        banks, par, free = map(_sizes, (num_bank_tiles, num_par_tiles, num_free_tiles))

        def address(index: Shape, partitions: int, size: int) -> Shape:
            row, column = _wrapped(index, par), _wrapped(index, free)
            return (
                base_bank + _wrapped(index, banks),
                base_partition + row * partitions,
                base_addr + column * size,
            )

        return self.alloc(address)


def _sizes(value: Any) -> Shape:
    return tuple(int(v) for v in value) if isinstance(value, (tuple, list)) else (int(value),)


sbuf = _Sbuf("sbuf")
psum = _Psum("psum")


# --- order --------------------------------------------------------------------------------------
@contextmanager
def no_reorder() -> Iterator[None]:
    """``with ncc.no_reorder():`` keeps the compiler from moving instructions.

    Its documentation (v2.26.1, nki.compiler: a guard that prevents the reordering of operations)
    leaves open how far it reaches; the time model issues the whole kernel as it is written.
    """
    trace.current("nki.compiler.no_reorder").program.in_order = True
    yield


# --- decorators -----------------------------------------------------------------------------------
def force_auto_alloc(func: Any = None) -> Any:
    """Decorator: ignore explicit addresses, for comparison with automatic allocation."""
    if func is None:
        return force_auto_alloc
    getattr(func, "function", func).nki_auto_alloc = True
    return func


def enable_stack_allocator(func: Any = None, log_level: int = 50) -> Any:
    """Decorator of the device compiler's allocator; nothing to choose here."""
    return func if func is not None else enable_stack_allocator


def skip_middle_end_transformations(func: Any = None) -> Any:
    """Decorator of the device compiler's pipeline; nothing to skip here."""
    if func is None:
        return skip_middle_end_transformations
    getattr(func, "function", func).skips_middle_end = True  # a kernel, or what will be one
    return func
