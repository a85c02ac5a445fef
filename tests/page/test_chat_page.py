"""The server's page in a real browser: a conversation, slots that fill, a failure, a key."""

from __future__ import annotations

import pytest
from transformers import AutoTokenizer

from harness.serving.app import Server
from harness.serving.blocks import BlockPool
from harness.serving.guard import Limits
from tests.serving.parts import (
    CHAT_TEMPLATE,
    LENGTH,
    SIZE,
    Cache,
    Echo,
    Running,
    answer_to,
    echo_api,
    on_a_free_port,
    refusal,
)

pytestmark = pytest.mark.browser


class Shown:
    """The page of a server whose lines the test holds, and what it complained about or fetched."""

    def __init__(self, browser, tokenizer, limits, blocks=None):
        self.tokenizer = tokenizer
        self.lines = Echo() if blocks is None else Cache()
        api = echo_api(tokenizer, self.lines, limits, blocks)
        self.server = Running(Server(api), on_a_free_port())
        self.page = browser.new_page(viewport={"width": 1100, "height": 800})
        self.troubles: list[str] = []
        self.requests: list[str] = []
        self.page.on("pageerror", lambda error: self.troubles.append(str(error)))
        self.page.on("console", lambda message: self.troubles.append(message.text))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(self.server.url)

    def close(self):
        self.lines.go.set()
        self.page.close()
        self.server.close()
        own = (self.server.url, "data:")
        assert all(address.startswith(own) for address in self.requests)

    def until(self, selector, text):
        found = self.page.locator(selector, has_text=text).first
        found.wait_for(timeout=20_000)

    def ask(self, text):
        self.page.fill("#prompt", text)
        self.page.press("#prompt", "Enter")

    def text(self, selector):
        return self.page.locator(selector).inner_text()


@pytest.fixture(scope="module")
def tokenizer(tiny_model):
    found = AutoTokenizer.from_pretrained(tiny_model)
    found.chat_template = CHAT_TEMPLATE
    return found


@pytest.fixture
def shown(browser, tokenizer):
    made = Shown(browser, tokenizer, Limits(waiting=4))
    yield made
    made.close()


def test_a_conversation_whose_slots_are_seen(shown):
    shown.until("#state", "connected")
    assert shown.text("h1") == "echo" and shown.text("#running") == "0 of 3"
    assert not shown.page.locator("#cache").is_visible()
    shown.page.fill("#most", "5")
    shown.lines.go.clear()
    shown.ask("<b>hi</b>")
    shown.until("#running", "1 of 3")
    shown.until("#slots", "12 + 0")  # tokens of the prompt, and new ones
    shown.lines.go.set()
    first = shown.tokenizer.decode(answer_to(_ids(shown, "u<b>hi</b>\na"), 5))
    shown.until("#said", first)
    shown.until("#running", "0 of 3")
    shown.ask("two")
    second = _ids(shown, f"u<b>hi</b>\na{first}\nutwo\na")
    shown.until("#said", shown.tokenizer.decode(answer_to(second, 5)))
    said = [item.inner_text() for item in shown.page.locator("#said li").all()]
    assert said[0] == "<b>hi</b>" and said[2] == "two" and len(said) == 4
    assert float(shown.text("#rate")) > 0
    shown.page.click("#clear")
    assert shown.page.locator("#said li").count() == 0
    assert not shown.troubles


def test_blocks_of_the_cache_are_seen_and_found_again(browser, tokenizer):
    """Nothing of them where the cache has lines; the same question twice finds its blocks."""
    shown = Shown(browser, tokenizer, Limits(waiting=4), blocks=BlockPool(30, SIZE, True))
    try:
        shown.until("#state", "connected")
        shown.until("#used", "0 of 30 of 4 tokens")
        shown.page.fill("#most", "3")
        shown.ask("what is this?")  # 16 tokens with the template's: 18 are cached in the end
        shown.until("#kept", "4")
        assert shown.text("#unused") == "26" and shown.text("#found") == "0 (0 %)"
        shown.page.click("#clear")
        shown.ask("what is this?")
        shown.until("#found", "12 (38 %)")
        assert shown.text("#kept") == "4" and not shown.troubles
    finally:
        shown.close()


def test_stop_leaves_the_slot_and_keeps_what_was_said(shown):
    shown.until("#state", "connected")
    shown.lines.go.clear()
    shown.ask("hello")
    shown.until("#running", "1 of 3")
    shown.page.click("#stop")
    shown.lines.go.set()
    shown.until("#running", "0 of 3")
    assert shown.page.is_enabled("#send")
    assert not shown.troubles


def test_refusals_and_failures_are_shown_in_words(shown):
    shown.until("#state", "connected")
    shown.ask("x" * LENGTH)
    shown.until("#said .failed", "expected 3 to")
    shown.lines.fail = refusal("llama.py line 7 raised.")
    shown.ask("hello")
    shown.until("#said .failed", "llama.py line 7 raised.")
    shown.until("#failures", "1")
    # the browser's own note on each response that is no success
    assert all("Failed to load resource" in trouble for trouble in shown.troubles)


def test_a_server_with_a_key_is_watched_once_it_is_given(browser, tokenizer):
    made = Shown(browser, tokenizer, Limits(key="secret"))
    try:
        made.until("#state", "Give this server's key")
        made.page.fill("#key", "secret")
        made.until("#state", "connected")
        made.ask("hello")
        made.until("#said .assistant", made.tokenizer.decode(answer_to(_ids(made, "uhello\na"), 9)))
    finally:
        made.close()


def _ids(shown, text):
    return shown.tokenizer(text)["input_ids"]
