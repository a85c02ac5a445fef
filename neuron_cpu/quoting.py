"""Words of strangers for a terminal, JSON, pages and logs: every letter prints or is escaped."""

from typing import Any


def quoted(text: str, most: int = 10_000, lines: bool = False) -> str:
    """The text with control characters, orders of writing and lone surrogates as escapes.

    Args:
        most: letters of it that are kept.
        lines: whether its lines and tabs stay; else it cannot begin a line of its own.
    """
    text = text[:most]
    if text.isprintable():
        return text
    kept = "\n\t" if lines else ""
    return "".join(
        c if c.isprintable() or c in kept else c.encode("unicode_escape").decode() for c in text
    )


def all_quoted(value: Any, most: int = 10_000, lines: bool = False) -> Any:
    """The same of every text in lists and dictionaries."""
    if isinstance(value, str):
        return quoted(value, most, lines)
    if isinstance(value, dict):
        return {quoted(str(k), most): all_quoted(v, most, lines) for k, v in value.items()}
    return (
        [all_quoted(v, most, lines) for v in value] if isinstance(value, (list, tuple)) else value
    )
