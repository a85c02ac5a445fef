"""Pieces of work on the workers of a Dask cluster (`--scheduler ADDRESS`) instead of here.

Dask places them, and places those of a worker that dies elsewhere. A piece names a function of this
project and has its arguments as JSON, the sources that it needs, and a digest of all of that. The
caller keeps its own pool of threads: a thread waits for its piece instead of doing it.
"""

import contextlib
import functools
import hashlib
import importlib
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Optional

from .errors import StandInError, UsageError

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("neuron_cpu",)  # of this project, whose files a piece runs
FILES = (".py", ".json", ".md")  # of them, which an installation has, too
VARIABLES = (
    "NEURON_CPU_NKI", "NEURON_CPU_NXDI", "NEURON_LOGICAL_NC_CONFIG",
    "NEURON_PLATFORM_TARGET_OVERRIDE",
)  # fmt: skip
ADDRESS = re.compile(r"(tcp|tls|ws|wss)://\S+:[0-9]{1,5}")
CONNECT_SECONDS = 10
AHEAD = 2  # pieces for each thread of a worker, so that none waits for its next one
MOST_BYTES = 1 << 25  # of a piece, whose sources a kernel imports: a folder of others is larger
HELP = "hand the pieces to the Dask cluster of this scheduler, such as tcp://HOST:8786"


@contextlib.contextmanager
def joined(address: str | None, rooms: Sequence[str] = ROOMS) -> Iterator[Optional["Cluster"]]:
    """The cluster of a scheduler while the body runs, None without an address."""
    if address is None:
        yield None
        return
    cluster = Cluster(address, rooms)
    try:
        yield cluster
    finally:
        cluster.close()


class WorkersLostError(StandInError):
    """A piece whose workers died, each that Dask gave it to."""


class Cluster:
    """A scheduler and its workers.

    Args:
        address: of the scheduler.
        rooms: folders and files of this project that have to be the same on a worker.

    Attributes:
        slots: pieces that its workers do at the same time.

    Raises:
        UsageError: there is no scheduler, or a worker has another version of this project.
    """

    def __init__(self, address: str, rooms: Sequence[str] = ROOMS) -> None:
        self.address, self._rooms = address, rooms
        self._client = _connected(address)
        try:
            for worker, told in self._client.run(_on_worker, self._head(b""), b"").items():
                _checked(told, worker)
            self.slots = max(1, sum(self._client.nthreads().values()))
        except BaseException:
            self.close()
            raise

    def call(self, function: Callable[..., Any], files: Iterable[Path] = (), **content: Any) -> Any:
        """What `function(folder, **content)` returns on a worker, in whose `folder` each of the
        `files` has its absolute path.

        Raises:
            WorkersLostError: the workers died on which Dask has tried it.
            UsageError: the cluster cannot do it.
        """
        texts = {str(path): path.read_text(encoding="utf-8") for path in files}
        name = f"{function.__module__}:{function.__name__}"
        body = json.dumps({"function": name, "files": texts, "content": content}).encode()
        if len(body) > MOST_BYTES:
            raise UsageError(
                f"a piece for {self.address} has {len(body)} bytes, expected at most {MOST_BYTES}; "
                "move the file to a folder with nothing else that it might import."
            )
        from distributed.scheduler import KilledWorker

        try:
            told = self._client.submit(_on_worker, self._head(body), body, pure=False).result()
        except KilledWorker as error:
            raise WorkersLostError(
                f"the workers that did it have died, the last one {error.last_worker.address}"
            ) from error
        except Exception as error:  # Dask's, or of the function there
            said = " ".join(str(error).split())[:300] or type(error).__name__
            raise UsageError(f"the cluster of {self.address} gives no answer ({said}).") from error
        return _checked(told, f"of {self.address}")

    def close(self) -> None:
        """Leave; who waits for a piece gets a UsageError. It may be called twice."""
        self._client.close()

    def _head(self, body: bytes) -> dict[str, Any]:
        """Version and digest that a worker has to find, too."""
        rooms = tuple(self._rooms)
        return {"rooms": rooms, "version": version(rooms), "digest": _digest(body)}


def jobs(asked: int | None, cluster: Cluster | None) -> int:
    """Pieces to have at the same time: as asked, or what the machine or the cluster can take."""
    return asked or (os.cpu_count() or 1 if cluster is None else AHEAD * cluster.slots)


