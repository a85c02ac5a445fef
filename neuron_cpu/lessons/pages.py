"""Pages that hold Python: what stands above a block of code, and a block as a module."""

import functools
import linecache
from pathlib import Path
from types import ModuleType

_FENCE, _PYTHON = "```", "```python\n"


def text_and_code(section: str) -> tuple[str, str]:
    """What stands above a section's block of code, and the code."""
    text, code = section.split(_PYTHON)
    return text.strip(), code.split(_FENCE)[0]


def as_file(section: str) -> str:
    """The section as a Python file: its text is the docstring."""
    return '"""{}\n"""\n\n{}'.format(*text_and_code(section))


@functools.cache
def sections(page: Path) -> dict[str, str]:
    """What stands below each `##` heading of a page, by the heading."""
    _, *found = page.read_text(encoding="utf-8").split("\n## ")
    return {name: rest for name, _, rest in (one.partition("\n") for one in found)}


def module(name: str, text: str, file: str) -> ModuleType:
    """Run a text as a module of that name, whose file is said to be `file`."""
    return _run(name, text, file, text.splitlines(keepends=True))


def section_module(name: str, page: Path, section: str) -> ModuleType:
    """Run a section's block as a module, whose lines are the page's."""
    lines, code = page.read_text(encoding="utf-8").splitlines(), _code_alone(page)
    first = lines.index(f"## {section}")
    after = (n for n, line in enumerate(lines[first + 1 :], first + 1) if line.startswith("## "))
    own = code[first : next(after, None)]
    return _run(name, "\n" * first + "".join(own), str(page), code)


@functools.cache
def _code_alone(page: Path) -> list[str]:
    """The lines of a page, empty ones in the place of those outside of blocks of Python."""
    found, inside = [], False
    for line in page.read_text(encoding="utf-8").splitlines(keepends=True):
        is_fence = line.startswith(_FENCE)
        found.append(line if inside and not is_fence else "\n")
        inside = line == _PYTHON if is_fence else inside
    return found


def _run(name: str, text: str, file: str, lines: list[str]) -> ModuleType:
    # Tracing reads a kernel's source, which no file holds as Python.
    linecache.cache[file] = len(text), None, lines, file
    made = ModuleType(name)
    made.__file__ = file
    exec(compile(text, file, "exec"), vars(made))
    return made
