"""Lists the constructs of a kernel file, and the source that shows that a device takes them.

`device/evidence.json` has a row for each construct: *seen on device* names a public run that
executed it (times, errors or a score are published); *documented* names the page that describes it;
*unproven* says that neither is known; *refused* is a construct that a public compiler refuses in
every form (device/refusals.json). A source names commit, chip and release. A construct without a
row is unproven. Constructs of today's language begin with ``nki.``, forms such as
``nki.index: slice`` included: what one language's compiler took proves nothing of the other's.
Files of today ran with SDK 2.29 or later.

Two readers find the constructs. ``in_source`` walks the syntax tree: names of the kernel language,
their keywords, and those forms of indices, loops and Python that a device of one of the languages
has not shown; only functions that use the language without PyTorch, and what those call, count as
kernel code. It sees names, not values: a slice of a slice is found where both stand in one
function. ``in_program`` reads a traced Program:
on which engine operands and results of which memory, type and first partition lie. One that ran
nowhere so is *documented*, beside the nearest that did.
"""

import ast
import functools
import inspect
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ..device import evidence, refusals
from ..device.evidence import Use
from ..instructions.alu import ACTIVATIONS, ARITHMETIC, BITWISE, LATER
from ..instructions.entry import FORMS, TABLE
from ..program.program import Program
from ..program.source import callee, pairs

SEEN, DOCUMENTED, UNPROVEN = "seen on device", "documented", "unproven"
REFUSED = "refused"
STATUSES = (REFUSED, UNPROVEN, DOCUMENTED, SEEN)  # what needs attention first
TODAY = {"nl": "nki.language", "nisa": "nki.isa", "nc": "nki.collectives"}
PAGES = {"neuronxcc.nki.isa": "doc-isa", "nki.isa": "doc-current", "nki.collectives": "doc-current"}
MODULES = {
    "nki.isa.constants": "nisa",
    "nki.dtype": "nl",
    **{module: short for short, module in TODAY.items()},
    "neuronxcc.nki.language": "nl",
    "neuronxcc.nki.isa": "nisa",
    "neuronxcc.nki.compiler": "ncc",
    "neuronxcc.nki.typing": "nt",
}
TILE_WORDS = ("nl.", "nisa.", "ncc.", "nc.")  # what makes a function kernel code
LOOPS = frozenset({"nl.affine_range", "nl.sequential_range", "nl.dynamic_range", "nl.static_range"})
SCRATCH = frozenset({"nl.hbm", "nl.private_hbm"})
TENSOR = "nki.language.NkiTensor."  # whose methods have rows
OPERATORS = {f"nl.{name}" for name in (*ARITHMETIC, *BITWISE, *LATER, *ACTIVATIONS)}
MAKERS = ("nl.ndarray", "nl.zeros", "nl.load", "nisa.")  # calls whose result is a tile
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
NARROW = frozenset({"nl.bfloat16", "nl.float16", "nl.float8_e4m3", "nl.float8_e5m2"})
Found = Mapping[Any, list[int]]  # a name, a form or a Use -> lines, in the order found
Function = ast.FunctionDef | ast.AsyncFunctionDef


class Row(NamedTuple):
    """One row of the table; `source` is empty where the construct is unproven."""

    status: str
    source: str


class Finding(NamedTuple):
    """A construct that a file uses, the first line that does, and how many lines do."""

    construct: str
    status: str
    source: str
    line: int
    lines: int


def table() -> dict[str, Row]:
    """Each construct's row, with its source spelled out: the shipped ones, and for functions of
    instructions and their keywords the page after which they were written."""
    return _table(sum(map(len, FORMS.values())))


@functools.lru_cache(1)
def _table(forms: int) -> dict[str, Row]:
    rows, sources = documented() | evidence.constructs(), evidence.sources()
    return {
        name: Row(status, sources[page].told() if page else "")
        for name, (status, page) in rows.items()
    }


