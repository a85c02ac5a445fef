"""Two drivers that talk: messages, and every way in which the other one may be gone."""

from __future__ import annotations

import socket
import time

import pytest

from harness.errors import UserError
from harness.experiments import link
from harness.experiments.link import Arrivals, Link, LinkLost


@pytest.fixture
def ends():
    """A link, and the bare socket at its other end."""
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    made = Link(near, "other side")
    yield made, far
    made.close()
    far.close()


def test_messages_arrive_in_order_and_whole(ends):
    one, far = ends
    two = Link(far, "first side")
    for number in range(3):
        one.send("a", number=number, text="é\n" * 10_000)
    got = [two.receive(10) for _ in range(3)]
    assert got == [{"kind": "a", "number": n, "text": "é\n" * 10_000} for n in range(3)]
    assert not two.ready
    two.send("b")
    assert one.receive(10) == {"kind": "b"}
    one.close()
    with pytest.raises(LinkLost, match=r"The first side is gone \(it has closed the connection\)"):
        two.receive(10)
    assert two.ready
    with pytest.raises(LinkLost, match="The first side is gone"):
        for _ in range(100):
            two.send("c")
            time.sleep(0.01)


@pytest.mark.parametrize(
    "sent",
    [
        b"HTTP/1.1 400 Bad Request\r\n",
        b"[1]\n",
        b'{"kind": 3}\n',
        b"\xff\xfe\n",
        b"[" * 99999 + b"\n",
    ],
)
def test_what_is_no_message_ends_the_link(ends, sent):
    one, far = ends
    far.sendall(sent)
    with pytest.raises(LinkLost, match="what it sent is no message of this driver"):
        one.receive(10)


def test_a_message_without_an_end_is_none(monkeypatch):
    monkeypatch.setattr(link, "MOST_BYTES", 100)
    near, far = socket.socketpair()
    one = Link(near, "other side")
    far.sendall(b'{"kind": "' + b"a" * 200 + b'"}\n')
    with pytest.raises(LinkLost, match="no message"):
        one.receive(10)
    one.close()
    far.close()


def test_a_mute_side_is_gone_and_a_slow_one_is_not(monkeypatch):
    monkeypatch.setattr(link, "MUTE_SECONDS", 0.4)
    near, far = socket.socketpair()
    one = Link(near, "other side")
    with pytest.raises(LinkLost, match=r"it was mute for 0.4 s"):
        one.receive(10)
    monkeypatch.setattr(link, "BEAT_SECONDS", 0.05)
    near, far = socket.socketpair()
    one, two = Link(near, "other side"), Link(far, "first side")
    with pytest.raises(LinkLost, match="has not answered within 0.8 s; --time-limit"):
        one.receive(0.8)
    two.send("late")
    assert one.receive(10) == {"kind": "late"}
    one.close()
    two.close()


def test_nobody_there_is_told_in_time():
    with socket.socket() as bound:  # and not listening
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
        with pytest.raises(UserError, match=rf"cannot be reached at 127.0.0.1 port {port} .*0.6 s"):
            link.connect("127.0.0.1", port, 0.6, "prefill side")
        with pytest.raises(UserError, match=f"Cannot listen on 127.0.0.1 port {port}: Address"):
            link.listen("127.0.0.1", port)
    with pytest.raises(UserError, match="cannot be reached at no.such.host.invalid"):
        link.connect("no.such.host.invalid", 1, 60, "prefill side")
    with pytest.raises(UserError, match="Cannot listen on 203.0.113.7"):
        link.listen("203.0.113.7", 0)


def test_who_comes_early_is_kept_and_who_does_not_come_is_told():
    listening = link.listen("127.0.0.1", 0)
    host, port = listening.getsockname()
    arrivals = Arrivals(listening, "decode side")
    with pytest.raises(UserError, match=f"No decode side has come to {host} port {port} in time"):
        arrivals.next(time.monotonic() + 0.1)
    early = link.connect(host, port, 10, "prefill side")
    early.send("hello")
    come = arrivals.next(time.monotonic() + 10)
    assert come.receive(10) == {"kind": "hello"}
    assert come.own_address == early.other_address == "127.0.0.1"
    arrivals.close()
    with pytest.raises(UserError, match="cannot be reached"):
        link.connect(host, port, 0.1, "prefill side")
    for end in (early, come):
        end.close()


def test_both_sides_have_to_know_the_key():
    listening = link.listen("127.0.0.1", 0)
    host, port = listening.getsockname()[:2]
    arrivals = link.Arrivals(listening, "second side", b"secret")
    for key, knows in ((b"secret", True), (b"", False), (b"other", False)):
        far = link.connect(host, port, 10, "first side", key)
        near = arrivals.next(time.monotonic() + 10)
        for number in range(2):
            far.send("hello", number=number)
        if knows:
            assert [near.receive(10)["number"] for _ in range(2)] == [0, 1]
            near.send("back")
            assert far.receive(10) == {"kind": "back"}
        else:
            with pytest.raises(LinkLost, match="does not know the key of --kv-key-file"):
                near.receive(10)
        near.close()
        far.close()
    arrivals.close()


def test_messages_are_not_said_twice_nor_back(ends):
    one, far = ends
    keyed = Link(socket.socketpair()[0], "x", b"secret")
    text = b'{"kind": "a"}'
    line = keyed._digest(0, False, text) + text
    assert keyed._checked(0, keyed._digest(0, True, text) + text) == text
    for number in (0, 1):  # its own line, sent back to it
        with pytest.raises(PermissionError):
            keyed._checked(number, line)


def test_connections_and_messages_are_bounded(ends):
    one, far = ends
    far.sendall(b'{"kind": "a"}\n' * (link.MOST_WAITING + 9))
    listening = link.listen("127.0.0.1", 0)
    arrivals = link.Arrivals(listening, "second side")
    guests = [socket.create_connection(listening.getsockname()) for _ in range(40)]
    for guest in guests:
        guest.settimeout(10)
    ended = [guest for guest in guests[link.MOST_GUESTS :] if closed(guest)]
    assert len(ended) == len(guests) - link.MOST_GUESTS
    assert one._arrived.qsize() == link.MOST_WAITING
    arrivals.close()
    for guest in guests:
        guest.close()


def closed(guest):
    try:
        return guest.recv(1) == b""
    except ConnectionResetError:
        return True
