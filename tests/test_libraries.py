"""Which NxD and NxD Inference are used, and what is refused: folders that only look like them."""

import os
import sys
from types import SimpleNamespace

import pytest

import neuron_cpu
from harness.inputs import submission
from neuron_cpu import libraries
from neuron_cpu.errors import UsageError
from neuron_cpu.sandbox import run_script


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """Makes checkouts of given versions; transformers and the packages beside it fit 0.6."""

    def make(nxdi="0.6.0", nxd="0.15.0", name="clones"):
        for package, version in ((libraries.NXDI, nxdi), (libraries.NXD, nxd)):
            if version is not None:
                folder = tmp_path / name / package.replace("_", "-") / "src" / package
                folder.mkdir(parents=True)
                (folder / "_version.py").write_text(f'# theirs\n__version__ = "{version}"\n')
                (folder / "__init__.py").write_text("")
        return tmp_path / name

    own = SimpleNamespace(make=make, transformers="4.51.3", lacking=())
    monkeypatch.setattr(libraries.importlib.metadata, "version", lambda _: own.transformers)
    monkeypatch.setattr(
        libraries.importlib.util, "find_spec", lambda name: None if name in own.lacking else name
    )
    monkeypatch.delenv(libraries.VARIABLE, raising=False)
    return own


def test_one_folder_of_both_clones_and_two_folders_are_found(fake, monkeypatch):
    root = fake.make()
    two = [root / "neuronx-distributed", root / "neuronx-distributed-inference" / "src"]
    for named in ([root], two, two[::-1]):
        monkeypatch.setenv(libraries.VARIABLE, os.pathsep.join(map(str, named)))
        found = libraries.find()
        assert (found.nxd, found.nxdi) == ("0.15.0", "0.6.0")
        assert found.places == (
            str(root / "neuronx-distributed" / "src"),
            str(root / "neuronx-distributed-inference" / "src"),
        )
        assert "NxD Inference 0.6.0 and NxD 0.15.0" in found.words


def test_a_changed_file_changes_the_identity(fake, monkeypatch):
    root = fake.make()
    monkeypatch.setenv(libraries.VARIABLE, str(root))
    before = libraries.find().identity()
    assert before == libraries.find().identity()
    (libraries.find().roots[0] / "__init__.py").write_text("changed = True\n")
    assert libraries.find().identity() != before


def test_without_them_the_imitation_is_used(fake, monkeypatch):
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p not in neuron_cpu.ROOTS])
    assert libraries.find(neuron_cpu.ROOTS) is None


@pytest.mark.parametrize(
    ("nxdi", "nxd", "message"),
    [
        ("0.6.0", "0.16.0", "do not fit each other: NxD Inference 0.6 goes with NxD 0.15"),
        ("0.6.0", "0.10.0", r"check out aws-neuron/neuronx-distributed at v2\.26\.0"),
        ("0.6.0", None, r"has no neuronx_distributed, .*neuronx-distributed at v2\.26\.0"),
        (None, "0.15.0", r"neuronx-distributed-inference at v0\.6\.10598"),
        ("1.2.0", "0.15.0", r"are not known here, expected NxD Inference 0\.1 to 0\.9"),
    ],
)
def test_pairs_that_do_not_fit_are_refused_with_the_one_that_does(
    fake, monkeypatch, nxdi, nxd, message
):
    monkeypatch.setenv(libraries.VARIABLE, str(fake.make(nxdi, nxd)))
    with pytest.raises(UsageError, match=message):
        libraries.find()


def test_transformers_and_what_is_lacking_are_named(fake, monkeypatch):
    monkeypatch.setenv(libraries.VARIABLE, str(fake.make()))
    fake.transformers = "4.45.2"
    with pytest.raises(UsageError, match=r"transformers 4\.45\.2: .* transformers 4\.51; pip"):
        libraries.find()
    fake.transformers, fake.lacking = "4.51.3", ("boto3", "tenacity")
    with pytest.raises(UsageError, match="pip install boto3 tenacity"):
        libraries.find()


