"""Data types of the NKI language and how they promote, round and map to numpy and torch.

Source: aws-neuron-sdk v2.21.1, general/nki/api/nki.api.shared.rst (supported types, promotion of
operands, weakly typed Python scalars). fp8 e4m3 is the IEEE-style type of ml_dtypes (largest finite
240, with infinities); sources name no other, so this is the safe side of the open question.
"""

from typing import Any

import ml_dtypes
import numpy as np
import torch

from .errors import NkiError, current_place
from .unknown import answer
from .written import function

Shape = tuple[int, ...]  # a number for each axis: its size, its stride, or an index
Tensors = list[torch.Tensor]  # values of operands or of results, in their order


class UnknownType(NkiError, TypeError):
    """Something that names no type of NKI."""


class tfloat32:
    """Marker class for TF32: 1-8-10 bits, kept in four bytes."""


class packed:
    """Marker class for several values of a narrow type in one opaque element."""


def _host(public: Any) -> np.dtype:
    return np.dtype(np.float32 if public is tfloat32 else public)


def _packed_host(name: str) -> np.dtype:
    """A record of four values of ml_dtypes; of fp4, which has a byte for each there, of their bits.

    numpy knows it by its name afterwards: ``np.zeros(shape, dtype=nl.float8_e4m3fn_x4)``.
    """
    element = getattr(ml_dtypes, name.removesuffix("_x4"))
    field = (name, np.uint16) if "float4" in name else (name, element, (4,))
    made = np.dtype([field])
    np.sctypeDict.setdefault(name, made)  # type: ignore[arg-type]
    return made


class DType:
    """One element type.

    Attributes:
        name: the NKI name, e.g. ``"bfloat16"``.
        public: the object of ``nki.language``: a numpy scalar class, an np.dtype where numpy has
            none of its own, or ``tfloat32``.
        numpy: dtype of host arrays of this type (tf32 travels as float32, packed types as records
            with one field of their name).
        of_tensor: what kernels see as ``tensor.dtype``: ``numpy``, except for tf32.
        torch: dtype of the torch tensor that stores elements (fp8 e4m3 as raw uint8).
        itemsize: bytes per element.
        kind: ``"f"`` float, ``"i"`` signed, ``"u"`` unsigned, ``"b"`` bool, ``"x"`` packed.
        rank: orders types of one kind by precision, for promotion.
    """

    __slots__ = ("itemsize", "kind", "name", "numpy", "of_tensor", "public", "rank", "torch")

    def __init__(self, name: str, public: Any, storage: torch.dtype, kind: str, rank: int) -> None:
        self.name, self.public, self.torch = name, public, storage
        self.kind, self.rank = kind, rank
        self.itemsize = storage.itemsize
        self.numpy = _packed_host(name) if public is packed else _host(public)
        self.of_tensor = public if public is tfloat32 else self.numpy

    def __repr__(self) -> str:
        return self.name

    @property
    def is_float(self) -> bool:
        return self.kind == "f"

    @property
    def is_int(self) -> bool:
        return self.kind in "iub"


FLOAT32 = DType("float32", np.float32, torch.float32, "f", 5)
TFLOAT32 = DType("tfloat32", tfloat32, torch.float32, "f", 4)
BFLOAT16 = DType("bfloat16", np.dtype(ml_dtypes.bfloat16), torch.bfloat16, "f", 3)
FLOAT16 = DType("float16", np.float16, torch.float16, "f", 2)
FLOAT8_E4M3 = DType("float8_e4m3", np.dtype(ml_dtypes.float8_e4m3), torch.uint8, "f", 1)
FLOAT8_E5M2 = DType("float8_e5m2", np.dtype(ml_dtypes.float8_e5m2), torch.float8_e5m2, "f", 0)
INT32 = DType("int32", np.int32, torch.int32, "i", 2)
INT16 = DType("int16", np.int16, torch.int16, "i", 1)
INT8 = DType("int8", np.int8, torch.int8, "i", 0)
UINT32 = DType("uint32", np.uint32, torch.uint32, "u", 2)
UINT16 = DType("uint16", np.uint16, torch.uint16, "u", 1)
UINT8 = DType("uint8", np.uint8, torch.uint8, "u", 0)
BOOL = DType("bool_", np.bool_, torch.bool, "b", -1)

