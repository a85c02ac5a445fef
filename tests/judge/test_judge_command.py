"""`neuron_cpu judge DIR`: strangers' files, each in a process under limits, and their score."""

import json
import os
import pickle
import time
from pathlib import Path

import pytest

from neuron_cpu import suite
from neuron_cpu.__main__ import main
from neuron_cpu.sandbox import limits

FASTER = """
import neuronxcc.nki as nki
import neuronxcc.nki.language as nl


@nki.jit
def kernel(decay_hbm, x_hbm):
    channels, length = x_hbm.shape
    out_hbm = nl.ndarray((channels, length), dtype=x_hbm.dtype, buffer=nl.shared_hbm)
    for channel in nl.static_range(0, channels, 128):
        end = min(channel + 128, channels)
        decay_sb = nl.load(decay_hbm[channel:end, :], dtype=nl.float32)
        x_sb = nl.load(x_hbm[channel:end, :], dtype=nl.float32)
        zero_sb = nl.zeros((end - channel, 1), dtype=nl.float32)
        states_sb = nisa.tensor_tensor_scan(decay_sb, x_sb, zero_sb, np.multiply, np.add)
        nl.store(out_hbm[channel:end, :], states_sb)
    return out_hbm
""".replace("as nl\n", "as nl\nimport neuronxcc.nki.isa as nisa\nimport numpy as np\n")

FORKING = """
import os, time
if os.fork() == 0:
    os.setsid()
    time.sleep(1000)
os._exit(3)
"""

TALKING = """
import os, time
for descriptor in range(3, 60):
    try:
        os.write(descriptor, b"\\x00\\x00\\x00\\x05hello")
    except OSError:
        pass
time.sleep(1000)
"""

SAYING = """
import json, os, struct, sys
said = WHAT if isinstance(WHAT, bytes) else json.dumps(WHAT).encode()
os.write(REPLIES, struct.pack("!i", len(said)) + said)
os._exit(0)
"""
FIND = """
import os, stat
REPLIES = [n for n in range(3, 64) if os.path.exists(f"/proc/self/fd/{n}")
           and stat.S_ISFIFO(os.fstat(n).st_mode)][0]
"""


def saying(what):
    """An answer that writes to the judge itself."""
    return f"inf = float('inf')\n{FIND}WHAT = {what!r}\n{SAYING}"


# What an answer patches in its own process changes no verdict.
LIAR = """
from neuron_cpu.judge import verdict
from neuron_cpu.core.time import schedule
true = verdict.speed
verdict.speed = lambda *given: true(*given)._replace(time_ns=1e-9)
schedule.schedule = None
"""
CLOCKS = """
import time
import numpy, torch
from neuron_cpu.judge import accuracy, cases, verdict
time.monotonic = time.perf_counter = time.time = lambda: 0.0
numpy.allclose = numpy.isclose = torch.allclose = torch.equal = lambda *a, **k: True
accuracy.measure = verdict.measured = verdict.run = lambda *a, **k: []
cases.Case.values = None
"""
# The recorder leaves out what is checked of an instruction, and how long a tile may be.
RECORDER = """
from neuron_cpu.core.check import verify
from neuron_cpu.core.instructions import entry
entry.OpSpec.check = lambda *given: None
verify.verify = lambda *given: None
"""
# It records all but the first instruction, a generation with a faster clock, or tiles in HBM.
TOLD = """
from neuron_cpu.sandbox import records
true = records.dumped
def dumped(content):
    program = content["program"]
    {change}
    return true(content)
records.dumped = dumped
"""
HALF = TOLD.replace("{change}", "program.instructions.pop(0)")
FASTER_CHIP = """
from neuron_cpu.core.device import spec
from neuron_cpu.core.language.kernel import Kernel
Kernel._core = lambda self: spec.GEN4
"""
CALLING = """
from neuron_cpu.sandbox import records
told = b'[{"dict": [["program", {"object": 0}]]}, [["CALLED", [0], [[7]]]]]'
records.dumped = lambda content: told
"""
OUTSIDE = TOLD.replace(
    "{change}",
    "for view in (v for one in program for v in one.src):\n        view.offset += 1 << 40",
)

