"""Nothing of a stranger's folder is imported outside of the process that is confined for it.

One folder has a module for every name that any process of ours imports, successfully or not. A run
notes these names itself, so a door whose processes import a new one runs again with that planted.
Every door starts in the folder, and works on the files there. A planted module that runs writes a
file which a confined process cannot write.
"""

import importlib
import importlib.util
import json
import os
import py_compile
import shutil
import subprocess
import sys
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from harness.errors import UserError
from harness.inputs import submission
from neuron_cpu import suite
from neuron_cpu.__main__ import main
from neuron_cpu.sandbox import foreign, interpreter, limits
from tests.conftest import REPOSITORY
from tests.crossed import full

MARK = """
import sys
with open(r"{told}/{name}", "a") as file:
    frame = sys._getframe()
    while frame:
        file.write(f"{{frame.f_code.co_filename}}:{{frame.f_lineno}}\\n")
        frame = frame.f_back
"""
NOTES = """
import sys
def note(event, given):
    if event == "import":
        try:
            with open({names!r}, "a") as file:
                file.write(given[0].partition(".")[0] + "\\n")
        except OSError:  # confined
            pass
sys.addaudithook(note)
"""
CANDIDATE = '{"kernel": {"name": "kernel", "file": "gelu.py"}, "cases": ["128x512:f32"],' + (
    ' "reference": {"name": "reference", "file": "gelu.py"}}\n'
)
TEST = """
def test_it(assert_kernel):
    from gelu import kernel, reference
    assert_kernel(kernel, reference, "128x512:f32", values=("random",))
"""
COMMAND = [sys.executable, "-m", "neuron_cpu"]
DRIVER = [sys.executable, str(REPOSITORY / "main.py")]
MODEL = ["--model-path", "MODEL", "--seq-len", "64"]
KERNELS = REPOSITORY / "tests" / "swap" / "kernels.py"
PRODUCT = REPOSITORY / "neuron_cpu"
LLAMA = ["--llama", str(REPOSITORY / "llama.py")]
ARGUMENT = ["--arg", "128x512:f32"]
UNTIL_IT_SERVES = """
import signal, subprocess, sys
served = subprocess.Popen(sys.argv[1:], stderr=subprocess.PIPE, text=True)
for line in served.stderr:
    sys.stderr.write(line)
    if "http://" in line:
        served.send_signal(signal.SIGINT)
sys.exit(served.wait())
"""
SHORTLY = [sys.executable, "-I", "-c", UNTIL_IT_SERVES]
PROMPT = ["--prompt", "a b", "--max-new-tokens", "2"]
MODES = {
    "compile": [], "chat": [*PROMPT[2:], "--seq-len", "256"], "profile": [],
    "validate": PROMPT, "evaluate": PROMPT, "diff": ["--enable-nki", *PROMPT[:2]],
}  # fmt: skip
# Of the full run: these start processes that those of `generate`, `check` and `judge` start, and
# `judge` asks an oracle.
OTHERS = {*MODES, "swap", "serve", "preflight", "test.py", "profile", "compare"}
OTHERS |= {"oracle", "check by a reference", "a submission beside", "learn", "pytest", "tune"}
DOORS = {
    "judge": [*COMMAND, "judge", ".", "--only", "gelu"],
    "check": [*COMMAND, "check", "gelu.py"],
    "check by a reference": [*COMMAND, "check", "gelu.py:kernel", "--ref", "gelu.py:reference"]
    + ARGUMENT,
    "profile": [*COMMAND, "profile", "gelu.py:kernel", *ARGUMENT],
    "compare": [*COMMAND, "compare", "gelu.py:kernel", *ARGUMENT],
    "tune": [*COMMAND, "tune", "gelu.py:kernel", *ARGUMENT, "--space", "ROWS=64,128"]
    + ["--ref", "gelu.py:reference"],
    "oracle": [*COMMAND, "oracle", "--jobs", "1"],
    "learn": [*COMMAND, "learn", "1", "--folder", "."],
    "a submission beside": [*DRIVER, "--mode", "generate", *MODEL, "--llama", "llama.py"],
    "generate": [*DRIVER, "--mode", "generate", "--enable-nki", *MODEL, *LLAMA],
    **{mode: [*DRIVER, "--mode", mode, *MODEL, *LLAMA, *more] for mode, more in MODES.items()},
    "swap": [*DRIVER, "--mode", "swap", *MODEL[:2], "--kernel", "swapped.py:rms_norm"]
    + ["--at", "rmsnorm"],
    "serve": [*SHORTLY, *DRIVER, "--mode", "serve", *MODEL, *LLAMA, "--port", "0"],
    "preflight": [*DRIVER, "--mode", "preflight", *MODEL, *LLAMA],
    "test.py": [sys.executable, str(REPOSITORY / "test.py"), "--limit", "1", *MODEL, *LLAMA],
    "pytest": [str(Path(sys.executable).parent / "pytest"), "-q", "-p", "neuron_cpu.pytest_plugin"]
    + ["-p", "no:cacheprovider", "-p", "no:hypothesispytest", "test_it.py"],
}


