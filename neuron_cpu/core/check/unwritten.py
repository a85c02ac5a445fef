"""What mends a store of what nobody has written, by what the program does with the tile."""

import ast
import itertools
from typing import Any

from ..program.program import Instruction, Program
from ..program.source import nodes_of, tree_of
from ..program.storage import Storage

_BEGINS = {"maximum": "-3e38", "minimum": "3e38", "multiply": "1.0"}


def mend(program: Program, store: Instruction, storage: Storage, region: str, whole: bool) -> str:
    """What to write, for ``region`` of ``storage``; ``whole``: all of it is undefined."""
    before = [*itertools.takewhile(lambda one: one is not store, program.instructions), store]
    writers = [i for i in before if storage in _written(i)]
    name = storage.name or "the tile"
    first = writers[0] if writers else None
    if first is not None and any(v.storage is storage for v in first.src):
        if first.op.is_copy:
            return f"line {_line(first)} copies {name} to itself: give another one as src or as dst"
        value = _BEGINS.get(str(getattr(first.attrs, "op", "")), "0.0")
        return (
            f"write nisa.memset(dst={name}, value={value}) before line {_line(first)}, which "
            "reads it, or begin with what leaves a product or a maximum as it is"
        )
    reader = next(i for i in before if any(v.storage.memory is storage for _, v in i.accesses()))
    if writers and reader not in writers and [*map(_line, before)].count(_line(reader)) == 1:
        return f"move line {_line(writers[0])}, which writes it, above line {_line(reader)}"
    if not whole:
        return (
            f"write {region}, too: round a loop's count up with -(-n // size), or fill it with "
            "nisa.memset first, or leave it out with a slice on both sides of the store"
        )
    if writers or not storage.name:
        return "load or compute it first, or fill it with nisa.memset"
    if left_out := not_run(program, storage):
        return left_out
    target = reader.dst[0].storage
    earlier = itertools.takewhile(lambda one: one is not reader, before)
    known = {*program.inputs, *(s for i in earlier for s in _written(i))}
    if reader.op.is_copy and target in known:
        return (
            f"dst comes first and looks swapped with src in line {_line(reader)}: write "
            f"dst={name}, src={target.name}"
        )
    other = _unread(program, before, storage)
    if other is not None and other.buffer == "psum":
        return f"copy {other.name}, which nobody reads, to {name} first with nisa.tensor_copy"
    if other is not None:
        return f"store {other.name}, which nobody reads, in place of {name}, or write {name} first"
    return f"load or compute {name} first, or fill it with nisa.memset"


def _written(instruction: Instruction) -> list[Storage]:
    return [view.storage for view in instruction.dst]


def _line(instruction: Instruction) -> int | str:
    return instruction.source.line if instruction.source else "unknown"


def not_run(program: Program, storage: Storage) -> str:
    """What mends that a line which would write the tensor has recorded nothing; "" without one."""
    function: Any = program.function
    tree = None if function is None else tree_of(function)
    ran = {_line(i) for i in program.instructions}
    if tree is None:
        return ""
    for call in nodes_of(tree):
        if isinstance(call, ast.Call) and call.lineno not in ran:
            named = [k.value for k in call.keywords if k.arg == "dst"] or call.args[:1]
            texts = [ast.unparse(one).partition("[")[0] for one in named]
            if storage.name in texts and ast.unparse(call.func).startswith(("nisa.", "nl.store")):
                return f"have {_left_out(tree, call.lineno, ran)}, which would write {storage.name}"
    return ""


def reasons(program: Program) -> str:
    """What in a kernel's text leaves a part of its output out, in words."""
    function: Any = program.function
    nodes = nodes_of(None if function is None else tree_of(function))
    said = ""
    if any(isinstance(one, ast.Attribute) and one.attr == "program_id" for one in nodes):
        said = ", in a loop over range(n), as nl.program_id is 0 without grid"
    loops = [one for one in nodes if isinstance(one, ast.For)]
    if any(isinstance(one, ast.Return) for loop in loops for one in ast.walk(loop)):
        said += ", with the return behind the loop"
    return said


def _left_out(function: ast.FunctionDef, line: int, ran: set[int | str]) -> str:
    """A line that has not run, with its outermost loop or branch of which nothing has."""
    for one in ast.walk(function):
        if isinstance(one, (ast.For, ast.If)):
            inside = range(one.lineno + 1, (one.end_lineno or 0) + 1)
            if line in inside and ran.isdisjoint(inside):
                head = ast.unparse(one.iter if isinstance(one, ast.For) else one.test)
                return f"{head} of line {one.lineno} lead to line {line}"
    return f"line {line} run, without a return before it or an error that is caught"


def _unread(program: Program, before: list[Instruction], like: Storage) -> Storage | None:
    """The last tile of the same shape that is computed and that nobody reads."""
    read = {v.storage for i in program.instructions for v in i.src}
    made = [s for i in before if not i.op.is_dma for s in _written(i)]
    unread = [s for s in made if s.on_chip and s.name and s not in read]
    return next((s for s in reversed(unread) if s.shape == like.shape), None)
