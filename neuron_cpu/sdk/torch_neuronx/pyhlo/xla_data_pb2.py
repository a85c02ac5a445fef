"""The element types of XLA that NxD names, by the numbers of the public `xla_data.proto`."""

from enum import IntEnum


class PrimitiveType(IntEnum):
    """The element types of an HLO shape."""

    TUPLE = 13
