"""The files of a compiled folder, written so that an unfinished one is never mistaken for whole.

neuron_config.json                                the configuration
model.pt                                          manifest (JSON): version, ranks, buckets
operators.json                                    what every sub-model and bucket runs
weights/tp{rank}_sharded_checkpoint.safetensors   one file a rank
graphs/<tag>/_tp0_bk<i>/model/graph.hlo           the traced graphs

The compiler's work folder has the same below <tag>, and each graph as hlo_module.pb, SDK 2.27's
name for it, beside its model folder, too.
"""

import json
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from neuron_cpu.errors import StandInError
from neuron_cpu.files import atomic_folder

MANIFEST_FILE = "model.pt"
OPERATORS_FILE = "operators.json"
GRAPHS_FOLDER = "graphs"
WEIGHTS_FOLDER = "weights"
FORMAT = "neuron_cpu-1"


def shard_path(folder: Path, rank: int) -> Path:
    return folder / WEIGHTS_FOLDER / f"tp{rank}_sharded_checkpoint.safetensors"


def graph_path(root: Path, tag: str, bucket_index: int) -> Path:
    return root / tag / f"_tp0_bk{bucket_index}" / "model" / "graph.hlo"


@contextmanager
def staged_folder(target: Path) -> Iterator[Path]:
    """A temporary sibling, which replaces `target` when the block ends without an exception.

    Files of an earlier `target` that the block did not write again stay (a tokenizer beside the
    model, say); earlier compile results do not.
    """
    target = Path(os.path.abspath(target))
    with atomic_folder(target) as stage:
        yield stage
        if target.exists():
            _keep_other_files(target, stage)


def _keep_other_files(old: Path, new: Path) -> None:
    """Copy the entries of `old` that are no compile results and that `new` lacks."""
    results = {MANIFEST_FILE, OPERATORS_FILE, GRAPHS_FOLDER, WEIGHTS_FOLDER}
    for entry in old.iterdir():
        if entry.name in results or (new / entry.name).exists():
            continue
        _copy(entry, new / entry.name)


def _copy(source: Path, target: Path) -> None:
    """Copy a file, folder or link without times and modes: a confined process may not set them."""
    if source.is_symlink():
        os.symlink(os.readlink(source), target)
    elif source.is_dir():
        target.mkdir()
        for entry in source.iterdir():
            _copy(entry, target / entry.name)
    else:
        shutil.copyfile(source, target)


def write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def clear_work_dir(work_dir: Path, tags: Iterable[str]) -> None:
    """Delete earlier graphs from the compiler's work folder, as the SDK does before it traces. Only
    the sub-models' own folders go: the variable may name a folder that holds other things."""
    for tag in tags:
        shutil.rmtree(work_dir / tag, ignore_errors=True)


def write_graph(path: Path, graph: bytes) -> None:
    """Write one graph to `path`; StandInError where that fails."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(graph)
    except OSError as error:
        raise StandInError(
            f"The graph {path} cannot be written ({error.strerror}), expected a writable folder; "
            "name another one in BASE_COMPILE_WORK_DIR, or another compiled-model path."
        ) from error


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a finished compile; StandInError where it is missing or foreign."""
    path = folder / MANIFEST_FILE
    if not path.is_file():
        raise StandInError(
            f"{folder} holds no compiled model, expected {MANIFEST_FILE} in it; "
            "call compile() with this path first."
        )
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError):
        manifest = {}
    if manifest.get("format") != FORMAT:
        raise StandInError(
            f"{path} was not compiled by this version of neuron_cpu, expected the format "
            f"{FORMAT}, got {manifest.get('format', 'a file of the device compiler')}; "
            "compile again."
        )
    return manifest
