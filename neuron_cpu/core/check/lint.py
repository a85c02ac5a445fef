"""Finds Python in a kernel's source that single tracing would change.

The device compiler traces the body of ``affine_range``, ``sequential_range`` and plain ``range``
loops once, with a symbolic index; this simulator runs it once per iteration. Python state that
changes from iteration to iteration therefore works here and fails there (aws-neuron-sdk v2.21.1,
general/nki/programming_model.rst, loop iterators). Nothing in a recorded program shows that, so
this pass reads the syntax tree of the kernel and of what it reaches in its module: functions that
it calls or passes on, classes that it makes and the methods of these that it names. For the same
reason an index of such a loop has no value: it may stand in affine expressions, subscripts of
tensors and arguments, but not choose an item of a Python list or become an ``int``.
``static_range`` bodies are unrolled on the device as well and exempt.

The pass sees names, not values: it is silent where a name may be a tensor updated in place. An
``if`` on an index around instructions is silent too: the device turns it into a condition. So are
``//`` and ``%`` of an index, which kernels of others use in subscripts.

One finding is an error, since the vendor documents it as one (v2.21.1, general/nki/api/
nki.errors.rst, err_local_variable_used_out_of_scope): a tensor made under a condition on an index
and used behind it. An ``if`` on values known while tracing is Python's own: public kernels that ran
on a device use what such a branch made.
"""

import ast
import functools
from collections.abc import Callable, Iterator, Sequence
from types import CodeType, FunctionType
from typing import Any, NamedTuple

from ..device.errors import refuse, warn
from ..program.source import callee, methods_of, names_of, nodes_of, pairs, reachable, tree_of

TRACED_ONCE = frozenset({"affine_range", "sequential_range", "range"})
CONTAINER_CALLS = frozenset({"list", "dict", "set", "defaultdict", "deque", "OrderedDict"})
MUTATORS = frozenset(
    {"append", "appendleft", "extend", "insert", "pop", "popitem", "remove", "discard", "clear",
     "update", "add", "setdefault", "sort", "reverse"}
)  # fmt: skip
LOOPS = TRACED_ONCE | {"static_range"}
VALUE_CALLS = frozenset({"divmod", "int", "float", "round"})
LOOKUPS = frozenset({"get", "index"})
TENSOR_MODULES = frozenset({"nl", "nisa", "ncc"})
NO_TENSORS = frozenset(  # what functions of these modules return that is no tensor
    {"affine_range", "arange", "ds", "num_programs", "par_dim", "program_id", "program_ndim",
     "sequential_range", "static_range", "get_nc_version", "device_print", "store"}
)  # fmt: skip
SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
Bound = dict[str, "ast.expr | None"]  # names bound so far and their last value, None if unknown


GRIDS = frozenset({"arange", "mgrid", "ds", "par_dim"})


def _is_grid(value: ast.expr, changing: set[str]) -> bool:
    """Whether an expression is an index grid or a sum of numbers, of names not ``changing``."""
    names = {n.id for n in ast.walk(value) if isinstance(n, ast.Name)}
    calls = [n for n in ast.walk(value) if isinstance(n, ast.Call)]
    attributes = {n.attr for n in ast.walk(value) if isinstance(n, ast.Attribute)}
    makes = {c.func.attr for c in calls if isinstance(c.func, ast.Attribute)}
    plain = all(isinstance(c.func, ast.Attribute) for c in calls) and makes <= GRIDS
    grid = plain and bool(attributes & GRIDS)
    numbers = (ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop, ast.Name, ast.Constant, ast.Load)
    return (grid or all(isinstance(n, numbers) for n in ast.walk(value))) and not names & changing


class Finding(NamedTuple):
    """One doubtful construct."""

    identifier: str
    line: int
    message: str


