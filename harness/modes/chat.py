"""`--mode chat`: several turns, typed at a terminal or one a line from a pipe."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

from harness import console
from harness.errors import UserError
from harness.inputs import prompts
from harness.inputs.chunks import with_chunks
from harness.inputs.prompts import Message
from harness.modes.generate import say_speed
from harness.session.building import Loaded, build
from harness.session.generation import generate_tokens, new_token_limit, reading
from harness.session.opening import Session, check_vocabulary, open_session
from harness.settings import Settings
from harness.streaming import Stream, decoded
from neuron_cpu.console import terminal

PROMPT = "> "
COMMANDS = {
    "/help": "these lines",
    "/reset": "forgets what was said; --system stays",
    "/exit": "ends, as Ctrl-D does; Ctrl-C ends an answer only",
}


def run(settings: Settings) -> int:
    """Build the model and answer until the input ends; 2 where a line of a pipe was refused."""
    if sys.stdin is None:
        raise UserError(
            "--mode chat reads standard input, and that is closed; open it, or use --mode generate."
        )
    session = for_turns(open_session(settings, ()))
    conversation = Conversation(session, settings.system)
    loaded = build(session)
    typed = sys.stdin.isatty()
    if typed:
        with contextlib.suppress(ImportError):  # arrow keys and the lines before
            import readline  # noqa: F401
        signal.signal(signal.SIGINT, signal.default_int_handler)  # takes a line away, and is over
        console.say(f"Chat with {session.model.name}; /help lists the commands.")
    refused = 0
    for line in _lines(typed):
        if line.split()[0] == "/exit":
            break
        try:
            _do(loaded, conversation, line)
        except UserError as error:
            if loaded.worker.ended:
                raise
            console.say(str(error))
            refused += 1
    return 2 if refused and not typed else 0


def _lines(typed: bool) -> Iterator[str]:
    """Yield the user's lines without blank ones; Ctrl-C drops a line."""
    while True:
        try:
            line = _typed_line() if typed else sys.stdin.buffer.readline().decode("utf-8")
        except EOFError:
            line = ""
        except UnicodeDecodeError:
            console.say("What you said is not UTF-8 text; say it again.")
            continue
        except KeyboardInterrupt:
            if not typed:
                raise
            console.say("\nCtrl-D ends the chat.")
            continue
        if not line:
            if typed:
                print(file=sys.stderr)  # the shell's prompt gets a line of its own
            return
        if line.strip():
            yield line.strip()


def _typed_line() -> str:
    """One line with its newline. Where standard output is a file the prompt stays out of it."""
    if sys.stdout.isatty():
        return input(PROMPT) + "\n"
    print(PROMPT, end="", file=sys.stderr, flush=True)
    return sys.stdin.readline()


def _do(loaded: Loaded, conversation: Conversation, line: str) -> None:
    """Obey a command, or answer."""
    word = line.split()[0]
    if word == "/help":
        for name, what in COMMANDS.items():
            console.say(f"{name:<8}{what}")
    elif word == "/reset":
        console.say(f"Forgotten: {_turns(conversation.turns)}.")
        conversation.reset()
    elif word.startswith("/"):
        raise UserError(f"There is no command {word}; /help lists the commands.")
    else:
        _answer(loaded, conversation, line)


def _answer(loaded: Loaded, conversation: Conversation, question: str) -> None:
    """Generate, show and remember one answer; Ctrl-C ends it after the step that is under way."""
    session, settings = loaded.session, loaded.session.settings
    ids, forgotten = conversation.ask(question)
    if forgotten:
        console.say(
            f"Forgotten to make room in --seq-len {settings.seq_len}: the oldest "
            f"{_turns(forgotten)}."
        )
    out = terminal.Running()
    stream = Stream(session.tokenizer, session.stop_tokens, [""], out.write)
    most = new_token_limit(settings, [ids])
    with _ctrl_c() as interrupted, reading(stream.step) as on_step:
        steps = generate_tokens(loaded, [ids], most, on_step, stop=interrupted)
    stream.finish()
    out.finish()
    tokens = [step[0] for step in steps]
    conversation.remember(question, decoded(session.tokenizer, tokens))
    if interrupted():
        console.say("Interrupted; what there is of the answer is remembered.")
    elif len(tokens) == most and tokens[-1] not in session.stop_tokens:
        limit = "--max-new-tokens" if settings.max_new_tokens == most else "--seq-len"
        console.say(f"The answer is cut short by {limit}.")
    say_speed(stream)


