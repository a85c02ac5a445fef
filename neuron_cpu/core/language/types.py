"""Element types and limits of the kernel language (aws-neuron-sdk v2.21.1, nki/language)."""

from dataclasses import dataclass
from typing import Any, NoReturn

import ml_dtypes
import numpy as np

from ..device import dtypes
from ..device.dtypes import to_dtype
from ..device.spec import GEN2
from ..device.unknown import no_member


@dataclass(slots=True, eq=False, repr=False)
class Buffer:
    """A memory to create tensors in."""

    name: str
    kind: str
    place = None  # of `ncc` allocations: gives a tensor its address

    def __repr__(self) -> str:
        return f"nl.{self.name}"


sbuf = Buffer("sbuf", "sbuf")
psum = Buffer("psum", "psum")
hbm = private_hbm = Buffer("hbm", "hbm")
shared_hbm = Buffer("shared_hbm", "shared_hbm")
BY_KIND = {made.kind: made for made in (sbuf, psum, hbm, shared_hbm)}


float32 = np.float32
float16 = np.float16
bfloat16 = dtypes.BFLOAT16.public
tfloat32 = dtypes.tfloat32
float8_e4m3 = dtypes.FLOAT8_E4M3.public
float8_e5m2 = dtypes.FLOAT8_E5M2.public
int32, int16, int8 = np.int32, np.int16, np.int8
uint32, uint16, uint8 = np.uint32, np.uint16, np.uint8
bool_ = np.bool_


class _Limits(type):
    def __getattr__(cls, name: str) -> NoReturn:
        __tracebackhide__ = True
        raise no_member(f"nl.{cls.__name__}", f".{name}", vars(cls))


class tile_size(metaclass=_Limits):
    """Tile limits of NeuronCore-v2 (nki/programming_model.rst)."""

    pmax = GEN2.partitions
    psum_fmax = GEN2.psum_free_max
    gemm_stationary_fmax = GEN2.stationary_free_max
    gemm_moving_fmax = GEN2.moving_free_max
    bn_stats_fmax = GEN2.bn_stats_free_max
    psum_min_align = GEN2.sbuf_align_bytes
    sbuf_min_align = GEN2.sbuf_align_bytes
    total_available_sbuf_size = GEN2.sbuf_usable_bytes


def finfo(dtype: Any) -> Any:
    """Limits of a floating-point type (``min``, ``max``, ``eps``, ...)."""
    return ml_dtypes.finfo(to_dtype(dtype).numpy)