def lint(function: Callable | None) -> None:
    """Warn of constructs in ``function`` that single tracing makes wrong, with their lines.

    Raises:
        NkiError: one of them is a documented error.
    """
    if function is None:
        return
    for place, finding in findings(function):
        if finding.identifier.startswith("err_"):
            raise refuse(finding.identifier, finding.message, place)
        # the contest's winner took min() of an index, and ran on a device
        warn(finding.identifier, finding.message, place, finding.identifier == "sim_loop_min_max")


def findings(function: Callable) -> list[tuple[str, Finding]]:
    """``(kernel (file:line), finding)`` for the function and what it reaches in its own module."""
    reached = reachable(function)
    return [
        (f"{reached[0][0].__name__} ({one.__code__.co_filename}:{finding.line})", finding)
        for one, owner in reached
        for finding in _of_function(one, owner)
    ]


# By code object: a kernel is traced for every shape, a helper is reached by many kernels.
_findings: dict[tuple[CodeType, type | None], list[Finding]] = {}


def _of_function(function: FunctionType, owner: type | None) -> list[Finding]:
    key = function.__code__, owner
    if key not in _findings:
        tree = tree_of(function)
        known = names_of(function)
        containers = frozenset() if owner is None else _attributes(owner)
        _findings[key] = [] if tree is None else _Scope(tree, known, containers).check()
    return _findings[key]


@functools.cache
def _attributes(owner: type) -> frozenset[str]:
    """Attributes that the class and its methods bind to Python containers and nothing else."""
    bound: dict[str, list[bool]] = {}
    for name, value in vars(owner).items():
        bound[name] = [isinstance(value, (list, dict, set))]
    for _, method in methods_of(owner):
        for node in nodes_of(tree_of(method)):
            if isinstance(node, ast.Assign):
                set_here = [pair for one in node.targets for pair in pairs(one, node.value)]
            elif isinstance(node, ast.AnnAssign) and node.value is not None:
                set_here = [(node.target, node.value)]
            else:
                continue
            for target, value in set_here:
                if isinstance(target, ast.Attribute):
                    bound.setdefault(target.attr, []).append(_is_container(value))
    return frozenset(name for name, kinds in bound.items() if all(kinds))


# --- reading syntax trees -------------------------------------------------------------------------
def _targets(node: ast.AST) -> list[ast.Name]:
    """Names that an assignment target binds."""
    names = (n for n in ast.walk(node) if isinstance(n, ast.Name))
    return [one for one in names if isinstance(one.ctx, ast.Store)]


def _walk(nodes: Sequence[ast.AST]) -> list[ast.AST]:
    """All nodes below, without nested functions."""
    return _below(tuple(nodes))[0]


def _stores(nodes: Sequence[ast.AST]) -> dict[str, ast.AST]:
    """Names that statements bind, with the first node that does."""
    return _below(tuple(nodes))[1]


@functools.lru_cache(256)  # every name of a loop asks again
def _below(nodes: tuple[ast.AST, ...]) -> tuple[list[ast.AST], dict[str, ast.AST]]:
    stack, below = list(nodes)[::-1], []
    found: dict[str, ast.AST] = {}
    while stack:
        node = stack.pop()
        below.append(node)
        if not isinstance(node, SCOPES):
            stack.extend(list(ast.iter_child_nodes(node))[::-1])
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.setdefault(node.id, node)
    # Variables of comprehensions live in a scope of their own: not stored where that was the first.
    for node in below:
        if isinstance(node, COMPREHENSIONS):
            for generator in node.generators:
                for name in _targets(generator.target):
                    if found.get(name.id) is name:
                        del found[name.id]
    return below, found


def _reads(node: ast.AST | None, name: str) -> bool:
    """True when evaluating ``node`` looks ``name`` up in the function's scope."""
    if node is None:
        return False
    if isinstance(node, ast.Name):
        return node.id == name and not isinstance(node.ctx, ast.Store)
    # What shadows the name: parameters of a lambda, and variables of a comprehension, which reads
    # only its first iterable outside.
    if isinstance(node, ast.Lambda) and any(a.arg == name for a in node.args.args):
        return False
    if isinstance(node, COMPREHENSIONS) and any(
        one.id == name for g in node.generators for one in _targets(g.target)
    ):
        return _reads(node.generators[0].iter, name)
    # The target of ``name += value`` has Store context and is read all the same.
    if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
        return node.target.id == name or _reads(node.value, name)
    return any(_reads(child, name) for child in ast.iter_child_nodes(node))


