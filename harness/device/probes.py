"""Kernels for the constructs of which no public run on a device shows that compilers take them.

The table is `probes.json`; compilers read kernels from files, so each text is written to one. Its
constructs are found as in any kernel (`provenance.in_source`). A probe that compiles and runs turns
what it uses into *seen*; the compiler's words stand beside one that does not.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

TEXT = '''"""A construct that no public run shows: does the compiler take it?"""

import neuronxcc.nki as nki
import neuronxcc.nki.compiler as ncc
import neuronxcc.nki.isa as nisa
import neuronxcc.nki.language as nl
import numpy as np


class Held:
    """An object that holds a tile."""


def doubled(tile):
    return nl.add(tile, tile)


def applied(function, tile):
    return function(tile)


{decorators}
def probe(x_hbm, y_hbm):
    out_hbm = nl.ndarray({shape}, {dtype}, buffer=nl.shared_hbm)
    {loads}
    {body}
    nl.store(out_hbm, result)
    return out_hbm


probe = probe{launch}
'''
USED = 5  # probes of what `llama.py` uses; they are the first


class Probe(NamedTuple):
    """A kernel whose ``result`` has some shape and type; ``given`` is the type of x and y."""

    body: str
    shape: Sequence[int] = (128, 512)
    dtype: str = "nl.float32"
    given: str = "fp32"
    loads: str = "x, y = nl.load(x_hbm), nl.load(y_hbm)"
    decorators: str = "@nki.jit"
    launch: str = ""

    @property
    def text(self) -> str:
        """The file."""
        return TEXT.format(**self._asdict() | {"shape": tuple(self.shape)})

    @property
    def call(self) -> dict[str, Any]:
        """The call of `probe`, but for the file that it stands in."""
        given = f"128x512:{self.given}"
        return {"kernel": "probe", "arguments": [given, given], "keywords": {}}


_TABLE = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
PROBES = {row.pop("name"): Probe(**row) for row in _TABLE}
