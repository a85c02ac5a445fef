"""Prompts: from the command line, from a file, and as the token ids that a model sees."""

import csv
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from harness.errors import UserError, words_of
from neuron_cpu.errors import nearest
from neuron_cpu.sandbox import limits

# Stands for a newline while csv parses a value: a lone surrogate never comes from a command line,
# whereas csv would take a bare newline for the end of a record.
_NEWLINE = "\ud800"

# A prompt of one token is taken for a decode step on an empty cache, and with two the positions of
# padding (1) tie with the last token's (NxDI 0.1, models/model_base.py), so three are needed.
MIN_PROMPT_TOKENS = 3
TEMPLATE_SECONDS, TEMPLATE_BYTES = 10, 1 << 30  # of one file's prompts: it takes milliseconds
LARGEST_SEQ_LEN = 2**31 - 1
# Twice a prompt of 128k English tokens. tokenizers takes up to 0.8 GB for it (measured), and ends
# the process where it does not get its memory.
MOST_CHARACTERS = 1 << 20
Message = dict[str, str]  # of a conversation: "role" (system, user, assistant) and "content"


def split_prompt_value(value: str) -> list[str]:
    """Prompts of one `--prompt` value: a comma-separated list, quoted as Python's csv module does.

    Newlines belong to the prompt that they stand in. A UserError tells about bad quoting.
    """
    line = value.replace("\n", _NEWLINE)
    try:
        rows = list(csv.reader([line], skipinitialspace=True, strict=True))
    except csv.Error as error:
        raise UserError(
            f"--prompt {value!r} is not a comma-separated list in the csv module's quoting "
            f'({error}); put the whole prompt in double quotes, doubled inside (""), '
            "or use --prompt-file."
        ) from error
    fields = rows[0] if rows and rows[0] else [""]
    return [field.replace(_NEWLINE, "\n") for field in fields]


def parse_prompt_text(text: str) -> list[str]:
    """Prompts of a prompt file: verbatim, separated by blank lines; newlines inside are kept."""
    blocks = re.split(r"\n[ \t]*(?:\n[ \t]*)*\n", text.replace("\r\n", "\n"))
    return [block.strip("\n") for block in blocks if block.strip()]


def read_prompt_file(path: Path) -> list[str]:
    """Prompts of a UTF-8 file, in order; a UserError where it cannot be read or holds none."""
    mend = nearest(path.name, [one.name for one in path.parent.glob("*.*")], "name a text file")
    if path.exists() and not path.is_file():  # a pipe would be waited for without a word
        raise UserError(f"Cannot read the prompt file {path}: it is no regular file; {mend}.")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(
            f"Cannot read the prompt file {path}: it is not UTF-8 text; save it as UTF-8."
        ) from error
    except OSError as error:
        raise UserError(f"Cannot read the prompt file {path}: {error.strerror}; {mend}.") from error
    if path.suffix == ".json" or text.startswith("# Baseline of"):
        raise UserError(
            f"{path} is JSON or a table; name a text, with blank lines between prompts."
        )
    prompts = parse_prompt_text(text)
    if not prompts:
        raise UserError(f"The prompt file {path} is empty: write at least one prompt into it.")
    return prompts


def encode(tokenizer: Any, prompts: Sequence[str], raw: bool) -> list[list[int]]:
    """Token ids of each prompt; through the chat template if there is one and `raw` is False."""
    templated = bool(tokenizer.chat_template) and not raw
    mend = "mend it, or leave it out with --raw" if templated else "download the model again"

    def ids(prompt: str) -> list[int]:
        if len(prompt) > MOST_CHARACTERS:
            raise ValueError(
                f"the prompt {shorten(prompt[:99])} has {len(prompt)} characters, expected at most "
                f"{MOST_CHARACTERS}"
            )
        if templated:
            return _templated(tokenizer, [{"role": "user", "content": prompt}])
        return list(tokenizer(prompt)["input_ids"])

    with _applied(templated, mend):
        return [ids(prompt) for prompt in prompts]


def encode_messages(tokenizer: Any, messages: Sequence[Message]) -> list[int]:
    """Token ids of a conversation through the chat template, up to where the answer begins."""
    mend = "leave --system out" if messages[0]["role"] == "system" else "mend it"
    with _applied(True, mend):
        return _templated(tokenizer, messages)


def _templated(tokenizer: Any, messages: Sequence[Message]) -> list[int]:
    return list(tokenizer.apply_chat_template(list(messages), add_generation_prompt=True))


@contextmanager
def _applied(templated: bool, mend: str) -> Iterator[None]:
    """Apply a template under bounds, since it is a program; its faults become a UserError."""
    try:
        with limits.bounded(TEMPLATE_SECONDS, TEMPLATE_BYTES) if templated else nullcontext():
            yield
    except BaseException as error:  # a panic of Rust is no Exception
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            raise
        what = "The chat template of the tokenizer" if templated else "The tokenizer"
        reason = words_of(error).rstrip(".")
        raise UserError(
            f"{what} cannot be applied ({type(error).__name__}: {reason[:120]}); {mend}."
        ) from error


def check_lengths(
    prompts: Sequence[str],
    ids: Sequence[Sequence[int]],
    seq_len: int,
    max_context: int | None,
    most: int | None = None,
) -> None:
    """Refuse prompts that do not fit: every prompt needs room for at least one new token.

    `max_context` is the longest prefill, None where chunks follow it; `most` is the longest
    sequence length that the model takes.
    """
    for prompt, tokens in zip(prompts, ids):
        shown = shorten(prompt)
        if len(tokens) < MIN_PROMPT_TOKENS:
            raise UserError(
                f"The prompt {shown} has {len(tokens)} token(s), expected at least "
                f"{MIN_PROMPT_TOKENS}; make it longer."
            )
        if most is not None and len(tokens) >= most:
            raise UserError(
                f"The prompt {shown} has {len(tokens)} tokens, and the model takes at most {most}, "
                "new ones included; shorten it."
            )
        if len(tokens) >= seq_len:
            enough = min(next_multiple(len(tokens) + 32), most or LARGEST_SEQ_LEN)
            raise UserError(
                f"The prompt {shown} has {len(tokens)} tokens, which leaves no room for new ones "
                f"in --seq-len {seq_len}; give --seq-len {enough}."
            )
        if max_context is not None and len(tokens) > max_context:
            raise UserError(
                f"The prompt {shown} has {len(tokens)} tokens, more than --max-context-length "
                f"{max_context}; raise that to at least {len(tokens)}, or leave out the "
                "option that keeps it from being fed in chunks (left padding, speculation)."
            )


def next_multiple(length: int) -> int:
    """`length` rounded up to a multiple of 64, for advice."""
    return -(-length // 64) * 64


def shorten(prompt: str, width: int = 48) -> str:
    """A prompt in one short line."""
    line = " ".join(prompt.split())
    return repr(line if len(line) <= width else line[: width - 3] + "...")
