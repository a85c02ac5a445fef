"""Published times of single instructions of a Trainium2 against the model's, as the page has them.

`instruction_times.json` says where the times come from. An estimate is what the instruction
occupies its engine for and, where the time runs until a result may be used, what follows.
"""

import json
import re
import statistics
from pathlib import Path

import neuronxcc.nki as nki
import neuronxcc.nki.isa as nisa
import neuronxcc.nki.language as nl

from neuron_cpu.core.device.spec import Engine, using
from neuron_cpu.core.time import cost

HERE = Path(__file__).resolve().parent
PAGE = HERE.parents[1] / "lab" / "docs" / "calibration.md"
ROWS = json.loads((HERE / "instruction_times.json").read_text())["rows"]
V, S = nisa.vector_engine, nisa.scalar_engine

MADE = {
    "copy_vector": lambda x, p: nisa.tensor_copy(x, engine=V),
    "copy_scalar": lambda x, p: nisa.tensor_copy(x, engine=S),
    "psum_copy": lambda x, p: nisa.tensor_copy(p, engine=V),
    "psum_copy_scalar": lambda x, p: nisa.tensor_copy(p, engine=S),
    "psum_reduce_max": lambda x, p: nisa.tensor_reduce(nl.maximum, p, axis=[1]),
    "psum_reduce_sum": lambda x, p: nisa.tensor_reduce(nl.add, p, axis=[1]),
    "reduce_max": lambda x, p: nisa.tensor_reduce(nl.maximum, x, axis=[1]),
    "reduce_sum": lambda x, p: nisa.tensor_reduce(nl.add, x, axis=[1]),
    "exp": lambda x, p: nisa.activation(op=nl.exp, data=x),
    "exp_before_sum": lambda x, p: nisa.activation(op=nl.exp, data=x),
    "rsqrt": lambda x, p: nisa.activation(op=nl.rsqrt, data=x),
    "sigmoid": lambda x, p: nisa.activation(op=nl.sigmoid, data=x),
    "reciprocal": lambda x, p: nisa.reciprocal(x),
    "multiply_tensors": lambda x, p: nisa.tensor_tensor(x, x, op=nl.multiply, engine=V),
    "multiply_scalar": lambda x, p: nisa.tensor_scalar(x, nl.multiply, 0.99, engine=V),
    "memset": lambda x, p: nisa.memset(x.shape, value=1, dtype=nl.float32, engine=V),
    "scan": lambda x, p: nisa.tensor_tensor_scan(x, x, initial=0, op0=nl.multiply, op1=nl.add),
}  # fmt: skip
PRODUCTS = {"matmul_64_rows": 64, "matmul_128_rows": 128}


@nki.jit
def one(a, name):
    """One instruction on a tile in SBUF, or on a copy of it in PSUM."""
    out = nl.ndarray(a.shape, a.dtype, buffer=nl.shared_hbm)
    x = nl.load(a)
    if name in PRODUCTS:
        nisa.nc_matmul(x[:, 0:128], x)
    else:
        p = nisa.nc_matmul(x[:, 0:64], x) if name.startswith("psum") else None
        MADE[name](x, p)
    nl.store(out, value=x)
    return out


def estimate(name, width, kind):
    """Nanoseconds of the instruction that ``name`` stands for."""
    rows = PRODUCTS.get(name, 64 if name.startswith("psum") else 128)
    import torch

    program = one.trace(torch.empty((rows, width), device="meta"), name)
    made = [i for i in program.instructions if i.op.engine is not Engine.DMA][-1]
    with using(program.core):
        engine = made.op.engine_of(made)
        found = cost.engine_ns(made, engine)
        return found if kind == "to the next one" else found + cost.result_ns(made, engine)


def table():
    """Markdown: every time, its estimate and their ratio, and how many are near."""
    lines, ratios = ["| Instruction | elements | measured ns | estimated ns | ratio |"], []
    lines.append("|---|---:|---:|---:|---:|")
    for name, width, measured, kind in ROWS:
        found = estimate(name, width, kind)
        ratios.append(found / measured)
        lines.append(f"| {name} | {width} | {measured} | {found:.0f} | {ratios[-1]:.2f} |")
    near = [sum(abs(r - 1) <= far for r in ratios) / len(ratios) for far in (0.15, 0.25)]
    error = statistics.fmean(abs(r - 1) for r in ratios)
    return "\n".join(lines) + (
        f"\n\nOf {len(ratios)} times {near[0]:.0%} lie within ±15 %, {near[1]:.0%} within ±25 %; "
        f"mean error {error:.0%}."
    )


def test_the_page_has_todays_times(monkeypatch):
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn2")
    block = re.search(
        r"<!-- instructions: begin -->\n(.*?)\n<!-- instructions: end -->", PAGE.read_text(), re.S
    )
    assert block and table() in block[1], f"put this into {PAGE.name}:\n{table()}"
