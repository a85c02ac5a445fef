"""Blocks of the cache: who gets which, what is found again, and texts over them."""

import asyncio
import concurrent.futures
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.errors import UserError
from harness.serving.blocks import BlockPool
from harness.serving.scheduler import End, Scheduler
from tests.crossed import full
from tests.serving.parts import LINES, SIZE, Cache, answer_to, refusal
from tests.serving.test_scheduler import answer, heard
from tests.serving.test_serve import Served, asked, text

BLOCKS = 12


def run(cache, test, pool, chunk=None, waiting=8):
    async def both():
        scheduler = Scheduler(cache, LINES, waiting, [2], pool, chunk)
        running = asyncio.create_task(scheduler.run())
        await test(scheduler)
        scheduler.drain()
        await asyncio.wait_for(running, 30)

    asyncio.run(both())
    state = pool.state()
    assert state["used"] == 0 and state["kept"] + state["free"] == pool.count


SYSTEM = [*range(100, 109)]  # two blocks and one token more


@pytest.mark.parametrize(
    ("prompt", "found"),
    [
        ([*SYSTEM, 7, 8], 8),
        (SYSTEM, 8),
        (SYSTEM[:8], 4),  # all of it is there, and the last token is computed
        ([*SYSTEM[:8], 9], 8),  # one token more than whole blocks
        (SYSTEM[:7], 4),
        ([9, *SYSTEM], 0),
        ([*SYSTEM[:4], 9, *SYSTEM[5:]], 4),
    ],
)
def test_a_prefix_that_others_have_cached_is_not_computed_again(prompt, found):
    cache, pool = Cache(), BlockPool(BLOCKS, SIZE, True)

    async def test(scheduler):
        first, second = answer(*SYSTEM, 5, most=3), answer(*prompt, most=3)
        scheduler.submit([first])
        assert await heard(first) == (answer_to(first.ids, 3), End("length"))
        before = cache.computed
        scheduler.submit([second])
        assert await heard(second) == (answer_to(prompt, 3), End("length"))
        # the rest of the prompt, and two of three new tokens
        assert cache.computed - before == len(prompt) - found + 2
        told = scheduler.state()["blocks"]
        assert (told["found_tokens"], told["asked_tokens"]) == (found, 10 + len(prompt))

    run(cache, test, pool)


def test_adapters_share_nothing():
    pool = BlockPool(8, SIZE, True)
    lease = pool.take([1, 2, 3, 4, 5], 3, 1)
    pool.fill(lease, [1, 2, 3, 4, 5])
    assert [pool.take([1, 2, 3, 4, 5], 3, adapter).computed for adapter in (0, 1, 2)] == [0, 4, 0]


def test_behind_a_failure_nothing_is_believed_of_the_cache():
    cache, pool = Cache(), BlockPool(BLOCKS, SIZE, True)

    async def test(scheduler):
        first, second, third = (answer(*SYSTEM, n, most=3) for n in (5, 6, 7))
        scheduler.submit([first])
        await heard(first)
        cache.fail = refusal("It is broken.")
        scheduler.submit([second])
        assert await heard(second) == ([], End("error", "It is broken."))
        scheduler.submit([third])
        assert await heard(third) == (answer_to(third.ids, 3), End("length"))
        assert ("prefill", 10) in cache.calls[-3:]

    run(cache, test, pool)


@pytest.mark.parametrize("chunk", [4, 7, 16])
def test_chunks_take_prompts_in_parts_beside_the_steps_of_others(chunk):
    cache, pool = Cache(), BlockPool(3 * BLOCKS, SIZE, False)

    async def test(scheduler):
        asked_ = [answer(*range(n, n + 3 * n), most=2 + n) for n in (3, 9, 5, 4, 8)]
        scheduler.submit(asked_)
        for one in asked_:
            assert await heard(one) == (answer_to(one.ids, one.most), End("length"))

    run(cache, test, pool, chunk)
    assert max(n for _, n in cache.calls) <= chunk
    prompts, new = (9 + 27 + 15 + 12 + 24), (5 + 11 + 7 + 6 + 10)
    assert cache.computed == prompts + new - 5


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.lists(st.integers(3, 5), min_size=2, max_size=14), st.integers(1, 9)),
        min_size=1,
        max_size=8,
    ),
    st.booleans(),
)
def test_any_answers_over_few_blocks_are_right(asked_of, leaves):
    """Few tokens, so that many prompts begin alike, and 6 blocks, so that many are evicted."""
    cache, pool = Cache(), BlockPool(6, SIZE, True)

    async def test(scheduler):
        answers = [answer(*ids, most=most) for ids, most in asked_of]
        scheduler.submit(answers)
        if leaves:
            scheduler.leave(answers[0])
        for one in answers[leaves:]:
            assert await heard(one) == (answer_to(one.ids, one.most), End("length"))

    run(cache, test, pool)


