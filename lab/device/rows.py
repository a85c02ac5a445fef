"""The measurements of the small kernels, and the constant that each kernel isolates.

The table is `rows.json`. A row's time is explained by the cost model alone: `fit.py` finds the
constants with which it gives all of the measured times. A name is the kernel's, a size and ``n``;
times of one kernel that differ in ``n`` differ by what is repeated.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple


class Row(NamedTuple):
    """One time.

    Attributes:
        kernel: function of `micro.py`; keywords: its constants.
        arguments: ``128x512:fp32`` for a tensor.
        isolates: a constant of `fit.py` or one of `fit.MECHANISMS`; "" where times are compared.
        because: why nothing else explains the time.
        calls, reduced: of a graph, how often it runs the kernel and reduces its result over two
            cores; 0 of a kernel that is timed alone.
    """

    name: str
    kernel: str
    arguments: tuple[str, ...]
    keywords: dict[str, Any]
    isolates: str = ""
    because: str = ""
    calls: int = 0
    reduced: int = 0


def _rows(kind: str) -> tuple[Row, ...]:
    told = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))[kind]
    return tuple(Row(**row | {"arguments": tuple(row["arguments"])}) for row in told)


GRAPHS, KERNELS = _rows("graphs"), _rows("kernels")
ROWS = {row.name: row for row in (*KERNELS, *GRAPHS)}
