"""Element types of XLA, as far as NxD names them: numbers of the public `xla_data.proto`."""

from enum import IntEnum


class PrimitiveType(IntEnum):
    """Kinds of an HLO shape."""

    TUPLE = 13
