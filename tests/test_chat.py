"""`--mode chat`: turns through the template, what the cache holds, commands, Ctrl-C, pipes."""

import contextlib
import io
import json
import os
import pty
import select
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from harness.errors import UserError
from harness.inputs.models import ModelFolder
from harness.modes.chat import Conversation
from tests.conftest import REPOSITORY
from tests.crossed import full
from tests.tiny_model import write_tiny_model

# One byte a token: "S" and the system prompt, "U" and the question, "A" and the answer.
TEMPLATE = (
    "{% for m in messages %}"
    "{{ {'system': 'S', 'user': 'U', 'assistant': 'A'}[m.role] + m.content }}"
    "{% endfor %}{% if add_generation_prompt %}A{% endif %}"
)


def write_chat_model(folder, template=TEMPLATE):
    """The tiny model, which never ends a text by itself, with a chat template."""
    write_tiny_model(folder, eos_token_id=None)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": template}))
    return folder


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory):
    return write_chat_model(tmp_path_factory.mktemp("models") / "chatty")


@pytest.fixture(scope="module")
def chat(run_main, chat_model, tmp_path_factory):
    """`main.py --mode chat` with lines from a pipe."""
    cache = str(tmp_path_factory.mktemp("cache"))

    def run(said, *arguments, mode="chat", model=chat_model):
        before, sys.stdin = sys.stdin, io.TextIOWrapper(io.BytesIO(said))
        try:
            return run_main(
                *["--mode", mode, "--model-path", model, "--tp-degree", "1"],
                *arguments,
                XDG_CACHE_HOME=cache,
            )
        finally:
            sys.stdin = before

    return run


@pytest.mark.parametrize("nki", [full("--enable-nki"), "--no-enable-nki"])
def test_each_turn_sees_what_was_said(chat, tmp_path, nki):
    lengths = ("--seq-len", "64", "--max-new-tokens", "6", nki)
    done = chat(b"one two\n\n three \n", *lengths, "--system", "be")
    assert done.returncode == 0, done.stderr
    generated = []
    for history in ("SbeUone twoA", "SbeUone twoA{}UthreeA"):
        prompt = tmp_path / "prompt.txt"
        prompt.write_text(history.format(*generated), encoding="utf-8")
        alone = chat(b"", "--prompt-file", prompt, "--raw", *lengths, mode="generate")
        start = f"Output 0: {prompt.read_text(encoding='utf-8')}"
        assert alone.stdout.startswith(start), alone.stderr
        generated.append(alone.stdout[len(start) : -1])
    assert done.stdout == "".join(f"{answer}\n" for answer in generated)
    assert done.stderr.count("The answer is cut short by --max-new-tokens.") == 2


def test_refused_lines_leave_the_others_and_show_in_the_status(chat):
    lengths = ("--seq-len", "64", "--max-new-tokens", "6")
    said = b"/nope\n\xff\n" + b"x" * 80 + b"\n/reset\n/help me\none\n/exit\nnever\n"
    done = chat(said, *lengths)
    assert done.returncode == 2
    assert "There is no command /nope" in done.stderr and "not UTF-8" in done.stderr
    assert "takes 82 tokens with the chat template, expected at most 58" in done.stderr
    assert "Forgotten: 0 turns." in done.stderr and "/reset  forgets" in done.stderr
    assert done.stdout == chat(b"one", *lengths).stdout  # no last newline, one answer


def conversation(seq_len=40, new=None, **changes):
    words = SimpleNamespace(
        chat_template="x",
        apply_chat_template=lambda messages, add_generation_prompt: [
            number for m in messages for number in (m["role"][0] + m["content"]).encode()
        ],
    )
    settings = SimpleNamespace(
        seq_len=seq_len, max_new_tokens=new, takes_chunks=True, max_context_length=seq_len
    )
    session = SimpleNamespace(
        tokenizer=words,
        settings=settings,
        vocabulary=256,
        pad_token_id=0,
        model=ModelFolder(Path("m"), "m", {}),
    )
    system = changes.pop("system", None)
    vars(settings).update(changes)
    return Conversation(session, system)  # type: ignore[arg-type]


def test_prompts_leave_room_for_an_answer():
    talk = conversation(seq_len=40)  # a quarter for the answer: prompts of at most 30
    for _ in range(2):
        ids, forgotten = talk.ask("123456789")
        talk.remember("123456789", "1234")
        assert not forgotten
    assert bytes(ids) == b"u123456789a1234u123456789" and talk.turns == 2
    ids, forgotten = talk.ask("1234")
    assert (len(ids), forgotten) == (20, 1) and talk.turns == 1
    ids, forgotten = talk.ask("x" * 29)
    assert (len(ids), forgotten, talk.turns) == (30, 1, 0)
    with pytest.raises(UserError, match="takes 31 tokens .* at most 30 in --seq-len 40"):
        talk.ask("x" * 30)