# --- the model ------------------------------------------------------------------------------------


def options_of(model, *more):
    """fp32, so that equal texts are no chance."""
    return [
        *["--model-path", str(model), "--seq-len", "128", "--batch-size", "3", "--torch-dtype"],
        *["float32", "--pa-block-size", "16", *more],
    ]


def prompts_behind_a_system_prompt():
    """Of lengths around a block's end; some are the system prompt itself or part of it."""
    random_, system = random.Random(1), "you are a helpful simulator, be brief. "  # 39 tokens
    rests = ["".join(random_.choices("abcdefg ", k=n)) for n in (1, 9, 8)]
    prompts = [*(system + rest for rest in rests), system, system[:32], system[:33], "another"]
    return [asked(prompt, 3 + n, seed=n) for n, prompt in enumerate(prompts)]


def together(served, bodies):
    with concurrent.futures.ThreadPoolExecutor(4) as clients:
        return list(clients.map(lambda body: text(served, body), bodies))


def number(served, name):
    """What /metrics says."""
    lines = served.ask("/metrics")[1].splitlines()
    return int(float(next(line for line in lines if line.startswith(name)).split()[-1]))


@pytest.mark.libraries
def test_texts_behind_a_shared_prefix_are_those_of_lines(tiny_model, tmp_path, monkeypatch):
    """Two ranks, llama.py's PyTorch; what a hit computes is counted, in /metrics and in /status."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    bodies = prompts_behind_a_system_prompt()
    plain = Served(*options_of(tiny_model)[:-2])
    expected = [text(plain, body) for body in bodies]
    plain.close()
    monkeypatch.setenv("NEURON_CPU_NXDI", "0.6")
    served = Served(
        *options_of(tiny_model, "--is-prefix-caching"),
        *["--max-context-length", "48", "--context-encoding-buckets", "16", "48"],
        *["--prefix-buckets", "32", "48"],
    )
    try:
        assert [text(served, body) for body in bodies] == expected
        # all but the first find two blocks, the system prompt's first 32 tokens one, "another" none
        assert number(served, 'nki_blocks{of="found_tokens"}') == 4 * 32 + 16
        assert together(served, bodies) == expected
        kept, free = (number(served, f'nki_blocks{{of="{n}"}}') for n in ("kept", "free"))
        assert kept + free == 24 and kept >= 4
    finally:
        served.close()


@pytest.mark.parametrize(
    ("version", "flags", "message"),
    [
        ("0.1", ["--is-prefix-caching"], "asks for a cache of blocks, .*0.6.* --libraries"),
        ("0.6", ["--is-block-kv-layout"], "needs --is-prefix-caching or --is-chunked-prefill"),
        ("0.6", ["--is-prefix-caching", "--is-chunked-prefill"], "one of them alone; got both"),
        ("0.6", ["--is-prefix-caching", "--pa-block-size", "24"], "power of two, got 24"),
        ("0.6", ["--is-prefix-caching", "--pa-num-blocks", "3"], "at least 8"),
        ("0.6", ["--is-prefix-caching", "--seq-len", "72"], "whole blocks of 16"),
        ("0.6", ["--is-prefix-caching", "--seq-len", "64"], "at least 128 with"),
        ("0.6", ["--is-prefix-caching", "--async-mode", "--on-device-sampling"], "--async-mode"),
        ("0.6", ["--prefix-buckets", "32"], "needs --is-prefix-caching or"),
        ("0.6", ["--is-chunked-prefill", "--kernel-q-tile-size", "48"], "must divide"),
        ("0.6", ["--is-chunked-prefill", "--kernel-kv-tile-size", "64"], "a multiple of 128"),
        full("0.6", ["--is-chunked-prefill"], "asks for a cache of blocks, .* --libraries"),
    ],
)
def test_what_versions_lack_is_refused_with_a_sentence(
    tiny_model, tmp_path, monkeypatch, version, flags, message
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("NEURON_CPU_NXDI", version)
    with pytest.raises(UserError, match=message):
        Served(*options_of(tiny_model, *flags))
