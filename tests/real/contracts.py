"""What the imitation of NxD and NxD Inference has otherwise than their sources: names, signatures,
members, attributes that a base class reads of a model, what a layer gets and returns, fields.

Sources are read, never run: `checkout` takes a release from clones of both repositories inside of
a folder (`neuronx-distributed`, `neuronx-distributed-inference`).
"""

from __future__ import annotations

import ast
import functools
import io
import subprocess
import tarfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import neuronx_distributed  # noqa: F401 - both tell the finder what they name
import neuronx_distributed_inference  # noqa: F401
from torch import nn

from neuron_cpu.closed import NAMED

IMITATION = Path(__file__).resolve().parents[2] / "neuron_cpu" / "imitation"
REPOSITORIES = ("neuronx-distributed", "neuronx-distributed-inference")
# Release of NxDI: commit of NxD that belongs to it, and its tag.
RELEASES = {"0.1": ("977d3b7", "v0.1.1"), "0.6": ("fecfe75", "v0.6.10598")}
# A later one, which the imitation follows for models with experts.
LATER = {"0.9": ("fbac349", "c63afe0")}
Function = ast.FunctionDef


@dataclass
class Module:
    """A module's public functions and classes, and every name that it binds."""

    functions: dict[str, Function] = field(default_factory=dict)
    classes: dict[str, ast.ClassDef] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)


@dataclass
class Library:
    """Modules by path inside of the import path, and classes by name, wherever they are."""

    modules: dict[str, Module]
    classes: dict[str, ast.ClassDef] = field(default_factory=dict)

    def __post_init__(self):
        for module in self.modules.values():
            for name, node in module.classes.items():
                self.classes.setdefault(name, node)

    def ancestry(self, node):
        """The class and those of its bases that the library has."""
        yield node
        for base in node.bases:
            name = base.attr if isinstance(base, ast.Attribute) else getattr(base, "id", "")
            if name in self.classes and self.classes[name] is not node:
                yield from self.ancestry(self.classes[name])

    def methods(self, node):
        found: dict[str, Function] = {}
        for one in self.ancestry(node):
            for item in one.body:
                if isinstance(item, Function):
                    found.setdefault(item.name, item)
        return found

    def attributes(self, node):
        """(names that its methods and those of its bases set on `self`, names that they read)."""
        stored: set[str] = set()
        read: set[str] = set()
        for one in self.ancestry(node):
            for item in one.body:
                if isinstance(item, (ast.Assign, ast.AnnAssign)):
                    stored |= set(_targets(item))
            for item in ast.walk(one):
                of_self = isinstance(item, ast.Attribute) and _is_self(item.value)
                if of_self and isinstance(item.ctx, ast.Load):
                    read.add(item.attr)
                elif of_self:
                    stored.add(item.attr)
                elif _calls(item, "setattr", "register_buffer", "register_parameter"):
                    stored |= {
                        a.value for a in item.args if isinstance(getattr(a, "value", None), str)
                    }
        return stored, read


def _is_self(node):
    return isinstance(node, ast.Name) and node.id == "self"


def _calls(node, *names):
    if not isinstance(node, ast.Call):
        return False
    return getattr(node.func, "id", getattr(node.func, "attr", "")) in names


def _targets(node):
    for target in getattr(node, "targets", [getattr(node, "target", None)]):
        for name in ast.walk(target) if target is not None else ():
            if isinstance(name, ast.Name):
                yield name.id


def module_of(source):
    found = Module()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            found.names |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
    for node in _statements(ast.parse(source).body):
        if isinstance(node, Function):
            found.functions[node.name] = node
        elif isinstance(node, ast.ClassDef):
            found.classes[node.name] = node
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            found.names |= set(_targets(node))
    found.names |= {*found.functions, *found.classes}
    return found


def _statements(body):
    """Those of a module, conditions and attempts included."""
    for node in body:
        yield node
        for part in ("body", "orelse", "handlers", "finalbody"):
            if isinstance(node, (ast.If, ast.Try)):
                for inner in getattr(node, part, ()):
                    yield from _statements(getattr(inner, "body", [inner]))


