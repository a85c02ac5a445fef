"""The page in a real browser: drawn, zoomed, selected, filtered, two profiles side by side."""

from __future__ import annotations

import re

import pytest

from neuron_cpu.__main__ import main
from neuron_cpu.page import data
from neuron_cpu.page.write import page as page_text
from tests.page.conftest import SHAPES

pytestmark = pytest.mark.browser

# Pixels of a canvas that have, nearly, the colour of a custom property.
COUNT = """(canvas, [name, left, right]) => {
  const hex = getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const want = [1, 3, 5].map(k => parseInt(hex.slice(k, k + 2), 16));
  const from = Math.floor(left * canvas.width), wide = Math.ceil((right - left) * canvas.width);
  const copy = new OffscreenCanvas(canvas.width, canvas.height);
  const pen = copy.getContext("2d", {willReadFrequently: true});
  pen.drawImage(canvas, 0, 0);
  const pixels = pen.getImageData(from, 0, wide, canvas.height).data;
  let count = 0;
  for (let k = 0; k < pixels.length; k += 4)
    if (pixels[k + 3] > 200 && want.every((v, c) => Math.abs(v - pixels[k + c]) < 6)) count++;
  return count;
}"""


class Shown:
    """A page in the browser, and what it complained about or asked the network for."""

    def __init__(self, page):
        self.page = page
        self.troubles: list[str] = []
        self.requests: list[str] = []
        page.on("pageerror", lambda error: self.troubles.append(str(error)))
        page.on("console", lambda message: self.troubles.append(message.text))
        page.on("dialog", lambda dialog: self.troubles.append(dialog.message))
        page.on("request", lambda request: self.requests.append(request.url))

    def open(self, path):
        self.page.goto(path.resolve().as_uri())
        self.drawn()
        return self.page

    def drawn(self):
        """Wait for the drawing that is under way."""
        self.page.evaluate(
            "() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"
        )

    def text(self, selector):
        return self.page.locator(selector).inner_text()

    def pixels(self, name, left=0.0, right=1.0, canvas=0):
        self.drawn()
        return self.page.locator("canvas").nth(canvas).evaluate(COUNT, [name, left, right])

    def range(self):
        """What the timelines show, in µs."""
        self.drawn()
        begin, end = re.findall(r"[\d.,]+", self.text("#range"))
        return float(begin.replace(",", "")), float(end.replace(",", ""))

    def press(self, keys):
        self.page.locator("canvas").first.focus()
        for key in keys:
            self.page.keyboard.press(key)


@pytest.fixture
def shown(browser):
    found = browser.new_page(viewport={"width": 1280, "height": 900})
    made = Shown(found)
    yield made
    found.close()
    assert not made.troubles
    assert all(url.startswith("file:") for url in made.requests) and len(made.requests) == 1


@pytest.fixture
def one(shown, matmul, tmp_path):
    """The page of one profile."""
    path = tmp_path / "one.html"
    path.write_text(page_text("matmul", [data.run("matmul", matmul)]), encoding="utf-8")
    shown.open(path)
    return shown


def test_the_command_writes_a_page_that_says_what_it_shows(shown, file, tmp_path, matmul, capsys):
    arguments = [part for shape in SHAPES for part in ("--arg", shape)]
    assert main(["profile", f"{file}:matmul", *arguments, "--html", "page.html"]) == 0
    assert "page: page.html" in capsys.readouterr().out
    shown.open(tmp_path / "page.html")
    assert shown.text("h1") == "mine.py:matmul"
    assert shown.page.title() == "mine.py:matmul · estimated profile"
    summary = shown.text("#summary")
    assert f"{matmul.total / 1e3:.1f} µs" in summary or f"{matmul.total / 1e3:.2f} µs" in summary
    assert "estimated" in summary and "on a device, by the calibration's" in summary
    assert "DMA profile sdk2.25" in summary and "bound by " in summary
    # The kernel's own text stands there as text, and has run nothing.
    source = shown.text("#sources")
    assert '</script><script>document.title = "broken"</script><!-- <script>' in source


