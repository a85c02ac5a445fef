"""Tables in pages of docs, each between two comments that name it, and on standard output."""

import re
import sys
from collections.abc import Callable
from pathlib import Path

from neuron_cpu.console import streams
from neuron_cpu.files import write_text_atomically


def _block(name: str) -> re.Pattern[str]:
    return re.compile(f"(<!-- {name}: begin -->\n)(.*?)\n?(<!-- {name}: end -->)", re.DOTALL)


def published(page: Path, name: str) -> str:
    """A table as the page has it."""
    found = _block(name).search(page.read_text(encoding="utf-8"))
    assert found is not None, f"{page} has no block '{name}'"
    return found[2]


def publish(page: Path, name: str, table: str) -> None:
    """Put a table into the page."""
    text = page.read_text(encoding="utf-8")
    made, count = _block(name).subn(lambda found: f"{found[1]}{table}\n{found[3]}", text)
    if count != 1:
        raise SystemExit(f"{page} has {count} blocks '{name}', expected 1")
    write_text_atomically(page, made)


def written(main: Callable[[], int]) -> int:
    """The status of ``main`` when its output is out; READER_GONE where nobody reads it any more."""
    try:
        status = main()
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        streams.abandon()
        return streams.READER_GONE
