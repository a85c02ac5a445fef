"""The page: one template with the data inside of it."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .. import __version__
from ..core.time.schedule import ENGINES
from ..files import write_text_atomically
from .data import WAITS

TEMPLATE = Path(__file__).resolve().with_name("page.html")
PLACE = "@DATA@"


def page(
    title: str,
    runs: Sequence[dict[str, Any]],
    beside: int | None = None,
    tables: Sequence[dict[str, Any]] = (),
    sentences: Sequence[str] = (),
) -> str:
    """The whole HTML text.

    Args:
        runs: what `data.run` made; the first is shown first.
        beside: which run is shown beside the first one, None for the first alone.
        tables: above the profiles (`as_table`).
        sentences: below those tables.
    """
    content = {
        "title": title,
        "version": __version__,
        "engines": [engine.value for engine in ENGINES],
        "waits": WAITS,
        "runs": runs,
        "beside": beside,
        "tables": tables,
        "sentences": sentences,
    }
    before, _, after = TEMPLATE.read_text(encoding="utf-8").partition(PLACE)
    return before + _script_text(content) + after


def _script_text(content: Any) -> str:
    """JSON that may stand inside of <script>: source text may hold </script> or <!--.

    Inside of a JSON string \\u003c is the same character, and no '<' stands outside of strings.
    """
    return json.dumps(content, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def as_table(table: Any) -> dict[str, Any]:
    """A table of the terminal (rich) as title, columns and rows of text."""
    cells = [[str(cell) for cell in column.cells] for column in table.columns]
    return {
        "title": str(table.title or "").strip(),
        "columns": [str(column.header) for column in table.columns],
        "right": [column.justify == "right" for column in table.columns],
        "rows": [list(row) for row in zip(*cells)],
    }


def write(path: Path, *arguments: Any, **named: Any) -> None:
    """`page` as a file, complete or not at all."""
    write_text_atomically(path, page(*arguments, **named))
