"""The element types of XLA that public libraries name, by the numbers of `xla_data.proto`."""

from enum import IntEnum


class PrimitiveType(IntEnum):
    """The element types of an HLO shape."""

    PRED = 1
    S8 = 2
    S16 = 3
    S32 = 4
    S64 = 5
    U8 = 6
    U16 = 7
    U32 = 8
    U64 = 9
    F16 = 10
    F32 = 11
    F64 = 12
    TUPLE = 13
    BF16 = 16
    F8E5M2 = 19
    F8E4M3FN = 20

    @classmethod
    def Name(cls, number: int) -> str:
        """The name of a number, as protobuf's enums say it."""
        return cls(number).name
