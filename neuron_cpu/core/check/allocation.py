"""Direct allocation beside the compiler's own.

The guide asks for addresses of all tensors or of none (aws-neuron-sdk v2.21.1,
general/nki/nki_direct_allocation_guide.rst); AWS's own allocated kernels leave some results to the
compiler and ran on devices, so a tensor without an address is a warning.
"""

from ..device.errors import refuse, warn
from ..program.program import Instruction, Program
from ..program.regions import place
from ..program.storage import Storage


def check_allocation(program: Program) -> None:
    """Warn of tensors that a kernel with addresses leaves to the compiler; refuse scratch in HBM.

    Raises:
        NkiError: ``sim_allocation_hbm``.
    """
    if not program.direct_allocation or program.mixed_placement:
        return
    told: set[Storage] = set()
    for instruction in program.instructions:
        for view in (*instruction.dst, *instruction.src):
            storage = view.storage
            if storage.on_chip and storage.address is None and storage not in told:
                told.add(storage)
                _warn_of_mixed(program, instruction, storage)
            if storage.buffer == "hbm" and storage.role == "local":
                raise refuse(
                    "sim_allocation_hbm",
                    f"{storage.label()} is scratch in HBM, expected none under direct allocation; "
                    "make it nl.shared_hbm and return it",
                    place(program, instruction),
                )


def _warn_of_mixed(program: Program, instruction: Instruction, storage: Storage) -> None:
    warn(
        "sim_mixed_allocation",
        f"{instruction.op.name} uses {storage.label()}, which has no address while other tensors "
        "have one, expected all or none; give it a buffer from ncc, and assign results of "
        "instructions to such tensors: tensor[...] = nisa....",
        place(program, instruction),
    )