ANSWERS = {  # operators of which the suite's own kernels are small
    "state_space_scan": (FASTER, "correct", ""),
    "attention_block": (None, "correct", ""),  # the suite's own kernel
    "rope": ("import sys\nsys.exit(0)", "failed", "rope.py:2: SystemExit: 0"),
    "gelu": ("kernel = 3", "failed", "it has no function 'kernel'"),
    "argmax": ("def kernel(x):\n    raise ValueError('odd')", "failed", "argmax.py:2: ValueError"),
    "transpose": ("held = bytearray(8 << 30)", "failed", "MemoryError"),
    "matmul": ("import os\nos.abort()", "failed", "SIGABRT"),
    "softmax": ("while True: pass", "failed", "processor time"),
    "row_sum": (FORKING, "failed", "status 3" if limits.missing() else "Operation not permitted"),
    "column_sum": (TALKING, "failed", "cannot be judged"),
    "embedding": (None, "missing", ""),
    "vector_add": (LIAR, "correct", ""),
    "swiglu_mlp": (CLOCKS, "correct", ""),
    "residual_rms_norm": (CLOCKS, "wrong", "of random values"),
    "causal_convolution": (RECORDER, "refused", "err_num_partition_exceed_arch_limit"),
    "low_rank_linear": (HALF, "refused", ""),
    "dequantized_linear": (FASTER_CHIP, "failed", "recorded for gen4, expected gen2"),
    "rms_norm_linear": (
        CALLING.replace("CALLED", "posix:_exit"),
        "failed",
        "'posix:_exit' is no class of such a record",
    ),
    "decode_attention": (
        CALLING.replace("CALLED", "builtins:exec"),
        "failed",
        "'builtins:exec' is no class of such a record",
    ),
    "causal_attention": (OUTSIDE, "failed", "has no elements"),
    "layer_norm": (saying(b"[" * 200_000), "failed", "cannot be judged"),
    "rms_norm": (saying(pickle.dumps([])), "failed", "cannot be judged"),
    "vector_matmul": (
        saying(b'[{"dict": [["failure", ["x", 3]]]}, []]'),
        "failed",
        "cannot be judged",
    ),
    "causal_softmax": ("nl.exp(seen_sb)", "wrong", "of large values"),
    "attention": ("dtype=nl.float32, buffer=nl.shared_hbm", "wrong", "expected float32 [77, 64]"),
    "cumulative_sum": ("nl.load(x_hbm)", "refused", "err_num_partition_exceed_arch_limit"),
}


def written(folder):
    folder.mkdir()
    for name, (text, word, _) in ANSWERS.items():
        source = suite.template(name)
        if name == "causal_softmax":
            exponent = "nl.exp(nl.subtract(seen_sb, nl.max(seen_sb, axis=1, keepdims=True)))"
            assert exponent in source
            text = source.replace(exponent, text)
        elif name == "attention":
            text = source.replace(
                "dtype=q_hbm.dtype, buffer=nl.shared_hbm", "dtype=nl.bfloat16, buffer=nl.shared_hbm"
            )
        elif name == "cumulative_sum":
            text = source.replace("nl.load(x_hbm[row:end, :]", "nl.load(x_hbm.reshape((7700, 1))")
        elif name == "residual_rms_norm":
            assert "nl.rsqrt(" in source
            text = source.replace("nl.rsqrt(", "nl.sqrt(") + text
        elif name == "causal_convolution":
            assert "128" in source
            text = source.replace("128", "256") + text
        elif text in (LIAR, CLOCKS, HALF, FASTER_CHIP, OUTSIDE) or "records.dumped" in (text or ""):
            text = source + text
        elif word == "missing":
            continue
        (folder / f"{name}.py").write_text(source if text is None else text)


