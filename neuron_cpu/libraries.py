"""Chooses NxD and NxD Inference: the real libraries, or the imitation of them.

The real ones are Python and public. Where checkouts are named (`NEURON_CPU_LIBRARIES`, folders
parted as in PATH), or both packages are installed, they run on the stand-in's lower tier. The
variable set to `none` asks for the imitation all the same.
"""

import hashlib
import importlib.machinery
import importlib.metadata
import importlib.util
import os
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from glob import escape, glob
from pathlib import Path
from typing import Any

from .errors import UsageError

VARIABLE = "NEURON_CPU_LIBRARIES"
NONE = "none"
NXD, NXDI = "neuronx_distributed", "neuronx_distributed_inference"


@dataclass(frozen=True)
class Release:
    """Versions of one SDK release that belong together, and where the checkouts are.

    Sources: setup.py and _version.py of the tags and commits named; the aws-neuron-sdk manifest.
    """

    nxdi: str
    nxd: str
    transformers: str
    nxdi_at: str  # tag or commit of aws-neuron/neuronx-distributed-inference
    nxd_at: str  # the same of aws-neuron/neuronx-distributed


RELEASES = (
    Release("0.1", "0.10", "4.45", "v0.1.0", "3aa65c6"),
    Release("0.2", "0.11", "4.48", "v0.2.0", "a070deb"),
    Release("0.3", "0.12", "4.48", "v0.3.5591", "e834945"),
    Release("0.4", "0.13", "4.51", "v0.4.7422", "c9ee222"),
    Release("0.5", "0.14", "4.51", "v0.5.9230", "c63420c"),
    Release("0.6", "0.15", "4.51", "v0.6.10598", "v2.26.0"),
    Release("0.7", "0.16", "4.56", "v0.7.14366", "v2.27.0"),
    Release("0.8", "0.17", "4.57", "cd3abf3", "v2.28.0"),
    Release("0.9", "0.18", "4.57", "c63afe0", "fbac349"),
)
# What NxD imports and does not name among its requirements.
BESIDE = ("boto3", "scipy", "tenacity")
# The plain package's operators are for PyTorch with CUDA, and its import fails beside another one.
_BUILDS = {"torchvision": "uv pip install --torch-backend cpu torchvision"}


@dataclass(frozen=True)
class Libraries:
    """The real libraries.

    Attributes:
        places: what goes on `sys.path`; nothing where they are installed.
        roots: the folders of the two packages, NxD's first.
        nxd, nxdi: their versions.
    """

    places: tuple[str, ...]
    roots: tuple[Path, Path]
    nxd: str
    nxdi: str

    @property
    def words(self) -> str:
        """The libraries in words: their versions and folders."""
        where = " and ".join(dict.fromkeys(self.places)) or "this Python's packages"
        return f"NxD Inference {self.nxdi} and NxD {self.nxd} from {where}"

    def identity(self) -> str:
        """Changes when a file of theirs does."""
        digest = hashlib.sha256()
        for root in self.roots:
            for path in sorted(root.rglob("*.py")):
                state = path.stat()
                digest.update(f"{path}:{state.st_size}:{state.st_mtime_ns};".encode())
        return f"nxdi {self.nxdi} nxd {self.nxd} {digest.hexdigest()[:16]}"


def lacking(error: BaseException) -> str:
    """Which package a file of the libraries imports that this Python lacks, and the mend; empty for
    other errors. Models of images and utils/accuracy.py import torchvision, and no others do."""
    if not isinstance(error, ModuleNotFoundError) or not error.name:
        return ""
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    importing = Path([file for file in files if not file.startswith("<frozen")][-1])
    package, name = error.name.partition(".")[0], {NXD, NXDI}.intersection(importing.parts)
    if not name or package in (NXD, NXDI):
        return ""
    mend = _BUILDS.get(package, f"pip install {package}")
    return f"{importing.name} of {name.pop()} imports {package}, which this Python lacks; {mend}"


def find(stand_in: Sequence[str] = ()) -> Libraries | None:
    """The real libraries, checked; None where the imitation is to be used.

    `stand_in` are the folders of this package on `sys.path`, which do not count.

    Raises:
        UsageError: what is named is no checkout, or the versions do not fit each other or
            transformers.
    """
    named = os.environ.get(VARIABLE, "")
    if named == NONE:
        return None
    folders = [Path(folder) for folder in named.split(os.pathsep) if folder]
    roots = _named(folders) if folders else _installed(stand_in)
    if roots is None:
        return None
    versions = [_version(root) for root in roots]
    places = tuple(str(root.parent) for root in roots) if folders else ()
    found = Libraries(places, roots, *versions)
    _check(found)
    return found


