"""Tensor indirection (gen4): columns of a tensor whose free offsets are data.

A tile stands for the columns. Their gather precedes each instruction that reads it, their scatter
follows each that writes it. Sources: aws-neuron-sdk 81ce03ae, nki/api/nki (NkiTensor.indirect,
nki.isa), nki/guides/architecture/trainium3_arch.rst.
"""

from __future__ import annotations

from typing import Any

from ..device.errors import refuse
from ..device.spec import CORE
from ..instructions.arguments import whole
from ..instructions.entry import OpSpec
from ..instructions.gpsimd import INDIRECT_READ, INDIRECT_WRITE, LocalGatherAttrs
from ..program import trace
from ..program.view import View


def columns_of(source: View, index: Any, num_elem: Any) -> Any:
    """The tile [P, num_elem] for the columns of ``source`` [P, ...] that ``index`` [P, K] names."""
    count, rows, said = whole(num_elem, "num_elem"), source.shape[0], f"{source.label()}.indirect()"
    if not (isinstance(index, View) and index.dt.is_int and index.shape[0] == rows):
        raise refuse(
            "sim_tensor_indirection", f"{said}, expected a tile of {rows} rows of integer offsets"
        )
    tracer = trace.current("indirect")
    made = tracer.storage((rows, count), source.dt, source.storage.buffer)
    made.name, made.source = f"{source.storage.name}.indirect", tracer.place()
    tile = tracer.whole(made)

    def move(view: View, op: OpSpec, reads: bool) -> None:
        """Record the gather for ``op``, which reads ``view``, or the scatter of its result."""
        each = CORE.quadrant_partitions if op.multiplies else CORE.gpsimd_partitions
        most = each * index.free_size
        wrong = None
        if rows % each or not 0 < count <= most:
            wrong = f"a multiple of {each} partitions and num_elem from 1 to {most}"
        elif not reads and (op.multiplies or view.size != made.size):
            wrong = "all columns written at once, and no product there"
        if wrong:
            raise refuse(
                "sim_tensor_indirection",
                f"{op.name} with {count} columns of {rows} partitions of {said}, expected {wrong}; "
                "use a tile of its own and nisa.tensor_copy",
            )
        attrs = LocalGatherAttrs(raw=True, free_axes=source.ndim - 1, count=count, each=each)
        columns = tile.reshape((rows, count, 1))
        del tracer.columns[made]  # its own reads and writes are meant as they are
        if reads:
            tracer.emit(INDIRECT_READ, (columns,), (source, index), attrs)
        else:
            tracer.emit(INDIRECT_WRITE, (source,), (columns, index, source), attrs)
        tracer.columns[made] = move

    tracer.columns[made] = move
    return tile