def documented() -> dict[str, list[str]]:
    """Status and page of the functions of instructions, and of their keywords."""
    rows: dict[str, list[str]] = {}
    for module, page in PAGES.items():
        for name, form in FORMS.get(module, {}).items():
            told = f"{'nisa' if module.startswith('neuronxcc') else module}.{name}"
            words = inspect.signature(form.function).parameters.values()
            named = [w.name for w in words if w.kind in (w.POSITIONAL_OR_KEYWORD, w.KEYWORD_ONLY)]
            named += ["name"] * form.named
            rows |= dict.fromkeys([told, *(f"{told}({one}=)" for one in named)], [DOCUMENTED, page])
    return rows


def judge(found: Found) -> list[Finding]:
    """The rows of the constructs, unproven ones first, then by construct."""
    findings = [
        Finding(str(construct), *_row(construct), min(lines), len(set(lines)))
        for construct, lines in found.items()
    ]
    return sorted(findings, key=lambda one: (STATUSES.index(one.status), one.construct))


def _row(construct: str | Use) -> Row:
    """The row of a construct; of a use the run that shows it, or the nearest one."""
    if isinstance(construct, str):
        missing = Row(UNPROVEN, "no row in the table")
        return _refused().get(construct) or table().get(construct, missing)
    runs = TABLE[construct.instruction].evidence(construct.language)
    shown = evidence.seen(construct, runs)
    return Row(SEEN, shown) if shown else Row(DOCUMENTED, evidence.nearest(construct, runs))


@functools.cache
def _refused() -> dict[str, Row]:
    """Constructs that compilers refuse in every form, with code and source."""
    return {
        construct: Row(REFUSED, entry.told())
        for entry in refusals.refusals()
        for construct in entry.constructs.split()
    }


def counts(findings: Sequence[Finding]) -> dict[str, int]:
    """How many constructs have each status."""
    statuses = [one.status for one in findings]
    return {status: statuses.count(status) for status in STATUSES}


def summary(findings: Sequence[Finding]) -> str:
    """One line: how many constructs there are of each status, and the unproven ones."""
    kinds = [pair for pair in counts(findings).items() if pair[1] or pair[0] != REFUSED]
    told = ", ".join(f"{number} {status}" for status, number in kinds[::-1])
    doubtful = (UNPROVEN, REFUSED)
    unproven = ", ".join(one.construct for one in findings if one.status in doubtful)
    return f"{len(findings)} constructs: {told}" + (f" ({unproven})" if unproven else "")


# --- Program --------------------------------------------------------------------------------------
def in_program(program: Program) -> dict[Use, list[int]]:
    """How a program uses each instruction, which its source does not show."""
    found: dict[Use, list[int]] = {}
    for instruction in program:
        line = instruction.source.line if instruction.source else 0
        engine = instruction.op.engine_of(instruction).value
        first = evidence.LANGUAGES[program.today], instruction.op.name, engine
        kinds = ("result", instruction.dst), ("operand", instruction.src)
        for role, view in ((role, view) for role, views in kinds for view in views):
            memory = view.storage.buffer if view.on_chip else "hbm"
            start = str(view.start_partition) if view.on_chip else "0"
            found.setdefault(Use(*first, role, memory, view.dt.name, start), []).append(line)
    return found


# --- source ---------------------------------------------------------------------------------------
def in_source(text: str, kernel: str | None = None) -> dict[str, list[int]]:
    """Constructs in the source of a module, or in one of its kernels and what that reaches.

    Raises:
        SyntaxError: it is no Python.
        LookupError: it has no function of that name.
    """
    tree = ast.parse(text)
    module = _Module(tree)
    if kernel is not None and kernel not in module.functions:
        raise LookupError(kernel, *module.functions)
    found: dict[str, set[int]] = {}
    inside = module.reached(module.functions[kernel] if kernel else module.kernel_code())
    names = (_names(module, root) for root in (inside if kernel else [tree]))
    forms = (_Forms(module, function).all() for function in inside)
    for construct, line in itertools.chain(*names, *forms):
        found.setdefault(of_today(construct) if module.today else construct, set()).add(line)
    return {construct: sorted(lines) for construct, lines in found.items()}