# Types of later generations: fp8 as OCP defines it (no infinities), scales that are powers of two,
# and four microscaled values in one element (aws-neuron-sdk v2.32.0, nki/api/nki/language).
FLOAT8_E4M3FN = DType("float8_e4m3fn", np.dtype(ml_dtypes.float8_e4m3fn), torch.uint8, "f", 1)
FLOAT8_E8M0FNU = DType("float8_e8m0fnu", np.dtype(ml_dtypes.float8_e8m0fnu), torch.uint8, "f", 0)
FLOAT8_E4M3FN_X4 = DType("float8_e4m3fn_x4", packed, torch.int32, "x", 0)
FLOAT8_E5M2_X4 = DType("float8_e5m2_x4", packed, torch.int32, "x", 0)
FLOAT4_E2M1FN_X4 = DType("float4_e2m1fn_x4", packed, torch.int16, "x", 0)
PACKED = (FLOAT8_E4M3FN_X4, FLOAT8_E5M2_X4, FLOAT4_E2M1FN_X4)
LATER = (FLOAT8_E4M3FN, FLOAT8_E8M0FNU, *PACKED)
BYTES = (FLOAT8_E4M3, FLOAT8_E4M3FN, FLOAT8_E8M0FNU)  # kept as raw bytes: torch lacks some

FLOATS = (FLOAT32, TFLOAT32, BFLOAT16, FLOAT16, FLOAT8_E4M3, FLOAT8_E5M2)
INTEGERS = (INT32, INT16, INT8, UINT32, UINT16, UINT8)
ALL = (*FLOATS, *INTEGERS, BOOL)
_OWN = [t for t in (*ALL, *LATER) if t not in PACKED]  # those whose Python object is their own
_BY_PUBLIC: dict[Any, DType] = {t.public: t for t in _OWN}
_BY_NUMPY: dict[np.dtype, DType] = {t.numpy: t for t in (*_OWN, *PACKED) if t is not TFLOAT32}
_BY_NAME: dict[str, DType] = {t.name: t for t in (*ALL, *LATER)} | {"bool": BOOL}
_BY_TORCH: dict[torch.dtype, DType] = {
    t.torch: t for t in ALL if t not in (TFLOAT32, FLOAT8_E4M3)
} | {torch.float8_e4m3fn: FLOAT8_E4M3}
_INT_BY_BITS = {("i", 8): INT8, ("i", 16): INT16, ("i", 32): INT32}


def to_dtype(spec: Any) -> DType:
    """The DType for a numpy/ml_dtypes/torch type, a name, or a Python type.

    Raises:
        TypeError: the type has no NKI counterpart (64-bit types among them).
    """
    if isinstance(spec, DType):
        return spec
    # Objects of nki.language first, which is what kernels pass; what cannot be hashed is no type.
    try:
        found = _BY_PUBLIC.get(spec)
    except TypeError:
        found = None
    if found is not None:
        return found
    if isinstance(spec, torch.dtype):
        if spec in _BY_TORCH:
            return _BY_TORCH[spec]
    elif isinstance(spec, str) and spec in _BY_NAME:
        return _BY_NAME[spec]
    elif spec is bool:
        return BOOL
    elif isinstance(spec, (np.dtype, type, str)):
        try:
            as_numpy = np.dtype(spec)
        except TypeError:
            as_numpy = None
        if as_numpy is not None and as_numpy in _BY_NUMPY:
            return _BY_NUMPY[as_numpy]
    raise UnknownType(
        "sim_dtype",
        f"dtype {spec.name if isinstance(spec, np.dtype) else repr(spec)} is not an NKI type, "
        f"expected one of {', '.join(t.name for t in ALL)}; {meant(spec)}",
        current_place(),
    )


def meant(given: Any) -> str:
    """The advice instead of a type that NKI lacks."""
    if given is None or isinstance(given, (bool, float, list)):
        return "write dtype=nl.float32, or name the argument that it is for, as keepdims=True"
    if isinstance(given, int):
        return "give the shape as one tuple, nl.zeros((128, 64), nl.float32)"
    if isinstance(given, tuple) and any(isinstance(one, slice) for one in given):
        return "slice the tensor itself, x_hbm[0:128, 0:64]"
    if isinstance(given, tuple) and function() == "transpose":
        return "leave the axes out, nl.transpose(x) exchanges the two that there are"
    if isinstance(given, tuple):
        return "give the shape first and the type second"
    if getattr(given, "shape", ()) and not isinstance(given, type):  # a tile
        return "give dtype= by its name, as nl.float32"
    name = given.__name__ if given is float or given is int else given
    if isinstance(name, str):
        return f"use {answer(name, False) or 'nl.float32 or another name of nl'}"
    if callable(given) and not isinstance(given, type):
        return "name a type, nl.float32, and call functions apart from it"
    near = "int32" if "int" in str(given) else "float32"
    return f"cast to a type of 32 bits or fewer, such as {near}"


