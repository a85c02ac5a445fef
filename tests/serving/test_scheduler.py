"""The scheduler over lines that notice every mistake: order, limits, leaving, failing, ending."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.serving.scheduler import Answer, End, Scheduler
from tests.serving.parts import LINES, Echo, answer_to, refusal


def answer(*ids, most=4):
    return Answer(list(ids), most, temperature=0.0, top_k=0, top_p=1.0, seed=0)


async def heard(asked):
    """The tokens and the end."""
    tokens: list[int] = []
    while not isinstance(event := await asyncio.wait_for(asked.events.get(), 30), End):
        tokens.append(event)
    return tokens, event


def run(lines, test, waiting=8, stop=()):
    """A test beside a scheduler that runs; it must come to its end when drained."""

    async def both():
        scheduler = Scheduler(lines, LINES, waiting, stop)
        running = asyncio.create_task(scheduler.run())
        await test(scheduler)
        scheduler.drain()
        await asyncio.wait_for(running, 30)

    asyncio.run(both())


def test_more_answers_than_lines_come_in_order_and_none_starves():
    lines = Echo()

    async def test(scheduler):
        asked = [answer(5, n, most=3 + n % 4) for n in range(1, 9)]
        scheduler.submit(asked)
        for one in asked:
            tokens, end = await heard(one)
            assert tokens == answer_to(one.ids, one.most) and end == End("length")
        assert scheduler.state()["running"] == scheduler.state()["waiting"] == 0

    run(lines, test)
    names = [name for name, _ in lines.calls]
    # those that run wait for one prefill at most, and a free line is taken at once
    assert "prefill prefill" not in " ".join(names)
    assert max(len(found) for name, found in lines.calls if name == "decode") == LINES


def test_an_end_token_ends_an_answer_and_is_not_handed_out():
    async def test(scheduler):
        asked = answer(9, 8, 7, most=6)
        scheduler.submit([asked])
        assert await heard(asked) == (answer_to([9, 8, 7], 2), End("stop"))

    run(Echo(), test, stop=answer_to([9, 8, 7], 3)[2:])


@pytest.mark.parametrize("error", [refusal("A kernel raised."), ValueError("of the harness")])
def test_a_failed_call_ends_what_is_in_flight_only(error):
    lines = Echo()

    async def test(scheduler):
        asked = [answer(n, 5, most=50) for n in range(1, LINES + 3)]
        scheduler.submit(asked)
        await asked[LINES - 1].events.get()
        lines.fail = error
        for one in asked[:LINES]:
            end = (await heard(one))[1]
            assert end.reason == "error" and str(error) in end.failure
        for one in asked[LINES:]:
            assert (await heard(one))[0] == answer_to(one.ids, 50)
        assert scheduler.state()["failures"] == 1

    run(lines, test)
    assert [name for name, _ in lines.calls].count("recover") == 1


def test_a_recovery_that_fails_costs_the_next_answer():
    lines = Echo()
    lines.fail, lines.fail_recovery = refusal("It ended."), refusal("It does not start.")

    async def test(scheduler):
        asked = [answer(n, 5) for n in range(1, 4)]
        scheduler.submit(asked)
        assert (await heard(asked[0]))[1].failure == "It ended."
        assert (await heard(asked[1]))[1].failure == "It does not start."
        assert (await heard(asked[2]))[0] == answer_to([3, 5], 4)

    run(lines, test)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 99), st.integers(1, 9), st.integers(0, 4), st.booleans()),
        max_size=12,
    )
)
def test_whoever_comes_and_goes_each_gets_its_own_answer(visits):
    """(prompt, length, rounds before it comes, whether it leaves after its first token)."""

    async def visit(scheduler, first, most, after, leaves):
        for _ in range(after):
            await asyncio.sleep(0)
        asked = answer(first, 3, most=most)
        scheduler.submit([asked])
        if leaves:
            assert await asked.events.get() == answer_to(asked.ids, 1)[0]
            scheduler.leave(asked)
        else:
            assert await heard(asked) == (answer_to(asked.ids, most), End("length"))

    async def test(scheduler):
        await asyncio.gather(*(visit(scheduler, *one) for one in visits))

    run(Echo(), test, waiting=12)