class _Module:
    """Imports and functions of a file."""

    def __init__(self, tree: ast.Module) -> None:
        imports = list(_imports(tree))
        self.today = any(name.split(".")[0] == "nki" for _, name in imports)
        other = "neuronxcc" if self.today else "nki"
        self.imported = {alias: name for alias, name in imports if name.split(".")[0] != other}
        named = (getattr(n, "name", getattr(n, "id", "")) for n in ast.walk(tree))
        self.views = "TensorView" in named  # its methods are not those of tensors
        self.functions: dict[str, list[Function]] = {}
        for node in ast.walk(tree):
            if isinstance(node, FUNCTIONS):
                self.functions.setdefault(node.name, []).append(node)
        self.top = {node.name for node in tree.body if isinstance(node, FUNCTIONS)}

    def name_of(self, node: ast.AST) -> str:
        """``nl.load`` for an expression that names it under any import; empty for others."""
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name) or node.id not in self.imported:
            return ""
        return _short(".".join([self.imported[node.id], *reversed(parts)]))

    def kernel_code(self) -> list[Function]:
        """Functions that use the language and not PyTorch."""
        return [
            one
            for one in itertools.chain(*self.functions.values())
            if any(self.name_of(node).startswith(TILE_WORDS) for node in _walk(one))
            and not self._uses_torch(one)
        ]

    def reached(self, roots: list[Function]) -> list[Function]:
        """The functions, and the functions of this file that they name, without repetition."""
        found = list(roots)
        for one in found:  # grows while it is walked
            for node in _walk(one):
                name = getattr(node, "id", None) or getattr(node, "attr", None)
                for other in self.functions.get(str(name), ()):
                    if other not in found and not self._uses_torch(other):
                        found.append(other)
        nested = {inner for one in found for inner in ast.walk(one) if inner is not one}
        return [one for one in found if one not in nested]  # their owner's walk covers them

    def _uses_torch(self, function: Function) -> bool:
        roots = {self.imported.get(n.id, "") for n in _walk(function) if isinstance(n, ast.Name)}
        return any(root.split(".")[0] == "torch" for root in roots)


def _axes(node: ast.Subscript) -> list[ast.expr]:
    return list(node.slice.elts) if isinstance(node.slice, ast.Tuple) else [node.slice]


def _bindings(node: ast.Assign) -> Iterator[tuple[ast.expr, ast.expr]]:
    every = itertools.chain(*(pairs(target, node.value) for target in node.targets))
    return ((to, value) for to, value in every if value is not None)


def _imports(tree: ast.Module) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                root = name.name.split(".")[0]
                yield (name.asname, name.name) if name.asname else (root, root)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from ((n.asname or n.name, f"{node.module}.{n.name}") for n in node.names)


def _short(dotted: str) -> str:
    """Shorten ``neuronxcc.nki.language.load`` to ``nl.load``; other names stay unchanged."""
    for module, short in MODULES.items():
        if dotted == module:
            return ""
        if dotted.startswith(module + "."):
            parts = dotted[len(module) + 1 :].split(".")
            deep = short == "ncc" or module.startswith("nki.")  # members of allocators and of enums
            return ".".join([short, *parts[: 2 if deep else 1]])
    return dotted


def of_today(construct: str) -> str:
    """The name of a construct in the language of today: all of them begin with ``nki.``."""
    first, _, rest = construct.partition(".")
    if first in TODAY:
        return f"{TODAY[first]}.{rest}"
    return construct if first == "nki" else f"nki.{construct}"