def _connected(address: str) -> Any:
    mending = "expected an address such as tcp://HOST:8786; `dask scheduler` prints its own."
    if not ADDRESS.fullmatch(address):  # of a wrong one Dask itself tells in a traceback
        raise UsageError(f"--scheduler {address} is no address of a scheduler, {mending}")
    try:
        from distributed import Client
    except ImportError as error:
        raise UsageError(
            "--scheduler needs the package distributed, which is not installed; "
            "pip install distributed."
        ) from error
    try:
        return Client(address, timeout=CONNECT_SECONDS, set_as_default=False)
    except (OSError, ValueError) as error:
        raise UsageError(
            f"--scheduler {address} has no scheduler of Dask ({error}), {mending}"
        ) from error


def _checked(told: dict[str, Any], worker: str) -> Any:
    """What a piece returned; a UsageError where the worker may not do it."""
    if "other" in told:
        raise UsageError(
            f"a worker {worker} has another version of this project ({told['other']}), expected "
            f"{told['asked']}; start every worker from one checkout."
        )
    if "refused" in told:
        raise UsageError(told["refused"])
    return told["done"]


def _digest(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()


@functools.cache
def version(rooms: tuple[str, ...]) -> str:
    """The release, a hash of every file of some rooms, and the variables that change an answer."""
    from . import __version__

    chosen = {name: os.environ[name] for name in VARIABLES if name in os.environ}
    whole = hashlib.sha256()
    for room in rooms:
        inside = sorted(p for p in (ROOT / room).rglob("*") if p.suffix in FILES)
        for path in [ROOT / room] if (ROOT / room).is_file() else inside:
            whole.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes() + b"\0")
    return ", ".join([__version__, whole.hexdigest()[:12], *map("=".join, chosen.items())])


# --- on a worker ----------------------------------------------------------------------------------
def _on_worker(head: dict[str, Any], body: bytes) -> dict[str, Any]:
    """Carry a piece out, if this worker has the sender's version of the project."""
    try:
        from neuron_cpu import cluster

        own = cluster.version(head["rooms"])
    except (ImportError, AttributeError) as error:
        own = f"{type(error).__name__}: {error}"
    if own != head["version"]:
        return {"other": own, "asked": head["version"]}
    return cluster.carried_out(head["digest"], body)


# Dask sends a function of a module by its name, which a scheduler or worker may not have or have
# another of. A function of __main__ it sends as it is.
_on_worker.__module__ = "__main__"


def carried_out(digest: str, body: bytes) -> dict[str, Any]:
    """What a piece's function returns, or why it refuses; nothing where the piece is empty."""
    if _digest(body) != digest:
        return {"refused": "a piece has arrived damaged; run again."}
    if not body:
        return {"done": None}
    # Under its nanny a worker is a daemon of multiprocessing, which forbids processes of its own.
    # They end with it all the same (sandbox/fork_server.py).
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    from . import ensure_sdk

    ensure_sdk()
    piece = json.loads(body)
    module, _, name = piece["function"].partition(":")
    function = getattr(importlib.import_module(module), name)
    folder = _folder_of(json.dumps(piece["files"]))
    try:
        done = json.dumps(function(folder, **piece["content"]))
        # texts name the sender's files instead of their copies in the folder
        return {"done": json.loads(done.replace(json.dumps(folder)[1:-1], ""))}
    except UsageError as error:
        return {"refused": str(error)}


@functools.cache
def _scratch() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="neuron_cpu-")


@functools.cache
def _folder_of(files: str) -> str:
    """A folder with these files, the same one for all pieces that have them."""
    folder = tempfile.mkdtemp(dir=_scratch().name)
    for name, text in json.loads(files).items():
        path = Path(folder + name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return folder


def threads() -> int:
    """Pieces that this worker does at the same time."""
    from distributed import get_worker

    return int(get_worker().state.nthreads)


PROJECT, FOLDER, RESULTS = "@PROJECT", "@FOLDER", "@RESULTS"  # in words of a command


def command(folder: str, words: list[str], cwd: str) -> dict[str, Any]:
    """A script of this project as a command on this worker, in the caller's folder if it is here.

    Args:
        words: the script and its arguments, in which PROJECT stands for the folder of this project,
            FOLDER for that of the piece's files, and RESULTS for one to write to.

    Returns:
        `status`, the last line `said`, and `results`: the JSON files that it wrote, by their names.
    """
    with tempfile.TemporaryDirectory() as results:
        started = [sys.executable]
        for word in words:
            for name, place in ((PROJECT, str(ROOT)), (FOLDER, folder), (RESULTS, results)):
                word = word.replace(name, place)
            started.append(word)
        where = cwd if Path(cwd).is_dir() else ROOT
        done = subprocess.run(started, cwd=where, capture_output=True, text=True, check=False)
        found = sorted(Path(results).rglob("*.json"))
        return {
            "status": done.returncode,
            "said": (done.stderr.strip().splitlines() or [""])[-1],
            "results": {file.name: json.loads(file.read_text(encoding="utf-8")) for file in found},
        }
