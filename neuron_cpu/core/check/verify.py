"""Checks on a whole Program that a single instruction cannot make.

Questions, each exact on the recorded accesses. Here: is a tensor used outside of the loop that made
it (scopes), has one no address where others have, and does a product overwrite one that nobody has
read. Elsewhere: does anything undefined reach HBM (``undefined.py``), do iterations that the kernel
declared independent touch each other's elements (``races.py``), and do the live tensors fit on chip
(``capacity.py``). Rules: aws-neuron-sdk v2.21.1, general/nki/api/nki.errors.rst and
general/nki/programming_model.rst.
"""

from ..device.errors import refuse, strict, warn
from ..instructions.ranks import by_core
from ..program.program import Instruction, Program
from ..program.regions import place
from ..program.storage import Frame, Storage
from .capacity import check_capacity
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


def check_allocation(program: Program) -> None:
    """Warn of tensors that a kernel with addresses leaves to the compiler; refuse scratch in HBM.

    The guide asks for addresses of all tensors or of none (aws-neuron-sdk v2.21.1,
    general/nki/nki_direct_allocation_guide.rst); AWS's own allocated kernels leave some results to
    the compiler and ran on devices.

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
                warn(
                    "sim_mixed_allocation",
                    f"{instruction.op.name} uses {storage.label()}, which has no address while "
                    "other tensors have one, expected all or none; give it a buffer from ncc, and "
                    "assign results of instructions to such tensors: tensor[...] = nisa....",
                    place(program, instruction),
                )
            if storage.buffer == "hbm" and storage.role == "local":
                raise refuse(
                    "sim_allocation_hbm",
                    f"{storage.label()} is scratch in HBM, expected none under direct allocation; "
                    "make it nl.shared_hbm and return it",
                    place(program, instruction),
                )


def check_lost_products(program: Program) -> None:
    """Warn of products that overwrite one which no instruction has read (the current language).

    There a product says with ``accumulate`` whether it adds to PSUM's content, so one False too
    many drops earlier products, and the result is wrong without an error. Only equal regions are
    compared.
    """
    if not program.today:
        return
    unread: dict[Storage, dict[tuple, Instruction]] = {}
    for instruction in program.instructions:
        for view in instruction.src:
            if view.storage.buffer == "psum":
                unread.pop(view.storage.memory, None)
            if view.by_data is not None:
                unread.pop(view.by_data[0].storage.memory, None)
        dst = instruction.dst[0]
        if not instruction.op.multiplies or dst.by_data is not None:
            for view in instruction.dst:
                if view.storage.buffer == "psum":
                    unread.pop(view.storage.memory, None)
            continue
        products = unread.setdefault(dst.storage.memory, {})
        region = (*dst.key(), dst.dt.name, instruction.frame)
        before = products.get(region)
        if before is not None and not instruction.attrs.accumulate:
            line = before.source.line if before.source is not None else "unknown"
            warn(
                "sim_lost_product",
                f"nc_matmul overwrites {dst.label()} with accumulate=False, and nobody has read "
                f"the product of line {line} there, expected that product to be read or added to; "
                "leave accumulate open or say True",
                place(program, instruction),
            )
        products[region] = instruction