def _first_event(statements: Sequence[ast.stmt], name: str) -> tuple[str, ast.AST] | None:
    """Whether the statements first read or first write ``name``, and the node that does.

    A write on one side of an ``if`` only does not count as one: the other side keeps the old value.
    """
    for statement in statements:
        event = _event(statement, name)
        if event is not None:
            return event
        if isinstance(statement, (ast.Return, ast.Raise)):
            return None
    return None


def _event(statement: ast.stmt, name: str) -> tuple[str, ast.AST] | None:
    if isinstance(statement, ast.If):
        if _reads(statement.test, name):
            return "read", statement.test
        # Which side runs is not known: a read on either counts, a write only if both write.
        sides = [_first_event(statement.body, name), _first_event(statement.orelse, name)]
        for side in sides:
            if side is not None and side[0] == "read":
                return side
        return sides[0] if all(sides) else None
    if isinstance(statement, (ast.For, ast.While)):
        head = statement.iter if isinstance(statement, ast.For) else statement.test
        if _reads(head, name):
            return "read", head
        if isinstance(statement, ast.For) and name in {n.id for n in _targets(statement.target)}:
            return "write", statement
        return _first_event([*statement.body, *statement.orelse], name)
    if isinstance(statement, ast.With):
        for item in statement.items:
            if _reads(item.context_expr, name):
                return "read", item.context_expr
        return _first_event(statement.body, name)
    if _reads(statement, name):
        return "read", statement
    return ("write", statement) if name in _stores([statement]) else None


def _is_container(value: ast.expr | None) -> bool:
    """True for expressions that visibly make a Python list, dict or set."""
    if isinstance(value, (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)):
        return True
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Mult):
        return _is_container(value.left) or _is_container(value.right)
    return (
        isinstance(value, ast.Call)
        and isinstance(value.func, ast.Name)
        and value.func.id in CONTAINER_CALLS
    )


def _calls_tensor_api(value: ast.AST | None) -> bool:
    return value is not None and any(
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id in TENSOR_MODULES
        for node in ast.walk(value)
    )


def _makes_tensor(value: ast.expr | None) -> bool:
    """True for expressions that visibly make a tensor."""
    if isinstance(value, ast.BinOp):
        return _makes_tensor(value.left) or _makes_tensor(value.right)
    if isinstance(value, (ast.UnaryOp, ast.Subscript)):
        return _makes_tensor(value.operand if isinstance(value, ast.UnaryOp) else value.value)
    if not isinstance(value, ast.Call) or not isinstance(value.func, ast.Attribute):
        return False
    module, name = value.func.value, value.func.attr
    if isinstance(module, ast.Name):
        return module.id in TENSOR_MODULES and name not in NO_TENSORS
    return _makes_tensor(module)  # a method of what an inner call made


def _binds_tensor(statements: Sequence[ast.stmt], name: str) -> bool:
    """True where every value that the statements bind to ``name`` is visibly a tensor."""
    values = [
        value
        for node in _walk(statements)
        if isinstance(node, ast.Assign)
        for one in node.targets
        for target, value in pairs(one, node.value)
        if isinstance(target, ast.Name) and target.id == name
    ]
    return _times_stored(statements, name) == len(values) and all(map(_makes_tensor, values))


def _times_stored(nodes: Sequence[ast.AST], name: str) -> int:
    names = (n for n in _walk(nodes) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))
    return sum(node.id == name for node in names)


