"""DMA: copies between HBM and SBUF, and transposes.

Sources: aws-neuron-sdk v2.21.1 to v2.26.1, general/nki/api/nki/isa/__init__.py. ``time/cost.py``
computes a transfer's time from its rows.
"""

from dataclasses import dataclass
from typing import Any

import torch

from ..device.errors import refuse
from ..device.spec import CORE, Engine
from ..program.attributes import Attrs
from ..program.program import Instruction
from ..program.view import View
from .entry import ANY_HBM, SBUF, OpSpec, first_operand, no_cycles


# --- copies ---------------------------------------------------------------------------------------
def _dma_rules(i: Instruction) -> None:
    for view in (*i.dst, i.src[0]):
        if not view.storage.on_chip:
            continue
        if len(view.shape) < 2:
            raise refuse("sim_rank", f"Insufficient rank: {view.label()}, expected at least 2 axes")
        if view.shape[0] > CORE.partitions:
            raise refuse(
                "err_num_partition_exceed_arch_limit",
                f"Size of partition dimension {view.shape[0]} exceeds architecture limitation of "
                f"{CORE.partitions} in dma of {view.label()}; tile the partition axis",
            )


DMA_COPY = OpSpec(
    "dma_copy",
    "copy",
    Attrs,
    first_operand,
    no_cycles,
    engine=Engine.DMA,
    reads=(*ANY_HBM, SBUF),
    writes=(*ANY_HBM, SBUF),
    rules=_dma_rules,
    same_partitions=False,
    indirect=True,
    note="HBM/SBUF to HBM/SBUF with cast; nl.load and nl.store; rows may be indirect",
)


SOURCES = 16  # of one dma_compute


def _sum(attrs: Attrs, xs: list[torch.Tensor]) -> torch.Tensor:
    total = xs[0]
    for x in xs[1:]:
        total = total + x
    return total


DMA_SUM = OpSpec(
    "dma_compute",
    "elementwise",
    Attrs,
    _sum,
    no_cycles,
    engine=Engine.DMA,
    reads=(*ANY_HBM, SBUF),
    writes=(*ANY_HBM, SBUF),
    rules=_dma_rules,
    same_partitions=False,
    indirect=True,
    note="SDK 2.29: the sum of up to 16 sources, added in fp32 on the way",
    operands=(1, SOURCES),
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class ExchangeAttrs(Attrs):
    """Attributes of an exchange between cores.

    Attributes:
        senders: whose tile each core receives.
    """

    senders: tuple[int, ...]


def _exchange(attrs: ExchangeAttrs, xs: list[torch.Tensor]) -> list[torch.Tensor]:
    copies = [x.clone() for x in xs]
    return [copies[core] for core in attrs.senders]


EXCHANGE = OpSpec(
    "sendrecv",
    "meeting",
    ExchangeAttrs,
    _exchange,
    no_cycles,
    engine=Engine.DMA,
    reads=(SBUF,),
    writes=(SBUF,),
    rules=_dma_rules,
    note="NeuronCore-v3: tiles of two cores change places",
    operands=(2, 2),
    results=2,
    generation=3,
)


# --- transposes -----------------------------------------------------------------------------------
TRANSPOSED_AXES = {2: (1, 0), 3: (2, 1, 0), 4: (3, 1, 2, 0)}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class PermuteAttrs(Attrs):
    """Attributes of a transpose by DMA.

    Attributes:
        order: the operand's axis that each axis of the result is.
    """

    order: tuple[int, ...]


def _permute(attrs: PermuteAttrs, xs: list[torch.Tensor]) -> torch.Tensor:
    lead = xs[0].ndim - len(attrs.order)
    return xs[0].permute(*range(lead), *(lead + a for a in attrs.order))


DMA_TRANSPOSE = OpSpec(
    "dma_transpose",
    "permute",
    PermuteAttrs,
    _permute,
    no_cycles,
    engine=Engine.DMA,
    reads=(*ANY_HBM, SBUF),
    writes=(SBUF,),
    same_partitions=False,
    by_element=True,
    box_mend="slice the operand instead",
    note="element-granular descriptors: very slow on this core",
)


def transposed_axes(src: View, axes: Any) -> tuple[int, ...]:
    """The order of axes that a transpose of ``src`` makes; refuses another one."""
    order = TRANSPOSED_AXES.get(src.ndim)
    if order is None or (axes is not None and tuple(axes) != order):
        raise refuse(
            "sim_dma_transpose_axes",
            f"dma_transpose of {src.label()} with axes {axes}, expected 2 to 4 axes and the "
            f"order {order or list(TRANSPOSED_AXES.values())}",
        )
    return order
