"""OpenAI's interface over HTTP, on lines that answer at once: forms, limits, refusals, failures."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import struct
import threading
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness.serving import app, guard, schema
from harness.serving.app import Server, application
from harness.serving.guard import Limits
from tests.serving.parts import (
    CHAT_TEMPLATE,
    LENGTH,
    LINES,
    Echo,
    Running,
    answer_to,
    echo_api,
    on_a_free_port,
    refusal,
)

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@pytest.fixture(scope="module")
def tokenizer(tiny_model):
    from transformers import AutoTokenizer

    found = AutoTokenizer.from_pretrained(tiny_model)
    found.chat_template = CHAT_TEMPLATE
    return found


@pytest.fixture(scope="module")
def lines():
    return Echo()


@pytest.fixture(scope="module")
def server(tokenizer, lines):
    running = Running(Server(echo_api(tokenizer, lines)), on_a_free_port())
    yield running
    running.close()


def body(prompt="hello", **more):
    return {"model": "echo", "prompt": prompt, **more}


def chat(*contents, **more):
    messages = [{"role": "user", "content": content} for content in contents]
    return {"model": "echo", "messages": messages, **more}


def text_of(tokenizer, ids, tokens):
    return tokenizer.decode(answer_to(ids, tokens))


def test_a_completion_has_openai_s_form(server, tokenizer):
    status, found, _ = server.ask(COMPLETIONS, body("hello", max_tokens=5))
    ids = tokenizer("hello")["input_ids"]
    assert status == 200 and found.pop("id").startswith("cmpl-") and found.pop("created") > 0
    text = text_of(tokenizer, ids, 5)
    assert found == {
        "object": "text_completion",
        "model": "echo",
        "choices": [{"index": 0, "text": text, "logprobs": None, "finish_reason": "length"}],
        "usage": {"prompt_tokens": 5, "completion_tokens": 5, "total_tokens": 10},
    }


@pytest.mark.parametrize(
    "prompt", ["hello", [70, 71, 72], ["hello", "you all"], [[9, 8, 7], [1, 2, 3]]]
)
def test_each_form_of_a_prompt_with_several_choices(server, tokenizer, prompt):
    status, found, _ = server.ask(COMPLETIONS, body(prompt, n=2, max_tokens=3))
    several = prompt if isinstance(prompt[0], (list, str)) and prompt != "hello" else [prompt]
    ids = [tokenizer(p)["input_ids"] if isinstance(p, str) else p for p in several]
    expected = [text_of(tokenizer, one, 3) for one in ids for _ in range(2)]
    assert [choice["text"] for choice in found["choices"]] == expected
    assert [choice["index"] for choice in found["choices"]] == list(range(len(expected)))


def test_a_chat_goes_through_the_template_and_streams_its_pieces(server, tokenizer):
    asked = chat("one", "two", max_completion_tokens=6)
    ids = tokenizer("uone\nutwo\na")["input_ids"]
    status, found, _ = server.ask(CHAT, asked)
    text = text_of(tokenizer, ids, 6)
    message = {"role": "assistant", "content": text, "refusal": None}
    assert status == 200 and found["choices"][0]["message"] == message
    *events, last = server.events(
        CHAT, asked | {"stream": True, "stream_options": {"include_usage": True}}
    )
    pieces = [json.loads(event) for event in events]
    assert last == "[DONE]" and pieces.pop()["usage"]["completion_tokens"] == 6
    deltas = [piece["choices"][0]["delta"] for piece in pieces]
    assert deltas[0]["role"] == "assistant" and deltas[-1] == {}
    assert "".join(delta.get("content", "") for delta in deltas) == text
    ends = [piece["choices"][0]["finish_reason"] for piece in pieces]
    assert ends == [None] * (len(ends) - 1) + ["length"]
    assert len({piece["id"] for piece in pieces}) == 1


def test_a_stop_string_ends_the_answer_and_frees_its_line(server, tokenizer, lines):
    ids = tokenizer("hello")["input_ids"]
    text = text_of(tokenizer, ids, 40)
    stop = text[7:9]
    _, found, _ = server.ask(COMPLETIONS, body("hello", max_tokens=40, stop=["~~", stop]))
    choice = found["choices"][0]
    assert choice["text"] == text[: text.index(stop)] and choice["finish_reason"] == "stop"
    Running.until(lambda: server.ask("/metrics")[1].count('nki_answers{of="stop"}'))
    _, state, _ = server.ask("/metrics")
    assert "nki_running 0.0" in state


def test_what_is_asked_for_beyond_the_cache_is_cut_to_it(server):
    _, found, _ = server.ask(COMPLETIONS, body("x" * 60, max_tokens=500))
    assert found["usage"]["completion_tokens"] == LENGTH - 60
    _, found, _ = server.ask(CHAT, chat("x"))
    assert found["usage"]["total_tokens"] == LENGTH


@pytest.mark.parametrize("asked", [{"temperature": 1}, {"top_p": 0.5}, {"seed": 3}])
def test_what_a_graph_draws_in_one_way_cannot_be_tuned(tokenizer, lines, asked):
    api = echo_api(tokenizer, lines)
    api.session = api.session.changed(on_device_sampling=True)
    running = Running(Server(api), on_a_free_port())
    try:
        status, found, _ = running.ask(COMPLETIONS, body(**asked))
        assert status == 400 and "leave temperature, top_p and seed out." in str(found)
        assert running.ask(COMPLETIONS, body(max_tokens=2))[0] == 200
    finally:
        running.close()


@pytest.mark.parametrize(
    ("asked", "status", "param"),
    [
        (body(model="other"), 404, "model"),
        (body("x" * LENGTH), 400, "prompt"),
        (body("ab"), 400, "prompt"),
        (body([1, 2, 320]), 400, "prompt"),
        (body([1, 2, 0, 3]), 400, "prompt"),
        (body([]), 400, "prompt"),
        (body(max_tokens=0), 400, "max_tokens"),
        (body(temperature=2.5), 400, "temperature"),
        (body(temperature="warm"), 400, "temperature"),
        (body(best_of=2), 400, "best_of"),
        (body(logit_bias={"5": 1}), 400, "logit_bias"),
        (body(echo=True), 400, "echo"),
        (body(stop=["a"] * 5), 400, "stop"),
        (body(stream_options={"include_usage": True}), 400, "stream_options"),
        (body(max_new_tokens="crimson"), 400, "max_new_tokens"),
        ({"model": "echo"}, 400, "prompt"),
        ([], 400, None),
        ('{"model": "echo", "prompt": "\\ud800abc"}', 400, None),
        ("{", 400, None),
        ("[" * 100_000, 400, None),
        (b"\xff\xfe", 400, None),
    ],
)
def test_bad_requests_are_refused_in_openai_s_form(server, asked, status, param):
    got, found, _ = server.ask(COMPLETIONS, asked)
    error = found["error"]
    assert (got, error["param"], error["type"]) == (status, param, "invalid_request_error")
    assert "; " in error["message"] and error["message"].endswith(".")  # what to write instead
    assert "crimson" not in error["message"]  # what was sent is not repeated


def test_other_kinds_of_bodies_paths_and_methods(server):
    assert server.ask(COMPLETIONS, body(), **{"Content-Type": "text/plain"})[0] == 415
    status, found, _ = server.ask(COMPLETIONS, "x" * (1 << 20) + "y")
    assert status == 413 and "1048576 bytes" in found["error"]["message"]
    assert server.ask("/v1/nothing")[0] == 404
    assert server.ask(COMPLETIONS)[0] == 405


def test_a_body_without_an_end_is_cut_off_at_the_limit(server):
    with socket.create_connection(("127.0.0.1", server.port)) as raw:
        head = (
            f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        )
        raw.sendall((head + "Transfer-Encoding: chunked\r\n\r\n").encode())
        chunk = b"10000\r\n" + b"x" * 0x10000 + b"\r\n"
        for _ in range(17):
            raw.sendall(chunk)
        assert b" 413 " in raw.recv(200)


def raw(server, request):
    """Whatever comes back until the server closes the connection."""
    found = b""
    with socket.create_connection(("127.0.0.1", server.port), 30) as to:
        to.sendall(request)
        while piece := to.recv(1 << 16):
            found += piece
    return found


def test_beyond_the_connections_each_is_told_so_and_the_others_go_on(tokenizer):
    running = Running(Server(echo_api(tokenizer, Echo(), Limits(connections=3))), on_a_free_port())
    try:
        others = [socket.create_connection(("127.0.0.1", running.port)) for _ in range(2)]
        with running.connection() as first:
            first.request("GET", "/health")
            first.getresponse().read()
            status, found, headers = running.ask("/health")
            assert status == 503 and found["error"]["code"] == "too_many_connections"
            assert headers["retry-after"] == "1" and headers["connection"] == "close"
            first.request("GET", "/health")
            assert first.getresponse().status == 200
        for other in others:
            other.close()
        Running.until(lambda: running.ask("/health")[0] == 200)
    finally:
        running.close()


@pytest.mark.parametrize("begin", [b"", b"GET /health HTTP/1.1\r\nHost: local"])
def test_a_head_that_does_not_come_is_cut_off(server, monkeypatch, begin):
    monkeypatch.setattr(guard, "HEAD_SECONDS", 0.2)
    found = raw(server, begin)
    assert found.startswith(b"HTTP/1.1 408 ") and b"headers did not arrive" in found


def test_what_is_no_http_is_refused_in_openai_s_form(server):
    head, _, content = raw(server, b"\x16\x03\x01\x02\x00\r\n\r\n").partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert json.loads(content)["error"]["type"] == "invalid_request_error"


SMUGGLED = {
    "two lengths": (b"Content-Length: 4\r\nTransfer-Encoding: chunked", 400),
    "twice in chunks": (b"Transfer-Encoding: chunked, chunked", 400),
    "zipped in chunks": (b"Transfer-Encoding: gzip, chunked", 400),
    "a name with a space": (b"Transfer-Encoding : chunked", 400),
    "a tab before the value": (b"Transfer-Encoding:\x0bchunked", 400),
    "two other lengths": (b"Content-Length: 0\r\nContent-Length: 5", 400),
    "a length with a sign": (b"Content-Length: +0", 400),
    "a length of other digits": (b"Content-Length: \xd9\xa0", 400),
    "a length without an end": (b"Content-Length: " + b"9" * 5000, 400),
    "another server as well": (b"Host: evil.example", 400),
    "a zero byte": (b"X: a\0b", 400),
    "a socket of the web": (b"Upgrade: websocket\r\nConnection: Upgrade, close", 415),
    "an older protocol's successor": (b"Upgrade: h2c\r\nConnection: Upgrade, close", 415),
}


@pytest.mark.parametrize("name", SMUGGLED)
def test_a_head_of_two_meanings_has_one_answer(name, server):
    """What follows it is not read as another request."""
    lines, status = SMUGGLED[name]
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n%s\r\n\r\n" % lines
    found = raw(server, head + b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert found.startswith(b"HTTP/1.1 %d " % status) and found.count(b"HTTP/1.1 ") == 1, found


@pytest.mark.parametrize("url", [b"http://evil.example/v1/models", b"evil.example:80", b"*"])
def test_a_whole_address_is_no_path(url, server):
    head = b"GET %s HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n" % url
    assert raw(server, head).startswith(b"HTTP/1.1 404 ")


def test_floods_hold_nobody_off(server):
    """Requests in a row, readers that do not read, and streams whose clients are gone at once."""
    text = json.dumps(body("hello", max_tokens=50, stream=True)).encode()
    sent = b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    sent = sent % COMPLETIONS.encode() + b"Content-Length: %d\r\n\r\n" % len(text) + text
    slow = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(40)]
    for number, one in enumerate(slow):
        one.sendall(sent if number else b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" * 500)
    assert server.ask("/health")[0] == 200
    for one in slow:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        one.close()
    state = server.server._scheduler.state
    server.until(lambda: not state()["running"] and not state()["waiting"])
    assert server.ask(COMPLETIONS, body())[0] == 200 and state()["failures"] == 0


def test_a_page_of_another_site_has_no_way_in(server):
    assert server.ask("/v1/models", Host="evil.example")[0] == 403
    for name in ("localhost.evil.example:80", "127.0.0.1:1@evil", "127.0.0.1:80:80", "[::1]x"):
        assert server.ask("/v1/models", Host=name)[0] == 403
    for name in ("localhost", "127.0.0.1:99", "[::1]:8000", "LOCALHOST:1"):
        assert server.ask("/v1/models", Host=name)[0] == 200


def test_models_health_and_the_page(server):
    assert server.ask("/v1/models")[1]["data"][0]["id"] == "echo"
    assert server.ask("/v1/models/echo")[1]["id"] == "echo"
    assert server.ask("/v1/models/none")[0] == 404
    assert server.ask("/health")[1] == {"status": "ok"}
    _, page, headers = server.ask("/")
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy and page.count(policy.split("nonce-")[1][:20]) == 2


def test_a_key_is_asked_for_on_every_path_but_the_page_and_health(tokenizer):
    limits = Limits(key="secret")
    running = Running(Server(echo_api(tokenizer, Echo(), limits)), on_a_free_port())
    try:
        for path in ("/v1/models", "/metrics", "/status", "/v1/nothing"):
            status, found, headers = running.ask(path)
            assert status == 401 and found["error"]["code"] == "invalid_api_key"
            assert headers["www-authenticate"] == "Bearer"
            assert running.ask(path, Authorization="Bearer wrong")[0] == 401
        assert running.ask("/health")[0] == running.ask("/")[0] == 200
        right = {"Authorization": "Bearer secret"}
        assert running.ask(COMPLETIONS, body(max_tokens=1), **right)[0] == 200
    finally:
        running.close()


def test_beyond_the_queue_a_request_is_refused_and_told_to_come_back(server, lines):
    lines.go.clear()
    with server.connection() as first:
        asked = json.dumps(body(["abc"] * (LINES + 4), max_tokens=1))
        first.request("POST", COMPLETIONS, asked, {"Content-Type": "application/json"})
        Running.until(lambda: "nki_waiting 0.0" not in server.ask("/metrics")[1])
        status, found, headers = server.ask(COMPLETIONS, body())
        assert status == 429 and headers["retry-after"] == "1"
        assert found["error"]["type"] == "rate_limit_error"
        lines.go.set()
        assert len(json.loads(first.getresponse().read())["choices"]) == LINES + 4


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_slot(server, lines, stream):
    gone = 'nki_answers{of="left"} '
    before = server.ask("/metrics")[1].partition(gone)[2].partition("\n")[0] or "0"
    lines.go.clear()
    with server.connection() as client:
        asked = json.dumps(body(max_tokens=50, stream=stream))
        client.request("POST", COMPLETIONS, asked, {"Content-Type": "application/json"})
        Running.until(lambda: "nki_running 1.0" in server.ask("/metrics")[1])
    lines.go.set()
    Running.until(lambda: "nki_running 0.0" in server.ask("/metrics")[1])
    after = server.ask("/metrics")[1].partition(gone)[2].partition("\n")[0]
    assert float(after) == float(before) + 1
    assert server.ask(COMPLETIONS, body(max_tokens=1))[0] == 200


def test_a_failure_is_told_with_its_reason_and_the_server_goes_on(server, lines):
    lines.fail = refusal("llama.py line 7 raised.")
    for asked in (body(), body(stream=True)):
        lines.fail = refusal("llama.py line 7 raised.")
        status, found, _ = server.ask(COMPLETIONS, asked)
        assert status == 500 and found["error"] == {
            "message": "llama.py line 7 raised.",
            "type": "server_error",
            "param": None,
            "code": "model_failure",
        }
    assert server.ask(COMPLETIONS, body(max_tokens=1))[0] == 200


def test_logs_have_no_text_of_clients(server):
    server.ask("/secret/path?token=1", Authorization="Bearer mine")
    server.ask(COMPLETIONS, body("hello secret", user="secret"))
    for line in ("GET another path: 404", "POST /v1/completions: 200"):
        Running.until(lambda line=line: any(said.startswith(line) for said in server.said))
    assert not [said for said in server.said if "secret" in said or "mine" in said]


# -- whatever is sent ------------------------------------------------------------------------------

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4)
    | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
forms = schema.CompletionRequest, schema.ChatRequest
known = {name for form in forms for name in form.model_fields} | {"best_of", "tools", "metadata"}
fields = st.sampled_from(sorted(known))
nearly = st.dictionaries(fields, json_values, max_size=6).map(
    lambda found: {"model": "echo", "prompt": "hello", "messages": [], "max_tokens": 1} | found
)
bodies = st.one_of(
    st.binary(max_size=64),
    json_values.map(lambda value: json.dumps(value).encode()),
    nearly.map(lambda value: json.dumps(value).encode()),
    nearly.map(lambda value: json.dumps(value).encode()[:-3]),
)


@pytest.fixture(scope="module")
def in_process(tokenizer):
    """`send(path, body)` -> status, without a socket in between."""
    api = echo_api(tokenizer, Echo(), Limits(waiting=64))
    app, loop = application(api), asyncio.new_event_loop()
    running = loop.create_task(api.scheduler.run())

    async def one(path, content):
        scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "query_string": b"",
            "root_path": "",
            "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
        }
        statuses, sent = [], False

        async def receive():
            nonlocal sent
            if sent:
                await asyncio.Event().wait()
            sent = True
            return {"type": "http.request", "body": content, "more_body": False}

        async def send(message):
            if message["type"] == "http.response.start":
                statuses.append(message["status"])

        await asyncio.wait_for(app(scope, receive, send), 30)
        return statuses[0]

    yield lambda path, content: loop.run_until_complete(one(path, content))
    api.scheduler.drain()
    loop.run_until_complete(running)
    loop.close()


@settings(max_examples=50, deadline=None, suppress_health_check=[*HealthCheck])
@given(path=st.sampled_from((COMPLETIONS, CHAT)), content=bodies)
def test_no_body_gives_a_500(in_process, path, content):
    assert in_process(path, content) in (200, 400, 404)


@pytest.mark.parametrize("patience", [30, 0])
def test_a_server_that_drains_says_so_and_cuts_answers_with_an_event(tokenizer, patience):
    """Its listener stays open; what runs ends whole, or with an error event in its stream."""
    lines = Echo()
    limits = Limits(waiting=4, drain_seconds=patience)
    running = Running(Server(echo_api(tokenizer, lines, limits)), on_a_free_port())
    heard: list[str] = []
    lines.go.clear()
    asked = body("hello hello", max_tokens=3, stream=True)
    client = threading.Thread(target=lambda: heard.extend(running.events(COMPLETIONS, asked)))
    client.start()
    running.until(lambda: lines.calls)
    running.server.handle_exit(signal.SIGTERM, None)
    status, said, _ = running.ask("/health")
    assert status == 503 and said == {"status": "draining"}
    status, said, _ = running.ask(COMPLETIONS, body())
    assert status == 503 and said["error"]["code"] == "draining"
    time.sleep(0.3)  # the patience of the second server is over
    lines.go.set()
    client.join(30)
    if patience:
        assert heard[-1] == "[DONE]" and not any("error" in event for event in heard)
    else:
        assert (
            "The server ends before this answer is whole."
            in json.loads(heard[-1])["error"]["message"]
        )
    running.close()


def test_choices_of_neighbouring_seeds_have_nothing_in_common():
    found = {app._seed(seed, number) for seed in range(20) for number in range(20)}
    assert len(found) == 400 and app._seed(7, 0) == 7
