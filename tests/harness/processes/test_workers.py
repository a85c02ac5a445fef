"""A submission is somebody else's code: whatever it does to its process becomes a verdict."""

import multiprocessing
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from harness import sdk
from harness.errors import UserError
from harness.processes import worker, workers
from harness.processes.worker import Role
from harness.processes.workers import SubmissionFailed, without_controls
from harness.session.building import construct
from neuron_cpu.sandbox import limits
from neuron_cpu.sandbox.pipes import Pipe
from tests.conftest import REPOSITORY
from tests.crossed import full
from tests.tiny_model import opened

WELL = (
    "from neuronx_distributed_inference.models.llama.modeling_llama import NeuronLlamaForCausalLM\n"
)


@pytest.fixture
def imported(tiny_model, tmp_path):
    """Has a submission imported and configured in its process."""

    def call(text, *arguments):
        entry = tmp_path / "entry.py"
        entry.write_text(text)
        session = opened(tiny_model, tmp_path / "c", "--llama", entry, *arguments)
        return construct(session, Role.TORCH)

    return call


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("import os\nos._exit(0)", "its process ended with status 0 before it answered"),
        ("import os\nos.kill(os.getpid(), 9)", "its process was ended by SIGKILL"),
        ("import sys\nsys.exit(0)", "line 2, raised SystemExit: 0"),
        ("raise KeyboardInterrupt", "line 1, raised KeyboardInterrupt"),
        ("import os\nos.closerange(3, 999)", "its process ended|closed the connection"),
        (
            "x = bytearray(8 << 30)",
            r"raised MemoryError: .*limited to 3.0 GiB, which --memory-limit",
        ),
    ],
)
def test_an_end_of_the_process_is_a_verdict(text, told, imported):
    with pytest.raises(UserError, match=told):
        imported(f"{text}\n{WELL}", "--memory-limit", "3")


def test_a_hang_ends_at_the_time_limit(imported):
    started = time.monotonic()
    with pytest.raises(SubmissionFailed, match="no answer within 1 s; --time-limit"):
        imported(f"import signal\nsignal.pause()\n{WELL}", "--time-limit", "1")
    assert time.monotonic() - started < 60


HALF = "os.write(fd, b'\\0\\0\\0\\x50{')\nsignal.pause()"
FLOOD = (
    'line = b\'{"request": %d, "kind": "progress", "shapes": [], '
    '"body": {"task": "a", "done": 1, "total": 9}}\'\n'
    "while True: os.write(fd, len(line % 1).to_bytes(4, 'big') + line % 1)"
)
FIND = (
    "import fcntl, os, signal, stat\n"
    "fd = [n for n in range(3, 64) if os.path.exists(f'/proc/self/fd/{n}') and stat.S_ISFIFO("
    "os.fstat(n).st_mode) and fcntl.fcntl(n, fcntl.F_GETFL) & os.O_WRONLY][0]\n"
)


@pytest.mark.parametrize("said", [HALF, FLOOD])
def test_half_a_message_and_a_flood_end_at_the_time_limit(said, imported):
    with pytest.raises(SubmissionFailed, match="no answer within 1 s; --time-limit"):
        imported(f"{FIND}{said}\n{WELL}", "--time-limit", "1")


def test_processor_time_is_limited(imported):
    with pytest.raises(SubmissionFailed, match="processor time that it may use; --cpu-limit"):
        imported(f"while True: pass\n{WELL}", "--cpu-limit", "1")


@pytest.mark.parametrize(
    "bytes_written",
    [full(b"garbage"), b"\x00\x00\x00\x02[]", full(b"\x00\x00\x00\x02{}"), b"\xff" * 64],
)
def test_what_is_written_to_the_connection_is_no_answer(bytes_written, imported):
    text = (
        "import os, stat\n"
        "for fd in range(3, 64):\n"
        "    try:\n"
        "        if stat.S_ISFIFO(os.fstat(fd).st_mode):\n"
        f"            os.write(fd, {bytes_written!r})\n"
        "    except OSError: pass\n"
    )
    with pytest.raises(SubmissionFailed, match="sent no valid answer"):
        imported(text + WELL)
    imported(WELL)


