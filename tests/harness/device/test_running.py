"""Processes that answer, raise, hang and die."""

from __future__ import annotations

import pytest

from harness.device.running import BENCHMARK, SIMULATOR, XLA, Unanswered, Workers


@pytest.fixture
def workers(tmp_path):
    with Workers(tmp_path, "trn2") as found:
        yield found


def refused(workers, *asked):
    with pytest.raises(Unanswered) as caught:
        workers.ask(*asked)
    return caught.value.status, caught.value.words


def test_a_process_answers_one_request_after_the_other(workers):
    assert workers.ask(BENCHMARK, "json:loads", {"s": "[1]"}, 120) == [1]
    first = workers.ask(BENCHMARK, "os:getpid", {}, 120)
    status, words = refused(workers, BENCHMARK, "json:loads", {"s": "{"}, 120)
    assert status == "refused" and words.startswith("json.decoder.JSONDecodeError")
    assert workers.ask(BENCHMARK, "os:getpid", {}, 120) == first


def test_what_hangs_or_dies_is_told_and_the_next_request_is_answered(workers):
    assert refused(workers, BENCHMARK, "signal:pause", {}, 5) == ("hung", "no answer within 5 s")
    died = refused(workers, BENCHMARK, "os:_exit", {"status": 3}, 120)
    assert died == ("died", "its process ended")
    assert workers.ask(BENCHMARK, "json:loads", {"s": "1"}, 120) == 1


def test_one_process_is_beside_the_device_and_the_simulator_knows_what_it_stands_for(workers):
    workers.ask(BENCHMARK, "os:getpid", {}, 120)
    workers.ask(XLA, "os:getpid", {}, 120)
    name = {"key": "NEURON_PLATFORM_TARGET_OVERRIDE"}
    assert workers.ask(SIMULATOR, "os:getenv", name, 120) == "trn2"
    assert set(workers._running) == {XLA, SIMULATOR}
