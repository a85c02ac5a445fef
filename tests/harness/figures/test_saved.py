"""--mode profile --saved-graphs: the times of graphs of PyHLO, and folders that it refuses."""

import json

import pytest
import torch
from torch_neuronx.pyhlo.scribe import HloScribe

import main
from harness.errors import UserError
from harness.figures import saved
from harness.inputs import command_line
from neuron_cpu.core.time import cost
from neuron_cpu.errors import CompileError
from neuron_cpu.hlo import calls, execute
from neuron_cpu.runtime import outside
from neuron_cpu.runtime.recording import TORCH, Event, TensorShape
from tests.hlo.kernels import call


def add(scribe):
    return scribe.f32.Add(*(scribe.f32.Parameter(parameter_number=k) for k in (0, 1)))


def decoder(name="fully_unrolled", tokens=1, kernel=False, rank=3):
    """A graph as the package lays it out: tokens, places, first places, a cache, a weight."""

    def entry(s):
        x = s.f32[512, tokens, 1].Parameter(parameter_number=0)
        s.s32[tokens].Parameter(parameter_number=1)
        s.s32[1].Parameter(parameter_number=2)
        cache = s.f32[64, 1, 4, 16].Parameter(parameter_number=3)
        weight = s.f32[512, 128].Parameter(parameter_number=4)
        numbers = {"lhs_contracting_dimensions": [0], "rhs_contracting_dimensions": [0]}
        x = s.f32[512, tokens].Reshape(x)
        product = s.f32[tokens, 128].Dot(x, weight, dot_dimension_numbers=numbers)
        if kernel:
            product = call(product)
        joined = s.f32[tokens, 128].AllReduce(product, replica_groups=[[0, 1]], to_apply=add)
        out = joined if rank == 2 else s.f32[128, tokens, 1].Reshape(joined)
        kept = s.f32[64, 1, 4, 16].Copy(cache)
        kept.set_alias_to(cache, must=True)
        return s.tuple(s.f32[out.sizes], s.f32[cache.sizes]).Tuple(out, kept)

    entry.__name__ = name
    module = HloScribe(None)(entry).module_proto
    calls.put_kernels(module)
    return execute.packed(module)


def call_of(module):
    return next(i for c in module.computations for i in c.instructions if i.backend_config)


def other(change):
    """A graph with a kernel of which somebody has changed a part."""
    module = execute.module_of(decoder(kernel=True))
    change(module)
    return execute.packed(module)


@pytest.fixture
def folder(tmp_path):
    for name, neff in {
        "a": decoder(),
        "b": decoder(tokens=16, kernel=True),
        "c": decoder("multi_layer", tokens=16),
    }.items():
        (tmp_path / f"{name}.neff").write_bytes(neff)
    return tmp_path


def estimates(folder, *arguments):
    words = ["--mode", "profile", "--saved-graphs", str(folder), *arguments]
    settings = command_line.parse(words)
    return saved.estimates(settings, folder, cost.DEFAULT_PROFILE).graphs


def test_times_are_those_of_pytorchs_operators(tmp_path):
    (tmp_path / "one.neff").write_bytes(decoder())
    (found,) = estimates(tmp_path)
    assert (found.submodel, found.bucket, found.batch) == ("token_generation_model", 64, 1)
    product, joined = found.operators
    shapes = [TensorShape(sizes, torch.float32) for sizes in ((1, 512), (512, 128), (1, 128))]
    event = Event("", TORCH, "mm", tuple(shapes[:2]), tuple(shapes[2:]), 512 * 128)
    assert (product.name, product.macs) == ("mm", event.macs)
    assert (product.bytes, product.time_ns) == (outside.moved(event), outside.work(event).ns(False))
    assert joined.time_ns == cost.Overheads().collective(4 * 128, 2)
    assert found.launch_ns == cost.Overheads().step_ns(1)


def test_each_kind_of_graph_has_its_name_and_its_kernels(folder):
    prompt, part, step = estimates(folder)
    assert [g.submodel for g in (prompt, part, step)] == [
        "context_encoding_model",
        "multi_layer",
        "token_generation_model",
    ]
    assert (prompt.sizes, part.sizes) == ("16+48", "16")
    (kernel,) = (op for op in prompt.operators if op.kind == "NKI kernel")
    assert kernel.name == "doubled" and kernel.profile.time_ns > 0
    assert part.launch_ns == cost.Overheads().step_ns(0)  # no logits


def test_a_graph_that_samples_sends_no_logits(tmp_path):
    (tmp_path / "one.neff").write_bytes(decoder(rank=2))
    (found,) = estimates(tmp_path, "--logits-us", "900")
    assert found.launch_ns == cost.Overheads().step_ns(0)


def test_the_driver_prints_and_writes_the_profile(folder, capsys):
    words = ["--mode", "profile", "--saved-graphs", str(folder)]
    assert main.main([*words, "--profile-output", str(folder / "out")]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "estimated, not measured" in said
    assert "doubled" in said and "ms for one execution" in said
    assert len(json.loads((folder / "out" / "profile.json").read_text())["graphs"]) == 3


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "has no .neff file, expected a folder that model.save"),
        (b"", "one.neff: A compiled graph of 0 bytes is not one of this neuron_cpu, is damaged"),
        (decoder()[:-9], "one.neff: .*cut short"),
        (decoder().replace(b"dot", b"dog"), "one.neff: .*is damaged"),
        (other(lambda m: setattr(m, "entry_computation_id", 999)), "do not fit each other"),
        (other(lambda m: call_of(m).operand_ids.append(999)), "do not fit each other"),
        (
            other(lambda m: setattr(call_of(m), "backend_config", b"{}")),
            "kernel of NKI whose program",
        ),
    ],
    ids=["none", "empty", "cut", "damaged", "entry", "operand", "kernel"],
)
def test_another_folder_is_refused_in_a_sentence(tmp_path, content, said):
    if content is not None:
        (tmp_path / "one.neff").write_bytes(content)
    with pytest.raises(UserError, match=said) as refused:
        estimates(tmp_path)
    assert "\n" not in str(refused.value)


def test_options_about_a_model_are_refused(tmp_path):
    with pytest.raises(UserError, match="--tp-degree is about a model, and --saved-graphs"):
        estimates(tmp_path, "--tp-degree", "2")


def test_a_kernel_that_nobody_traced_is_refused():
    def entry(s):
        x = s.f32[8].Parameter(parameter_number=0)
        return s.f32[8].CustomCall(x, custom_call_target=calls.KERNEL, backend_config=b"none")

    module = HloScribe(None)(entry).module_proto
    with pytest.raises(CompileError, match="that this process has not traced"):
        calls.put_kernels(module)
