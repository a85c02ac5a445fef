"""Direct allocation is all or nothing (aws-neuron-sdk v2.21.1, nki_direct_allocation_guide.rst)."""

from __future__ import annotations

from ..device.errors import NkiError, refuse
from ..program.program import Instruction, Program
from ..program.regions import place
from ..program.storage import Storage


def check_allocation(program: Program) -> None:
    """Refuse kernels that place some tensors themselves and leave others to the compiler.

    Raises:
        NkiError: ``sim_mixed_allocation`` for a tensor without address, ``sim_allocation_hbm`` for
            scratch in HBM.
    """
    if not program.direct_allocation:
        return
    for instruction in program.instructions:
        for view in (*instruction.dst, *instruction.src):
            storage = view.storage
            if storage.on_chip and storage.address is None:
                raise _mixed(program, instruction, storage)
            if storage.buffer == "hbm" and storage.role == "local":
                raise refuse(
                    "sim_allocation_hbm",
                    f"{storage.label()} is scratch in HBM, expected none under direct allocation; "
                    "make it nl.shared_hbm and return it",
                    place(program, instruction),
                )


def _mixed(program: Program, instruction: Instruction, storage: Storage) -> NkiError:
    return refuse(
        "sim_mixed_allocation",
        f"{instruction.op.name} uses {storage.label()}, which has no address while other tensors "
        "have one, expected all or none; give it a buffer from ncc, and assign results of "
        "instructions to such tensors: tensor[...] = nisa....",
        place(program, instruction),
    )
