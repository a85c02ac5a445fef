"""Speed is guarded: no estimate of a graph grows beyond what lab/docs/kernels.md says."""

import pytest

from lab import kernel_docs, pages, porting_docs, roofline
from neuron_cpu.core.time.cost import DEFAULT_PROFILE

TIME = "estimate, ms"


def check_published(name, table):
    said, found = (
        kernel_docs.column(t, TIME) for t in (pages.published(kernel_docs.PAGE, name), table)
    )
    assert found.keys() == said.keys()
    changed = {
        row: (said[row], time) for row, time in found.items() if abs(time / said[row] - 1) > 0.02
    }
    assert not changed, "(published, now); python -m lab.kernel_docs publishes what is meant"


@pytest.mark.speed
def test_no_graph_has_become_slower():
    """By more than 2 %, a prefill's and a decode step's of Llama-3.2-1B; nor faster unnoticed."""
    check_published("graphs", kernel_docs.graphs())


@pytest.mark.speed
def test_short_prompts_of_a_batch_share_their_weights():
    """Four of 64 tokens take at most 1.15 times as long as one of 256."""
    shape = roofline.MODEL_SHAPES[roofline.DEFAULT_MODEL]
    four, one = (
        roofline.estimate(shape, roofline.Row("prefill", *size, 1.0), DEFAULT_PROFILE, print)[0]
        for size in ((4, 64), (1, 256))
    )
    assert four < 1.15 * one


@pytest.mark.full
@pytest.mark.parametrize("name", kernel_docs.LARGER)
def test_no_larger_graph_has_become_slower(name):
    """The same of larger models, and of a prompt in chunks (kernel_docs.py --larger)."""
    check_published(name, kernel_docs.graphs(*kernel_docs.LARGER[name]))


@pytest.mark.speed
@pytest.mark.parametrize("name", porting_docs.SIZES)
def test_times_of_both_languages_are_those_of_the_page(name):
    """Within 2 %; on trn1 those of models/today.py are within 3 % of those of llama.py."""
    said, found = porting_docs.published(), porting_docs.times(name)
    for kernel, times in found.items():
        assert times == pytest.approx(said[f"{name}: {kernel}"], rel=0.02), kernel
        assert times[1] == pytest.approx(times[0], rel=0.03), kernel


@pytest.mark.speed
@pytest.mark.parametrize("length", porting_docs.LENGTHS)
@pytest.mark.parametrize("name", porting_docs.SIZES)
def test_both_languages_take_as_long_at_every_length(name, length):
    """Within 3 %."""
    for kernel, more in porting_docs.differences(name, length).items():
        assert abs(more) < 3, kernel
