"""Kernels for the constructs of which no public run on a device shows that compilers take them.

The tables are `probes.json`, of `neuronxcc.nki`, and `probes_today.json`, of `nki`. Compilers read
kernels from files, so each text is written to one. Its constructs are found as in any kernel
(`provenance.in_source`). A probe that compiles and runs turns what it uses into *seen*; the
compiler's words stand beside one that does not.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

BEFORE = '''"""A construct that no public run shows: does the compiler take it?"""

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
TODAY = '''"""A construct that no public run shows: does the compiler take it?"""

import nki
import nki.collectives as ncc
import nki.isa as nisa
import nki.language as nl


{decorators}
def probe({arguments}):
    out_hbm = nl.ndarray({shape}, dtype={dtype}, buffer=nl.shared_hbm)
    x = nl.ndarray((128, 512), dtype=x_hbm.dtype, buffer=nl.sbuf)
    y = nl.ndarray((128, 512), dtype=y_hbm.dtype, buffer=nl.sbuf)
    result = nl.ndarray({shape}, dtype={dtype}, buffer=nl.sbuf)
    nisa.dma_copy(dst=x, src=x_hbm)
    nisa.dma_copy(dst=y, src=y_hbm)
    {body}
    {stores}
    return out_hbm


probe = probe{launch}
'''
USED = 6, 6  # probes of what `llama.py` and `models/step.py` use; they are the first


class Probe(NamedTuple):
    """A kernel whose ``result`` has some shape and type; ``given`` is the type of x and y.

    ``expected`` is NumPy's expression of the result; chips of an earlier ``generation`` lack what
    is probed.
    """

    body: str
    shape: Sequence[int] = (128, 512)
    dtype: str = "nl.float32"
    given: str = "fp32"
    loads: str = "x, y = nl.load(x_hbm), nl.load(y_hbm)"
    decorators: str = "@nki.jit"
    launch: str = ""
    arguments: str = "x_hbm, y_hbm"
    stores: str = "nisa.dma_copy(dst=out_hbm, src=result)"
    expected: str = ""
    generation: int = 2
    today: bool = False

    @property
    def text(self) -> str:
        """The file."""
        text = TODAY if self.today else BEFORE
        return text.format(**self._asdict() | {"shape": tuple(self.shape)})

    @property
    def call(self) -> dict[str, Any]:
        """The call of `probe`, but for the file that it stands in."""
        given = f"128x512:{self.given}"
        return {"kernel": "probe", "arguments": [given, given], "keywords": {}}


def _read(name: str, today: bool) -> dict[str, Probe]:
    rows = json.loads(Path(__file__).with_name(name).read_text(encoding="utf-8"))
    return {row.pop("name"): Probe(**row, today=today) for row in rows}


PROBES = _read("probes.json", False), _read("probes_today.json", True)  # by language
