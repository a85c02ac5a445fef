"""The lists of docs/strangers.md, from the acts that tests try.

    python -m tests.strangers_page --write

Every act runs again, as every kind of user and with parts of the sandbox taken away; acts that end
alike stand together.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import textwrap
from pathlib import Path

from tests.conftest import REPOSITORY
from tests.harness.processes import acts
from tests.harness.processes.test_sandbox import DENIED, tried
from tests.sandbox.test_doors import DOORS
from tests.sandbox.test_records import ACTS

PAGE = REPOSITORY / "docs" / "strangers.md"
BEGIN, END = "<!-- acts: begin -->\n", "<!-- acts: end -->\n"
USERS = {
    "root": ["root"],
    "ordinary user": ["nobody"],
    "without Landlock": ["nobody", "without Landlock"],
    "without libseccomp": ["nobody", "without the filter"],
}


def outcomes():
    """Of every act how it ends for each user: done, refused, or not tried."""
    found: dict[str, list[str]] = {name: [] for name in (*acts.ALLOWED, *acts.CALLS, *acts.FILES)}
    for how in USERS.values():
        folder = Path(tempfile.mkdtemp(dir="/tmp"))
        try:
            for made in (folder, folder / "scratch", folder / "precious"):
                made.mkdir(exist_ok=True)
                made.chmod(0o777)
            (folder / "precious" / "file").write_text("precious")
            (folder / "precious" / "file").chmod(0o666)
            told = tried(folder, *how)
        finally:
            shutil.rmtree(folder)
        for name, words in found.items():
            end = told.get(name, "not tried")
            words.append("refused" if end in DENIED else end)
    return found


def lists():
    rows: dict[tuple[str, ...], list[str]] = {}
    for name, ends in outcomes().items():
        rows.setdefault(tuple(ends), []).append(name)
    items = []
    for ends, names in rows.items():
        told = [f"{user} {end}" for user, end in zip(USERS, ends)]
        said = f"{ends[0]} by all" if len(set(ends)) == 1 else ", ".join(told)
        items.append(f"- **{said}**: {', '.join(names)}.")
    items.append(f"- **of a record, refused**: {', '.join(ACTS)}.")
    items.append(f"- **doors with every name planted**: {', '.join(DOORS)}.")
    return "".join(textwrap.fill(item, 120, subsequent_indent="  ") + "\n" for item in items)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="into the page")
    told = lists()
    if parser.parse_args().write:
        before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
        after = rest.partition(END)[2]
        PAGE.write_text(f"{before}{BEGIN}{told}{END}{after}", encoding="utf-8")
    else:
        print(told)


if __name__ == "__main__":
    main()