def _named(folders: Sequence[Path]) -> tuple[Path, Path]:
    found: dict[str, Path] = {}
    for folder in folders:
        inside = [str(folder), str(folder / "src"), *sorted(glob(f"{escape(str(folder))}/*/src"))]
        here = [
            Path(place, name)
            for name in (NXD, NXDI)
            for place in inside
            if os.path.isfile(os.path.join(place, name, "_version.py"))
        ]
        if not here:
            raise UsageError(
                f"{folder} is no checkout of NxD or NxD Inference, expected a folder with "
                f"src/{NXD} or src/{NXDI}; clone aws-neuron/neuronx-distributed and "
                "aws-neuron/neuronx-distributed-inference, and name both folders."
            )
        for root in here:
            if not found.setdefault(root.name, root).samefile(root):
                raise UsageError(
                    f"{found[root.name]} and {root} are two checkouts of one library, expected one "
                    "of each; name the folders that belong together."
                )
    missing = [name for name in (NXD, NXDI) if name not in found]
    if missing:
        raise UsageError(
            f"{os.pathsep.join(map(str, folders))} has no {missing[0]}, expected both libraries, "
            f"because each release of one needs its own of the other; {_advice(found)}."
        )
    return found[NXD].resolve(), found[NXDI].resolve()


def _advice(found: dict[str, Path]) -> str:
    """Which checkout goes with the one that is there."""
    versions = {name: _minor(_version(root)) for name, root in found.items()}
    for release in RELEASES:
        if versions == {NXD: release.nxd}:
            return f"clone aws-neuron/neuronx-distributed-inference at {release.nxdi_at}"
        if versions == {NXDI: release.nxdi}:
            return f"clone aws-neuron/neuronx-distributed at {release.nxd_at}"
    return "clone both at the tags of one release"


def _installed(stand_in: Sequence[str]) -> tuple[Path, Path] | None:
    path = [place for place in sys.path if place not in stand_in]
    roots = []
    for name in (NXD, NXDI):
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is None or spec.origin is None:
            return None
        roots.append(Path(spec.origin).resolve().parent)
    return roots[0], roots[1]


def _version(root: Path) -> str:
    try:
        text = (root / "_version.py").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        text = ""
    found = re.search(r"__version__ = [\"']([\w.+]+)", text)
    if found is None:
        raise UsageError(
            f"{root / '_version.py'} names no version, expected one such as 0.6.0; take a checkout "
            "as it was published."
        )
    return found[1]


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def real_ones() -> str:
    """What to do for a feature that only the real libraries have: the checkouts for the installed
    transformers, else for the contest's newest."""
    fitting = [r for r in RELEASES if r.transformers == _minor(_transformers())]
    release = (fitting or [r for r in RELEASES if r.nxdi == "0.6"])[-1]
    return (
        f"clone aws-neuron/neuronx-distributed-inference at {release.nxdi_at} and "
        f"aws-neuron/neuronx-distributed at {release.nxd_at} and name both folders with "
        f"--libraries or {VARIABLE} (docs/libraries.md)"
    )


def only_of_the_library(name: str) -> Callable[..., Any]:
    """Stands for what only the library has, and refuses to be called."""

    def refuse(*_arguments: Any, **_options: Any) -> None:
        raise NotImplementedError(
            f"{name} belongs to a feature that this imitation of the libraries does not have, "
            f"expected none; {real_ones()}."
        )

    return refuse


def _transformers() -> str:
    """The installed version, "none" without one."""
    try:
        return importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        return "none"


def _check(found: Libraries) -> None:
    """Refuse versions that do not belong together, in one sentence with versions that do."""
    release = next((r for r in RELEASES if r.nxdi == _minor(found.nxdi)), None)
    if release is None:
        raise UsageError(
            f"{found.words} are not known here, expected NxD Inference {RELEASES[0].nxdi} to "
            f"{RELEASES[-1].nxdi}; take {RELEASES[-1].nxdi_at} with NxD at {RELEASES[-1].nxd_at}."
        )
    fitting = f"NxD {release.nxd} ({release.nxd_at}) and transformers {release.transformers}"
    if _minor(found.nxd) != release.nxd:
        raise UsageError(
            f"{found.words} do not fit each other: NxD Inference {release.nxdi} goes with "
            f"{fitting}; check out aws-neuron/neuronx-distributed at {release.nxd_at}."
        )
    installed = _transformers()
    if _minor(installed) != release.transformers:
        raise UsageError(
            f"{found.words} do not fit transformers {installed}: NxD Inference {release.nxdi} goes "
            f"with {fitting}; pip install 'transformers=={release.transformers}.*' into an "
            "environment for it."
        )
    lacking = [name for name in BESIDE if importlib.util.find_spec(name) is None]
    if lacking:
        raise UsageError(
            f"{found.words} import {' and '.join(lacking)}, which this Python lacks; pip install "
            f"{' '.join(lacking)}."
        )
