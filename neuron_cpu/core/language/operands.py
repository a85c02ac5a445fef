"""Arguments of the functions of ``nki.isa`` and ``nki.language``, fresh results, ``name=``.

Names of operators: ``nl`` functions, numpy functions and strings all mean the same op codes
(aws-neuron-sdk v2.21.1, general/nki/api/nki.api.shared.rst, supported math operators).
"""

import difflib
import functools
import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from types import FunctionType
from typing import Any

import numpy as np

from ..device import written
from ..device.dtypes import DType, Shape, to_dtype
from ..device.errors import NkiError, refuse, say, users_frames, warn
from ..device.release import ENVIRONMENT_VARIABLE, chosen, since
from ..device.spec import Engine
from ..device.target import needs
from ..device.unknown import CALLS, EXAMPLES, KEYWORDS
from ..instructions.alu import ACTIVATIONS, OPERATORS
from ..instructions.arguments import check_total, common_part, no_tensor
from ..instructions.entry import FORMS, SBUF, Form, OpSpec, form
from ..instructions.recorder import Axes, record
from ..program import regions, trace
from ..program.attributes import Attrs
from ..program.index import is_integer
from ..program.view import View, called

isa = functools.partial(form, "neuronxcc.nki.isa")


def tile(value: Any, what: str) -> View:
    """``value`` as a tile, or the refusal for anything else."""
    if isinstance(value, View):
        return value
    trace.current(what.partition(" ")[0])  # outside of a kernel that is the mistake
    raise no_tensor(value, what, "a tensor")


def result_type(dtype: Any, default: DType) -> DType:
    """The element type of a result: the given one, or ``default``."""
    return default if dtype is None else to_dtype(dtype)


def choose_engine(value: Any, what: str, allowed: tuple[Engine, ...]) -> Engine | None:
    """The engine of an ``engine=`` argument, None where it leaves the choice open."""
    if value is None or value == 0:
        return None
    if value not in allowed:
        names = " or ".join(e.value for e in allowed)
        raise refuse("sim_engine", f"{what} cannot run on {value}, expected {names}; drop engine=")
    return value


def same_shape(what: str, *views: View) -> None:
    """Refuse operands of different shapes."""
    for view in views[1:]:
        if view.shape != views[0].shape:
            raise refuse(
                "sim_shape_mismatch",
                f"{what} got {views[0].label()} and {view.label()}, expected equal shapes; "
                + common_part(views[0], view),
            )


def reduction_target(reduce_res: Any, data: View, what: str) -> View:
    """The (P, 1) tile that receives a second result."""
    total = tile(reduce_res, f"{what} reduce_res")
    check_total(total, data.shape[0], what)
    return total


def newer(name: str, release: str) -> None:
    """Warn that the SDK release in force does not have a function yet."""
    if since(release):
        return
    warn(
        "sim_newer_api",
        f"nisa.{name} needs SDK {release} or newer, expected functions of {chosen()}; the kernel "
        f"does not compile there, choose the release with {ENVIRONMENT_VARIABLE}",
    )


def fresh(
    op: OpSpec,
    src: tuple[View, ...],
    attrs: Attrs,
    dtype: Any = None,
    mask: Any = None,
    shape: Shape | None = None,
    axes: Sequence[Axes] = (),
    over: Shape | None = None,
    buffer: str = SBUF,
    also: tuple[View, ...] = (),
) -> View:
    """Record ``op`` into a new tile and return the tile; an assignment may move the result.

    Args:
        dtype, shape: of the tile; by default the first operand's.
        over: what the mask selects in; by default the shape of the first operand, if there is one.
        also: further destinations. The others as in ``record``.
    """
    tracer = trace.active() or trace.current(f"nisa.{op.name}")
    sizes = src[0].shape if shape is None else shape
    made = tracer.storage(sizes, src[0].dt if dtype is None else to_dtype(dtype), buffer)
    out = tracer.whole(made)
    if mask is None:  # the usual case without a second look
        made.producer = tracer.emit(op, (out, *also), src, attrs)
    else:
        before = len(tracer.program.instructions)
        over = over or (src[0].shape if src else sizes)
        made.producer = record(op, (out, *also), src, attrs, mask, over, axes)
        if made.producer is None:
            made.parts = [out.box_of(i.dst[0]) for i in tracer.program.instructions[before:]]
    return out


