"""Element types, memories and limits as ``nki.language`` names them."""

import functools
import inspect
import os
import types
from enum import Enum
from typing import Any, NoReturn

from ..device import dtypes
from ..device.dtypes import DType
from ..device.errors import refuse, warn
from ..device.release import nki_since
from ..device.spec import CORE
from ..device.unknown import no_member

TRANSPOSES_ON_TENSOR = "NKI_DMA_TRANSPOSE_AS_PE_TRANSPOSE"  # from gen3 on


class Name(str):
    """An element type: a constant that equals its own name (``nl.float32 == "float32"``)."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"nl.{self}"


_TYPES: dict[str, DType] = {made.name: made for made in (*dtypes.ALL, *dtypes.LATER)}
NAMES = {name: Name(name) for name in _TYPES}


def element_type(given: Any) -> DType:
    """The DType of a ``dtype=`` argument.

    Raises:
        NkiError: it is none of ``nki.language``.
    """
    if isinstance(given, str) and given in _TYPES:
        return _TYPES[given]
    if isinstance(given, DType):
        return given
    if type(given).__module__.startswith("jax.") and hasattr(given, "dtype"):  # jnp.bfloat16
        return dtypes.to_dtype(given.dtype)
    try:
        mend = f"write nl.{dtypes.to_dtype(given).name}"
    except TypeError:
        mend = dtypes.meant(given)
    raise refuse(
        "sim_dtype",
        f"dtype {given!s}, expected an element type of nki.language such as nl.bfloat16; {mend}",
    )


class MemoryRegion(Enum):
    """Where a tensor lies; the value is the kind of its storage."""

    sbuf = "sbuf"
    psum = "psum"
    private_hbm = "hbm"
    shared_hbm = "shared_hbm"

    def __repr__(self) -> str:
        return f"nl.{self.name}"

    def __str__(self) -> str:
        return f"MemoryRegion.{self.name}"


sbuf, psum = MemoryRegion.sbuf, MemoryRegion.psum
private_hbm = hbm = MemoryRegion.private_hbm
shared_hbm = MemoryRegion.shared_hbm
_HBM = (private_hbm, shared_hbm)


def region(given: Any) -> MemoryRegion:
    """A ``buffer=`` argument, or the refusal of anything else (strings since 0.3)."""
    if isinstance(given, MemoryRegion):
        return given
    if isinstance(given, str) and given in MemoryRegion.__members__ and not nki_since("2.29"):
        return MemoryRegion[given]
    raise refuse(
        "sim_buffer",
        f"buffer {given!r}, expected nl.sbuf, nl.psum, nl.private_hbm or nl.shared_hbm; write "
        "buffer=nl.sbuf for a tile",
    )


def is_hbm(buffer: Any) -> bool:
    """Whether a memory is HBM, a core's own or shared."""
    return region(buffer) in _HBM


def is_sbuf(buffer: Any) -> bool:
    """Whether a memory is SBUF."""
    return region(buffer) is sbuf


def is_psum(buffer: Any) -> bool:
    """Whether a memory is PSUM."""
    return region(buffer) is psum


def is_on_chip(buffer: Any) -> bool:
    """Whether a memory is SBUF or PSUM."""
    return region(buffer) not in _HBM


def _unpublished(name: str, value: int, advice: bool = False) -> int:
    warn(
        "sim_unpublished_limit",
        f"nl.tile_size.{name} is read, whose value is not published, expected a limit that is; "
        f"here it is {value}; write {value} to depend on none",
        advice=advice,
    )
    return value


class _TileSize:
    """``nl.tile_size``: limits of a tile; limits that differ by generation are properties."""

    pmax = 128
    psum_bank_fmax = psum_fmax = 512
    psum_bank_fmax_bytes = psum_fmax_bytes = 2048
    gemm_stationary_fmax = 128
    bn_stats_fmax = 512

    def __getattr__(self, name: str) -> NoReturn:
        __tracebackhide__ = True
        raise no_member("nl.tile_size", f".{name}", vars(type(self)))

    @property
    def gemm_moving_fmax(self) -> int:
        """Columns of a moving operand; whether gen4, which takes more, names more is open."""
        return _unpublished("gemm_moving_fmax", 512, advice=True) if CORE.number > 3 else 512

    @property
    def psum_min_align(self) -> int:
        """Bytes; the smallest word that hardware addresses."""
        return _unpublished("psum_min_align", CORE.sbuf_align_bytes)

    @property
    def sbuf_min_align(self) -> int:
        """Bytes; taken to be the smallest word that hardware addresses."""
        return _unpublished("sbuf_min_align", CORE.sbuf_align_bytes)

    @property
    def psum_num_banks(self) -> int:
        """One less where the compiler turns DMA transposes into TensorE's, which need a bank."""
        turned = os.environ.get(TRANSPOSES_ON_TENSOR, "").lower() in ("1", "true")
        return CORE.psum_banks - (turned and CORE.number > 2)

    @property
    def sbuf_fmax_bytes(self) -> int:
        """Bytes of a partition that the compiler leaves to kernels."""
        return CORE.sbuf_usable_bytes

    total_available_sbuf_size = sbuf_fmax_bytes

    @property
    def sbuf_fmax(self) -> int:
        """The same in fp32 elements."""
        return self.sbuf_fmax_bytes // 4

    @property
    def sbuf_size_bytes(self) -> int:
        """Bytes of all partitions together; no source says whether the compiler's share counts."""
        return _unpublished("sbuf_size_bytes", CORE.partitions * self.sbuf_fmax_bytes)


tile_size = _TileSize()


@functools.cache
def _field_names(kind: Any) -> list[str]:
    """Annotated names of a class and its bases, in order; since Python 3.14 they are made when
    somebody asks, and vars() has none."""
    return [name for one in reversed(kind.__mro__) for name in inspect.get_annotations(one)]


class NKIObject:
    """Base of a kernel's own classes: fields by position or keyword, missing ones are None.

    Class attributes without annotation are fields, too, and ``@dataclass`` makes no difference
    (nki-language-guide.rst; the published parser makes one constructor for all).
    """

    _by_fields = True  # what stands for it in a specialisation's key

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        own = inspect.get_annotations(cls)
        plain = (
            n for n, v in vars(cls).items() if not (n.startswith("__") or isinstance(v, _MEMBERS))
        )
        own |= {name: Any for name in plain if name not in own}
        cls.__annotations__ = own
        for name in own:  # what dataclass would ask for
            if name not in vars(cls):
                setattr(cls, name, None)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kind: Any = type(self)
        names = _field_names(kind)
        given = dict(zip(names, args), **kwargs)
        unknown = [n for n in given if n not in names]
        if unknown or len(args) > len(names):
            raise TypeError(
                f"{type(self).__name__} got {', '.join(unknown) or f'{len(args)} values'}, "
                f"expected fields {', '.join(names) or '(none)'}"
            )
        for name in names:
            setattr(self, name, given.get(name, getattr(type(self), name, None)))
        after = getattr(self, "__post_init__", None)
        if after is not None:
            after()


# What is no field among a class's attributes: a method, a property, a class inside of the class.
_MEMBERS = (
    types.FunctionType, staticmethod, classmethod, property, functools.cached_property, type,
    types.MemberDescriptorType,
)  # fmt: skip
