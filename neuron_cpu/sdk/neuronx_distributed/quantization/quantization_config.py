"""Enumerations of NxD's weight quantisation."""

from __future__ import annotations

from enum import Enum

import torch


class QuantizationType(Enum):
    """Over what one scale extends."""

    PER_TENSOR_SYMMETRIC = "per_tensor_symmetric"
    PER_CHANNEL_SYMMETRIC = "per_channel_symmetric"


class ActivationQuantizationType(Enum):
    """How activations are quantised (NxD 0.11 and later)."""

    NONE = None
    DYNAMIC = "dynamic"


class QuantizedDtype(Enum):
    """Storage type of quantised weights."""

    INT8 = torch.int8
    F8E4M3 = torch.float8_e4m3fn
    F8E5M2 = torch.float8_e5m2

    @classmethod
    def has_dtype(cls, dtype: torch.dtype) -> bool:
        return any(member.value is dtype for member in cls)

    @classmethod
    def get_dtype(cls, dtype: torch.dtype) -> QuantizedDtype:
        """The member of a torch dtype; ValueError for any other."""
        for member in cls:
            if member.value is dtype:
                return member
        raise ValueError(
            f"{dtype} is no quantised dtype, expected one of {[m.value for m in cls]}."
        )
