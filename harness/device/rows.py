"""What is measured of the small kernels, and which constant each one isolates.

A row's time is explained by the cost model alone: `fit.py` finds the constants with which it gives
all of the measured times. A name is the kernel's, a size and ``n``; times of one kernel that differ
in ``n`` differ by what is repeated.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

ALU = {"vector": "VectorE", "scalar": "ScalarE", "gpsimd": "GpSimdE"}
_RATE = "dma.bytes_per_ns"


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
    isolates: str
    because: str
    calls: int = 0
    reduced: int = 0


def _engine(name: str) -> Iterator[Row]:
    why = "independent instructions of one column follow each other at the initiation interval"
    for n in (32, 256):
        given = {"n": n, "engine": name}
        yield Row(f"{name}-stream-1-{n}", "stream", ("128x1:fp32",), given, "min_ii", why)
    for columns, n, isolates, why in (
        (1, 32, "dependent_cycles", "beside a stream the same instruction waits for its result"),
        (1, 128, "dependent_cycles", "beside a stream the same instruction waits for its result"),
        (512, 128, f"engine_start_cycles.{ALU[name]}", "beside 2048 columns: what does not grow"),
        (2048, 128, f"clock_hz.{ALU[name]}", "beside 512 columns: documented cycles of 1536 more"),
    ):
        given, shape = {"n": n, "engine": name}, f"128x{columns}:fp32"
        yield Row(f"{name}-chain-{columns}-{n}", "chain", (shape,), given, isolates, why)


def _products() -> Iterator[Row]:
    why = "products of one PSUM tile follow each other without a gap"
    for columns, n, isolates in (
        (32, 64, "clock_hz.TensorE"), (32, 256, "clock_hz.TensorE"),
        (128, 256, "engine_start_cycles.TensorE"), (512, 64, "tensor_pace"),
        (512, 256, "tensor_pace"),
    ):  # fmt: skip
        shapes = ("128x128:bf16", f"128x{columns}:bf16")
        yield Row(f"product-{columns}-{n}", "products", shapes, {"n": n}, isolates, why)
    shapes = ("128x128:fp32", "128x512:fp32")
    why = "fp32 takes four passes of what bf16 takes one"
    yield Row("product-fp32-512-64", "products", shapes, {"n": 64}, "", why)
    why = "TensorE and VectorE take turns, and each waits for the other"
    shapes = ("128x128:bf16", "128x32:bf16")
    for n in (16, 64):
        given = {"n": n}
        yield Row(f"product-chain-{n}", "product_chain", shapes, given, "dependent_cycles", why)


def _transfers() -> Iterator[Row]:
    why = "one transfer of equal rows keeps all 16 engines busy with nothing else to do"
    # elements of a row and rows a partition: all but the shortest move as much as the longest
    for size, k in {1: 256, 2: 256, 16: 256, 64: 256, 128: 128, 256: 64, 512: 32, 4096: 4}.items():
        constant = {1: "dma.part_word_ns", 512: _RATE, 4096: _RATE}.get(size, "dma.row_2_24_ns")
        shape = f"128x{k}x{2 * size}:fp32"
        yield Row(f"rows-{4 * size}", "rows", (shape,), {"row": size}, constant, why)
    why = "eight partitions are one engine's if places are fixed, and eight engines' if not"
    yield Row("partitions-8", "rows", ("8x8x8192:fp32",), {"row": 4096}, "fixed lanes", why)
    for name, kernel, shapes, counts, isolates, why in (
        ("transfers", "transfers", ("{n}x128x16:fp32",), (16, 64), "issue",
         "small transfers side by side: rows bind, unless one queue issues each"),
        ("lone", "transfers", ("{n}x1x16:fp32",), (16, 64), "dma.lone_row_ns",
         "each transfer has one row, so that no engine has another one to overlap with"),
        ("round-trips", "round_trips", ("128x128:fp32",), (4, 32), "dma.start_ns",
         "a transfer starts when the last one has ended: two starts a round trip, rows known"),
        ("gathers", "gathers", ("1024x16:fp32", "128x{n}:int32"), (8, 32), "dma.descriptor_ns",
         "GpSimdE builds 128 descriptors a load, which takes longer than the rows"),
    ):  # fmt: skip
        for n in counts:
            given = tuple(shape.format(n=n) for shape in shapes)
            yield Row(f"{name}-{n}", kernel, given, {"n": n}, isolates, why)


def _mechanisms() -> Iterator[Row]:
    for first, second, psum, isolates, why in (
        ("vector", "gpsimd", False, "ports", "the sum of both chains if they share SBUF's port"),
        ("vector", "scalar", True, "ports", "the sum of both chains if they share PSUM's port"),
        ("vector", "scalar", False, "", "no port is shared here: the longer of both chains"),
        ("vector", "vector", False, "order", "overlap if the compiler leaves program order"),
    ):
        name = f"two-{first}-{second}-{'psum' if psum else 'sbuf'}"
        given = {"n": 64, "first": first, "second": second, "in_psum": psum}
        shape = "128x512:fp32" if psum else "128x2048:fp32"
        yield Row(
            name, "two_chains", (shape,), given, isolates, f"chains without common data: {why}"
        )
    why = "24 tiles of 10 KiB a partition are more than SBUF has: what is away moves twice"
    yield Row("spills", "held", ("24x128x2560:fp32",), {"n": 24}, "", why)
    why = "a load, an instruction and a store are known: the graph's start and end are left"
    yield Row("small", "small", ("128x512:fp32",), {}, "GRAPH_START_NS", why)


def _graphs() -> Iterator[Row]:
    known = "the kernel's own time is measured alone"
    for calls, reduced, columns, isolates, why in (
        (1, 0, 512, "GRAPH_LAUNCH_NS", "one small kernel from the host, and back"),
        (33, 0, 512, "KERNEL_LAUNCH_NS", f"33 calls as a decode step has: {known}"),
        (129, 0, 512, "KERNEL_LAUNCH_NS", f"four times as many: {known}"),
        (1, 8, 512, "COLLECTIVE_START_NS", "a small all-reduce is all start"),
        (1, 34, 512, "COLLECTIVE_START_NS", "34 as a decode step has"),
        (1, 8, 16384, "COLLECTIVE_BYTES_PER_NS", "8 MiB each: beside a small one the rate"),
    ):
        name = f"collectives-{reduced}-{columns}" if reduced else f"launches-{calls}"
        yield Row(name, "small", (f"128x{columns}:fp32",), {}, isolates, why, calls, reduced)


GRAPHS = tuple(_graphs())
KERNELS = (*(row for e in ALU for row in _engine(e)), *_products(), *_transfers(), *_mechanisms())
ROWS = {row.name: row for row in (*KERNELS, *GRAPHS)}
