"""One kernel for each construct that documentation shows and no public run on a device does.

The text of a probe is made here and written to a file, since the compiler reads kernels from files.
What it uses is found as in any kernel (`provenance.in_source`). A probe that compiles and runs
turns what it uses into *seen*; the compiler's words stand beside one that does not.
"""

from typing import Any, NamedTuple

TEXT = '''"""A construct that documentation shows: does the compiler take it?"""

import neuronxcc.nki as nki
import neuronxcc.nki.isa as nisa
import neuronxcc.nki.language as nl
import numpy as np


@nki.jit
def probe(x_hbm, y_hbm):
    out_hbm = nl.ndarray({shape}, {dtype}, buffer=nl.shared_hbm)
    x, y = nl.load(x_hbm), nl.load(y_hbm)
    {body}
    nl.store(out_hbm, result)
    return out_hbm
'''
TILE, COLUMN, WHOLE = (128, 512), (128, 1), {"dtype": "nl.int32", "given": "int32"}
USED = 5  # probes of what `llama.py` uses; they are the first


class Probe(NamedTuple):
    """A kernel whose ``result`` has some shape and type; ``given`` is the type of x and y."""

    body: str
    shape: tuple[int, ...] = TILE
    dtype: str = "nl.float32"
    given: str = "fp32"

    @property
    def text(self) -> str:
        """The file."""
        return TEXT.format(shape=self.shape, dtype=self.dtype, body=self.body)

    @property
    def call(self) -> dict[str, Any]:
        """The call of `probe`, but for the file that it stands in."""
        given = f"128x512:{self.given}"
        return {"kernel": "probe", "arguments": [given, given], "keywords": {}}


_LISTED = "tiles = {}\n    result = nl.add(tiles[0], tiles[1])"
_STT = "nisa.scalar_tensor_tensor(data=x, op0=np.multiply, operand0=2.0, op1=np.add, operand1=y)"
_FAMILIES: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("abs arctan ceil cos erf erf_dx floor gelu gelu_apprx_sigmoid", "nl.{}(x)", {}),
    ("gelu_apprx_tanh gelu_dx mish relu sigmoid sign silu_dx sin", "nl.{}(x)", {}),
    ("softplus tan tanh trunc", "nl.{}(x)", {}),
    ("minimum fmod mod power", "nl.{}(x, y)", {}),
    ("greater greater_equal less less_equal not_equal", "nl.{}(x, y, dtype=nl.float32)", {}),
    ("logical_and logical_or logical_xor", "nl.{}(x, y, dtype=nl.float32)", {}),
    ("bitwise_and bitwise_or bitwise_xor left_shift right_shift", "nl.{}(x, y)", WHOLE),
    ("invert", "nl.{}(x)", WHOLE),
    ("mean prod", "nl.{}(x, axis=1, keepdims=True)", {"shape": COLUMN}),
    ("var", "nl.{}(x, axis=1)", {"shape": COLUMN}),
    ("softmax", "nl.{}(x, axis=1)", {}),
    ("transpose", "nl.{}(x[:, 0:128])", {"shape": (128, 128)}),
    ("zeros_like", "nl.add(x, nl.{}(x))", {}),
    ("ones", "nl.add(x, nl.{}((128, 512), nl.float32))", {}),
    (
        "int16 uint16 tfloat32 float8_e4m3 float8_e5m2",
        "nl.add(nl.copy(x, dtype=nl.{}), x)", {},
    ),
)  # fmt: skip
PROBES = {
    "nl.silu": Probe("result = nl.silu(x)"),
    "nisa.gpsimd_engine": Probe("result = nisa.tensor_copy(x, engine=nisa.gpsimd_engine)"),
    "nl.float16": Probe("result = nl.copy(x, dtype=nl.float16)", dtype="nl.float16"),
    "tiles in a Python list": Probe(_LISTED.format("[nl.load(x_hbm), nl.load(y_hbm)]")),
    "tiles in a tuple": Probe(_LISTED.format("(nl.load(x_hbm), nl.load(y_hbm))")),
    "nisa.scalar_tensor_tensor": Probe(f"result = {_STT}"),
    "nisa.scalar_engine": Probe("result = nisa.tensor_copy(x, engine=nisa.scalar_engine)"),
    "nisa.tensor_tensor(dtype=)": Probe(
        "result = nisa.tensor_tensor(x, y, np.add, dtype=nl.bfloat16)", dtype="nl.bfloat16"
    ),
    **{
        f"nl.{name}": Probe(f"result = {text.format(name)}", **more)
        for names, text, more in _FAMILIES
        for name in names.split()
    },
    "nisa.bn_stats, bn_aggr": Probe("result = nisa.bn_aggr(nisa.bn_stats(x))", shape=(128, 2)),
    "nisa.max8": Probe("result = nisa.max8(src=x)", shape=(128, 8)),
    "nisa.tensor_partition_reduce": Probe(
        "result = nisa.tensor_partition_reduce(np.add, x)", shape=(1, 512)
    ),
    "index: slice with a step": Probe("result = nl.copy(x[:, 0:512:2])", shape=(128, 256)),
    **{
        f"operands from partition {n}": Probe(
            f"result = x[{n}:{n + 32}, :] + y[{n}:{n + 32}, :]", shape=(32, 512)
        )
        for n in (32, 64, 96)
    },
    "operands of 64 from partition 64": Probe("result = x[64:128] + y[64:128]", shape=(64, 512)),
    "operands from two partitions": Probe(
        "result = nisa.tensor_tensor(x[0:32, :], y[64:96, :], np.add)", shape=(32, 512)
    ),
}
