"""Several turns with one model: the turns so far, cut to the length of the cache."""

from dataclasses import replace

from harness.errors import UserError
from harness.inputs import prompts
from harness.inputs.chunks import with_chunks
from harness.inputs.prompts import Message
from harness.session.opening import Session, check_vocabulary

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
