"""Submissions from a grammar of hostile acts: each gets its verdict, and the host is unhurt."""

import os
import random

import pytest

from neuron_cpu.sandbox import limits
from tests.crossed import full
from tests.judge.test_hostile import ACTS, IMPORTS

BASE = (
    "from neuronx_distributed_inference.models.llama import modeling_llama\n"
    "from neuronx_distributed_inference.models.llama.modeling_llama import *\n"
)
# What belongs to a driver only: its own words, its folders, its terminal.
MORE = (
    "open({mine!r} + '4', 'wb').write(b'x' * (1 << 34))", "print('x' * (1 << 22))",
    "print('\\x1b[2J\\x07')", "sys.setrecursionlimit(10**9) or (lambda f: f(f))(lambda f: f(f))",
    "os.dup2(0, 1)", "signal.pause()", "os.nice(5)", "open('/dev/tty', 'w')",
    "[threading.Thread(target=time.sleep, args=(9,)).start() for _ in range(200)]",
    "signal.signal(signal.SIGTERM, signal.SIG_IGN) or signal.pause()",
)  # fmt: skip
FORWARD = (
    "class NeuronLlamaModel(modeling_llama.NeuronLlamaModel):\n"
    "    def forward(self, input_ids, *arguments, **settings):\n"
    "        if input_ids.is_meta == {traced}:\n"
    "            {act}\n"
    "        return super().forward(input_ids, *arguments, **settings)\n"
    "class NeuronLlamaForCausalLM(modeling_llama.NeuronLlamaForCausalLM):\n"
    "    _model_cls = NeuronLlamaModel\n"
)
METHOD = (
    "class NeuronLlamaForCausalLM(modeling_llama.NeuronLlamaForCausalLM):\n"
    "    def {name}(self, *arguments, **settings):\n"
    "        {act}\n"
    "        return super().{name}(*arguments, **settings)\n"
)
WHEN = (
    "{act}",
    "try:\n    {act}\nexcept BaseException:\n    pass",
    "import atexit\natexit.register(lambda: ({act}))",
    FORWARD.replace("{traced}", "True"),
    FORWARD.replace("{traced}", "False"),
    METHOD.replace("{name}", "compile"),
    METHOD.replace("{name}", "load"),
    METHOD.replace("{name}", "reset"),
)


def submissions(seed, number, mine):
    chosen = random.Random(seed)
    made = []
    for n in range(number):
        when, act = chosen.choice(WHEN), chosen.choice((*ACTS, *MORE))
        act = act if seed + n else "os.closerange(3, 99)"
        act = act.format(mine=str(mine), judge=os.getpid())
        made.append(IMPORTS + BASE + when.replace("{act}", act))
    return made


@pytest.mark.skipif(not limits._has_filter(), reason="this system has no filter of system calls")
@pytest.mark.parametrize(("seed", "number"), [(0, 2), *(full(n, 20) for n in range(10))])
def test_hostile_submissions_get_a_verdict_and_hurt_nobody(
    seed, number, run_main, tiny_model, tmp_path
):
    closed = not limits.missing()  # without Landlock it may write all files that one may
    (tmp_path / "own").mkdir()
    mine = tmp_path / "own" / "mine"
    mine.write_text("precious")
    before, shared = mine.stat(), set(os.listdir("/dev/shm"))
    asked = ["--mode", "generate", "--model-path", tiny_model, "--prompt", "hello", "--seq-len"]
    asked += ["64", "--max-new-tokens", "3", "--tp-degree", "1", "--time-limit", "20"]
    asked += ["--cpu-limit", "15", "--memory-limit", "3", "--compiled-model-path", "c", "--llama"]
    (tmp_path / "entry.py").write_text(BASE)
    honest = run_main(*asked, "entry.py", cwd=tmp_path)
    assert honest.returncode == 0, honest.stderr
    for text in submissions(seed, number, mine):
        (tmp_path / "entry.py").write_text(text)
        done = run_main(*asked, "entry.py", cwd=tmp_path)
        assert "Traceback" not in done.stderr, (done.stderr, text)
        assert not set(done.stderr) & {"\x1b", "\x07"}, text
        if done.returncode == 0:
            assert done.stdout == honest.stdout, text
        else:
            assert done.returncode == 2 and "main.py: " in done.stderr, (done.stderr, text)
        assert not closed or sorted(os.listdir(tmp_path)) == ["c", "entry.py", "own"], text
        assert not [name for name in os.listdir(tmp_path / "c") if name.startswith(".")], text
    if closed:
        after = mine.stat()
        assert mine.read_text() == "precious" and os.listdir(mine.parent) == ["mine"]
        assert (before.st_mode, before.st_mtime) == (after.st_mode, after.st_mtime)
    assert os.getpriority(os.PRIO_PROCESS, 0) < 19
    assert not closed or not {n for n in os.listdir("/dev/shm") if "hostile" in n} - shared