@pytest.fixture(scope="module")
def judged(tmp_path_factory):
    """Answers by operator, their score under the name ``score``, and who ran before them."""
    from neuron_cpu.sandbox import forked

    server = forked._server()  # 0 before anything was forked
    before = alive(server) if server else []  # processes of other files' fixtures
    root = tmp_path_factory.mktemp("judged")
    written(root / "answers")
    figures = root / "figures.json"
    options = ["--only", ",".join(ANSWERS), "--json", str(figures), "--jobs", "2"]
    options += ["--time-limit", "60", "--cpu-limit", "3", "--memory-limit", "2"]
    assert main(["judge", str(root / "answers"), *options]) == 1
    content = json.loads(figures.read_text())
    answers = {one["operator"]: one for one in content["answers"]}
    return answers | {"score": content["score"], "before": before}


@pytest.mark.parametrize("name", ANSWERS)
def test_every_answer_gets_its_word(name, judged):
    _, word, reason = ANSWERS[name]
    found = judged[name]
    said = found["sentence"] + "".join(c.get("identifier", "") for c in found["cases"])
    assert found["outcome"] == word and reason in said, said


def test_the_score_counts_right_and_faster(judged):
    assert judged["state_space_scan"]["speedup"] > 4
    assert judged["attention_block"]["speedup"] == 1.0
    everything = judged["score"]["all"]
    assert everything["operators"] == len(ANSWERS)
    assert everything["correct"] == pytest.approx(4 / len(ANSWERS))
    assert everything["fast_4"] == everything["fast_1"] == pytest.approx(1 / len(ANSWERS))
    assert judged["score"]["level 3"]["correct"] == pytest.approx(3 / 6)


def test_nothing_of_theirs_is_left(judged):
    from neuron_cpu.sandbox import forked

    def left():
        return set(alive(forked._server())) - set(judged["before"])

    deadline = time.monotonic() + 10
    while left() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left()


def alive(server):
    """Children of the fork server that have not ended."""
    states = {}
    for child in limits.children(server):
        try:
            states[child] = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
    return [child for child, state in states.items() if state != "Z"]


@pytest.mark.skipif(bool(limits.missing()), reason="this system confines not all")
def test_answers_write_nowhere(tmp_path, capsys):
    target = tmp_path / "written"
    folder = tmp_path / "answers"
    folder.mkdir()
    (folder / "gelu.py").write_text(f"open({str(target)!r}, 'w')")
    assert main(["judge", str(folder), "--only", "gelu"]) == 1
    assert "PermissionError" in capsys.readouterr().out and not target.exists()


def test_isolation_may_be_required(tmp_path, capsys, monkeypatch):
    (tmp_path / "gelu.py").touch()
    monkeypatch.setattr(limits, "missing", lambda: "no Landlock")
    assert main(["judge", str(tmp_path), "--only", "gelu", "--require-isolation"]) == 2
    assert "a stranger's file is not confined here (no Landlock)" in capsys.readouterr().err
    assert main(["judge", str(tmp_path), "--only", "gelu"]) == 1
    assert "not confined as it should be: no Landlock" in capsys.readouterr().err


def test_the_template(tmp_path, capsys):
    folder = tmp_path / "new"
    assert main(["judge", str(folder), "--template"]) == 0
    assert sorted(os.listdir(folder)) == sorted(f"{name}.py" for name in suite.names())
    assert main(["judge", str(folder), "--template"]) == 2
    assert "already" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [(["absent"], "--template"), (["."], "--only names odd"), ([".", "--only", ","], "nothing")],
)
def test_mistakes(arguments, sentence, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    extra = ["--only", "odd"] if "odd" in sentence else []
    assert main(["judge", *arguments, *extra]) == 2
    assert sentence in capsys.readouterr().err