# --- the checks -----------------------------------------------------------------------------------
class _Scope:
    """One function: its statements in order, with earlier bindings and later statements of each.

    Attributes:
        indices: loop indices of the enclosing loops that are traced once, and names computed from
            them by plain arithmetic.
        fresh: names that the body of the innermost such loop has bound so far.
        attributes: names of the attributes of ``receiver`` that are Python containers.
    """

    def __init__(
        self, tree: ast.FunctionDef, known: dict[str, Any], attributes: frozenset[str] = frozenset()
    ) -> None:
        self.tree, self.known, self.attributes = tree, known, attributes
        arguments = [*tree.args.posonlyargs, *tree.args.args]
        self.receiver = arguments[0].arg if attributes and arguments else None
        self.found: dict[tuple[str, int, str], Finding] = {}
        self.indices: set[str] = set()
        self.fresh: set[str] = set()
        self.outer = {
            name
            for node in _walk(tree.body)
            if isinstance(node, (ast.Global, ast.Nonlocal))
            for name in node.names
        }
        self.writers = {
            node.name
            for node in tree.body
            if isinstance(node, ast.FunctionDef)
            and any(isinstance(n, (ast.Global, ast.Nonlocal)) for n in ast.walk(node))
        }

    def check(self) -> list[Finding]:
        every = self.tree.args
        named = [*every.posonlyargs, *every.args, *every.kwonlyargs]
        bound: Bound = {a.arg: None for a in (*named, every.vararg, every.kwarg) if a is not None}
        self._block(self.tree.body, [], bound, once=False)
        # Nested functions are scopes of their own: no index of this one is theirs.
        for node in _walk(self.tree.body):
            if isinstance(node, ast.FunctionDef):
                for finding in _Scope(node, self.known).check():
                    self.found.setdefault((finding.identifier, finding.line, node.name), finding)
        return sorted(self.found.values(), key=lambda f: f.line)

    def _report(self, identifier: str, node: ast.AST, name: str, message: str) -> None:
        line = getattr(node, "lineno", self.tree.lineno)
        self.found.setdefault((identifier, line, name), Finding(identifier, line, message))

    def _block(
        self, block: list[ast.stmt], after: list[ast.stmt], bound: Bound, once: bool
    ) -> None:
        """Visit statements; ``after`` runs when the block is done, ``once``: in a traced loop."""
        # Checks come before bindings: they see what was bound when the statement begins.
        for position, statement in enumerate(block):
            follow = [*block[position + 1 :], *after]
            if once:
                self._in_loop(statement, follow, bound)
            if isinstance(statement, ast.For):
                self._for(statement, follow, bound, once)
            elif isinstance(statement, (ast.If, ast.While)):
                self._block(statement.body, follow, bound, once)
                self._block(statement.orelse, follow, bound, once)
            elif isinstance(statement, ast.With):
                self._block(statement.body, follow, bound, once)
            elif isinstance(statement, ast.Assign):
                plain = [t for t in statement.targets if isinstance(t, ast.Name)]
                for target in statement.targets:
                    for name in _targets(target):
                        bound[name.id] = statement.value if name in plain else None
                        self.fresh.add(name.id)
                    if isinstance(target, ast.Attribute):
                        self.fresh.add(ast.unparse(target))
            else:
                for stored in _stores([statement]):
                    bound.setdefault(stored, None)

    def _for(self, loop: ast.For, follow: list[ast.stmt], bound: Bound, once: bool) -> None:
        traced_once = callee(loop.iter) in TRACED_ONCE
        names = [n.id for n in _targets(loop.target)]
        # A static loop inside a traced one keeps the outer indices, but its own are numbers.
        before = set(self.indices), self.fresh
        if traced_once:
            self._loop(loop, follow, bound)
            self.indices.update(names)
            self.fresh = set()
        else:
            self.indices.difference_update(names)
        for name in names:
            bound[name] = None
        self._block(loop.body, follow, bound, once or traced_once)
        self.indices, self.fresh = before

    def _loop(self, loop: ast.For, follow: list[ast.stmt], bound: Bound) -> None:
        """Names that the body rebinds and that carry a value out of an iteration."""
        # Carried: an iteration reads the name before it writes it, so it sees the iteration before.
        # Used: something after the loop reads what the last iteration left.
        for one in loop.body:
            if isinstance(one, (ast.Return, ast.Break, ast.Continue)):
                word = type(one).__name__.lower()
                self._report(
                    "sim_loop_exit",
                    one,
                    word,
                    f"{word} ends the loop at line {loop.lineno} in its first iteration, expected "
                    "the whole body, traced once for all iterations; move it behind the loop",
                )
        own = {n.id for n in _targets(loop.target)}
        for name, node in _stores([loop.target, *loop.body]).items():
            if self._only_updated_in_place(name, loop.body, bound):
                continue
            first = _first_event(loop.body, name)
            carried = name not in own and first is not None and first[0] == "read"
            later = _first_event(follow, name)
            used = later[1] if later is not None and later[0] == "read" else None
            if not carried and self._same_each_time(name, loop, own):
                continue
            if name in bound and (carried or used is not None):
                self._report(
                    "sim_loop_rebinding",
                    node,
                    name,
                    f"'{name}' is rebound inside the loop at line {loop.lineno} and its value is "
                    "used by later iterations or after it, expected no change of Python names: the "
                    f"device traces the body once; assign to a tensor, {name}[...] = value, or use "
                    "nl.static_range",
                )
            elif used is not None and name in own:
                self._report(
                    "sim_loop_index_used_after",
                    used,
                    name,
                    f"'{name}', the index of the loop at line {loop.lineno}, is used after it, "
                    "expected uses inside the loop, whose index has no value outside; move the "
                    "instruction into the loop",
                )
            elif used is not None:
                self._report(
                    "sim_loop_local_used_after",
                    used,
                    name,
                    f"'{name}' is bound only inside the loop at line {loop.lineno} and used after "
                    "it, expected uses inside the loop: its scope ends there on the device; create "
                    f"the tensor before the loop and assign to {name}[...] in it",
                )

    def _same_each_time(self, name: str, loop: ast.For, own: set[str]) -> bool:
        """True when the loop binds ``name`` to grids or numbers alone, the same in each round."""
        changing = set(_stores([loop.target, *loop.body])) | own
        values = []
        for node in _walk(loop.body):
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    if any(t.id == name for t in _targets(target)):
                        values.append(node.value)
            elif isinstance(node, (ast.AugAssign, ast.For)) and name in _stores([node]):
                return False
        return bool(values) and all(_is_grid(value, changing - {name}) for value in values)

    def _only_updated_in_place(self, name: str, body: list[ast.stmt], bound: Bound) -> bool:
        """True when the body binds ``name`` by augmented assignments of tensors alone."""
        updates = [
            node
            for node in _walk(body)
            if isinstance(node, ast.AugAssign)
            and isinstance(node.target, ast.Name)
            and node.target.id == name
        ]
        if not updates or _times_stored(body, name) != len(updates):
            return False
        return _calls_tensor_api(bound.get(name)) or all(
            self._adds_tensor(node, body, bound) for node in updates
        )

    def _adds_tensor(self, node: ast.AugAssign, body: list[ast.stmt], bound: Bound) -> bool:
        """True when an augmented assignment's value comes from the tensor API."""
        if _calls_tensor_api(node.value):
            return True
        if not isinstance(node.value, ast.Name):
            return False
        return any(
            isinstance(n, ast.Assign)
            and any(t.id == node.value.id for target in n.targets for t in _targets(target))
            and _calls_tensor_api(n.value)
            for n in _walk(body)
        )

    # --- statements inside a loop that is traced once ---------------------------------------------
    def _in_loop(self, statement: ast.stmt, follow: list[ast.stmt], bound: Bound) -> None:
        # Of a compound statement only the head is looked at here; ``_block`` visits its body.
        self._derive_indices(statement)
        nested = isinstance(statement, (ast.For, ast.While, ast.If, ast.With))
        for node in self._visible(_heads(statement) if nested else [statement]):
            self._index_use(node, bound)
            if isinstance(node, ast.Call):
                self._call(node, bound)
            elif isinstance(node, ast.IfExp) and self._depends(node.test):
                self._condition(node, "a value")
        if isinstance(statement, ast.While) and self._holds_index(statement.test):
            self._index_value(statement, "a while condition")
        # An ``if`` on an index becomes a condition on the device. What it cannot choose are things
        # of Python: where the body ends, and which value a name has afterwards.
        if isinstance(statement, ast.If) and self._depends(statement.test):
            if any(
                isinstance(n, (ast.Return, ast.Break, ast.Continue))
                for n in _walk([*statement.body, *statement.orelse])
            ):
                self._condition(statement, "where the loop's body ends")
            for name in _stores([*statement.body, *statement.orelse]):
                event = _first_event(follow, name)
                if event is None or event[0] != "read":
                    continue
                if _binds_tensor([*statement.body, *statement.orelse], name):
                    self._report(
                        "err_local_variable_used_out_of_scope",
                        event[1],
                        name,
                        f"'{name}' is a tensor made under the condition at line {statement.lineno} "
                        "and used outside of it, expected uses inside it only: the device traces "
                        "both sides, and each is a scope of its own; create the tensor before the "
                        f"if and assign to {name}[...] in it",
                    )
                else:
                    self._condition(statement, f"'{name}'")
        if isinstance(statement, (ast.Assign, ast.AugAssign)):
            self._assignment(statement, bound)

    def _derive_indices(self, statement: ast.stmt) -> None:
        if isinstance(statement, ast.Assign):
            for one in statement.targets:
                for target, value in pairs(one, statement.value):
                    if value is not None and self._depends(value, arithmetic=True):
                        self.indices.update(n.id for n in _targets(target))
                    else:
                        self.indices.difference_update(n.id for n in _targets(target))

    def _visible(self, nodes: Sequence[ast.AST]) -> Iterator[ast.AST]:
        """Nodes below in which the indices' names are the indices."""
        hidden = {
            below
            for node in _walk(nodes)
            if isinstance(node, COMPREHENSIONS)
            and any(n.id in self.indices for g in node.generators for n in _targets(g.target))
            for below in ast.walk(node)
        }
        return (node for node in _walk(nodes) if node not in hidden)

    def _holds_index(self, node: ast.AST) -> bool:
        """True when an index is part of the value, not an argument or subscript on the way."""
        if isinstance(node, (ast.Call, ast.Subscript, *SCOPES, *COMPREHENSIONS)):
            return False
        if isinstance(node, ast.Name):
            return node.id in self.indices
        return any(self._holds_index(child) for child in ast.iter_child_nodes(node))

    def _index_use(self, node: ast.AST, bound: Bound) -> None:
        """Uses of an index that need its value."""
        if isinstance(node, ast.Call) and any(self._holds_index(a) for a in node.args):
            self._index_call(node, bound)
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
            if self._holds_index(node.slice) and self._container(node.value, bound, tuples=True):
                self._index_value(node, f"the key of an item of '{ast.unparse(node.value)}'")
        elif (
            isinstance(node, ast.Compare)
            and isinstance(node.ops[0], (ast.In, ast.NotIn))
            and self._holds_index(node.left)
        ):
            self._index_value(node, "the left side of 'in'")

    def _index_call(self, node: ast.Call, bound: Bound) -> None:
        function = node.func
        if callee(node) in LOOPS:
            self._index_value(node, f"a bound of {callee(node)}()")
        elif isinstance(function, ast.Name):
            if function.id in VALUE_CALLS and function.id not in {*bound, *self.known}:
                self._index_value(node, f"an argument of {function.id}()")
        elif (
            isinstance(function, ast.Attribute)
            and function.attr in LOOKUPS
            and self._container(function.value, bound, tuples=True)
        ):
            self._index_value(node, f"the key of an item of '{ast.unparse(function.value)}'")

    def _index_value(self, node: ast.AST, what: str) -> None:
        self._report(
            "sim_loop_index_value",
            node,
            what,
            f"a loop index is {what}, expected affine expressions (+, - and * by constants), "
            "subscripts of tensors and arguments: the index is symbolic on the device and has no "
            "Python value; use nl.static_range",
        )

    def _depends(self, node: ast.expr, arithmetic: bool = False) -> bool:
        """True when the expression involves a loop index (through plain arithmetic only)."""
        if arithmetic and any(isinstance(n, (ast.Call, ast.Subscript)) for n in ast.walk(node)):
            return False
        return any(_reads(node, name) for name in self.indices)

    def _condition(self, node: ast.AST, what: str) -> None:
        self._report(
            "sim_loop_condition",
            node,
            what,
            f"a condition on a loop index chooses {what}, expected Python values that are the same "
            "in every iteration: the device traces both sides once; write tensors under the "
            "condition, use a mask, or nl.static_range",
        )

    def _call(self, node: ast.Call, bound: Bound) -> None:
        function = node.func
        if isinstance(function, ast.Name):
            if function.id in ("min", "max") and any(self._depends(a) for a in node.args):
                self._report(
                    "sim_loop_min_max",
                    node,
                    function.id,
                    f"{function.id}() of a loop index, expected affine expressions: the index is "
                    "symbolic on the device; mask the elements beyond the end instead",
                )
            if function.id in self.writers:
                self._side_effect(node, function.id, "assigns to outer variables")
        elif (
            isinstance(function, ast.Attribute)
            and function.attr in MUTATORS
            and self._outer_container(function.value, bound)
        ):
            name = ast.unparse(function.value)
            self._side_effect(node, name, f"is changed by .{function.attr}()")

    def _assignment(self, statement: ast.Assign | ast.AugAssign, bound: Bound) -> None:
        for whole in statement.targets if isinstance(statement, ast.Assign) else [statement.target]:
            for name in _targets(whole):
                if name.id in self.outer:
                    self._side_effect(statement, name.id, "is an outer variable assigned to")
            for target, _ in pairs(whole, None):
                if isinstance(target, ast.Subscript) and self._outer_container(target.value, bound):
                    self._side_effect(statement, ast.unparse(target.value), "has an item assigned")

    def _outer_container(self, node: ast.expr, bound: Bound) -> bool:
        """True for a Python container that the loop body did not make itself."""
        return ast.unparse(node) not in self.fresh and self._container(node, bound)

    def _container(self, node: ast.expr, bound: Bound, tuples: bool = False) -> bool:
        """True for names and attributes that visibly hold a Python container."""
        if isinstance(node, ast.Attribute):
            if tuples and node.attr == "shape":
                return True
            return (
                isinstance(node.value, ast.Name)
                and node.value.id == self.receiver
                and node.attr in self.attributes
            )
        if not isinstance(node, ast.Name):
            return tuples and (_is_container(node) or isinstance(node, ast.Tuple))
        if node.id not in bound:
            kinds = (list, dict, set, tuple) if tuples else (list, dict, set)
            return isinstance(self.known.get(node.id), kinds)
        value = bound[node.id]
        if isinstance(value, ast.Attribute):  # another name of an attribute
            return self._container(value, bound, tuples)
        return _is_container(value) or (tuples and isinstance(value, ast.Tuple))

    def _side_effect(self, node: ast.AST, name: str, what: str) -> None:
        self._report(
            "sim_loop_side_effect",
            node,
            name,
            f"'{name}' {what} inside a loop, expected no Python side effects: the device traces "
            "the body once, so it happens once; use a tensor with a block axis, or nl.static_range",
        )


def _heads(statement: ast.stmt) -> list[ast.AST]:
    """Expressions of a compound statement that are evaluated before its body."""
    if isinstance(statement, ast.For):
        return [statement.iter]
    if isinstance(statement, (ast.If, ast.While)):
        return [statement.test]
    return [i.context_expr for i in statement.items] if isinstance(statement, ast.With) else []
