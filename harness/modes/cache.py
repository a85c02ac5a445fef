"""`--mode cache`: lists the files that the driver keeps between runs, with sizes, and clears
them."""

import time
from pathlib import Path

from harness import console, files
from harness.errors import UserError
from harness.files import bytes_of, cache_folder, modified, remove_unlocked
from harness.session.building import MOST_COMPILED_BYTES, last_used
from harness.settings import Settings
from neuron_cpu.console import terminal

REFERENCES = "references"


def run(settings: Settings) -> int:
    """List the folders of the cache, or remove those named by `--clear`."""
    place = cache_folder()
    folders = {str(path.relative_to(place)): path for path in _folders(place)}
    wanted = dict(folders) if settings.clear == ["all"] else {}
    for name in settings.clear if not wanted else ():
        if name not in folders:
            raise UserError(
                f"The cache holds nothing named {name}, expected all or a name that --mode cache "
                "lists; correct it."
            )
        wanted[name] = folders[name]
    if stay := [name for name, path in wanted.items() if not remove_unlocked(path)]:
        console.say(f"Not removed, as they are in use or read-only: {', '.join(stay)}")
    _show(place, {name: path for name, path in folders.items() if path.exists()})
    return 1 if stay else 0


def _folders(place: Path) -> list[Path]:
    """Models, compiled and quantised ones each; references as one folder. Folders with a dot in
    front belong to running runs."""
    kinds = sorted(path for path in place.glob("[!.]*") if path.is_dir())
    return [
        path
        for kind in kinds
        for path in ([kind] if kind.name == REFERENCES else sorted(kind.glob("[!.]*")))
        if path.is_dir()
    ]


def _show(place: Path, folders: dict[str, Path]) -> None:
    out, table, total = terminal.output(100), terminal.table_of(">MiB|last used|folder"), 0
    for name, path in folders.items():
        size = bytes_of(path)
        used = time.strftime("%Y-%m-%d", time.localtime(last_used(path) or modified(path)))
        table.add_row(f"{size / 2**20:.0f}", used, name)
        total += size
    if folders:
        terminal.print_table(out, table)
    out.print(
        f"{console.shown(place)} holds {total / 2**30:.1f} GiB"
        f"{'' if folders else ': it is empty'}. Compiled models take at most "
        f"{MOST_COMPILED_BYTES / 2**30:.1f} GiB, logits and states of references "
        f"{files.MOST_REFERENCE_BYTES / 2**30:.1f}; those used longest ago go first. "
        "--mode cache --clear NAME removes one folder, --clear all every one."
    )