def imitation(root=IMITATION):
    paths = sorted(root.rglob("*.py"))
    files = {str(path.relative_to(root)): path.read_text(encoding="utf-8") for path in paths}
    modules = {path: module_of(text) for path, text in files.items()}
    for module, names in NAMED.items():
        if not module.startswith("neuronx_distributed"):
            continue
        made = modules[_path(module)] = Module(names=set(names))
        for name, place in names.items():
            source, _, other = place.partition(":")
            there = modules[_path(source)]
            if (other or name) in there.functions:
                made.functions[name] = there.functions[other or name]
            if (other or name) in there.classes:
                made.classes[name] = there.classes[other or name]
    return Library(modules)


def _path(module):
    return module.replace(".", "/") + ".py"


@functools.lru_cache
def checkout(folder, commits):
    """One release of both libraries."""
    modules: dict[str, Module] = {}
    for name, commit in zip(REPOSITORIES, commits, strict=True):
        command = ["git", "-C", str(folder / name), "archive", commit, "src"]
        packed = subprocess.run(command, check=True, capture_output=True).stdout
        with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
            for member in archive:
                if member.isfile() and member.name.endswith(".py"):
                    text = archive.extractfile(member).read().decode("utf-8")
                    modules[member.name.removeprefix("src/")] = module_of(text)
    return Library(modules)


# --- Differences ----------------------------------------------------------------------------------


@dataclass(frozen=True, order=True)
class Difference:
    """What the imitation has otherwise than a release: `kind`, of `place`, in words."""

    kind: str
    place: str
    what: str


class Ever(dict[str, set[str]]):
    """By place of a module or class, or of a function's arguments, what some release has there."""

    def note(self, library):
        for path, module in library.modules.items():
            self.setdefault(path, set()).update(module.names)
            for name, node in module.functions.items():
                self.setdefault(f"{path}:{name}", set()).update(_arguments(node))
            for name, node in module.classes.items():
                methods = library.methods(node)
                stored = library.attributes(node)[0]
                self.setdefault(f"{path}:{name}", set()).update(stored, methods)
                for method, function in methods.items():
                    place = f"{path}:{name}.{method}"
                    self.setdefault(place, set()).update(_arguments(function))

    def says(self, place, name):
        return "of another release" if name in self.get(place, ()) else "of none"


def differences(ours, theirs, ever):
    """From one release."""
    for path, module in ours.modules.items():
        other = theirs.modules.get(path)
        if other is None:
            kind = "of another release" if path in ever else "of none"
            yield Difference("module", path, kind)
            continue
        for name, node in module.functions.items():
            if name in other.functions:
                yield from _signature(f"{path}:{name}", node, other.functions[name], ever)
            elif not name.startswith("_") and name not in other.names:
                yield Difference("name", f"{path}:{name}", ever.says(path, name))
        for name, node in module.classes.items():
            if name in other.classes:
                pair = (ours, node), (theirs, other.classes[name])
                yield from _members(f"{path}:{name}", *pair, ever)
            elif not name.startswith("_") and name not in other.names:
                yield Difference("name", f"{path}:{name}", ever.says(path, name))


Owned = tuple[Library, ast.ClassDef]


def _members(place, own, other, ever):
    methods, known = own[0].methods(own[1]), other[0].methods(other[1])
    (stored, read), (known_stored, known_read) = (x.attributes(node) for x, node in (own, other))
    for name, node in methods.items():
        if name.startswith("_") and name != "__init__":
            continue
        if name in known:
            yield from _signature(f"{place}.{name}", node, known[name], ever)
        elif name not in known_stored:
            yield Difference("member", f"{place}.{name}", ever.says(place, name))
    for name in sorted(stored - known_stored - known.keys() - methods.keys()):
        if not name.startswith("_"):
            yield Difference("member", f"{place}.{name}", ever.says(place, name))
    asked = known_read - known_stored - known.keys() - set(dir(nn.Module()))
    for name in sorted(asked - read - stored - methods.keys()):
        yield Difference("read", f"{place}.{name}", "of a subclass, there")


def _arguments(function):
    args = function.args
    return {a.arg for a in (*args.posonlyargs, *args.args, *args.kwonlyargs)}


