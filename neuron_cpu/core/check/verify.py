"""Checks on a whole Program that a single instruction cannot make.

Four questions, each exact on the recorded accesses: is a tensor used outside of the loop that made
it (scopes, here), does anything undefined reach HBM (``undefined.py``), do iterations that the
kernel declared independent touch each other's elements (``races.py``), and do the live tensors fit
on chip (``capacity.py``). Rules: aws-neuron-sdk v2.21.1, general/nki/api/nki.errors.rst and
general/nki/programming_model.rst.
"""

from ..device.errors import refuse, strict
from ..instructions.ranks import by_core
from ..program.program import Instruction, Program
from ..program.regions import place
from ..program.storage import Frame, Storage
from .allocation import check_allocation
from .capacity import check_capacity
from .lost import check_lost_products
from .races import check_races
from .undefined import check_values

later = False  # whether another process verifies what this one records


def verify(program: Program) -> None:
    """Refuse a program that the device would refuse or silently miscompute.

    Raises:
        NkiError: undefined data stored, output not written, race, tensor used out of its scope,
            automatic beside explicit allocation, or more live data than SBUF or PSUM holds. An
            output written in part is a warning.
    """
    if later and not strict():  # whose refusals go before those of the source
        return
    check_scopes(program)
    check_allocation(program)
    check_races(program)  # before values: a race explains elements that nobody wrote
    check_values(program)
    check_lost_products(program)
    for part in by_core(program):
        check_capacity(part)


def check_scopes(program: Program) -> None:
    """Refuse uses of a tensor outside of the loop iteration that created it.

    On the device a loop body is traced once, so a tensor made in it names one buffer per iteration
    that nothing outside can address.
    """
    legal: dict[Frame | None, set[Frame | None]] = {}
    for instruction in program.instructions:
        if instruction.op.flow == "meeting":  # joins tiles of all grid instances
            continue
        frame = instruction.frame
        inside = legal.get(frame)
        if inside is None:
            inside = legal[frame] = {None, *(frame.path() if frame is not None else ())}
        for view in (*instruction.src, *instruction.dst):
            if view.storage.frame not in inside:
                raise _out_of_scope(program, instruction, view.storage)


def _out_of_scope(program: Program, instruction: Instruction, storage: Storage) -> Exception:
    frame = storage.frame
    assert frame is not None  # top-level tensors are in scope everywhere
    return refuse(
        "err_local_variable_used_out_of_scope",
        f"{instruction.op.name} uses {storage.label()}, which iteration {frame.i} of the "
        f"{frame.loop.kind} loop at {frame.loop.source} created, outside of that iteration, "
        "expected uses inside it only; create the tensor before the loop and "
        + (
            "add to it there, acc = nl.zeros(shape, nl.float32, buffer=nl.psum) and in it "
            "acc += nisa.nc_matmul(...)"
            if storage.buffer == "psum"
            else "assign to tensor[...] in it"
        ),
        place(program, instruction),
    )