@pytest.mark.parametrize("changes", [{"new": 40}, {"new": 38}, {"system": "x" * 27}])
def test_a_cache_without_room_is_refused_before_anything_compiles(changes):
    with pytest.raises(UserError, match="--seq-len 40 is too short to chat"):
        conversation(**changes)


REFUSALS = {
    "template": (["--model-path", "TINY"], "no chat template"),
    "system": (["--system", "x" * 60, "--seq-len", "64"], "with --system"),
    "batch": (["--batch-size", "2"], "--batch-size 2"),
    "prompt": (["--prompt", "x"], "--prompt works with --mode generate"),
    "no role": (["--system", "x", "--model-path", "STRICT"], "no system here); leave --system"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals(case, chat, tiny_model, tmp_path):
    arguments, told = REFUSALS[case]
    folders = {"TINY": tiny_model}
    if "STRICT" in arguments:
        strict = "{% if messages[0].role == 'system' %}{{ raise_exception('no system here') }}"
        folders["STRICT"] = write_chat_model(tmp_path / "m", strict + "{% endif %}xyz")
    done = chat(b"one\n", *(folders.get(word, word) for word in arguments))
    assert done.returncode == 2 and not done.stdout and "Traceback" not in done.stderr
    assert told in done.stderr.splitlines()[-1]


class TypedChat:
    """The driver at a terminal of its own. Every wait has an end, and so has the process."""

    SECONDS = 90.0  # for one wait: on a busy machine PyTorch takes 20 s to be imported
    AGAIN = 5.0  # a signal between Python's prompt and its wait for input is seen with the next key

    def __init__(self, folder, *arguments):
        self.process, self._terminal = pty.fork()
        if self.process == 0:
            try:
                os.environ.update(TERM="dumb", XDG_CACHE_HOME=str(folder))
                driver = [sys.executable, str(REPOSITORY / "main.py"), "--mode", "chat"]
                os.execv(driver[0], [*driver, *arguments])
            finally:
                os._exit(127)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process:
            os.kill(self.process, signal.SIGKILL)
            os.waitpid(self.process, 0)
        os.close(self._terminal)

    def type(self, keys):
        os.write(self._terminal, keys)

    def read(self, again=b""):
        """The next byte that is shown; `again` is typed once more while nothing comes."""
        ends = time.monotonic() + self.SECONDS
        while time.monotonic() < ends:
            if select.select([self._terminal], [], [], self.AGAIN)[0]:
                try:
                    return os.read(self._terminal, 1)
                except OSError:  # Linux says so where the other end is closed
                    break
            self.type(again)
        raise AssertionError("the chat shows nothing more")

    def until(self, text, again=b""):
        """What is shown up to `text`."""
        shown, ends = b"", time.monotonic() + self.SECONDS
        while text not in shown:
            assert time.monotonic() < ends, shown
            shown += self.read(again)
        return shown

    def status(self):
        """The exit status of a chat that ends by itself."""
        ends = time.monotonic() + self.SECONDS
        while time.monotonic() < ends:
            if select.select([self._terminal], [], [], 0.1)[0]:
                with contextlib.suppress(OSError):  # Linux says so where the other end is closed
                    os.read(self._terminal, 4096)
            ended, status = os.waitpid(self.process, os.WNOHANG)
            if ended:
                self.process = 0
                return os.waitstatus_to_exitcode(status)
        raise AssertionError("the chat does not end")


def test_at_a_terminal_ctrl_c_ends_an_answer_and_ctrl_d_the_chat(chat_model, tmp_path):
    lengths = ["--seq-len", "2048", "--enable-bucketing", "false", "--tp-degree", "1"]
    with TypedChat(tmp_path, "--model-path", str(chat_model), *lengths) as chat:
        chat.until(b"\n> ")
        chat.type(b"\x03")  # at the prompt it throws away what was typed
        chat.until(b"Ctrl-D ends the chat.\r\n> ", again=b"\x03")
        chat.type(b"tell me\n")
        chat.until(b"tell me\r\n")
        chat.read()  # the answer has begun
        chat.type(b"\x03")
        shown = chat.until(b"\n> ")
        assert b"Interrupted; what there is of the answer is remembered." in shown
        chat.type(b"/reset\n")
        # Before the prompt readline does not listen yet, and what it finds later is no Ctrl-D.
        chat.until(b"Forgotten: 1 turn.\r\n> ")
        chat.type(b"\x04")
        assert chat.status() == 0