def test_output_does_not_reach_standard_output(imported, capsys):
    loaded = imported(
        f"import os\nprint('loud \\x1b[2J')\nos.write(1, b'Accuracy: True\\n')\n{WELL}"
    )
    loaded.worker.close()
    printed = capsys.readouterr()
    assert printed.out == "" and "loud \\x1b[2J\n" in printed.err
    assert "Accuracy: True" in printed.err


def test_endless_output_is_cut(imported, capsys):
    loaded = imported(f"for _ in range(100): print('x' * 99_999)\n{WELL}")
    loaded.worker.close()
    told = capsys.readouterr().err
    assert len(told) < 2_000_000 and "prints more than is shown" in told


@pytest.mark.skipif(bool(limits.missing()), reason="this system confines nothing, or not all of it")
def test_nothing_outside_of_its_folder_is_written(imported, tmp_path):
    mine = tmp_path / "precious"
    mine.write_text("1")
    for action in (
        f"open({str(mine)!r}, 'w')",
        f"os.remove({str(mine)!r})",
        f"os.mkdir({str(tmp_path / 'new')!r})",
        f"os.truncate({str(mine)!r}, 0)",
    ):
        with pytest.raises(UserError, match="raised PermissionError"):
            imported(f"import os\n{action}\n{WELL}")
    assert mine.read_text() == "1" and not (tmp_path / "new").exists()
    imported(f"import tempfile\nwith tempfile.TemporaryFile() as f: f.write(b'1')\n{WELL}")


def test_children_and_threads_end_with_the_session(imported, monkeypatch, capsys):
    """Where nothing is confined, as beside an SDK: elsewhere there are no children."""
    platform = replace(sdk.platform(), confines=False)
    monkeypatch.setattr(sdk, "platform", lambda: platform)
    monkeypatch.setattr(workers, "_told", [])
    loaded = imported(
        "import os, signal, sys, threading\n"
        "threading.Thread(target=threading.Event().wait).start()\n"
        "child = os.fork()\n"
        "if not child:\n"
        "    os.setsid()\n"
        "    os.fork()\n"
        "    signal.pause()\n"
        f"print('child', child, file=sys.stderr)\n{WELL}"
    )
    assert "not confined as it should be: the SDK's compiler" in capsys.readouterr().err
    answer = loaded.worker.call("tests.harness.processes.far_side:children", "x")
    loaded.worker.close()
    assert answer.body and all(_has_ended(process) for process in answer.body)
    assert not loaded.worker.job.scratch.exists()


def _has_ended(process):
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.01)
    return False


@pytest.mark.parametrize(
    ("arguments", "lacking", "why"),
    [((), "no Landlock", "no Landlock"), (["--no-isolate"], "", "in the driver's own process")],
)
def test_isolation_may_be_required(arguments, lacking, why, imported, monkeypatch, capsys):
    monkeypatch.setattr(limits, "missing", lambda: lacking)
    monkeypatch.setattr(workers, "_told", [])
    with pytest.raises(UserError, match=f"--require-isolation: .* not confined here .*{why}"):
        imported(WELL, "--require-isolation", *arguments)
    for _ in range(2):
        imported(WELL, *arguments)
    told = capsys.readouterr().err
    assert told.count("The submission is not confined as it should be: no Landlock.") == bool(
        lacking
    )


def test_the_drivers_own_checks_are_out_of_reach(imported):
    from harness.figures import accuracy

    before = accuracy.check_row
    imported(f"from harness.figures import accuracy\naccuracy.check_row = None\n{WELL}")
    assert accuracy.check_row is before