def _walk(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes below, without annotations and decorators."""
    yield node
    for field, value in ast.iter_fields(node):
        if field not in ("annotation", "returns", "decorator_list"):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from _walk(child)


def _names(module: _Module, root: ast.AST) -> Iterator[tuple[str, int]]:
    """Names of the kernel language and the keywords that calls give them."""
    inner = {n.value for n in ast.walk(root) if isinstance(n, ast.Attribute)}
    callees = {n.func for n in ast.walk(root) if isinstance(n, ast.Call)}
    for node in ast.walk(root):
        name = module.name_of(node.func if isinstance(node, ast.Call) else node)
        if isinstance(node, ast.Call) and name.startswith(TILE_WORDS):
            yield from ((f"{name}({k.arg}=)", node.lineno) for k in node.keywords if k.arg)
        elif isinstance(node, (ast.Attribute, ast.Name)) and node not in inner:
            if module.today and node in callees and name in OPERATORS:
                name += "()"  # a function on tiles since 2.29, not the operator of an instruction
            if name.startswith((*TILE_WORDS, "nki.", "nt.", "neuronxcc.")):
                yield name, node.lineno


class _Forms:
    """Index forms, loops and Python around them in one function."""

    def __init__(self, module: _Module, function: Function) -> None:
        self.module, self.function = module, function
        self.nodes = list(_walk(function))
        assignments = (n for n in self.nodes if isinstance(n, ast.Assign))
        bound = itertools.chain(*map(_bindings, assignments))
        self.assigned = {to.id: value for to, value in bound if isinstance(to, ast.Name)}
        lengths = (n for n in self.nodes if isinstance(n, ast.Call) and self._called(n) == "len")
        # tiles have no len()
        self.lists = {getattr(n.args[0], "id", "") for n in lengths if n.args}
        self.parameters = {node.arg for node in self.nodes if isinstance(node, ast.arg)}
        self.nested = {n.name for n in self.nodes if isinstance(n, FUNCTIONS) and n is not function}

    def all(self) -> Iterator[tuple[str, int]]:
        for node in self.nodes:
            for form in self._of(node):
                yield form, node.lineno  # type: ignore[attr-defined]

    def _of(self, node: ast.AST) -> Iterator[str]:
        if isinstance(node, ast.Subscript):
            yield from self._subscript(node)
        elif isinstance(node, ast.Call):
            yield from self._call(node)
        elif isinstance(node, ast.While):
            yield "while on Python values"
        elif isinstance(node, ast.For):
            if self._called(node.iter) == "nl.static_range" and self._survives(node):
                yield "tile of a static_range body used after it"
        elif isinstance(node, ast.Assign):
            bound = (value for to, value in _bindings(node) if isinstance(to, ast.Attribute))
            if any(self._makes_tiles(self._value(value)) for value in bound):
                yield "tile in an attribute of an object"
        elif isinstance(node, FUNCTIONS) and node is not self.function:
            yield "function defined in a kernel"

    # --- subscripts -------------------------------------------------------------------------------
    def _subscript(self, node: ast.Subscript) -> Iterator[str]:
        if self.module.name_of(node.value) == "nl.mgrid":
            return  # counted as a name
        if any(isinstance(axis, ast.Slice) and axis.step for axis in _axes(node)):
            yield "index: slice with a step"
        if self._has_range(node):
            yield from self._inner(node.value)

    def _inner(self, base: ast.expr) -> Iterator[str]:
        """The tensor of which a subscript with a range takes a part."""
        base = self._value(base)
        if self._has_range(base):
            yield "index: slice of a slice"
        elif (
            isinstance(base, ast.Subscript)
            and not any(isinstance(axis, ast.Slice) for axis in _axes(base))
            and getattr(base.value, "id", "") not in self.lists
        ):
            yield "index: integer, then slice"

    def _has_range(self, node: ast.AST) -> bool:
        """Whether an expression is a subscript of a tensor that takes a part of an axis."""
        if not isinstance(node, ast.Subscript):
            return False
        axes = _axes(node)
        certain = len(axes) > 1 or not isinstance(axes[0], ast.Slice)  # else it may be a list
        return certain and any(map(self._is_span, axes))

    def _is_span(self, axis: ast.expr) -> bool:
        """Whether an axis of a subscript takes a range that may be a part of the axis."""
        if isinstance(axis, ast.Slice):
            return bool(axis.lower or axis.upper or axis.step)
        return self._called(self._value(axis)) == "nl.ds"

    # --- calls ------------------------------------------------------------------------------------
    def _called(self, node: ast.AST) -> str:
        if not isinstance(node, ast.Call):
            return ""
        return self.module.name_of(node.func) or getattr(node.func, "id", "")

    def _call(self, node: ast.Call) -> Iterator[str]:
        name = self._called(node)
        keywords = {k.arg: self.module.name_of(k.value) for k in node.keywords}
        if name in LOOPS and len(node.args) > 1:
            yield f"{name}(start, stop)"
        last = node.args[-1] if node.args else None
        if name in LOOPS and isinstance(last, ast.Constant) and last.value == 0:
            yield "loop of zero iterations"
        loops = (n for n in self.nodes if isinstance(n, (ast.For, ast.While)))
        if keywords.get("buffer") in SCRATCH and any(node in ast.walk(n) for n in loops):
            yield "HBM scratch tensor created in a loop"
        if keywords.get("buffer") == "nl.psum":
            named = {keywords.get("dtype", ""), *map(self.module.name_of, node.args)}
            yield from (f"PSUM tile of {n}" for n in sorted(named) if n in NARROW)
        if isinstance(node.func, ast.Attribute) and not name and self.module.today:
            yield from self._method(node.func.attr, keywords)
        if name.startswith(TILE_WORDS) or callee(node) not in self.module.functions:
            return  # an allocator or Python's own: sorted, functools.partial
        given = [*node.args, *(k.value for k in node.keywords)]
        names = {value.id for value in given if isinstance(value, ast.Name)} - self.parameters
        if names & self.nested or any(isinstance(value, ast.Lambda) for value in given):
            yield "closure passed as an argument"
        if (names & self.module.top) - self.nested - set(self.assigned):
            yield "function of the file passed as an argument"

    def _method(self, name: str, keywords: Iterable[str | None]) -> Iterator[str]:
        """A method of tiles; today's library has views of its own with the same names."""
        if name == "depends_on":
            yield "nisa.NkiInstruction.depends_on"
        elif TENSOR + name in table() and not self.module.views:
            yield f"nl.NkiTensor.{name}"
            yield from (f"nl.NkiTensor.{name}({word}=)" for word in keywords)

    def _value(self, node: ast.expr) -> ast.expr:
        """The last binding of a local name, or the expression itself."""
        return self.assigned.get(node.id, node) if isinstance(node, ast.Name) else node

    def _makes_tiles(self, node: ast.AST) -> bool:
        return any(self._called(n).startswith(MAKERS) for n in _walk(node))

    def _survives(self, loop: ast.For) -> bool:
        """Whether a name that the body binds to a call's result is next read after the loop."""
        assignments = (n for n in _walk(loop) if isinstance(n, ast.Assign))
        bound = itertools.chain(*map(_bindings, assignments))
        made = {getattr(to, "id", "") for to, value in bound if self._makes_tiles(value)}
        end = loop.end_lineno or loop.lineno
        names = [n for n in self.nodes if isinstance(n, ast.Name) and n.lineno > end]
        first: dict[str, ast.Name] = {}
        for one in sorted(names, key=lambda n: (n.lineno, isinstance(n.ctx, ast.Store))):
            first.setdefault(one.id, one)
        return any(isinstance(first[n].ctx, ast.Load) for n in made if n in first)
