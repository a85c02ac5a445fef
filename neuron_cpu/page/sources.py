"""The text of a kernel's functions, line by line, from the file that was traced."""

import ast
import functools
import linecache
from collections.abc import Iterable

NEAR = 2  # lines shown around one that stands in no function


def shown_lines(file: str, used: Iterable[int]) -> list[tuple[int, str]]:
    """(number, text) of the functions that the used lines stand in, in order of the file.

    Number 0 stands for lines that are left out. Without a file the list is empty, as for a kernel
    that somebody typed.
    """
    text = linecache.getlines(file)
    wanted: set[int] = set()
    functions = _functions("".join(text))
    for number in used:
        around = [span for span in functions if number in span]
        span = around[0] if around else range(number - NEAR, number + NEAR + 1)
        wanted.update(span)
    rows: list[tuple[int, str]] = []
    for number in sorted(n for n in wanted if 0 < n <= len(text)):
        if rows and number != rows[-1][0] + 1:
            rows.append((0, ""))
        rows.append((number, text[number - 1].rstrip("\r\n")))
    return rows


@functools.lru_cache(8)  # a page shows many kernels of few files
def _functions(text: str) -> tuple[range, ...]:
    """Lines of every function, decorators included, an outer one before those inside of it."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return ()  # the file has changed since it was traced
    found = []
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
            found.append(range(first, (node.end_lineno or node.lineno) + 1))
    return tuple(found)
