"""What holds of all sources: nothing of others is run, nobody else's package is proposed."""

import ast
import re
import subprocess

import pytest

from tests.conftest import REPOSITORY
from tests.harness.processes import acts
from tests.sandbox.test_doors import DOORS
from tests.sandbox.test_records import ACTS

ROOMS = ("neuron_cpu", "models", "harness", "lab", "docs")
SOURCES = [
    *REPOSITORY.glob("*.py"),
    *(file for room in ROOMS for file in (REPOSITORY / room).rglob("*.py")),
]
# Whoever calls one of these runs what somebody has written. Where it may be, and who has.
RUNS = {
    "harness/processes/worker.py:main pickle.loads": "the driver, by a pipe that none else writes",
    "neuron_cpu/runtime/tape.py:from_bytes pickle.loads": "the model's own process, confined",
    "neuron_cpu/sdk/torch_neuronx/scripting.py:install pickle.loads": "the model's own process",
    "neuron_cpu/sdk/torch_neuronx/tracing.py:_traced_file torch.load": "who loads a module of his",
    "neuron_cpu/sandbox/run_script.py:_run_file exec": "the user, who asks for this script",
    "neuron_cpu/judge/chains.py:build exec": "the same, with lines of it written otherwise",
    "neuron_cpu/judge/drafts.py:built exec": "this file, from what the user's reference did",
    "neuron_cpu/judge/operations.py:_apply eval": "this project",
    "neuron_cpu/judge/repairs.py:build exec": "the kernel's author, whose own source it is",
    "neuron_cpu/judge/repairs.py:strict exec": "the same, with its bounds looked at",
    "neuron_cpu/judge/recorder.py:record eval": "a candidate in its confined process",
    "neuron_cpu/lessons/pages.py:_run exec": "this project",
    "neuron_cpu/core/device/errors.py:_entry exec": "this project",
    "models/step.py:kernel_of exec": "this file, which writes the signature of its kernel",
    "models/qwen3_moe.py:kernel_of exec": "this file, which writes the signature of its kernel",
    "neuron_cpu/core/language/annotation.py:_evaluated eval": "the kernel's author, who runs code",
}
READERS = (
    r"(c?[pP]ickle|dill|cloudpickle|joblib|marshal|shelve)\.(loads?|open|Unpickler)|eval|exec"
    r"|torch\.load|(np|numpy)\.load|yaml\.(unsafe_|full_)?load"
)


def _harmless(name, call):
    """Tensors and arrays alone: PyTorch has to be asked for that, numpy has to be asked not to."""
    named = {word.arg: getattr(word.value, "value", None) for word in call.keywords}
    if name == "torch.load":
        return named.get("weights_only") is True
    return name in ("np.load", "numpy.load") and not named.get("allow_pickle")


def readers(source, file):
    """Calls of a source that run what they read: file:function and what is called."""
    found = []

    def look(node, function):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            function = node.name
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if re.fullmatch(READERS, name) and not _harmless(name, node):
                found.append(f"{file}:{function} {name}")
            elif name.endswith(".recv") and not node.args:  # of a connection, which unpickles
                found.append(f"{file}:{function} recv")
        if isinstance(node, ast.ImportFrom) and node.module in ("pickle", "marshal", "shelve"):
            found.append(f"{file}:{function} from {node.module}")
        for child in ast.iter_child_nodes(node):
            look(child, function)

    if re.search(rf"\b({READERS}|\w+\.recv)\(|from (pickle|marshal|shelve)\b", source):
        look(ast.parse(source), "")
    return found


def test_nothing_that_others_can_write_is_unpickled_or_run():
    found = [
        one
        for file in SOURCES
        for one in readers(
            file.read_text(encoding="utf-8"), file.relative_to(REPOSITORY).as_posix()
        )
    ]
    assert sorted(set(found)) == sorted(RUNS)


@pytest.mark.parametrize(
    "source",
    [
        "pickle.loads(x)", "pickle.Unpickler(x)", "torch.load(x)", "eval(x)", "line.recv()",
        "torch.load(x, weights_only=False)", "np.load(x, allow_pickle=True)",
        "from pickle import *", "marshal.loads(x)", "yaml.load(x)",
    ],
)  # fmt: skip
def test_a_reader_that_runs_what_it_reads_is_found(source):
    assert len(readers(source, "f")) == 1


NAMES = r"['\"]?(neuron[-_]cpu|nki[-_]llama)(\[.*\])?['\"]?[.,:]?"
PROPOSED = re.compile(NAMES).fullmatch


@pytest.mark.parametrize("suffix", ["py", "md", "txt", "Makefile"])
def test_no_package_is_proposed_that_a_stranger_could_publish(suffix):
    """This project is installed from its checkout only."""
    listed = subprocess.run(
        ["git", "ls-files", f"*{suffix}"], cwd=REPOSITORY, capture_output=True, text=True
    )
    files = [REPOSITORY / name for name in listed.stdout.split() if not name.startswith("tests/")]
    commands = [
        (file.name, words.replace(" @ ", "@"))  # from an address, not by its name
        for file in files
        for words in re.findall(r"pip install([^\n`;&]*)", file.read_text(encoding="utf-8"))
    ]
    assert files and [one for one in commands if any(map(PROPOSED, one[1].split()))] == []


def test_each_test_that_the_page_names_is_there():
    page = (REPOSITORY / "docs" / "strangers.md").read_text(encoding="utf-8")
    tests = "".join(file.read_text(encoding="utf-8") for file in REPOSITORY.glob("tests/**/*.py"))
    named = set(re.findall(r"`(test_\w+)`", page))
    assert len(named) > 50
    assert [name for name in sorted(named) if f"def {name}(" not in tests] == []


def test_the_page_has_every_act():
    page = (REPOSITORY / "docs" / "strangers.md").read_text(encoding="utf-8")
    lists = page.partition("<!-- acts: begin -->")[2].partition("<!-- acts: end -->")[0]
    listed = " ".join(lists.split())
    for name in (*acts.ALLOWED, *acts.CALLS, *acts.FILES, *ACTS, *DOORS):
        assert re.search(rf"[ ,]{re.escape(name)}[,.]", listed), name
