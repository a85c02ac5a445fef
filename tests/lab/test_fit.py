"""Constants of a played device come out of its times, or are said to be untold."""

import numpy as np
import pytest

from lab.device import fit
from lab.device.rows import KERNELS, ROWS
from tests.crossed import full
from tests.lab import played
from tests.warned import allows

pytestmark = allows("sim_sbuf_capacity")  # a row spills on purpose
SEEDS = range(20)
MECHANISMS = (None, *fit.MECHANISMS)
MOVING = ("rows-", "transfers-", "lone-", "round-", "gathers-", "small", "part", "launches")
# what three engines, their ports and short rows show
FEW = {
    row.name: row
    for row in KERNELS
    if row.name.startswith(("vector-", "scalar-", "gpsimd-chain", "two-", "rows-", "small"))
}


def recovered(device, found):
    """Constants that the fit says it can tell, and that are farther off than it may be."""
    return [
        f"{name}: {one['value']:g}, expected {device.constants[name]:g}"
        for name, one in found["constants"].items()
        if one["told"] and abs(one["value"] / device.constants[name] - 1) > fit.TOLD
    ]


@pytest.mark.full  # as one of transfers below, in twice the time
def test_a_port_that_is_not_shared_is_named_and_constants_are_recovered():
    device = played.Device(3, "ports")
    found = fit.fit(played.times(device, FEW))
    assert found["mechanisms"] == ["ports"]
    assert recovered(device, found) == [] and found["unexplained"] == []
    told = {name for name, one in found["constants"].items() if one["told"]}
    assert {"clock_hz.VectorE", "clock_hz.ScalarE", "dma.bytes_per_ns"} <= told
    assert "clock_hz.TensorE" not in told and "COLLECTIVE_START_NS" not in told


@pytest.mark.parametrize(("target", "today"), [("trn1", False), ("trn2", True)])
def test_times_carry_their_derivatives_by_every_constant(target, today, monkeypatch):
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", target)
    names = (*FEW, "product-chain-16", "transfers-16", "launches-33", "collectives-8-16384")
    problem = fit.Problem({name: 10.0 for name in names}, today)
    variant = fit.switched(fit.Variant(problem.core, today), "issue")
    u = np.random.default_rng(1).uniform(-0.3, 0.3, len(variant.names))
    at, slopes = problem.slopes(variant, u)
    for k, name in enumerate(variant.names):
        if name not in fit.BY_STEPS:
            moved = problem.values(variant, u + 1e-6 * (np.arange(len(u)) == k))
            then = np.log(np.array(problem.predicted(variant, moved)))
            assert np.allclose((then - at) / 1e-6, slopes[:, k], atol=1e-3), name


@pytest.mark.parametrize("mechanism", [full("issue"), "fixed lanes"])
def test_what_moves_transfers_of_nki_is_named_though_the_cost_model_knows_nothing_of_it(
    mechanism, monkeypatch
):
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn2")
    device = played.Device(11, mechanism, target="trn2", today=True)
    rows = {name: row for name, row in ROWS.items() if name.startswith(MOVING)}
    found = fit.fit(played.times(device, rows), today=True)
    assert found["mechanisms"] == [mechanism]
    assert recovered(device, found) == [] and found["unexplained"] == []


@pytest.mark.full
@pytest.mark.parametrize("seed", SEEDS)
def test_every_constant_is_recovered_or_said_to_be_untold(seed):
    device = played.Device(seed, MECHANISMS[seed % len(MECHANISMS)])
    found = fit.fit(played.times(device, ROWS))
    assert recovered(device, found) == []
    assert found["mechanisms"] == [device.mechanism] * bool(device.mechanism)
