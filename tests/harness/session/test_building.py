"""Compiled folders that were damaged, submissions that fail late, two runs at once."""

import functools
import json
import os
import pickle
import shutil
import threading
from pathlib import Path

import pytest

from harness.errors import UserError
from harness.files import locked_folder
from harness.inputs import command_line
from harness.session import building
from harness.session.building import build
from harness.session.generation import generate_tokens
from harness.session.opening import open_session
from tests.crossed import full
from tests.tiny_model import opened, write_tiny_model


def build_into(folder, model, *arguments):
    return build(opened(model, folder, *arguments))


@pytest.fixture
def compiled(tiny_model, tmp_path):
    """Builds the tiny model without kernels into a folder of the test's own."""
    return functools.partial(build_into, tmp_path / "c", tiny_model)


@pytest.fixture(scope="module")
def finished(tiny_model, tmp_path_factory):
    """What `compiled` leaves, built once."""
    root = tmp_path_factory.mktemp("finished") / "c"
    build_into(root, tiny_model)
    return root


@pytest.fixture
def again(finished, tmp_path):
    """A compiled folder of the test's own, which `compiled` would reuse."""
    shutil.copytree(finished, tmp_path / "c")
    (folder,) = (tmp_path / "c").iterdir()
    return folder


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1])


def flip(path):
    """Another value in the middle, at equal length."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x41
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        full("model.pt", truncate),
        full("operators.json", Path.unlink),
        ("weights/*.safetensors", flip),
        full("weights/*.safetensors", Path.unlink),
    ],
)
def test_a_damaged_compiled_folder_is_built_anew(name, damage, again, compiled, capsys):
    damage(next(again.glob(name)))
    capsys.readouterr()
    assert compiled().folder == again
    assert "(compiled files damaged)" in capsys.readouterr().err
    compiled()
    assert "Reusing the compiled" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_broken_tokenizer_is_refused_in_one_sentence(name, tmp_path):
    model = write_tiny_model(tmp_path / "m")
    (model / name).write_text("{")
    args = command_line.parse(["--mode", "generate", "--model-path", str(model)])
    with pytest.raises(UserError, match="Cannot read the tokenizer in .*download them again"):
        open_session(args)


def test_one_run_at_a_time_uses_a_folder(tmp_path):
    waits, entered = threading.Event(), threading.Event()

    def second():
        with locked_folder(tmp_path / "root", waits.set):
            entered.set()

    thread = threading.Thread(target=second)
    with locked_folder(tmp_path / "root", lambda: pytest.fail("the first run waits")):
        thread.start()
        assert waits.wait(30)
        assert not entered.is_set()
    thread.join(30)
    assert entered.is_set() and list((tmp_path / "root").iterdir()) == []


LEFT = (
    "import os\n"
    "from neuronx_distributed_inference.models.llama import modeling_llama\n"
    "class NeuronLlamaForCausalLM(modeling_llama.NeuronLlamaForCausalLM):\n"
    "    def compile(self, path):\n"
    "        super().compile(path)\n"
    "        {}\n"
)


@pytest.mark.parametrize(
    ("act", "told"),
    [
        ("os.symlink({mine!r}, path + '/tokenizer.json')", "'tokenizer.json' is no plain file"),
        full("os.mkfifo(path + '/weights/x')", "'x' is no plain file|Operation not permitted"),
        ("os.rename(path, path + '2'); os.symlink('/etc', path)", "'torch' is no folder"),
        full("import shutil; shutil.rmtree(path)", "No such file"),
        full("os.mkdir(path + '/tokenizer.json')", "a folder tokenizer.json, where"),
        full("open(path + '/tokenizer.json', 'w').write('0')", None),
        full("os.umask(0); os.open(path + '/x', os.O_CREAT, 0o6777)", "'x' is no plain file"),
        full("os.truncate(path + '/model.pt', 0)", "Operation not permitted"),
        (
            "open(path + '/x', 'w').truncate(1 << 42)",
            "takes longer than the limit: 'x' is too large",
        ),
        ("open(path + '/\\n\\x1b[2J\\u202e\\udcff', 'w')", None),
    ],
)
def test_what_a_submission_leaves_is_plain_or_refused(act, told, compiled, tmp_path):
    mine = tmp_path / "mine"
    mine.write_text("precious")
    entry = tmp_path / "leaves.py"
    entry.write_text(LEFT.format(act.format(mine=str(mine))))
    if told is None:
        loaded = compiled("--llama", entry)
        assert (loaded.folder / "tokenizer.json").stat().st_size > 100
        return
    with pytest.raises(UserError, match=told):
        compiled("--llama", entry, *(["--time-limit", "2"] if "longer than" in told else []))
    assert mine.read_text() == "precious"
    assert not any(path.name.startswith(".") for path in (tmp_path / "c").glob("*"))


def test_what_a_submission_changes_behind_the_look_is_seen(compiled, tmp_path, monkeypatch):
    """A thread of its own goes on; once the folder has moved, it reaches nothing there."""
    rename = os.rename

    def raced(source, target):
        if Path(source).name == "torch" and ".work." in str(source):
            (Path(source) / "late").symlink_to("/etc/passwd")
        rename(source, target)

    monkeypatch.setattr(building.os, "rename", raced)
    with pytest.raises(UserError, match="'late' is no plain file"):
        compiled()


@pytest.mark.parametrize(
    "options", [[], full(["--on-device-sampling"]), full(["--speculate", "lookup"])]
)
def test_a_checkpoint_of_nan_is_no_answer(options, tmp_path):
    from safetensors.torch import load_file, save_file

    model = write_tiny_model(tmp_path / "nan")
    weights = load_file(model / "model.safetensors")
    weights["model.norm.weight"][:] = float("nan")
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    told = pytest.raises(UserError, match="logits .*are NaN, (so it has no answer|expected)")
    loaded = build_into(tmp_path / "c", model, *options)
    with told:
        generate_tokens(loaded, loaded.session.prompt_ids, new_tokens=4)


def test_a_home_that_cannot_be_written_names_a_way_out(tiny_model, tmp_path, monkeypatch):
    (tmp_path / "cache").write_text("a file")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    args = command_line.parse(["--mode", "generate", "--model-path", str(tiny_model)])
    with pytest.raises(UserError, match="Cannot write .*; set XDG_CACHE_HOME to a folder"):
        build(open_session(args))


class _Act:
    """Pickled, a file that whoever reads it writes."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.write_text, (self.path, "ran")


def test_a_planted_pickle_of_a_compiled_folder_runs_nothing(again, run_main, tiny_model, tmp_path):
    content = pickle.dumps(_Act(tmp_path / "ran"))
    manifest = json.loads((again / "driver.json").read_text())
    for name in ("model.pt", "operators.json"):
        (again / name).write_bytes(content)
        manifest["files"][name] = building._checksum(again / name)
    (again / "driver.json").write_text(json.dumps(manifest))
    done = run_main(
        *["--mode", "generate", "--model-path", tiny_model, "--prompt", "hello"],
        *["--tp-degree", "1", "--seq-len", "64", "--compiled-model-path", again.parent],
    )
    assert "Reusing the compiled" in done.stderr and done.returncode in (1, 2), done.stderr
    assert "Traceback" not in done.stderr and not (tmp_path / "ran").exists()
    pickle.loads(content)
    assert (tmp_path / "ran").exists()
