"""How the driver makes a model's configuration."""

import pytest

from harness.errors import UserError
from harness.session import model


class Config:
    """A NeuronConfig whose asynchronous mode has a keyword of its own, as in each release."""

    def __init__(self, keyword, **given):
        self.async_mode = bool(given.get(keyword, False))


@pytest.mark.parametrize("keyword", ["async", "async_mode"])  # NxDI 0.1; 0.2 and later
def test_asynchronous_mode_is_asked_for_by_the_name_that_the_version_has(keyword):
    made = model._made(lambda **given: Config(keyword, **given), {"async_mode": True})
    assert made.async_mode
    model._check_fields(made, {"async_mode": True})
    assert not model._made(lambda **given: Config(keyword, **given), {}).async_mode


def test_a_version_without_it_is_refused():
    made = model._made(lambda **given: Config("", **given), {"async_mode": True})
    with pytest.raises(
        UserError, match="--async-mode needs a later version .* NEURON_CPU_NXDI=0.6"
    ):
        model._check_fields(made, {"async_mode": True})
