"""Pieces on a Dask cluster: the answers of one machine, whatever becomes of a worker."""

from __future__ import annotations

import ast
import contextlib
import inspect
import json
import shutil
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from neuron_cpu import cluster
from neuron_cpu.__main__ import main
from neuron_cpu.core.run import execute
from neuron_cpu.errors import UsageError
from neuron_cpu.oracle import forms
from neuron_cpu.oracle.serve import Oracle
from tests.conftest import REPOSITORY
from tests.dask_cluster import Started, candidate, started

KERNEL = """
import neuronxcc.nki as nki
import neuronxcc.nki.language as nl
import beside

WIDTH = 64
SPACE = {"WIDTH": (32, 64, 128), "beside.FACTOR": (2.0, 3.0)}

@nki.jit
def kernel(x):
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    for column in range(0, x.shape[1], WIDTH):
        part = nl.load(x[:, column : column + WIDTH])
        nl.store(out[:, column : column + WIDTH], nl.multiply(part, beside.FACTOR))
    return out

def reference(x):
    return beside.twice(x)
"""
BESIDE = "FACTOR = 2.0\n\ndef twice(x):\n    return x * 2\n"
WIDE = "128x128:fp32"
KILLS = "import os, signal; os.kill(os.getppid(), signal.SIGKILL)"
OF_A_RUN = "seconds", "spent_ms", "cached"


def has_dask():
    reason = "distributed is not installed; make test-dask installs it"
    pytest.importorskip("distributed", reason=reason)


@pytest.fixture(scope="module")
def workers(tmp_path_factory):
    """A scheduler and two workers."""
    has_dask()
    with started(tmp_path_factory.mktemp("dask"), 2) as made:
        yield made


@pytest.fixture
def kernel(tmp_path):
    """A kernel's file, which imports another one beside it."""
    (tmp_path / "beside.py").write_text(BESIDE)
    (tmp_path / "kernel.py").write_text(KERNEL)
    return tmp_path / "kernel.py"


def without_times(found):
    """An answer without what differs from run to run."""
    if isinstance(found, dict):
        return {k: without_times(v) for k, v in found.items() if k not in OF_A_RUN}
    return [without_times(one) for one in found] if isinstance(found, list) else found


def answers(requests, joined=None):
    """Those of an oracle, in the order of the requests."""
    with contextlib.closing(Oracle(2, cluster=joined)) as oracle, ThreadPoolExecutor(2) as pool:
        return [without_times(one) for one in pool.map(oracle.one, requests)]


def test_the_oracle_s_answers_are_those_of_one_machine(workers, kernel):
    """Right, wrong, refused, failing, invalid, and a file that imports its neighbour."""
    plain = KERNEL.replace("import beside", "").replace("beside.FACTOR", "2.0")
    plain = plain.replace("beside.twice(x)", "x * 2")
    sources = [
        plain,
        plain.replace("x * 2", "x * 3"),
        plain.replace("    for column", "    1 / 0\n    for column"),
        plain.replace("nl.load(x[:", "nl.load(x[1:"),
    ]
    codes = [{"source": one} for one in sources] + [{"file": str(kernel)}, {"file": "no such"}]
    asked = [
        forms.Request.model_validate(
            {
                "id": number,
                "kernel": {"name": "kernel", **code},
                "reference": {"name": "reference", **code},
                "cases": [WIDE],
                "seeds": [1, 2],
            }
        )
        for number, code in enumerate(codes)
    ]
    here = answers(asked)
    kinds = [one["outcome"] for one in here]
    assert kinds == ["passed", "wrong", "failed", "refused", "passed", "invalid"]
    with cluster.joined(workers.address) as joined:
        assert answers(asked, joined) == here


def test_a_search_finds_the_same(workers, kernel, tmp_path):
    words = ["tune", f"{kernel}:kernel", "--arg", WIDE, "--ref", f"{kernel}:reference"]
    found = []
    for more in ([], ["--scheduler", workers.address]):
        file = tmp_path / f"{len(more)}.json"
        assert main([*words, "--jobs", "2", "--json", str(file), *more]) == 0
        found.append(without_times(json.loads(file.read_text())))
    assert found[0] == found[1]
    kinds = [trial["kind"] for trial in found[0]["trials"]]
    assert kinds.count("wrong") == 3 and kinds.count("legal") == 3


