"""The imitation beside the sources of NxD and NxD Inference, of which PUBLIC names clones."""

import json
import os
import subprocess
import sys
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
from neuronx_distributed_inference.models import config as config_module
from neuronx_distributed_inference.models.llama import modeling_llama

from lab.device import calls
from neuron_cpu import libraries
from tests.real import contracts, releases, seams
from tests.real.differences import ACCEPTED, SEAMS

FOLDER = os.environ.get("PUBLIC", "")
checkouts = pytest.mark.skipif(
    not FOLDER,
    reason="PUBLIC names no folder with clones of neuronx-distributed and "
    "neuronx-distributed-inference; clone them there.",
)


@pytest.fixture(params=contracts.RELEASES)
def release(request, monkeypatch):
    monkeypatch.setenv("NEURON_CPU_NXDI", request.param)
    return contracts.checkout(Path(FOLDER), contracts.RELEASES[request.param])


def accepted(difference):
    given = difference.kind, difference.place, difference.what
    return [n for n, row in enumerate(ACCEPTED) if all(map(fnmatchcase, given, row))]


@checkouts
def test_what_differs_stands_in_the_list_and_the_list_differs():
    found = contracts.everything(Path(FOLDER))
    matches = {difference: accepted(difference) for difference in found}
    unknown = [
        f"{d.kind} {d.place}: {d.what} ({', '.join(found[d])})"
        for d, rows in sorted(matches.items())
        if not rows
    ]
    assert not unknown, "\n".join(unknown)
    used = {row for rows in matches.values() for row in rows}
    assert used == set(range(len(ACCEPTED))), [ACCEPTED[n] for n in {*range(len(ACCEPTED))} - used]


@checkouts
def test_layers_get_what_the_base_class_hands_them(release, tiny_llama, application, monkeypatch):
    seen, results = set(), set()
    original = modeling_llama.NeuronLlamaDecoderLayer.forward

    def spy(self, hidden_states, **kwargs):
        seen.update(kwargs)
        found = original(self, hidden_states, **kwargs)
        results.add(len(found))
        return found

    monkeypatch.setattr(modeling_llama.NeuronLlamaDecoderLayer, "forward", spy)
    _, folder = tiny_llama()
    application(folder, load=False)
    assert seen == contracts.layer_keywords(release)
    assert results == {contracts.layer_results(release)}


OWN_FIELDS = {"contract"}
# Set again behind it, from other fields.
DERIVED = {"world_size", "local_ranks_size", "overrides_torch_dtype"}
DERIVED |= {"blockwise_matmul_config", "router_config"}


@checkouts
@pytest.mark.parametrize("name", ["NeuronConfig", "MoENeuronConfig", "OnDeviceSamplingConfig"])
def test_configurations_have_the_fields_of_their_release(release, name):
    known, defaults = contracts.fields(release, name)
    own = vars(getattr(config_module, name)())
    if name == "MoENeuronConfig":  # one class serves all releases, that of 0.9 too
        later = (contracts.checkout(Path(FOLDER), each) for each in contracts.LATER.values())
        known = known.union(*(contracts.fields(one, name)[0] for one in later))
    assert own.keys() - known - OWN_FIELDS == set()
    wrong = {
        key: (own[key], value)
        for key, value in defaults.items()
        if key in own and own[key] != value and key not in DERIVED
    }
    assert not wrong


@checkouts
@pytest.mark.parametrize(
    ("version", "model"),
    [("0.1", "llama"), ("0.6", "llama"), ("0.9", "Qwen3-MoE")],  # those of the imitation
)
def test_inputs_parameters_calls_and_refusals_are_those_of_the_release(version, model, tmp_path):
    real = releases.environment(releases.RELEASES[version], Path(FOLDER))
    own = {**os.environ, libraries.VARIABLE: libraries.NONE, "NEURON_CPU_NXDI": version}
    found = []
    for environment in (own, real):
        command = [sys.executable, "-W", "ignore", seams.__file__, model]
        run = subprocess.run(
            command, env=environment, cwd=tmp_path, stdout=subprocess.PIPE, check=True
        )
        found.append(json.loads(run.stdout))
    told = set(seams.differences(*found))
    unknown = [one for one in told if not any(_fits(one, row[:3]) for row in SEAMS)]
    assert not unknown, "\n".join(map(str, sorted(unknown)))


TWO_RANKS = """
import torch
import neuron_cpu
neuron_cpu.ensure_sdk()
from harness import sdk
from lab.device import calls, plan, timing
from lab.device.rows import ROWS

call = plan.of_row(ROWS["collectives-8-512"], sdk.today()).call
reduced = timing._of_torch(call)()
(whole,) = calls.computed(call, calls.Seeded())
assert torch.equal(reduced, 2 ** call["reduced"] * whole[:, :1])
"""


@checkouts
@pytest.mark.parametrize(
    ("version", "language"),
    [("0.5", {}), ("0.6", {}), ("0.7", {}), ("0.8", {}), ("0.9", {"NEURON_CPU_NKI": "2.31"})],
)
def test_the_hour_compiles_a_graph_of_two_ranks_by_the_release_s_builder(
    version, language, tmp_path
):
    """`lab.device_report` in SDK 2.25 to 2.31: the library's own code, a kernel, all-reduces."""
    real = releases.environment(releases.RELEASES[version], Path(FOLDER))
    path = f"{calls.ROOT}:{real['PYTHONPATH']}"
    of_chip = {"NEURON_PLATFORM_TARGET_OVERRIDE": "trn2" if language else "trn1", "NEURON_CPU": "1"}
    environment = real | language | of_chip | {"PYTHONPATH": path}
    command = [sys.executable, "-W", "ignore", "-c", TWO_RANKS]
    subprocess.run(command, env=environment, cwd=tmp_path, check=True)


def _fits(given, row):
    return all(map(fnmatchcase, given, row))


# --- The comparison itself ------------------------------------------------------------------------


def library(**modules):
    return contracts.Library({f"{k}.py": contracts.module_of(v) for k, v in modules.items()})
