"""The constant serializer that callers hand to `HloScribe`."""

from ..scribe import _literal as serialize_torch

__all__ = ["serialize_torch"]
