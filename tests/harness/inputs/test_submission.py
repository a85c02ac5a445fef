"""Which files belong to a submission, and that each is found, hashed and named."""

import sys
from pathlib import Path

import pytest

from harness.errors import UserError
from harness.inputs import submission


@pytest.fixture(autouse=True)
def own_modules(monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = dict(sys.modules)
    yield
    for name in set(sys.modules) - set(before):
        del sys.modules[name]


def folder_of(root, entry, **texts):
    root.mkdir()
    (root / "entry_of_test.py").write_text(entry)
    for name, text in texts.items():
        place = root / Path(*name.split("__")).with_suffix(".py")
        place.parent.mkdir(exist_ok=True)
        place.write_text(text)
    return root / "entry_of_test.py"


def test_its_files_are_those_that_it_imports_and_that_these_import(tmp_path):
    entry = folder_of(
        tmp_path / "mine",
        "import importlib, json\nfrom first_part import x\nimportlib.import_module('third_part')\n",
        first_part="def late():\n    import second_part\nx = 1\n",
        second_part="import entry_of_test\nfrom own_package.inner import y\n",
        third_part="import no_python_part\n",
        no_python_part="x = (\n",
        own_package__inner="from . import other\n",
        own_package__other="",
        not_imported="",
    )
    names = [str(file.relative_to(entry.parent)) for file in submission.files(entry)]
    assert names == [
        "entry_of_test.py",
        "first_part.py",
        "no_python_part.py",
        "own_package/inner.py",
        "own_package/other.py",
        "second_part.py",
        "third_part.py",
    ]
    found = {submission.digest(entry)}
    for file in submission.files(entry):
        file.write_bytes(file.read_bytes() + b"# edited\n")
        found.add(submission.digest(entry))
    assert len(found) == 1 + len(names)
    (entry.parent / "not_imported.py").write_text("x = 2")
    assert submission.digest(entry) in found


def test_each_submission_finds_the_files_beside_it(tmp_path):
    entries = [
        folder_of(tmp_path / name, "from part_of_test import said", part_of_test=f"said = {name!r}")
        for name in ("a", "b", "c")
    ]
    assert [submission.imported(entry).said for entry in [*entries, entries[0]]] == [*"abca"]


def test_an_error_names_the_file_that_raised(tmp_path):
    entry = folder_of(tmp_path / "mine", "import part_of_test", part_of_test="\n1 / 0\n")
    with pytest.raises(UserError, match=r"part_of_test\.py, line 2, raised ZeroDivisionError"):
        submission.imported(entry)
    places = folder_of(tmp_path / "b", "import part_b\n\ndef f(): ...", part_b="def g(): ...")
    assert submission.kernel_places(places) == {"f": "entry_of_test.py:3", "g": "part_b.py:1"}


def test_a_class_without_the_librarys_base_is_refused(tmp_path):
    entry = folder_of(tmp_path / "mine", "class NeuronLlamaForCausalLM: ...")
    told = "defines no application of NxDI as NeuronLlamaForCausalLM.*begin with a copy of llama.py"
    with pytest.raises(UserError, match=told):
        submission.load(entry, "llama")
