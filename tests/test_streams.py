"""Standard output that is full, closed or narrow in its encoding, and signals, end in order."""

import io
import os
import pty
import signal
import subprocess
import sys

import pytest

import main
from tests.conftest import REPOSITORY
from tests.crossed import crossed, full
from tests.harness.processes.test_workers import FIND, FLOOD


def start(*arguments, **options):
    command = [sys.executable, str(REPOSITORY / "main.py"), *map(str, arguments)]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, **options)


def on(mode, model, folder):
    """Arguments of a short run of ``mode`` that compiles into ``folder``."""
    settings = ["--seq-len", "64", "--compiled-model-path", folder / "compiled"]
    return ["--mode", mode, "--model-path", model, *settings]


with_full_device = pytest.mark.skipif(
    not os.path.exists("/dev/full"), reason="this system has no /dev/full"
)


@with_full_device
@pytest.mark.full  # the tools' below ends in the same way, and a process of the driver takes long
def test_a_full_output_is_one_sentence(tiny_model, tmp_path):
    with open("/dev/full", "w") as device:
        process = start(
            *on("generate", tiny_model, tmp_path), stdout=device, stderr=subprocess.PIPE, text=True
        )
        _, errors = process.communicate(timeout=300)
    assert process.returncode == 2 and "Traceback" not in errors and "Exception" not in errors
    assert "No space left on device" in errors.splitlines()[-1]


@pytest.mark.parametrize(("mode", "streams"), [("profile", "both"), full("generate", "stdout")])
def test_a_reader_that_leaves_is_no_error(mode, streams, tiny_model, tmp_path):
    together = subprocess.STDOUT if streams == "both" else subprocess.DEVNULL
    process = start(*on(mode, tiny_model, tmp_path), stdout=subprocess.PIPE, stderr=together)
    assert process.stdout is not None
    if streams == "both":
        process.stdout.readline()
    process.stdout.close()
    assert process.wait(300) == 141


def test_an_encoding_without_the_characters_escapes_them(tiny_model, tmp_path, monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    monkeypatch.chdir(tmp_path)
    assert main.main(["--mode", "profile", "--model-path", str(tiny_model), "--seq-len", "64"]) == 0
    assert b"\\xb5s" in written.getvalue() and written.getvalue().isascii()


@pytest.mark.full  # 9 s; Ctrl-C at a terminal is test_chat.py's, too, and statuses are below
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_give_the_terminal_back(number, status, tiny_model, tmp_path):
    waiting = tmp_path / "waiting.py"
    waiting.write_text(
        "NeuronLlamaForCausalLM = None\nimport time\nprint('here', flush=True)\ntime.sleep(300)\n"
    )
    ours, theirs = pty.openpty()
    process = start(
        *["--mode", "generate", "--model-path"],
        tiny_model,
        "--llama",
        waiting,
        *["--prompt", "abcd", "--compiled-model-path"],
        tmp_path / "c",
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm"},
    )
    os.close(theirs)
    shown = b""
    while b"here" not in shown:
        shown += os.read(ours, 4096)
    process.send_signal(number)
    if number == signal.SIGTERM:  # `timeout` signals the process and its group
        process.send_signal(number)
    assert process.wait(60) == status
    try:
        while more := os.read(ours, 4096):
            shown += more
    except OSError:  # the terminal is gone
        pass
    os.close(ours)
    assert shown.count(b"\x1b[?25l") == shown.count(b"\x1b[?25h")  # cursor hidden, shown
    assert b"Traceback" not in shown
    assert (b"Interrupted" in shown) == (number == signal.SIGINT)


@pytest.mark.full  # test_workers.py has its end by the time limit
def test_a_flood_of_progress_does_not_hold_the_end_off(tiny_model, tmp_path):
    flood = tmp_path / "flood.py"
    flood.write_text(FIND + "NeuronLlamaForCausalLM = None\nprint('here', flush=True)\n" + FLOOD)
    asked = [*on("generate", tiny_model, tmp_path), "--prompt", "abcd", "--llama", flood]
    process = start(*asked, "--time-limit", "600", stderr=subprocess.PIPE, text=True)
    shown = ""
    while "here" not in shown:
        shown += process.stderr.readline()
    process.terminate()
    told = process.communicate(timeout=120)[1]
    assert process.returncode == 143 and "Traceback" not in told


@pytest.mark.parametrize(
    ("number", "status", "last"),
    [(signal.SIGINT, 130, "Interrupted\n"), (signal.SIGTERM, 143, "")],
    ids=["INT", "TERM"],
)
def test_an_end_that_somebody_swallows_comes_again(number, status, last, tmp_path):
    """And it does not come into what is put in order."""
    (tmp_path / "swallows.py").write_text(
        "import main, sys, time\n"
        "main.AGAIN_SECONDS = 0.2\n"
        "def waits(*_):\n"
        "    try:\n"
        "        print('here', flush=True)\n"
        "        time.sleep(300)\n"
        "    except:\n"
        "        print('swallowed', flush=True)\n"
        "    try:\n"
        "        time.sleep(300)\n"
        "    finally:\n"
        "        time.sleep(1)\n"
        "        print('put in order', flush=True)\n"
        "main._run, main._say = waits, lambda text: print(text[9:20])\n"
        "sys.exit(main.script())\n"
    )
    process = subprocess.Popen(
        [sys.executable, tmp_path / "swallows.py"],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )
    assert process.stdout is not None and process.stdout.readline() == "here\n"
    process.send_signal(number)
    told, _ = process.communicate(timeout=60)
    assert (process.returncode, told) == (status, f"swallowed\nput in order\n{last}")


@pytest.mark.parametrize(
    ("program", "closed"),
    crossed(
        ["main.py --help", "-m neuron_cpu judge --help"], ["<&-", ">&-", "<&- >&- 2>&-", "2>&-"]
    ),
)
def test_closed_streams_lead_nowhere(closed, program):
    run = subprocess.run(
        ["sh", "-c", f"{sys.executable} {program} {closed}"], cwd=REPOSITORY, capture_output=True
    )
    assert run.returncode == 0 and b"Traceback" not in run.stderr


@with_full_device
def test_a_full_output_of_the_tools_is_one_sentence(tmp_path):
    with open("/dev/full", "w") as device:
        run = subprocess.run(
            [sys.executable, "-m", "neuron_cpu", "learn"],
            cwd=REPOSITORY,
            stdout=device,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "HOME": str(tmp_path)},
        )
    assert run.returncode == 2 and "Traceback" not in run.stderr
    assert "No space left on device" in run.stderr


INTERRUPTED = """
import os, runpy, signal, sys
class Finder:
    def find_spec(self, name, *_):
        if name == "harness.console":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder())
runpy.run_path("main.py", run_name="__main__")
"""


def test_ctrl_c_while_the_driver_is_imported():
    command = [sys.executable, "-c", INTERRUPTED]
    run = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert (run.returncode, run.stderr) == (-signal.SIGINT, "")


COLLECTED = """
import os, signal, time, weakref
import main
def run(argv):
    class Thing: pass
    thing = Thing()
    weakref.finalize(thing, os.kill, os.getpid(), signal.SIGTERM)
    del thing
    time.sleep(300)
main.main = run
raise SystemExit(main.script([]))
"""


def test_an_end_within_what_the_collector_calls_comes_again_without_a_word():
    command = [sys.executable, "-c", COLLECTED]
    run = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120)
    assert (run.returncode, run.stderr) == (128 + signal.SIGTERM, "")