def test_every_part_is_drawn(one):
    for engine in ("--e0", "--e2", "--e4"):  # TensorE, ScalarE, DMA
        assert one.pixels(engine) > 20, engine
    assert one.pixels("--e3") == 0  # GpSimdE has nothing to do
    assert one.pixels("--w1") > 20  # stalls
    assert one.pixels("--path") > 20
    assert one.page.locator("#roofline circle.point").count() == 1
    assert "TFLOP/s (estimated)" in one.page.locator("#roofline").text_content()
    assert one.page.locator("#summary svg rect").count() == 1  # the band
    assert "hbm_read_bytes" in one.text("#figures")
    assert "DMA" in one.text("#critical") and "TensorE" in one.text("#idle")


def test_zoom_and_move_by_keys_buttons_and_wheel(one, matmul):
    begin, end = one.range()
    assert begin == 0 and end == pytest.approx(1.01 * matmul.total / 1e3, rel=0.02)
    one.press("ww")
    zoomed = one.range()
    assert zoomed[1] - zoomed[0] == pytest.approx(0.36 * end, rel=0.02)
    one.press("a")
    assert one.range()[0] < zoomed[0]
    one.press("f")
    assert one.range() == (begin, end)
    one.page.click("#in")
    assert one.range()[1] < end
    one.page.click("#fit")
    box = one.page.locator("canvas").bounding_box()
    one.page.mouse.move(box["x"] + 110, box["y"] + 20)
    one.page.mouse.wheel(0, -200)
    assert one.range() == (begin, end)  # the wheel alone scrolls the page
    one.page.evaluate("window.scrollTo(0, 0)")
    box = one.page.locator("canvas").bounding_box()
    one.page.mouse.move(box["x"] + 110, box["y"] + 20)
    one.page.keyboard.down("Control")
    one.page.mouse.wheel(0, -200)
    one.page.keyboard.up("Control")
    assert one.range()[0] < 0.05 * end and one.range()[1] < 0.9 * end
    start = one.range()[0]
    one.page.mouse.down()
    one.page.mouse.move(box["x"] + 10, box["y"] + 20)
    one.page.mouse.up()
    assert one.range()[0] > start


def test_an_instruction_tells_what_it_waited_for(one, matmul):
    instructions = matmul.program.instructions
    products = [at for at, i in enumerate(instructions) if i.op.name == "nc_matmul"]
    product = products[3]  # the last one of the first sum
    box = one.page.locator("canvas").bounding_box()
    middle = (matmul.start[product] + matmul.end[product]) / 2 / (1.01 * matmul.total)
    one.page.mouse.click(box["x"] + 104 + middle * (box["width"] - 112), box["y"] + 16)
    details = one.text("#details")
    assert f"#{product} nc_matmul on TensorE" in details and "Waited for operands" in details
    assert details.count("dma_copy") >= 2
    assert re.search(r"Its results are read by: #\d+ activation", details)
    assert one.pixels("--accent") > 10  # arrows of its operands
    assert re.search(r"reads \w+: partitions 0 to 127 of 128, columns 0 to 511 of 512", details)
    assert re.search(r"writes \w+: partitions 0 to \d+ of \d+, columns 0 to 511 of 512", details)
    painted = "canvas => new Set(canvas.getContext('2d').getImageData(0, 0, 24, 12).data).size > 1"
    assert all(one.page.locator("#regions canvas").evaluate_all(f"all => all.map({painted})"))
    one.page.locator("#details button.step").last.click()
    assert f"#{products[4]} nc_matmul" in one.text("#details")
    one.page.locator("#details button.step").first.click()
    one.press("]")
    following = one.text("#details")
    assert "nc_matmul on TensorE" in following and f"#{product} nc" not in following[:20]
    one.page.locator("#details button.link").first.click()
    assert "dma_copy on DMA" in one.text("#details")
    one.press(["Escape"])
    assert "Select an instruction" in one.text("#details")


def test_the_judge_writes_its_verdicts_above_the_profiles(shown, file, tmp_path):
    case = " ".join(SHAPES)
    command = ["check", f"{file}:matmul", "--ref", f"{file}:reference", "--case", case]
    command += ["--values", "zeros,random", "--baseline", f"{file}:resident"]
    main([*command, "--html", "page.html"])
    page = shown.open(tmp_path / "page.html")
    assert "largest error" in shown.text("#verdicts") and case in shown.text("#verdicts")
    assert "line by line" in shown.text("#verdicts")
    assert page.locator("canvas").count() == 2
    assert f"mine.py:resident {case}" in shown.text("#summary")