def rows_only(what: str, mask: Any, *views: View) -> Iterator[View]:
    """``views`` of one shape, cut by a mask that selects a box (instructions over whole rows)."""
    cut = None if mask is None else regions.region(mask, views[0].shape)
    if cut is not None and not isinstance(cut, tuple):
        raise refuse(
            "sim_reduce_mask",
            f"mask of {what} is no box of {views[0].label()}, expected one bound per axis and at "
            "least one element; slice the operand instead",
        )
    for view in views:
        yield view if cut is None else view.slice_box(cut)


_NUMPY: dict[Any, str] = {
    getattr(np, name): name for name in (*OPERATORS, *ACTIVATIONS, "divide") if hasattr(np, name)
} | {
    np.max: "maximum",
    np.min: "minimum",
    np.sum: "add",
    np.prod: "multiply",
    np.all: "logical_and",
    np.any: "logical_or",
}


# functions that reduce, and the operators that they reduce with
REDUCTIONS = {"sum": "add", "max": "maximum", "min": "minimum", "prod": "multiply"}
FUNCTIONS = REDUCTIONS | {"all": "logical_and"}


def name_of(op: Any) -> str:
    """Op code of an operator argument.

    Raises:
        NkiError: the object is no operator of the language.
    """
    own = getattr(op, "nki_name", None)
    if own is not None:
        return FUNCTIONS.get(own, own)
    try:
        found = _NUMPY.get(op)
    except TypeError:
        found = None
    if found is None and isinstance(op, str):
        found = FUNCTIONS.get(op, op)
    if found is None:
        raise refuse(
            "sim_unknown_operator",
            f"operator {getattr(op, '__name__', op)} is none of the language, expected an nl or "
            "numpy function such as nl.add or np.exp; give it by name, as op=nl.add or op0=nl.add",
        )
    return found


# --- name= and misfits ----------------------------------------------------------------------------
# Every function of ``nki.language`` and ``nki.isa`` takes ``name=``, as a label: the documented
# signatures end in ``**kwargs`` (aws-neuron-sdk v2.21.1, general/nki/api/nki), which public kernels
# use for it. The label names the result in messages and reports.
def labelled(function: Callable, form: Form | None = None) -> Callable:
    """``function`` with the keyword ``name``, and refusals for arguments that it does not take; of
    a form also with the warning of earlier releases and the refusal of earlier generations."""
    own = "name" in inspect.signature(function).parameters
    entry = None if form is None else form.entry
    return fitted(function, form, label=None if own else _name, entry=entry)


def _name(result: Any, name: Any) -> None:
    if name and isinstance(result, View) and not result.storage.name:
        result.storage.name = name


def fitted(
    function: Callable,
    form: Form | None = None,
    check: Callable[[Any, str], View] = tile,
    label: Callable[[Any, Any], None] | None = None,
    shown: bool = False,
    entry: OpSpec | None = None,
    prepare: Callable[[tuple, dict[str, Any]], tuple] | None = None,
) -> Callable:
    """``function`` as kernels call it.

    Args:
        form: its releases and generations.
        check: refuses arguments that are no tensors, for parameters that are annotated ``View``.
        label: gets the result and what ``name=`` gives.
        shown: whether ``name`` is the last parameter, too.
        entry: the instruction, whose memories are told before sizes and types.
        prepare: refuses or respells arguments; gives those without a name, changes those by name.

    Raises:
        NkiError: arguments that the function does not take.
    """
    came, generation = (form.came, form.generation) if form is not None else ("", 2)
    signature = inspect.signature(function)
    listed = list(signature.parameters.values())
    views = (View, "View")
    operands = [(at, one.name) for at, one in enumerate(listed) if one.annotation in views]
    if shown:
        last = inspect.Parameter("name", inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None)
        signature = signature.replace(parameters=[*listed, last])

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True  # as in a kernel's call
        if prepare is not None:
            args = prepare(args, kwargs)
        name = kwargs.pop("name", None) if label is not None else None
        if shown and len(args) > len(listed) and isinstance(args[-1], str):
            args, name = args[:-1], args[-1]
        try:
            if generation > 2:
                needs(function.__name__, generation)
            if came:
                newer(function.__name__, came)
            for at, word in operands:
                value = args[at] if at < len(args) else kwargs.get(word)
                if not isinstance(value, View) and _fits(function, args, kwargs):
                    check(value, f"{function.__name__} {word}")
            result = function(*args, **kwargs)
            if name is not None and label is not None:
                label(result, name)
        except TypeError as error:
            if error.__traceback__ is not None and error.__traceback__.tb_next is None:
                raise _misfit(call, error, args, kwargs) from None
            raise
        except NkiError as error:
            if error.identifier.removeprefix("sim_") in _KINDS and (
                told := _in_order(call, args, kwargs)
            ):
                say(error, f"{error.message.rpartition('; ')[0]}; {told}")
            elif entry is not None:  # memories before sizes and types
                entry.check_memories({**dict(zip(signature.parameters, args)), **kwargs})
            if trace.active() is None:  # no kernel's call takes the entries of ours away
                raise error.with_traceback(users_frames(error)) from None
            raise
        return result

    call.__signature__ = signature  # type: ignore[attr-defined]
    return call