def test_judged_answers_are_the_same(workers, tmp_path, monkeypatch):
    """Right, missing and broken; sums are those of one thread, as workers have."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    some = ["--only", "gelu,softmax,rms_norm"]
    folder = tmp_path / "answers"
    assert main(["judge", str(folder), "--template", *some]) == 0
    (folder / "softmax.py").unlink()
    (folder / "rms_norm.py").write_text("raise ValueError(__file__)")
    found = []
    for more in ([], ["--scheduler", workers.address]):
        file = tmp_path / f"{len(more)}.json"
        assert main(["judge", str(folder), *some, "--seed", "3", "--json", str(file), *more]) == 1
        found.append(json.loads(file.read_text()))
    assert [one["outcome"] for one in found[0]["answers"]] == ["correct", "missing", "failed"]
    for one, other in zip(found[0]["answers"], found[1]["answers"], strict=True):
        assert without_times(one) == without_times(other)


def test_prompts_are_evaluated_as_here(workers, run_script, tiny_model, tmp_path):
    """Two submissions, one of which cannot be built."""
    shutil.copy(REPOSITORY / "llama.py", tmp_path / "mine.py")
    (tmp_path / "broken.py").write_text("raise ValueError('broken')")
    words = ["--model-path", tiny_model, "--max-new-tokens", "2", "--limit", "2"]
    words += ["--llama", "mine.py", "broken.py", "--no-isolate"]
    found = []
    for more in ([], ["--scheduler", workers.address]):
        folder = tmp_path / f"results{len(more)}"
        cache = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
        done = run_script("test.py", *words, "--results-path", folder, *more, cwd=tmp_path, **cache)
        assert done.returncode == 1 and "raised ValueError: broken" in done.stdout + done.stderr
        files = sorted(folder.glob("*/*/prompt-*.json"))
        found.append([(file.parts[-3], json.loads(file.read_text())) for file in files])
    assert len(found[0]) == 4
    for (name, here), (other, there) in zip(*found, strict=True):
        assert name == other and here["accurate"] == there["accurate"]
        assert here["error"] == there["error"]
        for key in ("rows", "nki_share"):
            assert here.get(key) == there.get(key)


def test_a_piece_of_a_worker_that_dies_is_done_elsewhere(tmp_path):
    has_dask()
    asked = [candidate(number, 0.5) for number in range(8)]
    with started(tmp_path, 2) as made, cluster.joined(made.address) as joined:
        found: list[Any] = []
        asking = threading.Thread(target=lambda: found.extend(answers(asked, joined)))
        asking.start()
        while len(made.processes) == 3:  # until the first one is at work, whatever its start takes
            time.sleep(0.5)
            if candidates_of(made.processes[1].pid):
                made.kill(made.processes.pop(1))
        asking.join()
        assert [one["id"] for one in found] == list(range(8))
        assert {one["outcome"] for one in found} == {"passed"}
    assert found == answers(asked)


def candidates_of(session):
    """Processes of a worker's session below its fork server, which are those of candidates."""
    parents = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = entry.read_text().rpartition(")")[2].split()
            parents[int(entry.parent.name)] = int(fields[1]), int(fields[3])
    depth = {session: 0}
    for _ in range(4):
        for pid, (parent, _) in parents.items():
            if parent in depth:
                depth.setdefault(pid, depth[parent] + 1)
    return [pid for pid, level in depth.items() if level >= 3]


def test_an_end_waits_for_no_piece(workers):
    """As Ctrl-C asks for: threads that wait end, and with them the program."""
    with cluster.joined(workers.address) as joined:
        assert joined is not None
        oracle, told = Oracle(1, cluster=joined), list[Any]()
        for number in (1, 2):
            oracle.submit(candidate(number, 50.0), told.append)
        threading.Timer(1.0, oracle.close).start()
        while len(told) < 1:  # the second one has not begun
            time.sleep(0.1)
    assert "gives no answer" in told[0]["sentence"]


