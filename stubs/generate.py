"""Write the stubs of the SDK's names for editors and type checkers, from the names themselves.

    python stubs/generate.py [--check]

Functions come with the signature and docstring of their form (``core/instructions/entry.py``);
parameters take anything, so that no kernel that runs is reported. Names that a module lacks are
reported: the stubs have no ``__getattr__``. ``--check`` writes nothing and exits with 1 where a
file is out of date.
"""

import argparse
import ast
import importlib
import inspect
import os
import sys
import textwrap
from collections.abc import Iterable, Iterator
from enum import Enum, EnumMeta
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent)]

import neuron_cpu  # noqa: E402 - after the path

os.environ["NEURON_CPU_SDK"] = "2.26"  # names of later releases, too
neuron_cpu.ensure_sdk()
from neuron_cpu.core.instructions.entry import FORMS  # noqa: E402

ROOTS = ("nki", "neuronxcc")
HEAD = '"""{doc}"""\n\n# Written by stubs/generate.py.\nfrom typing import Any\n\n'
ANNOTATIONS = ("nki.typing", "neuronxcc.nki.typing")  # of shapes that no checker knows
# mypy takes MYPY for true and refuses sizes of a class; pyright refuses those of anything else.
SIZED = """from typing import Protocol

MYPY = False
if MYPY:
    def __getattr__(name: str) -> Any: ...
else:
"""
TYPE = """    class {name}(Any, Protocol):
        def __class_getitem__(cls, sizes: Any) -> Any: ...
        def __getattr__(self, name: str) -> Any: ...
        def __getitem__(self, *args: Any, **kwargs: Any) -> Any: ...
        def __setitem__(self, *args: Any, **kwargs: Any) -> Any: ...
"""
# Functions that public kernels write as the type of what they return, and its class. A class of
# unknown base would have pyright take an element of list[nl.ndarray] for a list.
MAKERS = {"nki.language": {"ndarray": "NkiTensor"}, "neuronxcc.nki.language": {"ndarray": "tensor"}}
BASES = ("NKIObject",)  # fields need no annotation, and what dataclass asks for may be missing
TYPES = ("dtype",)  # modules that public kernels write as a type
LABELLED = ("neuronxcc.nki.isa", "neuronxcc.nki.language")  # each function takes name=
UNLISTED = {"nki.language": ("bool", "range"), "neuronxcc.nki.compiler": ("no_reorder",)}
# Closed kernels' modules that public files import: a checker finds files alone.
CLOSED = {
    "kernels": "attention cumsum vision",
    "_private_kernels": "attention blockwise_mm blockwise_mm_bwd collectives mlp qkv rmsnorm",
    "_pre_prod_kernels": "attention_token_gen attn_fwd blockwise_mm collectives moe_token_gen "
    "output_proj qkv_tkg_impl ring_attention",
}
ANYTHING = "\ndef __getattr__(name: str) -> Any: ...\n"
SIMPLE = (type(None), bool, int, float, str)
OPERATORS = {
    f"__{side}{name}__"
    for name in ("add", "sub", "mul", "truediv", "pow", "and", "or", "xor", "lshift", "rshift")
    for side in ("", "r", "i")
} | {
    "__getitem__", "__setitem__", "__call__", "__neg__", "__lt__", "__le__", "__gt__", "__ge__",
    "__iter__", "__enter__", "__exit__",
}  # fmt: skip


def default(value: Any) -> str:
    """A default as a stub shows it."""
    if isinstance(value, Enum):
        return f"{type(value).__name__}.{value.name}"
    text = repr(value)
    plain = isinstance(value, SIMPLE) or value in ((), [])
    return text if plain and text not in ("inf", "-inf", "nan") else "..."


def parameters(function: Any, method: bool) -> str:
    """The parameters of a function: names, kinds and defaults."""
    parts, starred, kinds = [], False, inspect.Parameter
    try:
        listed = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return "self, *args: Any, **kwargs: Any" if method else "*args: Any, **kwargs: Any"
    for at, one in enumerate(listed):
        if one.kind is kinds.KEYWORD_ONLY and not starred:
            parts.append("*")
            starred = True
        starred |= one.kind is kinds.VAR_POSITIONAL
        several: dict[Any, str] = {kinds.VAR_POSITIONAL: "*", kinds.VAR_KEYWORD: "**"}
        stars = several.get(one.kind, "")
        own = method and at == 0
        after = "" if one.default is one.empty else f" = {default(one.default)}"
        parts.append(f"{stars}{one.name}" + ("" if own else f": Any{after}"))
    return ", ".join(parts)


def documented(value: Any, before: str) -> str:
    """The body of a definition: its docstring, or nothing."""
    doc = inspect.getdoc(value)
    if not doc:
        return " ..."
    quoted = doc.replace("\\", "\\\\").replace('"""', '\\"\\"\\"')
    return "\n" + textwrap.indent(f'"""{quoted}"""', before)