def _fits(function: Callable, args: tuple[Any, ...], given: dict[str, Any]) -> bool:
    try:
        inspect.signature(function).bind(*args, **given)
    except TypeError:  # which the call raises, too, and names all of
        return False
    return True


# refusals of one argument's kind, which the place of another may be the reason of
_KINDS = ("operand_type", "number", "unknown_operator", "engine", "dtype")


def _in_order(function: Callable, args: tuple, given: dict[str, Any]) -> str:
    """The call with its arguments by name, "" where they stand in the right order already.

    A value goes to the first parameter of its kind; dst is the one left out where the values fit
    behind it. What else is required is added.
    """
    known, (texts, named) = inspect.signature(function).parameters, written.arguments()
    names = [name for name, one in known.items() if not isinstance(one.default, bool)]
    rest = names[1:] if names[0] == "dst" and "dst" not in given else []
    tiles = [name for name in _required(function) if known[name].annotation in (View, "View")]
    few = sum(isinstance(one, View) for one in (*args, *given.values())) < len(tiles)
    left_out = bool(rest) and (few or all(map(_takes, map(known.get, rest), args)))
    found, pool = [], rest if left_out else list(names)
    last = any(isinstance(one, View) and not one.on_chip for one in args[-1:])
    if last := last and pool[0] == "dst" and any(map(callable, args)):  # of an engine's it is dst
        args, texts = (args[-1], *args[:-1]), [texts[-1], *texts[:-1]]
    for value in args:
        fits = next((name for name in pool if _takes(known[name], value)), "")
        found.append(fits)
        pool = [name for name in pool if name != fits]
    if "" in found or len(texts) != len(found):
        return ""
    tile, new = written.target()
    told = {**({"dst": tile} if left_out else {}), **dict(zip(found, texts)), **named}
    lacks = [name for name in _required(function) if name not in told]
    named_only = found and known[found[0]].kind is inspect.Parameter.KEYWORD_ONLY
    right = lacks or (found == list(known)[: len(found)] and not named_only)
    if right and not left_out and not last:
        return ""
    told |= {name: EXAMPLES.get(name, "...") for name in lacks}
    of = written.called(function.__name__)
    call = f"{of}({', '.join(f'{name}={text}' for name, text in told.items())})"
    memory = "psum" if function.__name__.endswith(("matmul", "transpose")) else "sbuf"
    views = [one for one in (*args, *given.values()) if isinstance(one, View)]
    shape, dtype = _result(function.__name__, [one for one in views if one.on_chip] or views)
    made = f", and {tile} = nl.ndarray({shape}, {dtype}, buffer=nl.{memory}) before it" * new
    return f"write {call}{made}" if left_out else f"name its arguments: {call}"


_COLUMNS = {"tensor_reduce": 1, "bn_stats": 6, "bn_aggr": 2, "max8": 8}  # of results


def _result(name: str, tiles: list[View]) -> tuple[str, str]:
    """Shape and type of what an instruction makes of tiles, or the words for them."""
    if not tiles or any(one.ndim != 2 for one in tiles):
        return "shape", "dtype"
    (rows, columns), dtype = tiles[0].shape, tiles[0].storage.dtype.name
    if name.endswith("matmul"):
        return str((columns, tiles[-1].shape[1])), "nl.float32"
    shape = (columns, rows) if name.endswith("transpose") else (rows, _COLUMNS.get(name, columns))
    return str(shape), f"nl.{dtype}"