def _turns(count: int) -> str:
    return f"{count} turn" + "s" * (count != 1)


@contextlib.contextmanager
def _ctrl_c() -> Iterator[Callable[[], bool]]:
    """Whether Ctrl-C came: takes note of the first; the second interrupts the program as ever."""
    came: list[int] = []

    def note(number: int, _: object) -> None:
        came.append(number)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with contextlib.suppress(OSError):
            console.say("\nThe answer ends after this step; Ctrl-C again ends the chat.")

    main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGINT, note) if main else None
    try:
        yield lambda: bool(came)
    finally:
        if before is not None:
            signal.signal(signal.SIGINT, before)


LEAST_ANSWER = 4  # a fraction, 1/4: of the cache, kept free for an answer of any length
SHORTEST = "Hi"


def for_turns(session: Session) -> Session:
    """The same session, compiled for prompts of any length that fits the cache."""
    if not session.settings.takes_chunks:
        return session
    longest = range(session.settings.seq_len - 1)
    return replace(session, settings=with_chunks(session.settings, session.model.config, [longest]))


class Conversation:
    """Turns through the tokenizer's chat template.

    Every prompt leaves room for an answer of `--max-new-tokens`, or of a quarter of the cache.

    Raises:
        UserError: the model has no chat template, or the system prompt leaves no room.
    """

    def __init__(self, session: Session, system: str | None) -> None:
        settings = session.settings
        if not session.tokenizer.chat_template:
            raise UserError(
                f"{session.model.name} has no chat template, so it is no chat model; --mode "
                "generate goes on where a text ends."
            )
        self._session = session
        self._system: list[Message] = []
        self._said: list[Message] = []  # user and assistant in turn
        room = settings.max_new_tokens or max(1, settings.seq_len // LEAST_ANSWER)
        self._longest = settings.seq_len - room  # tokens of a prompt
        if not settings.takes_chunks:
            self._longest = min(self._longest, settings.max_context_length)
        if system is not None:
            self._system = [{"role": "system", "content": system}]
        least = len(self._encoded([{"role": "user", "content": SHORTEST}]))
        if least > self._longest:
            what = "--system" if system is not None else "the chat template"
            raise UserError(
                f"--seq-len {settings.seq_len} is too short to chat: a question takes {least} "
                f"tokens with {what}, and {room} are for the answer; give --seq-len "
                f"{prompts.next_multiple(2 * least + room)}."
            )

    @property
    def turns(self) -> int:
        """Questions that have been answered and are remembered."""
        return len(self._said) // 2

    def ask(self, question: str) -> tuple[list[int], int]:
        """The prompt that asks `question` after the remembered turns; the number of turns
        forgotten.

        Raises:
            UserError: the question alone leaves no room for an answer.
        """
        asked: Message = {"role": "user", "content": question}
        kept = self._said
        ids = self._encoded([*kept, asked])
        while len(ids) > self._longest and kept:
            kept = kept[2:]
            ids = self._encoded([*kept, asked])
        if len(ids) > self._longest:
            raise UserError(
                f"The question {prompts.shorten(question)} takes {len(ids)} tokens with the chat "
                f"template, expected at most {self._longest} in --seq-len "
                f"{self._session.settings.seq_len}; shorten it, or give a longer --seq-len."
            )
        check_vocabulary(self._session, [ids])
        forgotten = (len(self._said) - len(kept)) // 2
        self._said = kept
        return ids, forgotten

    def remember(self, question: str, answer: str) -> None:
        """Add a turn, whole or interrupted."""
        self._said = [
            *self._said,
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
        ]

    def reset(self) -> None:
        """Forget all turns; the system prompt stays."""
        self._said = []

    def _encoded(self, messages: list[Message]) -> list[int]:
        return prompts.encode_messages(self._session.tokenizer, [*self._system, *messages])