def test_a_piece_that_ends_every_worker_is_told(tmp_path, monkeypatch):
    has_dask()
    monkeypatch.setenv("DASK_DISTRIBUTED__SCHEDULER__ALLOWED_FAILURES", "0")
    with started(tmp_path, 1) as made, cluster.joined(made.address) as joined:
        assert joined is not None
        with pytest.raises(cluster.WorkersLostError, match="^the workers that did it have died"):
            joined.call(cluster.command, words=["-c", KILLS], cwd="/")
        made.kill(made.processes[0])
        with pytest.raises(UsageError, match="gives no answer"):
            joined.call(cluster.command, words=["x"], cwd="/")


@pytest.mark.parametrize("other", ["changed", "none"])
def test_a_worker_of_another_version_is_refused(other, tmp_path, capsys):
    """With a changed file, and without the project."""
    has_dask()
    project = tmp_path / "project"
    project.mkdir()
    if other == "changed":
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(REPOSITORY / "neuron_cpu", project / "neuron_cpu", ignore=ignored)
        (project / "neuron_cpu" / "quoting.py").open("a").write("\n")
    made = Started(tmp_path)
    try:
        made.worker()
        made.worker(project)
        made.wait_for(2)
        assert main(["oracle", "--scheduler", made.address]) == 2
    finally:
        made.close()
    told = capsys.readouterr().err.strip().splitlines()[-1]
    assert "has another version of this project" in told and "from one checkout" in told


def test_what_changes_between_two_workers_is_their_version(monkeypatch):
    """Files and the variables of releases and chips, and nothing else."""
    cluster.version.cache_clear()
    plain = cluster.version(("neuron_cpu/quoting.py",))
    assert plain == cluster.version(("neuron_cpu/quoting.py",))
    assert plain != cluster.version(("neuron_cpu/errors.py",))
    cluster.version.cache_clear()
    monkeypatch.setenv("NEURON_CPU_NKI", "2.27")
    assert cluster.version(("neuron_cpu/quoting.py",)) == f"{plain}, NEURON_CPU_NKI=2.27"
    cluster.version.cache_clear()


def test_a_damaged_piece_is_refused():
    assert "damaged" in cluster.carried_out("0" * 64, b"{}")["refused"]


def test_make_library_s_own_memory_takes_what_execute_gives():
    """Its file changes the interpreter that imports it, so the test reads it."""
    tree = ast.parse((REPOSITORY / "tests" / "library.py").read_text(encoding="utf-8"))
    zeros = next(node for node in tree.body if getattr(node, "name", "") == "zeros")
    assert isinstance(zeros, ast.FunctionDef)
    assert [a.arg for a in zeros.args.args] == list(inspect.signature(execute.allocate).parameters)


@pytest.mark.parametrize("command", ["oracle", "judge .", "tune x.py:k"])
@pytest.mark.parametrize("address", ["nonsense", "http://a:1", "tcp://a", "tcp://a:x"])
def test_an_address_that_is_none(command, address, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "column_sum.py").touch()
    assert main([*command.split(), "--scheduler", address]) == 2
    told = capsys.readouterr().err.strip().splitlines()[-1]
    assert told.startswith(f"--scheduler {address} is no address of a scheduler, expected ")


def test_no_scheduler_there(monkeypatch, capsys):
    has_dask()
    monkeypatch.setattr(cluster, "CONNECT_SECONDS", 1)
    assert main(["oracle", "--scheduler", "tcp://127.0.0.1:1"]) == 2
    assert "has no scheduler of Dask" in capsys.readouterr().err


def test_the_driver_refuses_an_address_likewise(run_main, tmp_path):
    done = run_main("--mode", "evaluate_all", "--scheduler", "nonsense", "--results-path", tmp_path)
    told = "main.py: --scheduler nonsense is no address of a scheduler"
    assert done.returncode == 2 and told in done.stderr and "Traceback" not in done.stderr


def test_distributed_is_missing(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "distributed", None)
    assert main(["oracle", "--scheduler", "tcp://127.0.0.1:1"]) == 2
    assert "pip install distributed" in capsys.readouterr().err