def _takes(one: Any, value: Any) -> bool:
    """Whether a parameter is of the value's kind: tile, operator, choice, list, label or number."""
    if one.annotation in (View, "View"):
        return isinstance(value, View)
    if "op" in one.name and "operand" not in one.name:
        return callable(value) and not isinstance(value, View)
    if one.name in ("reduce_cmd", "engine", "name"):
        return type(value) is str if one.name == "name" else isinstance(value, Enum)
    if one.name in ("pattern", "shape", "axes", "shuffle_mask", "srcs"):
        return isinstance(value, (list, tuple))
    return isinstance(value, (View, int, float, np.number, tuple)) and one.name not in (
        "mask",
        "dtype",
    )


def _misfit(function: Callable, error: TypeError, args: tuple, given: dict) -> NkiError:
    """Arguments that a function does not take (the call itself failed, no line of the function)."""
    told = " ".join(str(error).split())
    known = inspect.signature(function).parameters
    names = list(known)
    lacks = [name for name in _required(function) if name not in (*names[: len(args)], *given)]
    unknown = [word for word in given if word not in names]
    placed = all(map(_takes, known.values(), args))
    free = names[len(args) :] if placed else names
    renamed = _renamed(unknown, lacks, [name for name in free if name not in given])
    wrong = next((word for word in unknown if word not in renamed), "")
    mend = CALLS.get(wrong or function.__name__, "")
    if args and isinstance(args[0], View):
        mend = mend.replace("x_hbm", called(args[0]))
    if wrong in ("dst", "out") and names[0] != "dst":
        mend = written.assigned(function.__name__)
    elif wrong == "dtype" and names[0] == "dst":
        mend = "leave dtype= out: the type is that of dst, as tile = nl.ndarray(shape, dtype) made"
    elif renamed:
        mend = "write " + ", ".join(f"{right}= for {word}=" for word, right in renamed.items())
        mend += f", and leave {wrong}= out" * bool(wrong)
    elif wrong and not mend:
        mend = f"leave {wrong}= out"
    elif names[0] == "shape" and len(args) > 1 and is_integer(args[0]):
        mend = f"give the shape as one tuple, {function.__name__}({args[:2]}, ...)"
    elif not mend and "missing" in told:
        mend = _completed(function, lacks, args, given, placed)
    elif not mend and "positional argument" in told:
        mend = _in_order(function, args, given) or "give no more than these, in this order"
    return refuse(
        "sim_arguments",
        f"{told}, expected {function.__name__}({', '.join(names)}); "
        + (mend or "give each once, and by its name"),
    )


def _renamed(unknown: list[str], lacks: list[str], names: list[str]) -> dict[str, str]:
    """What keywords that a function does not have are among ``names``, those not given yet.

    As many as it ``lacks`` are those, in their order, where nothing else is known of them.
    """
    found: dict[str, str] = {}
    for word in unknown:
        meant = [name for name in KEYWORDS.get(word, "").split() if name in names]
        numbered = [name for name in names if re.match(rf"{word}_|{word}\d$", name)]
        meant += [name for name in numbered if name in lacks]
        meant += [] if lacks else ["= or ".join(numbered)]
        meant += difflib.get_close_matches(word, names, 1, 0.8)
        right = next((name for name in meant if name and name not in found.values()), "")
        if right:
            found[word] = right
    rest = [name for name in lacks if name not in found.values()]
    left = [word for word in unknown if word not in found and word not in CALLS]
    return found | (dict(zip(left, rest)) if len(left) == len(rest) else {})


def _completed(function: Callable, lacks: list[str], args: tuple, given: dict, right: bool) -> str:
    """The arguments to add, with an example of each; the whole call where dst was left out."""
    examples = [f"{name}={EXAMPLES.get(name, '...')}" for name in lacks]
    whole = "dst" in lacks or not (right and EXAMPLES.get(lacks[0]))
    return whole and _in_order(function, args, given) or f"add {', '.join(examples)}"


def _required(function: Callable) -> list[str]:
    """The arguments that have no default."""
    known = inspect.signature(function).parameters.values()
    return [one.name for one in known if one.default is one.empty and one.kind < one.VAR_KEYWORD]


def exported() -> dict[str, Callable]:
    """The functions that ``neuronxcc.nki.isa`` offers: the forms of its instructions."""
    return {name: labelled(one.function, one) for name, one in FORMS["neuronxcc.nki.isa"].items()}


def label_all(namespace: dict[str, Any], names: list[str]) -> None:
    """Give the functions among ``names`` the keyword and the refusals."""
    for key in names:
        function = namespace[key]
        if isinstance(function, FunctionType):
            namespace[key] = labelled(function)