@pytest.mark.parametrize("isolate", ["--isolate", "--no-isolate"])
def test_both_kinds_of_processes_answer_alike(isolate, imported):
    assert set(imported(WELL, isolate).buckets) == {
        "context_encoding_model",
        "token_generation_model",
    }
    with pytest.raises(SubmissionFailed, match="line 1, raised ValueError: bad"):
        imported(f"raise ValueError('bad')\n{WELL}", isolate)


# --- messages -------------------------------------------------------------------------------------
@pytest.fixture
def line():
    reader, writer = multiprocessing.Pipe(duplex=False)
    alive, end = os.pipe()
    yield Pipe(reader, alive), writer
    for one in (reader, writer):
        one.close()
    for one in (alive, end):
        os.close(one)


def soon():
    return time.monotonic() + 5


def test_messages_arrive_as_they_were_sent(line):
    reader, writer = line
    array = np.array([[1.5, np.nan], [-np.inf, 0]], dtype=np.float32)
    worker.send(writer, 7, "event", {"ü": [1, None]}, [array, np.zeros((0, 3))])
    message = worker.receive(reader, soon())
    assert (message.request, message.kind, message.body) == (7, "event", {"ü": [1, None]})
    np.testing.assert_array_equal(message.arrays[0], array)
    assert message.arrays[1].shape == (0, 3)


def head(request="1", kind='"a"', shapes="[[1]]"):
    return f'{{"request": {request}, "kind": {kind}, "body": 0, "shapes": {shapes}}}'.encode()


@pytest.mark.parametrize(
    "parts",
    [
        [b"\x80\x04K\x01."],
        [b"[]"],
        [b"{}"],
        [head(request='"x"')],
        [head(kind="1")],
        [head(shapes="[[-1]]")],
        [head(shapes="[[true]]")],
        [head(), b"1"],
        [head(), (8).to_bytes(8, "little")],
        [head(), (4).to_bytes(8, "little"), b"12345"],
        [b"[" * 20_000],
        [head(shapes="[[2000000000], [2000000000], [2000000000]]")],
        [head(shapes="3")],
    ],
)
def test_messages_of_another_form_are_none(parts, line):
    reader, writer = line
    for part in parts:
        writer.send_bytes(part)
    writer.close()
    with pytest.raises((worker.WireError, EOFError)):
        worker.receive(reader, soon())


def test_a_message_is_no_longer_than_it_may_be(line):
    reader, writer = line
    os.write(writer.fileno(), b"\xff\xff\xff\xff\0\0\1\0\0\0\0\0")
    with pytest.raises(worker.WireError, match="a message of 1099511627776 bytes"):
        worker.receive(reader, soon())


def test_what_comes_after_the_deadline_is_late_however_fast(line):
    """Somebody who floods the pipe always has something there."""
    reader, writer = line
    worker.send(writer, 1, "event", None)
    with pytest.raises(TimeoutError):
        worker.receive(reader, time.monotonic())
    assert worker.receive(reader, soon()).kind == "event"


ORPHAN = """
import os, signal, time
from neuron_cpu.sandbox import limits
ready, tell = os.pipe()
if os.fork() == 0:
    limits.apply(limits.Limits(1 << 30, 60, 60))
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print(os.getpid(), flush=True)
    os.write(tell, b"1")
    time.sleep(300)
os.read(ready, 1)
os.kill(os.getpid(), 9)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with its parent")
def test_a_process_ends_with_its_parent():
    command = [sys.executable, "-c", ORPHAN]
    done = subprocess.run(command, stdout=subprocess.PIPE, cwd=REPOSITORY, timeout=120)
    assert done.returncode == -9 and _has_ended(int(done.stdout))


def test_control_characters_are_written_as_escapes():
    text = "a\x1b[31mb\x1b[0m\x1b]0;title\x07\r\tc\n"
    assert without_controls(text) == r"a\x1b[31mb\x1b[0m\x1b]0;title\x07\r" + "\tc\n"
    assert (
        without_controls(text, styled=True) == "a\x1b[31mb\x1b[0m" + r"\x1b]0;title\x07\r" + "\tc\n"
    )