def host_dtype(dtype: DType) -> torch.dtype:
    """torch dtype that a caller's tensor of this type has (fp8 e4m3 is stored as bytes here)."""
    return torch.float8_e4m3fn if dtype in (FLOAT8_E4M3, FLOAT8_E4M3FN) else dtype.torch


def scalar_dtype(value: Any) -> DType:
    """Type of a scalar operand: Python scalars mean the widest type, numpy ones keep theirs."""
    if isinstance(value, np.generic) and value.dtype.itemsize < 8:  # np.sqrt(64) is Python's own
        return to_dtype(value.dtype)
    if isinstance(value, bool):
        return UINT8
    if isinstance(value, (int, np.integer)):
        return INT32
    return FLOAT32


def _promote_float(a: DType, b: DType) -> DType:
    # Types of equal width hold no values of each other: the next wider one holds both.
    wide = (FLOAT32, TFLOAT32)
    if a in wide or b in wide or {a, b} == {FLOAT16, BFLOAT16}:
        return a if a is b else FLOAT32
    if {a, b} == {FLOAT8_E4M3, FLOAT8_E5M2}:
        return BFLOAT16
    return a if a.rank >= b.rank else b


def promote(a: DType, b: DType) -> DType:
    """Result type of a binary ``nl`` operation (nki.api.shared.rst, type promotion table)."""
    if a is b:
        return a
    if a.is_float or b.is_float:
        return _promote_float(a, b) if a.is_float and b.is_float else (a if a.is_float else b)
    if BOOL in (a, b):
        return b if a is BOOL else a
    if a.kind == b.kind:
        return a if a.itemsize >= b.itemsize else b
    # Signed beside unsigned: a signed type that holds both, fp32 where none has 32 bits or fewer.
    signed, unsigned = (a, b) if a.kind == "i" else (b, a)
    if signed.itemsize > unsigned.itemsize:
        return signed
    bits = unsigned.itemsize * 16
    return _INT_BY_BITS[("i", bits)] if bits <= 32 else FLOAT32


def round_tf32(x: torch.Tensor) -> torch.Tensor:
    """fp32 values rounded to nearest even on 10 mantissa bits; NaN and infinities kept."""
    # Half of the last kept bit, less one where that bit is even, carries ties to even; 13 go.
    bits = x.contiguous().view(torch.int32)
    rounded = (bits + 0xFFF + ((bits >> 13) & 1)) & ~0x1FFF
    return torch.where(torch.isfinite(x), rounded.view(torch.float32), x)


_E4M3_VALUES = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3).astype(np.float32)


def decode(raw: torch.Tensor, dtype: DType) -> torch.Tensor:
    """Stored elements as fp32 compute values."""
    if dtype is FLOAT8_E4M3:
        # bytes, whether the caller's tensor has PyTorch's type or the raw one
        return torch.from_numpy(_E4M3_VALUES[raw.contiguous().view(torch.uint8).numpy()])
    if dtype in BYTES:
        return torch.from_numpy(raw.contiguous().numpy().view(dtype.numpy).astype(np.float32))
    return raw.to(torch.float32)


def encode(values: torch.Tensor, dtype: DType) -> torch.Tensor:
    """fp32 (or int64) values rounded once to ``dtype``, in its storage representation.

    Floats round to nearest even; integers round to nearest even and saturate (stated for SDK 2.32
    only, taken for 2.21 as well: nki_simulator.rst); bool is ``value != 0``.
    """
    if dtype.kind == "b":
        return values != 0
    if dtype.is_int:
        return _encode_int(values, dtype)
    if dtype.kind == "x":  # bits as they are; there is no number to round
        return torch.nan_to_num(values).to(dtype.torch)
    if dtype is TFLOAT32:
        return round_tf32(values.to(torch.float32))
    if dtype in BYTES:
        host = values.to(torch.float32).contiguous().numpy().astype(dtype.numpy)
        return torch.from_numpy(host.view(np.uint8))
    if dtype is FLOAT8_E5M2:
        host = values.to(torch.float32).contiguous().numpy().astype(ml_dtypes.float8_e5m2)
        return torch.from_numpy(host.view(np.uint8)).view(torch.float8_e5m2)
    return values.to(dtype.torch)


def _encode_int(values: torch.Tensor, dtype: DType) -> torch.Tensor:
    info = np.iinfo(dtype.numpy)
    if values.dtype.is_floating_point:
        # fp32 cannot hold 2^31 - 1: clamp in fp64, where every 32-bit integer is exact
        exact = torch.nan_to_num(values.to(torch.float64), nan=0.0).round()
        return exact.clamp(float(info.min), float(info.max)).to(torch.int64).to(dtype.torch)
    return values.to(torch.int64).clamp(info.min, info.max).to(dtype.torch)