# Names that are imported where they are found: with them the first run is the last.
ABSENT = """backports brotli brotlicffi chardet cuda envwrap monkeytype opt_einsum org pydot pynvml
simplejson socks torchcomms triton"""
STANDS_IN = [path.stem for room in ("sdk", "imitation") for path in (PRODUCT / room).glob("[a-z]*")]


class Folder:
    """A stranger's folder with everything planted, and what came of it."""

    def __init__(self, place, model):
        self.place, self.model = place / "theirs", place / "model"
        self.told, self.names, site = place / "told", place / "names", place / "site"
        for folder in (self.place, self.told, site):
            folder.mkdir()
        shutil.copytree(model, self.model)
        config = self.model / "tokenizer_config.json"
        chat = {"chat_template": "{% for one in messages %}{{ one.content }}{% endfor %}"}
        config.write_text(json.dumps(json.loads(config.read_text()) | chat))
        (site / "sitecustomize.py").write_text(NOTES.format(names=str(self.names)))
        self.path = os.pathsep.join((str(site), str(REPOSITORY)))
        kernel = suite.template("gelu")
        (self.place / "gelu.py").write_text(kernel.replace("128)", "ROWS)") + "\nROWS = 128\n")
        shutil.copyfile(REPOSITORY / "llama.py", self.place / "llama.py")
        shutil.copyfile(KERNELS, self.place / "swapped.py")
        (self.place / "test_it.py").write_text(TEST)
        self.kept = {path.stem for path in self.place.iterdir()} | _of_python_itself(site)
        self.plant(sys.stdlib_module_names | set(packages_distributions()))
        self.plant(path.stem for path in REPOSITORY.iterdir())
        self.plant(
            {name.partition(".")[0] for name in sys.modules}.union(ABSENT.split(), STANDS_IN)
        )

    def plant(self, names):
        for name in names:
            if (
                name.isidentifier()
                and name not in self.kept
                and name not in sys.builtin_module_names
            ):
                (self.place / f"{name}.py").write_text(MARK.format(told=self.told, name=name))

    def run(self, command, apart):
        """A run in which all names that it imports are planted."""
        words = [str(self.model) if word == "MODEL" else word for word in command]
        while True:
            self.names.write_text("")
            done = subprocess.run(
                words,
                cwd=self.place,
                input=CANDIDATE,
                capture_output=True,
                text=True,
                timeout=600,
                env={**os.environ, "PYTHONPATH": self.path, "OMP_NUM_THREADS": "1"},
            )
            before = set(os.listdir(self.place))
            self.plant(set(self.names.read_text().split()).difference(apart))
            if set(os.listdir(self.place)) == before:
                return done


def _of_python_itself(site):
    """What `python -m neuron_cpu` finds in the working folder before it comes to our first line."""
    (site / "first_line.py").write_text("import sys; print(*sys.modules)")
    told = subprocess.run(
        [sys.executable, "-m", "first_line"], cwd=site, capture_output=True, text=True, check=True
    )
    return {"neuron_cpu", *(name.partition(".")[0] for name in told.stdout.split())}


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tiny_model):
    return Folder(tmp_path_factory.mktemp("doors"), tiny_model)


