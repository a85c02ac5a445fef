"""Products that nobody reads before the next one overwrites them (the current language).

There a product says with ``accumulate`` whether it adds to PSUM's content, so one False too many
drops earlier products, and the result is wrong without an error. Only equal regions are compared.
"""

from ..device.errors import warn
from ..program.program import Instruction, Program
from ..program.regions import place
from ..program.storage import Storage


def check_lost_products(program: Program) -> None:
    """Warn of products that overwrite one which no instruction has read."""
    if not program.today:
        return
    unread: dict[Storage, dict[tuple, Instruction]] = {}
    for instruction in program.instructions:
        for view in instruction.src:
            unread.pop(view.storage.memory, None)
            if view.by_data is not None:
                unread.pop(view.by_data[0].storage.memory, None)
        dst = instruction.dst[0]
        memory = dst.storage.memory
        if not instruction.op.multiplies or dst.by_data is not None:
            for view in instruction.dst:
                unread.pop(view.storage.memory, None)
            continue
        products = unread.setdefault(memory, {})
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
