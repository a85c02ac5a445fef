"""The picture of README: the profile page of a kernel, as a browser shows it.

    python docs/picture.py

It profiles the last lesson's kernel again, opens the page without a window and writes
docs/profile.png. Chromium or Chrome must be installed; playwright drives it.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image
from PIL.PngImagePlugin import PngInfo

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))
from neuron_cpu.lessons import LESSONS, TODAY  # noqa: E402

PICTURE = ROOT / "docs" / "profile.png"
CHIP = "trn2"
SHAPES = ("8x64:bf16", "4096x64:bf16", "4096x64:bf16")
ESTIMATE = "estimate"  # the note inside of the picture that says what it shows
WIDTH, HEIGHT = 1200, 760  # CSS pixels


def main() -> None:
    browser = os.environ.get("BROWSER_PROGRAM") or shutil.which("chromium")
    if browser is None:
        sys.exit("No chromium was found; install it, or name a browser in BROWSER_PROGRAM.")
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "profile.html"
        estimate = profiled("--html", str(page))
        shoot(browser, page)
    note = PngInfo()
    note.add_text(ESTIMATE, estimate)
    Image.open(PICTURE).save(PICTURE, pnginfo=note, optimize=True)
    print(f"{PICTURE.relative_to(ROOT)}: {PICTURE.stat().st_size >> 10} KiB, {estimate}")


def profiled(*more: str) -> str:
    """The kernel's estimate in the command's words."""
    lesson = LESSONS[-1]
    arguments = [word for shape in SHAPES for word in ("--arg", shape)]
    with tempfile.TemporaryDirectory() as folder:
        kernel = Path(folder) / f"{lesson.name}.py"
        kernel.write_text(lesson.track(TODAY).solution, encoding="utf-8")
        command = [sys.executable, "-m", "neuron_cpu", "profile", f"{kernel}:{lesson.name}"]
        command += ["--target", CHIP, *arguments, *more]
        told = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return next(line.partition(",")[0].strip() for line in told.splitlines() if "µs" in line)


def shoot(browser: str, page: Path) -> None:
    """Write what the browser shows of a page."""
    from playwright.sync_api import sync_playwright  # only whoever makes the picture needs it

    with sync_playwright() as play:
        shown = play.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        tab = shown.new_page(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme="light")
        tab.goto(page.as_uri())
        tab.wait_for_timeout(500)  # its drawing
        tab.screenshot(path=str(PICTURE))
        shown.close()


if __name__ == "__main__":
    main()
