"""Public kernels with published times: what calibration.json says of them, and how to run them.

Rows of one's own: a file of the same form, run by ``calibrate.py --public DIR --data FILE``. It has
``{"about": text, "sources": {NAME: source}}``; a source has the fields of ``Row`` that its rows
share and ``"rows": [{"id": ..., "arguments": ["128x512:bf16", 2], "measured_us": ...}, ...]``.
Needed are ``repository``, ``commit`` (40 digits), ``file``, ``function``, ``figures``, ``machine``,
``kind``, ``sdk``, ``set`` (one of ``SETS``) and, for a Trainium2, ``target``:
``trn2``. The kernel's text lies unmodified at ``DIR/REPOSITORY@COMMIT/FILE``, seven digits of the
commit. Of a time on both physical cores of a logical one ``grid`` is [2].

A row runs the kernel of a named file at a named commit as it stands there. Two things may be done
to the text first, both written down in the data: a repair (an exact replacement, for a constant
that the published figure varies or for characters that a stored text lacks), and the extraction of
one step of an autotuner's trace (``extract: trace``).
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib
import importlib.util
import itertools
import json
import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import lab

DATA = lab.DATA / "calibration.json"
TENSOR = re.compile(r"(\d+(?:x\d+)*):(\w+)")
RELATIVE = re.compile(r"^\s*from \.", re.MULTILINE)
DTYPES = {
    "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "int32": torch.int32,
    "int8": torch.int8, "uint8": torch.uint8, "uint32": torch.uint32, "fp8": torch.float8_e4m3fn,
}  # fmt: skip
FITTED, CHECKED, OPENED, SEALED = SETS = ("fitted", "checked", "opened", "sealed")
CLASSES = ("DMA", "TensorE", "VectorE", "ScalarE", "latency")
_numbers = itertools.count()


@dataclass(frozen=True)
class Row:
    """One published time.

    Attributes:
        id: name in tables.
        source: key of the source that it belongs to.
        repository, commit, file, function: where the kernel stands.
        extract: ``module`` (a Python file) or ``trace`` (a step of an autotuner's trace).
        step: which one, of a trace; 0 is the untouched start.
        imports: lines put before an extracted step.
        repairs: ``(old, new)``, each old text occurring exactly once.
        folders: folders of the repository that the file's imports are found in.
        arguments, keywords: ``128x512:bf16`` for a tensor, anything else as it is.
        grid: launch grid, empty for a plain call.
        measured_us: published microseconds.
        kind: what was measured (p99, one profile, limit of a test).
        sdk: release line whose DMA profile applies.
        profile: the DMA profile where the release does not say it (``static``: --disable-dge).
        target: chip that the kernel is built for; empty for trn1.
        set: ``fitted`` where constants of the cost model were chosen on it, ``checked`` where it
            was looked at while the model was made, ``sealed`` where it was not before the end,
            ``opened`` where it was sealed and has been looked at since.
        share: of the time of one physical core that the figure stands for.
        engines: published share of the time that each engine was busy.
        hbm_mb: published megabytes read from and written to HBM, None where one is not published.
        bound: class that public figures give the kernel, where they do.
        group: rows whose order is compared.
    """

    id: str
    source: str
    repository: str
    commit: str
    file: str
    function: str
    measured_us: float
    kind: str
    sdk: str
    set: str
    group: str
    figures: str
    machine: str
    extract: str = "module"
    step: int = 0
    target: str = ""
    profile: str = ""
    share: float = 1.0
    engines: dict[str, float] = field(default_factory=dict)
    hbm_mb: tuple[float | None, ...] = ()
    imports: tuple[str, ...] = ()
    repairs: tuple[tuple[str, str], ...] = ()
    folders: tuple[str, ...] = ()
    arguments: tuple[Any, ...] = ()
    keywords: dict[str, Any] = field(default_factory=dict)
    grid: tuple[int, ...] = ()
    bound: str = ""
    caveat: str = ""


class Missing(Exception):
    """The folder of public files lacks the row's file."""


def rows(path: Path = DATA) -> list[Row]:
    """All rows, in the order of the data."""
    found = []
    for key, source in json.loads(path.read_text())["sources"].items():
        common = {k: v for k, v in source.items() if k != "rows"}
        for entry in source["rows"]:
            merged = {"group": key, **common, **entry}
            merged["repairs"] = common.get("repairs", []) + entry.get("repairs", [])
            merged["bound"] = merged.pop("class", "")
            for name in ("imports", "folders", "arguments", "grid", "hbm_mb"):
                merged[name] = _frozen(merged.get(name, []))
            merged["repairs"] = _frozen(merged["repairs"])
            merged["keywords"] = {k: _frozen(v) for k, v in merged.get("keywords", {}).items()}
            found.append(Row(source=key, **merged))
    return found


def _frozen(value: Any) -> Any:
    """Lists as tuples, as the kernels' callers wrote them."""
    return tuple(_frozen(v) for v in value) if isinstance(value, list) else value


def tensor(value: Any) -> Any:
    """A meta tensor for ``128x512:bf16``, an object for ``=module:name``, else the value."""
    match = TENSOR.fullmatch(value) if isinstance(value, str) else None
    if match is None and isinstance(value, str) and value.startswith("="):
        module, _, name = value[1:].partition(":")
        return functools.reduce(getattr, name.split("."), importlib.import_module(module))
    if match is None:
        return value
    shape = tuple(int(n) for n in match[1].split("x"))
    return torch.empty(shape, dtype=DTYPES[match[2]], device="meta")


def checkout(row: Row, public: Path) -> Path:
    """The row's repository below ``public``.

    Raises:
        Missing: neither ``OWNER/NAME@COMMIT`` nor ``OWNER/NAME`` has the file.
    """
    for name in (f"{row.repository}@{row.commit[:7]}", row.repository):
        if (public / name / row.file).is_file():
            return public / name
    raise Missing(f"{row.repository}@{row.commit[:7]}/{row.file} is not there")


def kernel(row: Row, public: Path) -> Any:
    """The row's kernel, from its file below ``public``."""
    root = checkout(row, public)
    path = root / row.file
    folders = [path.parent, *(root / f for f in row.folders)]
    if row.extract != "module" or row.repairs:
        path = Path(scratch().name) / f"{row.id}.py"
        path.write_text(source(row, public))
    found = getattr(_import(path, folders), row.function)
    if not hasattr(found, "trace"):  # a plain function: the caller decorates it
        import neuronxcc.nki as nki

        found = nki.jit(found)
    return found[row.grid if len(row.grid) > 1 else row.grid[0]] if row.grid else found


def trace(row: Row, public: Path) -> Any:
    """The program of the row's kernel, recorded anew."""
    keywords = {name: tensor(value) for name, value in row.keywords.items()}
    return kernel(row, public).trace(*map(tensor, row.arguments), **keywords)


def source(row: Row, public: Path) -> str:
    """The text that the row runs: its file below ``public``, or a step of it, repaired."""
    text = (checkout(row, public) / row.file).read_text()
    if row.extract == "trace":
        text = "\n".join([*row.imports, steps(text)[row.step]])
    for old, new in row.repairs:
        if text.count(old) != 1:
            raise ValueError(f"{row.id}: {text.count(old)} times {old!r}, expected once")
        text = text.replace(old, new)
    return text


def digest(row: Row, public: Path) -> str:
    """Of what the row's program is made from: the modules of its checkout, its text, its call."""
    call = row.function, row.folders, row.arguments, row.keywords, row.grid, row.target
    told = f"{_modules(checkout(row, public))} {call} {source(row, public)}"
    return hashlib.sha256(told.encode()).hexdigest()[:16]


@functools.cache
def _modules(root: Path) -> str:
    texts = b"".join(path.read_bytes() for path in sorted(root.rglob("*.py")))
    return hashlib.sha256(texts).hexdigest()


@functools.cache
def scratch() -> tempfile.TemporaryDirectory:
    """Where changed texts stay until the process ends: errors and lints read their lines."""
    return tempfile.TemporaryDirectory(prefix="calibration-")


def _import(path: Path, folders: list[Path]) -> Any:
    """Run a file as a module of its own, its neighbours importable while it runs; or as one of the
    package in which it imports by dots."""
    if RELATIVE.search(path.read_text()):
        top = next(one for one in path.parents if not (one / "__init__.py").is_file())
        with _importable([top, *folders]):
            return importlib.import_module(".".join(path.with_suffix("").relative_to(top).parts))
    name = f"public_{next(_numbers)}_{re.sub(r'[^0-9A-Za-z]', '_', path.stem)}"
    found = importlib.util.spec_from_file_location(name, path)
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module
    with _importable(folders):
        found.loader.exec_module(module)
    return module


@contextmanager
def _importable(folders: list[Path]) -> Iterator[None]:
    before, known = list(sys.path), set(sys.modules)
    sys.path[:0] = [str(f) for f in folders]
    try:
        yield
    finally:
        sys.path[:] = before
        for name in set(sys.modules) - known:  # the next checkout has its own of the same name
            origin = getattr(sys.modules[name], "__file__", None) or ""
            if any(Path(origin).is_relative_to(f) for f in folders):
                del sys.modules[name]


def steps(text: str) -> list[str]:
    """The texts of an autotuner's trace, the untouched start first.

    The file is one expression of nested ``CodeCandidate(parent=..., code=..., score=...)`` calls,
    of which nothing but the literal texts is evaluated.
    """
    calls = (one for one in ast.walk(ast.parse(text, mode="eval")) if isinstance(one, ast.Call))
    texts = (k.value for one in calls for k in one.keywords if k.arg == "code")
    return [ast.literal_eval(text) for text in texts][::-1]  # a step stands around its parent
