"""How an option is declared: a field of a topic. Its type says its form on the command line.

The parser, the help, the refusals of what a mode ignores and the settings are made from the fields.
"""

import argparse
import ast
import re
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, ClassVar, NamedTuple, get_args, get_origin

from pydantic import Field, TypeAdapter
from typing_extensions import dataclass_transform

from neuron_cpu.console.arguments import finite, path, positive, shown

ON_OR_OFF: dict[str, Any] = {"action": argparse.BooleanOptionalAction}
_FORMS: dict[Any, dict[str, Any]] = {
    bool: {"action": "store_true"},
    int: {"type": positive, "metavar": "N"},
    float: {"type": finite, "metavar": "N"},
    Path: {"type": path, "metavar": "PATH"},
    str: {},
}


class Option(NamedTuple):
    """One option.

    Attributes:
        name: of the field.
        flag: its name on the command line.
        help: what it does, for a line.
        modes: in which it means something; empty: in all. In others it is refused.
        form: what argparse is told beside them.
        also: a second flag.
        needs: the property of the arguments without which it changes nothing, and what to say then.
    """

    name: str
    flag: str
    help: str
    modes: tuple[str, ...]
    form: dict[str, Any]
    also: tuple[str, ...]
    needs: tuple[str, str] | None

    @property
    def left(self) -> str:
        """The flag and its argument, as help shows them."""
        if self.form.get("action") is argparse.BooleanOptionalAction:
            return f"--[no-]{self.flag[2:]}"
        value = self.form.get("metavar") or "|".join(self.form.get("choices", ()))
        return f"{self.flag} {value}".rstrip()


@dataclass_transform(frozen_default=True)
class Topic:
    """Options that belong together; a subclass is a frozen dataclass of them."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    title: ClassVar[str]  # what they are about
    modes: ClassVar[tuple[str, ...]]  # of the options that name none
    # Modes whose help explains them; in others it names them. None: in all modes.
    whole_in: ClassVar[tuple[str, ...] | None]

    def __init_subclass__(
        cls, title: str = "", modes: tuple[str, ...] = (), whole_in: tuple[str, ...] | None = None
    ) -> None:
        cls.title, cls.modes, cls.whole_in = title, modes, whole_in
        dataclass(frozen=True)(cls)


def option(
    help: str,
    modes: tuple[str, ...] | None = None,
    *,
    default: Any = None,
    flag: str = "",
    also: tuple[str, ...] = (),
    needs: tuple[str, str] | None = None,
    **form: Any,
) -> Any:
    """A field that is an option; `form` is what argparse is told beside its type's own form."""
    told = {"help": help, "modes": modes, "also": also, "needs": needs}
    return field(default=default, metadata={"told": told, "flag": flag, "form": form})


def options_of(topic: Any) -> tuple[Option, ...]:
    """The options that a topic declares, in their order."""
    found = []
    for declared in fields(topic):
        if not declared.metadata:
            continue
        name, told = declared.name, dict(declared.metadata["told"])
        told["modes"] = topic.modes if told["modes"] is None else told["modes"]
        flag = declared.metadata["flag"] or "--" + name.replace("_", "-")
        form = _form(declared.type, declared.default, declared.metadata["form"])
        found.append(Option(name, flag, form=form | {"dest": name}, **told))
    return tuple(found)


def _form(kind: Any, default: Any, given: dict[str, Any]) -> dict[str, Any]:
    """What argparse is told of a field of a type; a switch without a default is None."""
    if isinstance(kind, UnionType):
        kind = next(inner for inner in get_args(kind) if inner is not type(None))
    several = get_origin(kind) is list
    own: dict[str, Any] = {}
    if not {"action", "choices"} & given.keys():
        own = {"nargs": "+"} if several else {}
        own |= _FORMS.get(get_args(kind)[0] if several else kind, {})
    if "type" in given:
        own.pop("action", None)
    return own | given | {"default": default}


def boolean(text: str) -> bool:
    """`--do-sample False` means False, unlike with the contest driver's `type=bool`."""
    values = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
    if text.lower() not in values:
        raise argparse.ArgumentTypeError(f"expected true or false, got {text!r}; write true")
    return values[text.lower()]


BOOL: dict[str, Any] = {"type": boolean, "metavar": "BOOL", "nargs": "?", "const": True}


def port(text: str) -> int:
    """A number of a TCP port; 0 stands for a free one."""
    if not text.isascii() or not text.isdecimal() or len(text) > 5 or int(text) > 65535:
        raise argparse.ArgumentTypeError(
            f"expected a port from 0 to 65535, got {shown(text)}; write 8000"
        )
    return int(text)


_Tolerance = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_Top = Annotated[int, Field(gt=0, strict=True)]
_Map: Any = Annotated[
    dict[_Top | None, _Tolerance | tuple[_Tolerance, _Tolerance]], Field(min_length=1)
]
_TOLERANCES: TypeAdapter[Any] = TypeAdapter(_Map)


def tolerance_map(text: str) -> dict[int | None, tuple[float, float]]:
    """`{None: 0.05, 5: (1e-5, 0.03)}`: top-k (None = all) -> (absolute, relative tolerance)."""
    try:
        read = _TOLERANCES.validate_python(ast.literal_eval(text))
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError) as error:
        one = text if re.fullmatch(r"[\d.]+", text) else "0.05"
        raise argparse.ArgumentTypeError(
            f"expected a dict such as '{{None: (1e-5, 0.05), 5: (1e-5, 0.03)}}' of finite "
            f"tolerances of at least 0, got {shown(text)}; write '{{None: {one}}}'"
        ) from error
    return {top: one if isinstance(one, tuple) else (1e-5, one) for top, one in read.items()}
