"""What is measured of the small kernels, and which constant each one isolates.

A row's time is explained by the cost model alone: `fit.py` finds the constants with which it gives
all of the measured times. A name is the kernel's, a size and ``n``; times of one kernel that differ
in ``n`` differ by what is repeated.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

ALU = {"vector": "VectorE", "scalar": "ScalarE", "gpsimd": "GpSimdE"}


@dataclass(frozen=True)
class Row:
    """One time.

    Attributes:
        name: of the measurement.
        kernel: function of `micro.py`.
        arguments: ``128x512:fp32`` for a tensor.
        keywords: constants of the kernel.
        isolates: fields of `fit.CONSTANTS` or names of `fit.MECHANISMS`; empty where the time is
            only compared.
        because: why nothing else explains it.
        calls, reduced: of a graph, how often it runs the kernel and reduces its result over two
            cores; 0 of a kernel that is timed alone.
    """

    name: str
    kernel: str
    arguments: tuple[str, ...]
    keywords: dict[str, Any]
    isolates: tuple[str, ...]
    because: str
    calls: int = 0
    reduced: int = field(default=0)


def _engine(engine: str) -> Iterator[Row]:
    name, constant = engine, ALU[engine]
    start, clock = f"engine_start_cycles.{constant}", f"clock_hz.{constant}"
    for n in (32, 256):
        yield Row(
            f"{name}-stream-1-{n}", "stream", ("128x1:fp32",), {"n": n, "engine": engine},
            ("min_ii",),
            "independent instructions of one column follow each other at the initiation interval",
        )  # fmt: skip
    for columns, n in ((1, 32), (1, 128), (512, 128), (2048, 128)):
        isolates, why = {
            1: (("dependent_cycles",), "beside a stream the same instruction waits for its result"),
            512: ((start,), "beside 2048 columns what does not grow with columns is left"),
            2048: ((clock,), "beside 512 columns only the documented cycles of 1536 more differ"),
        }[columns]
        yield Row(
            f"{name}-chain-{columns}-{n}", "chain", (f"128x{columns}:fp32",),
            {"n": n, "engine": engine}, isolates, why,
        )  # fmt: skip


def _products() -> Iterator[Row]:
    pace = "products of one PSUM tile follow each other without a gap"
    for columns, n, isolates in (
        (32, 64, "clock_hz.TensorE"), (32, 256, "clock_hz.TensorE"),
        (128, 256, "engine_start_cycles.TensorE"), (512, 64, "tensor_pace"),
        (512, 256, "tensor_pace"),
    ):  # fmt: skip
        shapes = ("128x128:bf16", f"128x{columns}:bf16")
        yield Row(f"product-{columns}-{n}", "products", shapes, {"n": n}, (isolates,), pace)
    yield Row(
        "product-fp32-512-64", "products", ("128x128:fp32", "128x512:fp32"), {"n": 64}, (),
        "fp32 takes four passes of what bf16 takes one; no constant",
    )  # fmt: skip
    for n in (16, 64):
        yield Row(
            f"product-chain-{n}", "product_chain", ("128x128:bf16", "128x32:bf16"), {"n": n},
            ("dependent_cycles",), "TensorE and VectorE take turns, each waits for the other",
        )  # fmt: skip


# elements of a row and rows a partition: all but the shortest move as much as the longest
_ROWS = {1: 256, 2: 256, 16: 256, 64: 256, 128: 128, 256: 64, 512: 32, 4096: 4}


def _transfers() -> Iterator[Row]:
    for size, k in _ROWS.items():
        constant = {1: "dma.part_word_ns", 512: "dma.bytes_per_ns", 4096: "dma.bytes_per_ns"}
        yield Row(
            f"rows-{4 * size}", "rows", (f"128x{k}x{2 * size}:fp32",), {"row": size},
            (constant.get(size, "dma.row_2_24_ns"), "rows"),
            "one transfer of equal rows keeps all 16 engines busy with nothing else to do",
        )  # fmt: skip
    yield Row(
        "partitions-8", "rows", ("8x8x8192:fp32",), {"row": 4096}, ("fixed lanes",),
        "eight partitions are one engine's if places are fixed, and eight engines' if not",
    )  # fmt: skip
    for n in (16, 64):
        yield Row(
            f"transfers-{n}", "transfers", (f"{n}x128x16:fp32",), {"n": n}, ("issue",),
            "small transfers side by side: rows bind, unless one queue issues each",
        )  # fmt: skip
    for n in (16, 64):
        yield Row(
            f"lone-{n}", "transfers", (f"{n}x1x16:fp32",), {"n": n}, ("dma.lone_row_ns",),
            "each transfer has one row, so that no engine has another one to overlap with",
        )  # fmt: skip
    for n in (4, 32):
        yield Row(
            f"round-trips-{n}", "round_trips", ("128x128:fp32",), {"n": n}, ("dma.start_ns",),
            "a transfer starts when the last one has ended: two starts a round trip, rows known",
        )  # fmt: skip
    for n in (8, 32):
        yield Row(
            f"gathers-{n}", "gathers", ("1024x16:fp32", f"128x{n}:int32"), {"n": n},
            ("dma.descriptor_ns",), "GpSimdE builds 128 descriptors a load, longer than rows take",
        )  # fmt: skip


def _mechanisms() -> Iterator[Row]:
    for first, second, in_psum, isolates, why in (
        ("vector", "gpsimd", False, "ports", "the sum of both chains if they share SBUF's port"),
        ("vector", "scalar", True, "ports", "the sum of both chains if they share PSUM's port"),
        ("vector", "scalar", False, "", "no port is shared here: the longer of both chains"),
        ("vector", "vector", False, "order", "overlap if the compiler leaves program order"),
    ):
        memory = "psum" if in_psum else "sbuf"
        yield Row(
            f"two-{first}-{second}-{memory}", "two_chains",
            ("128x512:fp32" if in_psum else "128x2048:fp32",),
            {"n": 64, "first": first, "second": second, "in_psum": in_psum},
            (isolates,) if isolates else (), f"two chains that share no data: {why}",
        )  # fmt: skip
    yield Row(
        "spills", "held", ("24x128x2560:fp32",), {"n": 24}, (),
        "24 tiles of 10 KiB a partition are more than SBUF has: what is away moves twice",
    )  # fmt: skip
    yield Row(
        "small", "small", ("128x512:fp32",), {}, ("GRAPH_START_NS",),
        "a load, an instruction and a store are known: the graph's start and end are left",
    )  # fmt: skip


def _graphs() -> Iterator[Row]:
    known = "the kernel's own time is measured alone"
    for calls, reduced, size, isolates, why in (
        (1, 0, "128x512", "GRAPH_LAUNCH_NS", "one small kernel from the host, and back"),
        (33, 0, "128x512", "KERNEL_LAUNCH_NS", f"33 calls as a decode step has: {known}"),
        (129, 0, "128x512", "KERNEL_LAUNCH_NS", f"four times as many: {known}"),
        (1, 8, "128x512", "COLLECTIVE_START_NS", "a small all-reduce is all start"),
        (1, 34, "128x512", "COLLECTIVE_START_NS", "34 as a decode step has"),
        (1, 8, "128x16384", "COLLECTIVE_BYTES_PER_NS", "8 MiB each: beside a small one the rate"),
    ):
        kind = f"collectives-{reduced}-{size}" if reduced else f"launches-{calls}"
        yield Row(kind, "small", (f"{size}:fp32",), {}, (isolates,), why, calls, reduced)


KERNELS = (
    *(row for engine in ALU for row in _engine(engine)), *_products(), *_transfers(),
    *_mechanisms(),
)  # fmt: skip
GRAPHS = tuple(_graphs())
ROWS = {row.name: row for row in (*KERNELS, *GRAPHS)}
