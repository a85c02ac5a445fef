"""Compiled models at an address: taken whole or not at all, from a folder and from memory."""

from __future__ import annotations

import io
import json
import shutil
import sys
import tarfile
from pathlib import Path
from typing import Any

import fsspec
import pytest

from harness.errors import UserError
from harness.session import building, shared_cache
from tests.crossed import full
from tests.harness.session.test_building import build_into

ADDRESSES = ("memory://{}/shared", full("{}/shared"))


@pytest.fixture
def model(tiny_model, tmp_path):
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


@pytest.mark.parametrize("address", ADDRESSES)
def test_another_machine_takes_what_one_has_compiled(address, model, tmp_path, monkeypatch, capsys):
    """The other one has the same files elsewhere, and written at another time."""
    monkeypatch.setenv(shared_cache.VARIABLE, address.format(tmp_path))
    first = build_into(tmp_path / "one", model)
    other = Path(shutil.copytree(model, tmp_path / "other", copy_function=shutil.copyfile))
    capsys.readouterr()
    second = build_into(tmp_path / "two", other)
    told = capsys.readouterr().err
    assert "Fetching the compiled" in told and "Compiling" not in told
    assert second.folder != first.folder
    assert weights(first.folder) == weights(second.folder)
    build_into(tmp_path / "two", other)
    assert "Reusing the compiled" in capsys.readouterr().err


def weights(folder):
    return {path.name: path.read_bytes() for path in folder.glob("weights/*")}


def packed(**files):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


def changed_weight(content):
    """The same length, other values."""
    at = len(content) // 2
    while not any(content[at : at + 64]):
        at += 64
    return content[:at] + bytes(byte ^ 0x41 for byte in content[at : at + 64]) + content[at + 64 :]


DAMAGES: dict[str, Any] = {
    "cut short": lambda content: content[: len(content) // 2],
    "no archive": lambda content: b"a model of somebody else",
    "nothing": lambda content: b"",
    "other bytes": changed_weight,
    "no manifest": lambda content: packed(other=b"1"),
    "a manifest of another": lambda content: packed(**{"driver.json": b'{"shared": "0"}'}),
    "a list": lambda content: packed(**{"driver.json": b"[]"}),
    "outside": lambda content: packed(**{"../../outside": b"1"}),
}


def test_a_broken_or_foreign_entry_is_told_and_compiled_anew(model, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv(shared_cache.VARIABLE, f"memory://{tmp_path}/damaged")
    loaded = build_into(tmp_path / "c", model)
    files = fsspec.filesystem("memory")
    (path,) = files.glob(f"{tmp_path}/damaged/neuron_cpu/*.tar")
    content = files.cat(path)
    inputs = json.loads((loaded.folder / building.MANIFEST).read_text())
    shared = shared_cache.Entry(files, path, inputs["shared"])
    for name, damage in DAMAGES.items():
        files.pipe(path, damage(content))
        capsys.readouterr()
        assert not building._fetched(loaded, inputs, shared), name
        assert "holds no compiled model that this run can take (" in capsys.readouterr().err, name
    assert not list(tmp_path.rglob("outside"))
    shutil.rmtree(loaded.folder)
    build_into(tmp_path / "c", model)
    told = capsys.readouterr().err
    assert "compiles anew" in told and "Compiling" in told
    assert len(files.cat(path)) == len(content)
    assert building._fetched(loaded, inputs, shared)


def test_a_store_that_fails_leaves_no_part(tmp_path, monkeypatch):
    files = fsspec.filesystem("file")
    folder = tmp_path / "made"
    folder.mkdir()
    (folder / "weights").write_bytes(b"1" * 5000)
    entry = shared_cache.Entry(files, str(tmp_path / "shared" / "MODULE_1.tar"), "1")

    def fail(*_, **__):
        raise OSError("the disk is full")

    with monkeypatch.context() as patched:
        patched.setattr(tarfile.TarFile, "add", fail)
        with pytest.raises(OSError, match="full"):
            entry.store(folder)
    assert not list((tmp_path / "shared").iterdir())
    entry.store(folder)
    assert [path.name for path in (tmp_path / "shared").iterdir()] == ["MODULE_1.tar"]


@pytest.mark.parametrize(
    ("address", "absent", "told"),
    [
        ("nowhere://bucket", None, "Protocol not known: nowhere"),
        ("s3://bucket/models", "s3fs", "s3fs"),
        ("s3://bucket/models", "fsspec.core", "fsspec"),
    ],
)
def test_an_address_that_nothing_opens_is_refused_at_once(address, absent, told, monkeypatch):
    monkeypatch.setenv(shared_cache.VARIABLE, address)
    if absent:
        monkeypatch.setitem(sys.modules, absent, None)
    with pytest.raises(UserError, match=told) as refused:
        shared_cache.check()
    assert "expected a folder or an address that fsspec knows" in str(refused.value)


def test_without_the_variable_nothing_is_shared(monkeypatch):
    monkeypatch.delenv(shared_cache.VARIABLE, raising=False)
    assert shared_cache.entry({"settings": {}}) is None