@pytest.mark.parametrize("place", [libraries.NXDI, "mine"])
def test_a_package_that_a_file_of_theirs_imports_is_named(tmp_path, monkeypatch, place):
    """As torchvision, which utils/accuracy.py imports, in a script and in a submission."""
    folder = tmp_path / place
    folder.mkdir()
    (folder / "accuracy.py").write_text("import nowhere.transforms\n")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "accuracy", raising=False)
    with pytest.raises(ModuleNotFoundError) as raised:
        import accuracy  # noqa: F401
    said = f"accuracy.py of {libraries.NXDI} imports nowhere, which this Python lacks; pip install"
    told = [submission.raised(raised.value), *run_script.missing(raised.value)]
    assert [said in words for words in told] == (
        [True, True] if place == libraries.NXDI else [False]
    )
    raised.value.name = "torchvision.transforms"  # whose plain package does not fit the CPU's torch
    assert ("--torch-backend cpu" in libraries.lacking(raised.value)) == (place == libraries.NXDI)


def test_a_folder_that_is_no_checkout_ends_a_run_with_status_2(run_main, tmp_path):
    ended = run_main("--libraries", tmp_path, "--mode", "compile", NEURON_CPU_LIBRARIES="")
    assert ended.returncode == 2
    assert f"{tmp_path} is no checkout of NxD" in ended.stderr + ended.stdout
    assert "Traceback" not in ended.stderr


NO_CHECKOUT = "is no checkout of NxD or NxD Inference, expected a folder with src/"
NO_VERSION = r"_version\.py names no version, expected one such as 0\.6\.0"


@pytest.mark.parametrize(
    ("spoiled", "message"),
    [
        (lambda path: path.write_bytes(b""), NO_VERSION),
        (lambda path: path.write_bytes(b"\x8f\x00version = 1"), NO_VERSION),
        (lambda path: path.unlink(), r"has no neuronx_distributed,"),
        (lambda path: (path.unlink(), path.symlink_to(path)), r"has no neuronx_distributed,"),
    ],
    ids=["empty", "bytes", "none", "a link to itself"],
)
def test_a_checkout_without_a_version_is_refused(fake, monkeypatch, spoiled, message):
    root = fake.make()
    spoiled(root / "neuronx-distributed" / "src" / libraries.NXD / "_version.py")
    monkeypatch.setenv(libraries.VARIABLE, str(root))
    with pytest.raises(UsageError, match=message):
        libraries.find()


@pytest.mark.parametrize("kind", ["file", "empty", "loop", "nested", "x" * 5000])
def test_what_is_no_checkout_is_refused(fake, monkeypatch, tmp_path, kind):
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "nested").mkdir()
    (tmp_path / "nested" / "src").symlink_to(tmp_path / "nested")
    monkeypatch.setenv(libraries.VARIABLE, str(tmp_path / kind))
    with pytest.raises(UsageError, match=NO_CHECKOUT):
        libraries.find()


def test_two_checkouts_of_one_library_are_refused_by_name(fake, monkeypatch):
    one, other = fake.make(), fake.make("0.7.0", None, "other")
    monkeypatch.setenv(libraries.VARIABLE, os.pathsep.join(map(str, (one, other))))
    with pytest.raises(UsageError, match="clones.* and .*other.* are two checkouts of one library"):
        libraries.find()
    monkeypatch.setenv(libraries.VARIABLE, os.pathsep.join(map(str, (one, one))))
    assert libraries.find().nxdi == "0.6.0"


@pytest.mark.parametrize(
    ("installed", "tag"),
    [("4.45.2", "v0.1.0"), ("4.51.3", "v0.6.10598"), ("4.57.1", "c63afe0"), ("5.0", "v0.6.10598")],
)
def test_the_checkouts_to_take_fit_the_installed_transformers(fake, installed, tag):
    fake.transformers = installed
    assert f"neuronx-distributed-inference at {tag} and" in libraries.real_ones()
