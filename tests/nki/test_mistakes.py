"""Beginners' mistakes: each message names the mend, and the last entry shown is the user's line."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
import textwrap
import traceback
import warnings
from pathlib import Path

import numpy as np
import pytest

from tests.crossed import crossed, full

HEADS = {
    "neuronxcc": (
        "import math\nimport numpy as np\nimport torch\nfrom neuronxcc import nki\n"
        "import neuronxcc.nki.isa as nisa\nimport neuronxcc.nki.language as nl\n\n\n"
        "@nki.jit\ndef kernel(x_hbm, y_hbm):\n"
        "    out_hbm = nl.ndarray((128, 64), nl.float32, buffer=nl.shared_hbm)\n"
        "    x, y = nl.load(x_hbm), nl.load(y_hbm)\n",
        "    nl.store(out_hbm, r)\n    return out_hbm\n",
    ),
    "nki": (
        "import math\nimport numpy as np\nimport torch\nimport nki\n"
        "import nki.isa as nisa\nimport nki.language as nl\n\n\n"
        "@nki.jit\ndef kernel(x_hbm, y_hbm):\n"
        "    out_hbm = nl.ndarray((128, 64), dtype=nl.float32, buffer=nl.shared_hbm)\n"
        "    x = nl.ndarray((128, 64), dtype=nl.float32, buffer=nl.sbuf)\n"
        "    y = nl.ndarray((128, 64), dtype=nl.float32, buffer=nl.sbuf)\n"
        "    r = nl.ndarray((128, 64), dtype=nl.float32, buffer=nl.sbuf)\n"
        "    nisa.dma_copy(dst=x, src=x_hbm)\n    nisa.dma_copy(dst=y, src=y_hbm)\n",
        "    nisa.dma_copy(dst=out_hbm, src=r)\n    return out_hbm\n",
    ),
}


_MEND = re.compile(r"mend: `(.*?)`(?:, in nki `(.*)`)?")


def parts(text):
    """The sections of mistakes.md by part: name -> lines, and the mend in each language."""
    found: dict[str, dict[str, tuple[str, str, str]]] = {}
    for part in text.split("\n# ")[1:]:
        title, *entries = part.split("\n## ")
        found[title.strip()] = {}
        for name, mend, lines in (entry.split("\n", 2) for entry in entries):
            old, new = _MEND.fullmatch(mend).groups()
            found[title.strip()][name] = (textwrap.dedent(lines).strip("\n"), old, new or old)
    return found


PARTS = parts(Path(__file__).with_name("mistakes.md").read_text("utf-8"))
CALLS = PARTS["calls"]
# language -> name -> lines and their mend; most are wrong in both languages
TABLES = {
    language: {
        name: (lines, mends[place])
        for name, (lines, *mends) in (PARTS["both"] | PARTS[language]).items()
    }
    for place, language in enumerate(("neuronxcc", "nki"))
}
# A mistake in both languages is made in one of them, by turns; in the full run in each.
BOTH = [
    (full if name in PARTS["both"] and (number + place) % 2 else pytest.param)(language, name)
    for place, (language, table) in enumerate(TABLES.items())
    for number, name in enumerate(table)
]


def told(language, name, folder):
    """What a mistake is told with, warnings included, and the last file of its traceback."""
    lines, _ = TABLES[language][name]
    head, tail = HEADS[language]
    path = folder / "mistake.py"
    path.write_text(head + textwrap.indent(lines, "    ") + "\n" + tail)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            spec.loader.exec_module(module)
            module.kernel(*[np.ones((128, 64), np.float32)] * 2)
            said, last = "", str(path)
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
            frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
            last = frames[-1].f_code.co_filename
            # what a notebook shows beside the user's own: nothing
            shown = {f.f_code.co_filename for f in frames if "__tracebackhide__" not in f.f_locals}
            assert shown <= {__file__, str(path)}
        finally:
            del sys.modules[path.stem]
    return said + "".join(f"; {one.message}" for one in warned), last


@pytest.mark.parametrize(("language", "name"), BOTH)
def test_the_message_mends_and_the_last_entry_is_the_users(language, name, tmp_path):
    if name.startswith("jnp."):
        pytest.importorskip("jax", reason="requirements-jax.txt is not installed")
    said, last = told(language, name, tmp_path)
    assert said and last == str(tmp_path / "mistake.py"), (said, last)
    # The mend is the last clause of a message: words of its fault do not count.
    words = TABLES[language][name][1]
    clauses = [one.split("; ")[-1] for one in re.split(r" \[\w+\]", said) if one.strip()]
    assert any(re.search(words, one) for one in clauses), said


def called(path, language, name):
    """Call a right kernel of the file ``path`` as the mistake ``name`` does."""
    head, tail = HEADS[language]
    path.write_text(head + tail.replace("r)", "x)").replace("=r)", "=x)"))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.o = np.ones((128, 64), np.float32)
    eval(compile(CALLS[name][0], str(path), "eval"), vars(module))


@pytest.mark.parametrize(("language", "name"), crossed(list(HEADS), list(CALLS)))
def test_a_wrong_call_ends_at_lines_of_the_users(language, name, tmp_path):
    path = tmp_path / "called.py"
    with pytest.raises(Exception, match=CALLS[name][1]) as raised:
        called(path, language, name)
    frames = [frame for frame, _ in traceback.walk_tb(raised.value.__traceback__)]
    shown = [f.f_code.co_filename for f in frames if "__tracebackhide__" not in f.f_locals]
    assert set(shown) <= {__file__, str(path)} and shown[-1] == str(path)
    assert frames[-1].f_code.co_filename == str(
        path
    )  # a notebook shows the last one whatever it is


IDENTIFIED = {
    "return in a loop": "sim_loop_exit",
    "meta tensor": "sim_meta_argument",
    "sparse tensor": "sim_argument_layout",
    "jit of a name": "sim_no_function",
}


@pytest.mark.parametrize("name", IDENTIFIED)
def test_the_identifier_of_a_mistake(name, tmp_path):
    if name in TABLES["neuronxcc"]:
        assert IDENTIFIED[name] in told("neuronxcc", name, tmp_path)[0]
    else:
        with pytest.raises(Exception, match=IDENTIFIED[name]):
            called(tmp_path / "called.py", "neuronxcc", name)


def test_a_file_that_is_read_anew_names_its_new_lines(tmp_path):
    head, tail = HEADS["nki"]
    for number, name in enumerate(("first", "other")):  # as a notebook's reload after an edit
        path = tmp_path / "edited.py"
        wrong = f"{name} = nl.ndarray((128, 32), nl.float32)\n    nisa.tensor_copy({name}, x)\n"
        path.write_text(f"{head}    {wrong}{tail}")
        os.utime(path, (number, number))
        spec = importlib.util.spec_from_file_location(path.stem, path)
        module = importlib.util.module_from_spec(spec)
        exec(compile(path.read_text(), path, "exec"), vars(module))
        with pytest.raises(Exception, match=rf" {name} \(128, 32\)"):
            module.kernel(*[np.ones((128, 64), np.float32)] * 2)