@pytest.mark.skipif(bool(limits.missing()), reason="a process that is not confined may write")
@pytest.mark.parametrize("door", [full(d) if d in OTHERS else d for d in DOORS])
def test_no_process_of_ours_imports_what_a_stranger_has_planted(door, folder):
    own = {"neuronxcc"} if door == "pytest" else set()  # imports of the test itself
    for name in own:
        (folder.place / f"{name}.py").unlink(missing_ok=True)
    done = folder.run(DOORS[door], own)
    ran = {path.name: path.read_text() for path in folder.told.iterdir()}
    for path in folder.told.iterdir():
        path.unlink()
    assert ran == {}, "".join(ran.values()) + done.stderr
    beside = door in ("a submission beside", "swap")  # find their own modules first, as scripts do
    status = 2 if beside else 1 if door in ("check", "learn") else 0
    assert done.returncode == status, done.stdout + done.stderr
    assert not beside or "The submission" in done.stderr


CACHES = {"unchecked": "UNCHECKED_HASH", "of its time": "TIMESTAMP"}


@pytest.mark.parametrize("validity", ["unchecked", full("of its time")])
def test_byte_code_beside_a_file_does_not_run_in_its_place(validity, tmp_path, monkeypatch):
    """Neither of the file that is judged, nor of a module or package that it imports."""
    source, told = suite.template("gelu"), tmp_path / "told"
    files = {"gelu.py": "from parts import kernel\n", "parts/__init__.py": "from .more import *\n"}
    files["parts/more.py"] = source
    for name, text in files.items():
        path = tmp_path / "theirs" / name
        path.parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / "forged.py").write_text(f"open({str(told)!r}, 'w')\n1 / 0\n")
        cache = importlib.util.cache_from_source(str(path))
        mode = py_compile.PycInvalidationMode[CACHES[validity]]
        py_compile.compile(str(tmp_path / "forged.py"), cache, invalidation_mode=mode)
        path.write_text(text)
        if validity == "of its time":  # as Python writes it beside the source: time and size
            data = bytearray(Path(cache).read_bytes())
            at = path.stat()
            data[8:16] = int(at.st_mtime).to_bytes(4, "little") + at.st_size.to_bytes(4, "little")
            Path(cache).write_bytes(data)
    monkeypatch.chdir(tmp_path / "theirs")
    checked = ["check", "gelu.py:kernel", *ARGUMENT, "--ref", "parts/more.py:reference"]
    for words in (checked, ["judge", ".", "--only", "gelu"]):
        assert main(words) == 0 and not told.exists()
    before = {path: path.read_bytes() for path in (tmp_path / "theirs").rglob("*.pyc")}
    assert len(before) == 3  # none is written


def test_a_file_without_a_kernel_is_no_answer_whatever_lies_in_its_cache(tmp_path):
    (tmp_path / "gelu.py").write_text("")
    (tmp_path / "whole.py").write_text(suite.template("gelu"))
    cache = importlib.util.cache_from_source(str(tmp_path / "gelu.py"))
    mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
    py_compile.compile(str(tmp_path / "whole.py"), cache, invalidation_mode=mode)
    assert main(["judge", str(tmp_path), "--only", "gelu"]) == 1
    with pytest.raises(UserError, match="does not define NeuronLlamaForCausalLM"):
        py_compile.compile(str(REPOSITORY / "llama.py"), cache, invalidation_mode=mode)
        submission.load(tmp_path / "gelu.py", "llama")


def test_modules_of_a_folder_are_for_its_files_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "meta_path", sys.meta_path[:])
    (tmp_path / "only_here.py").write_text("import json\n")
    (tmp_path / "json.py").write_text("1 / 0\n")
    (tmp_path / "mine.py").write_text("import only_here\n")
    foreign.put_last(tmp_path)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("only_here")
    foreign.imported(tmp_path / "mine.py", "mine of a folder")
    assert sys.modules.pop("only_here").__file__ == str(tmp_path / "only_here.py")


def test_paths_of_what_is_started_have_no_working_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", ".", str(tmp_path), "/elsewhere"])
    assert interpreter.paths() == ["/elsewhere"]
    (tmp_path / "json.py").write_text("1 / 0\n")
    monkeypatch.undo()
    code = "import json, sys; print(sys.argv)"
    words = interpreter.command("-c", code, "more")
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == "['-c', 'more']\n"
    words = interpreter.command("-m", "json.tool", "--help")
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "--sort-keys" in done.stdout
