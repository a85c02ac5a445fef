"""Answers made from a grammar of hostile acts: each gets its word, and the host is unhurt."""

import json
import os
import random
import shutil

import pytest

from neuron_cpu import suite
from neuron_cpu.__main__ import main
from neuron_cpu.sandbox import limits
from tests.crossed import full

# What an answer does, when, and how: one act of each line makes an answer.
ACTS = (
    "open({mine!r}, 'w')", "os.remove({mine!r})", "os.chmod({mine!r}, 0)", "os.utime({mine!r})",
    "os.truncate({mine!r}, 0)", "os.rename({mine!r}, {mine!r} + '2')", "os.kill({judge}, 9)",
    "os.kill(-{judge}, 9)", "resource.prlimit({judge}, resource.RLIMIT_CPU, (0, 0))",
    "os.setpriority(os.PRIO_PROCESS, {judge}, 19)", "os.fork()", "subprocess.run(['true'])",
    "os.execv('/bin/true', ['true'])", "socket.socket()", "socket.socket(socket.AF_UNIX)",
    "open('/dev/shm/neuron_cpu_hostile', 'w')", "os.memfd_create('x')", "mmap.mmap(-1, 1 << 30)",
    "bytearray(1 << 33)", "os._exit(0)", "os.abort()", "os.kill(os.getpid(), 40)", "sys.exit(3)",
    "os.closerange(3, 99)", "(lambda f: f(f))(lambda f: f(f))", "exec('while True: pass')",
    "write(b'[' * 9999)", "write(b'\\0\\0\\0\\2{{}}')", "write(b'\\0\\0\\0\\x09{{}}')",
    "time.sleep(99)", "threading.Thread(target=time.sleep, args=(99,)).start() or 1 / 0",
    "open('/proc/{judge}/mem', 'wb')", "os.symlink('/etc', 'x')", "os.mkfifo({mine!r} + '3')",
)  # fmt: skip
WHEN = (
    "{act}",
    "def kernel(*given):\n    {act}\n    raise ValueError('odd')",
    "class Odd:\n    def __call__(self, *given):\n        {act}\nkernel = Odd()",
    "try:\n    {act}\nexcept BaseException:\n    pass\n{source}",
    "import atexit\natexit.register(lambda: ({act}))\n1 / 0",
)
IMPORTS = """import mmap, os, resource, signal, socket, subprocess, sys, threading, time
def write(said):
    for n in range(3, 64):
        try:
            os.write(n, said)
        except OSError:
            pass
"""


def answers(seed, number, mine):
    """(operator, source, whether the suite's kernel follows) of answers drawn from the grammar."""
    chosen = random.Random(seed)
    small = ["gelu", "vector_add", "row_sum", "argmax", "rope", "embedding"]
    made = []
    for n in range(number):
        name, when = small[n % len(small)], chosen.choice(WHEN)
        act = chosen.choice(ACTS).format(mine=str(mine), judge=os.getpid())
        source = suite.template(name) if "{source}" in when else ""
        text = IMPORTS + when.replace("{act}", act).replace("{source}", source)
        made.append((name, text, bool(source)))
    return made


@pytest.mark.skipif(not limits._has_filter(), reason="this system has no filter of system calls")
@pytest.mark.parametrize(("seed", "number"), [(0, 3), *(full(n, 20) for n in range(10))])
def test_hostile_answers_get_their_word_and_hurt_nobody(seed, number, tmp_path):
    mine = tmp_path / "mine"
    mine.write_text("precious")
    before = mine.stat()
    shared = set(os.listdir("/dev/shm"))
    drawn = answers(seed, number, mine)
    closed = not limits.missing()  # without Landlock it may write all files that one may
    for first in range(0, number, 6):
        folder, figures = tmp_path / f"answers{first}", tmp_path / "figures.json"
        folder.mkdir()
        group = drawn[first : first + 6]
        for name, text, _ in group:
            (folder / f"{name}.py").write_text(text)
        options = ["--only", ",".join(name for name, _, _ in group), "--json", str(figures)]
        options += ["--time-limit", "30", "--cpu-limit", "5", "--memory-limit", "2"]
        status = main(["judge", str(folder), *options, "--jobs", "2"])
        found = {one["operator"]: one for one in json.loads(figures.read_text())["answers"]}
        for name, text, follows in group:
            word = found[name]["outcome"]
            assert word == "failed" or (follows and word == "correct"), (word, text)
        assert status == (0 if all(one["outcome"] == "correct" for one in found.values()) else 1)
        shutil.rmtree(folder)
    if closed:
        after = mine.stat()
        assert mine.read_text() == "precious"
        assert sorted(os.listdir(tmp_path)) == ["figures.json", "mine"]
        assert (before.st_mode, before.st_mtime) == (after.st_mode, after.st_mtime)
    assert os.getpriority(os.PRIO_PROCESS, 0) == os.getpriority(os.PRIO_PROCESS, os.getpid()) < 19
    assert not closed or not {n for n in os.listdir("/dev/shm") if "hostile" in n} - shared
