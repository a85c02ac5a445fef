"""Compiled models at an address that machines share: NEURON_COMPILE_CACHE_URL, as SDK users set it.

The SDK takes a folder or s3:// (AWS Neuron documentation, guide to Neuron's persistent cache);
here fsspec opens any address. One model is one file, so whoever reads sees all of it or none. Its
name is a hash of what it was compiled from.
"""

import hashlib
import json
import os
import secrets
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import sdk
from harness.errors import UserError
from neuron_cpu.files import check_plain

VARIABLE = "NEURON_COMPILE_CACHE_URL"


@dataclass(frozen=True)
class Entry:
    """The place of one compiled model.

    Attributes:
        files: fsspec's file system of the address.
        path: the file's path in it.
        key: the hash of what the model is compiled from.
    """

    files: Any
    path: str
    key: str

    def fetch(self, folder: Path) -> None:
        """Unpack the file into an empty folder: plain files alone, below it.

        Raises:
            Exception: any that the file system, the archive or `check_plain` has.
        """
        with (
            self.files.open(self.path, "rb") as file,
            tarfile.open(fileobj=file, mode="r|") as archive,
        ):
            archive.extractall(folder, filter="data")
        check_plain(folder)

    def store(self, folder: Path) -> None:
        """Put the folder's files there under another name, and rename what is whole.

        Raises:
            Exception: any that the file system has.
        """
        self.files.makedirs(os.path.dirname(self.path), exist_ok=True)
        part = f"{self.path}.{secrets.token_hex(4)}"
        try:
            with (
                self.files.open(part, "wb") as file,
                tarfile.open(fileobj=file, mode="w|") as archive,
            ):
                archive.add(folder, ".")
            self.files.mv(part, self.path)
        except BaseException:
            if self.files.exists(part):
                self.files.rm(part)
            raise


def check() -> None:
    """Refuse an address that no installed package opens, before anything long begins."""
    _opened()


def entry(inputs: dict[str, Any]) -> Entry | None:
    """The place of a model that is compiled from `inputs`; None where no address is set."""
    place = _opened()
    if place is None:
        return None
    files, root = place
    key = hashlib.sha256(json.dumps(_by_content(inputs), sort_keys=True).encode()).hexdigest()
    return Entry(files, f"{root.rstrip('/')}/neuron_cpu/MODULE_{key}.tar", key)


def _opened() -> tuple[Any, str] | None:
    address = os.environ.get(VARIABLE)
    if not address or not sdk.platform().simulates:  # on a device the SDK itself keeps graphs there
        return None
    try:
        from fsspec.core import url_to_fs

        return url_to_fs(address)
    except (ImportError, ValueError) as error:
        raise UserError(
            f"{VARIABLE} is {address}, which does not open ({error}), expected a folder or an "
            "address that fsspec knows; correct it, or pip install fsspec and what opens it (s3fs "
            "for s3://)."
        ) from error


def _by_content(inputs: Any) -> Any:
    """The same with hashes for sizes and times of a folder's files: other machines have others."""
    if isinstance(inputs, list):
        return [_by_content(one) for one in inputs]
    if not isinstance(inputs, dict):
        return inputs
    if "folder" not in inputs:
        return {name: _by_content(one) for name, one in inputs.items()}
    (folder,) = inputs["folder"]
    return {name: _digest(Path(folder) / name) for name in inputs if name != "folder"}


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(1 << 22):
            digest.update(part)
    return digest.hexdigest()