def function(
    name: str,
    value: Any,
    method: bool = False,
    former: Iterable[str] = (),
    module: ModuleType | None = None,
) -> str:
    """A definition; ``former`` are spellings of earlier releases, taken with a warning."""
    before = "    " if method else ""
    told, given = documented(value, before + "    "), parameters(value, method)
    for word in former if "**" not in given else ():
        star = [] if "*" in given else ["*"]
        given = ", ".join(filter(None, (given, *star, f"{word}: Any = ...")))
    made = MAKERS.get(getattr(module, "__name__", ""), {}).get(name)
    if made:  # what a kernel annotates so may be a class of its own
        inner = "    def __getattr__(self, name: str) -> Any: ...\n"
        return f"class {name}({made}):{told}\n    def __init__(self, {given}) -> None: ...\n{inner}"
    return f"{before}def {name}({given}) -> Any:{told}\n"


def made_class(name: str, value: type) -> str:
    """A class: members of an enumeration, or attributes, methods and operators."""
    if isinstance(value, EnumMeta):
        listed: Any = value
        members = "".join(f"    {one.name} = {one.value!r}\n" for one in listed)
        kind = "IntEnum" if issubclass(value, int) else "Enum"
        return f"class {name}({kind}):{documented(value, '    ').removesuffix(' ...')}\n{members}"
    parts = ["    def __init__(self, *args: Any, **kwargs: Any) -> None: ...\n"]
    for member in sorted(dir(value)):
        if member.startswith("_") and member not in OPERATORS:
            continue
        found = inspect.getattr_static(value, member)
        if found is getattr(object, member, None):
            continue
        if isinstance(found, FunctionType):
            parts.append(function(member, found, method=True))
        elif isinstance(found, (classmethod, staticmethod)) or member in OPERATORS:
            parts.append(f"    def {member}(self, *args: Any, **kwargs: Any) -> Any: ...\n")
        else:
            parts.append(f"    {member}: Any\n")
    told = documented(value, "    ").removesuffix(" ...")
    base = "(Any)" if name in BASES else ""
    return f"class {name}{base}:{told}\n{''.join(parts) or '    ...'}\n"


def stub(module: ModuleType) -> str:
    """The text of a module's stub."""
    if module.__name__ in ANNOTATIONS:
        doc = inspect.getdoc(module) or ""
        names = [name for name in vars(module)["__all__"] if name != "Optional"]
        return HEAD.format(doc=doc) + SIZED + "".join(TYPE.format(name=name) for name in names)
    doc = (inspect.getdoc(module) or module.__name__).split("\n\n")[0]
    if not hasattr(module, "__file__") or module.__name__.endswith("_kernels"):
        return HEAD.format(doc=doc) + ANYTHING
    shown = getattr(module, "__all__", None) or [n for n in vars(module) if n[0] != "_"]
    shown = [*shown, *UNLISTED.get(module.__name__, ())]
    classes, functions, others = [], [], []
    for name in dict.fromkeys(shown):
        value = getattr(module, name)
        if isinstance(value, ModuleType):
            if name in TYPES:
                members = "".join(f"    {one}: Any\n" for one in vars(value)["__all__"])
                others.append(f"class {name}:{documented(value, '    ')}\n{members}\n")
            elif value.__name__.startswith(module.__name__):
                others.append(f"from . import {name} as {name}\n")
        elif isinstance(value, type):
            classes.append((not isinstance(value, EnumMeta), name, value))
        elif callable(value) and hasattr(value, "__name__"):
            form = FORMS.get(module.__name__, {}).get(name)
            more = [*(form.former if form else ())]
            if module.__name__ in LABELLED and "name" not in inspect.signature(value).parameters:
                more.append("name")
            functions.append(function(name, value, former=more, module=module))
        else:
            others.append(f"{name}: Any\n")
    others += [
        f"from .. import {one}\n"
        for one in MAKERS.get(module.__name__, {}).values()
        if one not in shown
    ]
    made = [made_class(name, value) for _, name, value in sorted(classes, key=lambda c: c[:2])]
    enums = "from enum import Enum, IntEnum\n" if any(not plain for plain, *_ in classes) else ""
    text = HEAD.format(doc=doc).replace("from typing", f"{enums}from typing")
    return text + "".join([*others, "\n", *made, *sorted(functions)])


def modules(root: str) -> Iterator[tuple[Path, ModuleType]]:
    """Every module below a root, and the file of its stub."""
    sdk = Path(neuron_cpu.__file__).with_name("sdk")
    for source in sorted((sdk / root).rglob("*.py")):
        parts = source.relative_to(sdk).with_suffix("").parts
        name = ".".join(parts).removesuffix(".__init__")
        place = HERE.joinpath(f"{root}-stubs", *parts[1:]).with_suffix(".pyi")
        yield place, importlib.import_module(name)
    for package, names in CLOSED.items() if root == "neuronxcc" else ():
        for module in ("", *names.split()):
            place = HERE / f"{root}-stubs" / "nki" / package / f"{module or '__init__'}.pyi"
            name = f"{root}.nki.{package}.{module}".rstrip(".")
            yield place, importlib.import_module(name)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="only say whether they are up to date")
    args = parser.parse_args()
    stale = 0
    for path, module in (one for root in ROOTS for one in modules(root)):
        text = stub(module)
        ast.parse(text)
        if path.exists() and path.read_text(encoding="utf-8") == text:
            continue
        stale += 1
        if args.check:
            print(f"{path} is out of date; run python stubs/generate.py")
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    return int(args.check and stale > 0)


if __name__ == "__main__":
    sys.exit(main())
