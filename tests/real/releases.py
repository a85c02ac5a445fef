"""What a run with the real libraries needs: sources of a release from clones, and its transformers.

    python tests/real/releases.py RELEASE PUBLIC COMMAND ...

runs a command under a release. Both are kept in the user's cache; packages come from PyPI by name.
"""

import io
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))

from neuron_cpu import libraries  # noqa: E402

RELEASES = {release.nxdi: release for release in libraries.RELEASES}
DEFAULT = ("0.1", "0.3", "0.6", "0.7")
# transformers' minor version: its release, and that of tokenizers which it takes.
PINS = {
    "4.45": ("4.45.2", "0.20.3"),
    "4.48": ("4.48.3", "0.21.4"),
    "4.51": ("4.51.3", "0.21.4"),
    "4.56": ("4.56.2", "0.22.0"),
    "4.57": ("4.57.1", "0.22.0"),
}


def environment(release, public):
    """The variables under which a Python finds the sources and the packages of a release."""
    roots = [
        sources(public / "neuronx-distributed", release.nxd_at),
        sources(public / "neuronx-distributed-inference", release.nxdi_at),
    ]
    packages = [str(requirements(release)), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        libraries.VARIABLE: os.pathsep.join(map(str, roots)),
        "PYTHONPATH": os.pathsep.join(filter(None, packages)),
        "NXD_LOG_LEVEL": "error",
    }


def cache(*parts):
    root = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    return root.joinpath("nki-llama", "real", *parts)


def sources(clone, at):
    """The sources of a tag or commit of a clone."""
    folder = cache("sources", f"{clone.name}-{at}")
    if not folder.is_dir():
        packed = subprocess.run(
            ["git", "-C", str(clone), "archive", at, "src"], check=True, capture_output=True
        ).stdout
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as unfinished:
            with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
                archive.extractall(unfinished, filter="data")
            os.rename(unfinished, folder)
            os.mkdir(unfinished)
    return folder


def requirements(release):
    """The transformers that a release pins, and what NxD imports besides."""
    transformers, tokenizers = PINS[release.transformers]
    folder = cache("packages", transformers)
    if not folder.is_dir():
        pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        pinned = [f"transformers=={transformers}", f"tokenizers=={tokenizers}"]
        subprocess.run([*pip, "--no-deps", "--target", str(folder), *pinned], check=True)
        subprocess.run([*pip, "--target", str(folder), "boto3", "tenacity"], check=True)
        subprocess.run([*pip, "--no-deps", "--target", str(folder), "scipy"], check=True)
    return folder


if __name__ == "__main__":
    _release, _public, *_command = sys.argv[1:]
    os.execvpe(_command[0], _command, environment(RELEASES[_release], Path(_public)))
