"""What the hour asks of a compiler: every construct that no public run shows, and every kernel."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
import torch

from lab.device import calls, model
from lab.device.probes import PROBES
from neuron_cpu.core import NkiError
from neuron_cpu.core.check import provenance

# By language.
NO_PROBE = {
    "nisa.builtin_custom_op": "runs a program of which no source tells the format",
    "nisa.dma_engine": "no instruction of that language takes it",
    "nisa.range_select": "its page is for a later chip than the language's kernels here",
    "nl.gemm_grid": "no page tells its arguments",
    "nl.gemm_stationary_grid": "no page tells its arguments",
    "ncc.psum.kind": "the stand-in's own", "ncc.sbuf.kind": "the stand-in's own",
}, {
    "nki.collectives.all_gather_v": "its page asks for four ranks of two cores",
    "nki.collectives.all_to_all_v": "its page asks for ranks on several devices or nodes",
    "nki.isa.NkiValidationError": "is raised where a kernel is built, and no kernel names it",
    "nki.isa.engine.dma": "no instruction takes it",
    **dict.fromkeys(
        ["nki.language.dynamic_range",
         *(f"nki.language.dynamic_range({name}=)" for name in ("start", "step", "stop")),
         *(f"nki.language.fori_loop({name}=)" for name in ("body_fun", "lower", "step", "upper")),
         "nki.language.fori_loop", "nki.language.while_loop", "nki.language.while_loop(body_fun=)",
         "nki.language.while_loop(init=)"],
        "a public compiler refuses it on one core of gen3",
    ),
    "nki.language.fmod": "no page lists it among operators of instructions",
    "nki.language.logical_not": "no page lists it among operators of instructions",
    "nki.language.mod": "no page lists it among operators of instructions",
    "nki.simulate": "runs no device",
    "nki.typing.mutable_tensor": "no page of the language has it",
    **dict.fromkeys(
        ("nki.isa.dge_mode", "nki.isa.dma_engine", "nki.isa.engine", "nki.isa.matmul_perf_mode",
         "nki.isa.nc_version", "nki.isa.oob_mode", "nki.isa.reduce_cmd",
         "nki.language.MemoryRegion", "nki.language.tile_size"), "kernels name its members alone",
    ),
}  # fmt: skip
WIDE = {"fp32": torch.float64, "bf16": torch.float64, "int32": torch.int32}
CHIPS = {"trn1": 2, "trn2": 3, "trn3": 4}  # and their generations
EXACT, ROUNDED = 1e-6, 5e-3  # relative to the values' size: results in bf16 have eight bits


def scanned(step, x, y):
    """A scan along rows, from 0 on."""
    columns = [np.zeros(len(x))]
    for a, b in zip(x.T, y.T):
        columns.append(step(a, b, columns[-1]))
    return np.stack(columns[1:], 1)


def counted(mask, offset, padding):
    """Places of what is true in each 16th row, and how many there are."""
    found = np.zeros((mask.shape[0], mask.shape[1] + 1))
    for row in range(0, mask.shape[0], 16):
        places = np.flatnonzero(mask[row])
        rest = mask.shape[1] - len(places)
        found[row] = np.r_[places + offset, [padding] * rest, len(places)]
    return found


KNOWN = {
    "np": np, "ml_dtypes": ml_dtypes, "erf": np.vectorize(math.erf), "scan": scanned,
    "counted": counted,
}  # fmt: skip


def unseen(today):
    """Constructs of a language that a table calls documented or unproven."""
    rows = provenance.table().items()
    return {
        construct
        for construct, row in rows
        if row.status != provenance.SEEN
        and construct.startswith("nki.") == today
        and not construct.startswith("neuronxcc.")
    }


def without(construct, today):
    """Whether a construct has no probe, or belongs to one that has none."""
    owner = construct.partition("(")[0]
    owners = {owner, owner.removesuffix("_prepare"), owner.removesuffix("_trigger"), construct}
    return not owners.isdisjoint(NO_PROBE[today])


def written(probe, folder):
    """The call of a probe whose file stands in a folder."""
    file = folder / f"probe_{len(list(folder.iterdir()))}.py"
    file.write_text(probe.text)
    return probe.call | {"module": str(file)}


@pytest.mark.filterwarnings("ignore")  # a probe may be doubtful
@pytest.mark.parametrize("today", [False, True])
def test_every_construct_that_no_public_run_shows_has_a_probe_that_the_simulator_takes(
    today, tmp_path, monkeypatch
):
    shown: set[str] = set()
    for name, probe in PROBES[today].items():
        for target in [chip for chip, number in CHIPS.items() if number >= probe.generation]:
            monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", target)
            try:
                found = model.constructs(written(probe, tmp_path))
                break
            except NkiError as error:
                refused = error
        else:
            raise AssertionError(f"{name}: {refused}")
        assert found, f"{name} shows nothing that is not seen; drop it"
        shown |= set(found)
    missing = unseen(today) - shown
    assert {one for one in missing if not without(one, today)} == set()
    assert missing >= set(NO_PROBE[today])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("target", CHIPS)
def test_a_probe_of_today_has_numpy_s_result_or_is_refused_by_a_chip_that_lacks_it(
    target, tmp_path, monkeypatch
):
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", target)
    for name, probe in PROBES[True].items():
        call = written(probe, tmp_path)
        if probe.generation > CHIPS[target]:
            with pytest.raises(NkiError):
                calls.computed(call, calls.Seeded())
            continue
        try:
            (ours,), values = calls.computed(call, calls.Seeded()), calls.Seeded()
        except NkiError as error:  # of this chip; another one has the probe's result
            assert "a device's compiler refuses it" in str(error), name
            continue
        x, y = (np.asarray(values([128, 512], probe.given).to(WIDE[probe.given])) for _ in "xy")
        theirs = np.asarray(eval(probe.expected, KNOWN | {"x": x, "y": y})).astype(np.float64)
        assert ours.shape == theirs.shape, name
        size = np.sqrt(np.mean(theirs**2)) or 1.0
        limit = EXACT if ours.dtype == torch.int32 else ROUNDED
        assert np.sqrt(np.mean((ours.double().numpy() - theirs) ** 2)) / size < limit, name