def _signature(place, own, other, ever):
    mine, theirs = own.args, other.args
    for kind, given in (("positions", "vararg"), ("keywords", "kwarg")):
        if getattr(mine, given) and not getattr(theirs, given):
            yield Difference("signature", place, f"takes any {kind}")
    order, known = ([a.arg for a in (*x.posonlyargs, *x.args)] for x in (mine, theirs))
    for at, (a, b) in enumerate(zip(order, known)):
        if a != b:
            yield Difference("signature", place, f"argument {at} is {a}, not {b}")
            break
    every, all_known = _arguments(own), _arguments(other)
    if not theirs.kwarg:
        for name in sorted(every - all_known):
            yield Difference("signature", place, f"takes {name} {ever.says(place, name)}")
    if not mine.kwarg:
        for name in sorted(all_known - every):
            yield Difference("signature", place, f"takes no {name}")
    defaults, known_defaults = _defaults(mine), _defaults(theirs)
    for name in sorted(every & all_known):
        a, b = defaults.get(name), known_defaults.get(name)
        if (a is None) != (b is None):
            word = "needs" if a is None else "does without"
            yield Difference("signature", place, f"{word} {name}")
        elif a is not None and _value(a) != _value(b):
            yield Difference("signature", place, f"{name} is {a} by default, not {b}")


def _defaults(args):
    positional = [*args.posonlyargs, *args.args]
    pairs = list(zip(positional[len(positional) - len(args.defaults) :], args.defaults))
    pairs += [(a, d) for a, d in zip(args.kwonlyargs, args.kw_defaults) if d is not None]
    return {argument.arg: ast.unparse(default) for argument, default in pairs}


def _value(source):
    """A literal, sequences alike, or the last part of a dotted name."""
    try:
        found = ast.literal_eval(source)
    except ValueError:
        return source.removeprefix("nn.").removeprefix("torch.nn.")
    return list(found) if isinstance(found, tuple) else found


def everything(folder):
    """Differences from every release, and which these are."""
    every = RELEASES | LATER
    releases = {name: checkout(folder, commits) for name, commits in every.items()}
    ours, ever = imitation(), Ever()
    for library in releases.values():
        ever.note(library)
    found: dict[Difference, list[str]] = {}
    for name, library in releases.items():
        for difference in differences(ours, library, ever):
            found.setdefault(difference, []).append(name)
    return found


# --- What a release hands to a layer, reads of its results, and has in its configuration ----------


BASE = ("neuronx_distributed_inference/models/model_base.py", "NeuronBaseModel")


def layer_keywords(library):
    """Keywords that a decoder layer is called with by a step or a prompt, what the base hands on
    included."""
    methods = library.methods(library.modules[BASE[0]].classes[BASE[1]])
    calls = [n for n in ast.walk(methods["get_model_output"]) if _calls(n, "decoder_layer")]
    given = {keyword.arg for call in calls for keyword in call.keywords}
    if None not in given:
        return given
    more = [n for n in ast.walk(methods["forward"]) if _calls(n, "get_model_output")]
    handed = {keyword.arg for call in more for keyword in call.keywords}
    return (given | handed - _arguments(methods["get_model_output"])) - {None}


def layer_results(library):
    """Items of a layer's result that the base class reads."""
    body = library.methods(library.modules[BASE[0]].classes[BASE[1]])["get_model_output"]
    most = 0
    for node in ast.walk(body):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Subscript):
            place = node.value.slice
            if getattr(node.value.value, "id", "") != "layer_outputs":
                continue
            if isinstance(place, ast.Constant):
                most = max(most, place.value + 1)
            else:  # a, b = outputs[2:]
                most = max(most, place.lower.value + len(node.targets[0].elts))
    return most


def fields(library, name):
    """(attributes that a configuration may have, their defaults as far as these are literals)."""
    node = library.modules["neuronx_distributed_inference/models/config.py"].classes[name]
    defaults: dict[str, Any] = {}
    for item in ast.walk(node):
        if not isinstance(item, ast.Assign) or not _calls(item.value, "pop"):
            continue
        target, call = item.targets[0], item.value
        if isinstance(target, ast.Attribute) and _is_self(target.value) and len(call.args) == 2:
            try:
                defaults[target.attr] = ast.literal_eval(call.args[1])
            except ValueError:
                continue
    return library.attributes(node)[0], defaults
