"""Requests to the oracle and its answers: schema 1, an object a line (docs/oracle.md)."""

import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ..core.device.release import NKI_RELEASES, NKI_VARIABLE
from ..core.device.target import ENVIRONMENT_VARIABLE, TARGETS
from ..core.time import cost
from ..core.time.schedule import ORDERS
from ..errors import UsageError, nearest
from ..judge.cases import HARD, HIDDEN, KINDS, case
from ..judge.recorder import Recording
from ..judge.verdict import Settings
from ..sandbox.limits import Limits

SCHEMA = 1
FILE = "candidate.py"  # what messages call a source without a file
LONGEST = 1 << 24  # bytes of a request
MOST_CASES, MOST_SEEDS = 64, 100
ALL_KINDS = (*KINDS, *HARD, HIDDEN)  # of values; the last overwrites what `hidden` says
Answer = dict[str, Any]


class _Form(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class Code(_Form):
    """Python source, or a file that the oracle may read, and the name of a function in it.

    Attributes:
        source: beside a file, what stands in its place.
        modules: sources of modules that a kernel imports, by name, in place of their files.
        arguments: keyword arguments of a kernel that the reference does not get, as in a call.
        library: numpy or torch, what a reference computes with; found in its code where None.
    """

    name: Annotated[str, Field(min_length=1, max_length=200)]
    source: str | None = None
    file: str | None = None
    modules: dict[str, str] = {}
    arguments: str = ""
    library: Literal["numpy", "torch"] | None = None

    @model_validator(mode="after")
    def _one(self) -> "Code":
        if self.source is None and self.file is None:
            raise ValueError("source or file is needed")
        return self

    def text(self) -> str:
        """The source.

        Raises:
            ValueError: there is no such file, or it is no text.
        """
        if self.source is not None:
            return self.source
        try:
            return Path(str(self.file)).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or "it is no UTF-8 text"
            raise ValueError(f"file {self.file!r:.200} cannot be read ({reason})") from error


class Tolerance(_Form):
    """The limits for a right result; by default the types' own.

    Attributes:
        element: largest error of an element, relative to it or to its row's root mean square.
        relative_l2: norm of the difference over the norm of what is expected.
        allclose: `[rtol, atol]` of numpy.allclose.
    """

    element: Annotated[float, Field(gt=0)] | None = None
    relative_l2: Annotated[float, Field(gt=0)] | None = None
    allclose: (
        Annotated[list[Annotated[float, Field(ge=0)]], Field(min_length=2, max_length=2)] | None
    ) = None


class Bounds(_Form):
    """Of each of the two processes that a candidate gets."""

    seconds: Annotated[float, Field(gt=0, le=86_400)] = 60.0
    cpu_seconds: Annotated[int, Field(ge=1, le=86_400)] = 60
    memory_gib: Annotated[float, Field(gt=0, le=1024)] = 4.0

    def limits(self) -> Limits:
        return Limits(int(self.memory_gib * 2**30), self.cpu_seconds, self.seconds)


class Request(_Form):
    """One candidate.

    Attributes:
        id: comes back with the answer.
        cases: arguments of a call each, as in `neuron_cpu check --case`.
        inputs: function of the reference's file that makes a trial's arguments of its seed, as a
            list or a dictionary; values of kinds where None.
        outputs: function of the reference's file that takes the kernel's results and the
            reference's (`references.comparable`), and returns what is compared.
        values, seeds: what each case is tried with; nothing is run without a reference. The oracle
            draws a seed when it starts, for requests without one.
        release: of `nki`, such as 2.29; the newest where None.
        lines: source lines that the answer tells, those that take most time first.
    """

    kernel: Code
    cases: Annotated[list[str], Field(min_length=1, max_length=MOST_CASES)]
    id: str | int | None = None
    schema_: Literal[1] = Field(1, alias="schema")
    reference: Code | None = None
    inputs: str | None = None
    outputs: str | None = None
    values: Annotated[list[Literal[ALL_KINDS]], Field(min_length=1)] = [  # type: ignore[valid-type]
        "random"
    ]
    seeds: Annotated[list[int], Field(min_length=1, max_length=MOST_SEEDS)] | None = None
    tolerance: Tolerance = Tolerance()
    target: Literal[tuple(TARGETS)] | None = None  # type: ignore[valid-type]
    release: Literal[NKI_RELEASES] | None = None  # type: ignore[valid-type]
    grid: Annotated[list[Annotated[int, Field(ge=1, le=1 << 16)]], Field(max_length=3)] = []
    dma_profile: Literal[tuple(cost.PROFILES)] = cost.DEFAULT_PROFILE  # type: ignore[valid-type]
    order: Literal[tuple(ORDERS)] | None = None  # type: ignore[valid-type]
    limits: Bounds = Bounds()
    lines: Annotated[int, Field(ge=0, le=1000)] = 5

    def recording(self, text: str) -> Recording:
        """What the candidate's process gets, with the kernel's `text`."""
        code, named = self.kernel, {ENVIRONMENT_VARIABLE: self.target, NKI_VARIABLE: self.release}
        return Recording(
            Path(code.file or FILE),
            code.name,
            [case(one).public for one in self.cases],
            tuple(self.grid),
            self.limits.limits(),
            text,
            alone=code.file is None,
            modules=code.modules,
            arguments=code.arguments,
            environment={name: value for name, value in named.items() if value is not None},
        )

    def settings(self) -> Settings:
        """How the judgement tries a kernel."""
        return Settings(
            grid=tuple(self.grid),
            kinds=tuple(self.values),
            seeds=tuple(self.seeds or (0,)),
            tolerance=self.tolerance.element,
            dma_profile=self.dma_profile,
            order=self.order,
        )


_CODE = '{"file": "softmax.py", "name": "softmax"}'
_EXAMPLES = {  # of fields
    "kernel": _CODE,
    "reference": _CODE,
    "cases": '["128x512:bf16"]',
    "values": '["random", "zeros"]',
    "seeds": "[0, 1]",
    "tolerance": '{"element": 0.01}',
    "limits": '{"seconds": 60}',
    "grid": "[2]",
}


_CASES = ("arg", "args", "arguments", "shape", "shapes", "inputs")  # in place of `cases`


def requests(line: bytes) -> Iterator[Request | Answer]:
    """The requests of one line, an object or a list of them; an answer in place of a wrong one."""
    if len(line) > LONGEST:
        said = f"the line has {len(line)} bytes, expected at most {LONGEST}"
        return iter([answer(None, "invalid", said)])
    try:
        content = json.loads(line)
    except (ValueError, RecursionError) as error:
        said = f"the line is no JSON ({str(error)[:100] or type(error).__name__})"
        said += ", expected one object on one line, as json.dumps or jq -c writes it"
        said += f'; write {{"kernel": {_CODE}, "cases": ["128x512:bf16"]}}'
        return iter([answer(None, "invalid", said)])
    return map(request, content if isinstance(content, list) else [content])  # as they are taken


def request(content: Any) -> Request | Answer:
    """A request, or the answer in place of a wrong one."""
    name = content.get("id") if isinstance(content, dict) else None
    name = name if isinstance(name, (str, int)) else None
    try:
        return Request.model_validate(content)
    except ValidationError as error:
        said = {}
        for one in reversed(error.errors()):  # the first of each field
            place = ".".join(map(str, one["loc"])) or "the request"
            said[one["loc"][:1]] = f"{place}: {one['msg']}{_mend(one)}"
        return answer(name, "invalid", ". ".join(reversed(said.values()))[:700])
    except RecursionError:
        return answer(name, "invalid", "the request has too many levels")


def _mend(problem: Any) -> str:
    """What to write for a field that is wrong."""
    place = [*map(str, problem["loc"]), ""]
    if problem["type"] == "literal_error":
        known = re.findall(r"[\w.]+", problem["msg"].removeprefix("Input should be "))
        return f"; {nearest(str(problem['input']), known, f'write {known[0]}')}"
    given = problem["input"]
    if problem["type"] == "missing":
        given = next((given[name] for name in _CASES if name in given), given)
    if place[0] in ("cases", *_CASES):
        return f"; write {'cases: ' * (place[0] != 'cases')}{_cases(given)}"
    if problem["type"] == "list_type":
        return f"; write {json.dumps([given])}"
    if isinstance(given, str) and given.count(":") == 1 and place[0] in ("kernel", "reference"):
        return f"; write {json.dumps(dict(zip(('file', 'name'), given.split(':'))))}"
    if problem["type"] != "extra_forbidden":
        return f"; write {_EXAMPLES[place[0]]}" if place[0] in _EXAMPLES else ""
    if place[-2] in ("time_limit", "timeout", "memory"):
        return f"; write limits: {_EXAMPLES['limits']}"
    names = [name for form in (Request, Code, Tolerance, Bounds) for name in form.model_fields]
    mend = nearest(place[-2], names, "leave it out")
    example = _EXAMPLES.get(mend.removeprefix("write "))
    return f"; {mend}{f': {example}' if example else ''}"


def _cases(given: Any) -> str:
    """Cases as a request has them, of what was given in their place; an example of other things."""
    calls = [given] if _argument(given) or not isinstance(given, list) else given
    if all(map(_argument, calls)):
        calls = [calls]  # the arguments of one call
    with contextlib.suppress(TypeError, UsageError, RecursionError):
        said = [" ".join(_arguments(one)) for one in calls]
        if all(said):
            return json.dumps([str(case(one)) for one in said])
    return _EXAMPLES["cases"]


def _arguments(given: Any) -> Iterator[str]:
    """Texts of arguments in lists and dictionaries."""
    if alone := _argument(given):
        yield alone
    else:
        for one in given.values() if isinstance(given, dict) else given:
            yield from _arguments(one)


def _argument(given: Any) -> str:
    """A tensor of its sizes, an argument of its text; empty of other things."""
    sizes = isinstance(given, (list, tuple)) and all(isinstance(one, int) for one in given)
    if sizes and given:
        return "x".join(map(str, given)) + ":f32"
    return given if isinstance(given, str) else ""


def answer(name: str | int | None, outcome: str, sentence: str = "", **more: Any) -> Answer:
    """An answer: `outcome` is passed, wrong, refused, failed or invalid; `sentence` says why."""
    return {"schema": SCHEMA, "id": name, "outcome": outcome, "sentence": sentence, **more}
