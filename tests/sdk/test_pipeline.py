"""Layers split over stages of ranks: threads, processes in threads, and torchrun."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from neuronx_distributed.parallel_layers import mappings, parallel_state
from safetensors import safe_open

from neuron_cpu.errors import CollectiveError, CompileError, StandInError
from neuron_cpu.processes.torchrun import Place
from neuron_cpu.runtime import pipeline
from neuron_cpu.runtime.processes import Processes
from neuron_cpu.runtime.ranks import Group, RankPool, current_group, rank_context
from tests.sdk.test_processes import at_once, torchrun_command, two_agents

PROMPT = [5, 17, 101, 3, 44]
SCRIPT = Path(__file__).with_name("generate_under_torchrun.py")


def test_stages_have_layers_rounded_up():
    split = [list(pipeline.layers_of(stage, 3, 7)) for stage in range(3)]
    assert split == [[0, 1, 2], [3, 4, 5], [6]]
    for layers in range(1, 20):
        for stages in range(1, layers + 1):
            parts = [pipeline.layers_of(stage, stages, layers) for stage in range(stages)]
            assert [layer for part in parts for layer in part] == list(range(layers))
            if not parts[-1]:
                with pytest.raises(CompileError, match="leave the last stage without one"):
                    pipeline.check_split(stages, layers)
            else:
                pipeline.check_split(stages, layers)
    with pytest.raises(CompileError, match="4 layers in 3 stages of 2 .* such as 2; change pp"):
        pipeline.check_split(3, 4)
    with pytest.raises(CompileError, match="2 layers in 5 stages of 1 .* such as 2"):
        pipeline.check_split(5, 2)


def test_names_of_a_stage_are_those_of_the_model():
    cut = pipeline.Cut(range(2, 4))
    assert cut.name("layers.1.mlp.layers.0.weight") == "layers.3.mlp.layers.0.weight"
    assert cut.name("kv_mgr.past_key_values.3") == "kv_mgr.past_key_values.7"
    assert cut.name("lm_head.weight") == "lm_head.weight"
    names = ["embed_tokens.weight", "layers.0.a", "layers.3.a", "norm.weight", "lm_head.b", "rank"]
    had = [[n for n in names if pipeline.has(n, stage, 2, 4)] for stage in range(2)]
    assert had == [
        ["embed_tokens.weight", "layers.0.a", "rank"],
        ["layers.3.a", "norm.weight", "lm_head.b", "rank"],
    ]


# --- ranks by themselves --------------------------------------------------------------------------
def through_stages(rank, size, large=False):
    """What a model does: receive, reduce within the stage, hand on; the last stage's on all."""
    group = current_group()
    line = group.pipeline
    assert (parallel_state.get_pipeline_model_parallel_rank(), line.stages) == (rank // size, 3)
    hidden = line.receive() if line.stage else {"x": torch.ones(5000 if large else 3), "y": None}
    summed = mappings.reduce_from_tensor_model_parallel_region(hidden["x"] * (1 + rank % size))
    if line.stage < 2:
        line.hand_on({"x": summed, "y": ("kept", line.stage)})
    else:
        assert hidden["y"] == ("kept", 1)
    return line.outputs([summed])[0]


def in_threads(size, function):
    pool = RankPool(size, 3)
    try:
        return pool.run([lambda rank=rank: function(rank, size) for rank in range(3 * size)])
    finally:
        pool.close()


def in_processes(size, function):
    """Each rank's `Processes`, in threads of one process: results, or what they raise."""
    from datetime import timedelta

    import torch.distributed as dist

    store = dist.HashStore()

    def run(rank):
        gloo = dist.ProcessGroupGloo(store, rank, 3 * size, timedelta(seconds=20))
        world = Processes(Place(rank, 3 * size, "localhost", 0), gloo, 3)
        group = Group(rank % size, size, world)
        group.pipeline = pipeline.of_processes(world)
        with rank_context(group):
            first = world.call(lambda: function(rank, size), "a call")
            return first, world.call(lambda: function(rank, size), "again")[0]

    found = at_once(3 * size, run)
    return [one if isinstance(one, BaseException) else one[0] for one in found]


@pytest.mark.parametrize("run", [in_threads, in_processes])
@pytest.mark.parametrize("size", [1, 2])
def test_what_passes_the_stages(run, size):
    whole = sum(range(1, size + 1)) ** 3
    for got in run(size, through_stages):
        assert got.tolist() == [whole] * 3
    for got in run(size, lambda rank, size: through_stages(rank, size, large=True)):
        assert got.tolist() == [whole] * 5000


def fails_at(place):
    def function(rank, size):
        if rank == place:
            raise ValueError("no weights")
        return through_stages(rank, size)

    return function


@pytest.mark.parametrize("place", [0, 1, 3, 4])
def test_a_failure_in_any_stage_ends_all(place):
    with pytest.raises(ValueError, match="no weights"):
        in_threads(2, fails_at(place))
    for rank, error in enumerate(in_processes(2, fails_at(place))):
        assert str(error) in ("no weights", f"Rank {place} failed: no weights.")
        assert (rank == place) == isinstance(error, ValueError)


def test_stages_that_do_not_do_their_part_are_told():
    def silent(rank, size):
        return through_stages(rank, size) if rank >= size else torch.zeros(3)

    with pytest.raises(CollectiveError, match="wait in stage-transfer"):
        in_threads(2, silent)
    for error in in_processes(2, silent):
        assert "wait in stage-transfer(hidden states of stage 0) for rank 0" in str(error)

    def all_wait(rank, size):
        line = current_group().pipeline
        return line._meet((line.stage + 1) % 3, None)

    for error in in_processes(1, all_wait):
        assert "All stages of the pipeline wait" in str(error)


# --- models ---------------------------------------------------------------------------------------
def logits(app, steps=4):
    """Of a prompt, and of greedy steps behind it."""
    ids = torch.tensor([PROMPT])
    found = [app(input_ids=ids, position_ids=torch.arange(len(PROMPT))[None]).logits[0, -1]]
    for position in range(len(PROMPT), len(PROMPT) + steps):
        output = app(
            input_ids=found[-1].argmax().reshape(1, 1),
            attention_mask=torch.ones(1, position),
            position_ids=torch.tensor([[position]]),
        )
        found.append(output.logits[0, -1])
    return torch.stack(found)


@pytest.mark.parametrize(
    ("version", "tensor", "stages", "shape"),
    [
        ("0.1", 2, 2, {}),
        ("0.6", 1, 3, {"tie_word_embeddings": True}),
        *(
            pytest.param(version, 2, 3, {}, marks=pytest.mark.full)
            for version in ("0.1", "0.2", "0.3", "0.4", "0.5", "0.6")
        ),
    ],
)
def test_a_model_in_stages_gives_the_same_bits(
    tiny_llama, application, monkeypatch, version, tensor, stages, shape
):
    monkeypatch.setenv("NEURON_CPU_NXDI", version)
    _, folder = tiny_llama(num_hidden_layers=5, **shape)
    options = dict(tp_degree=tensor, torch_dtype="bfloat16")
    whole = application(folder, **options)
    expected = logits(whole)
    staged = application(folder, pp_degree=stages, save_sharded_checkpoint=True, **options)
    assert torch.equal(logits(staged), expected)
    manifest = json.loads((folder / "compiled" / "model.pt").read_text())
    assert manifest["pp_degree"] == stages
    with pytest.raises(StandInError, match=f"compiled with pp_degree {stages}, expected 1"):
        whole.load(folder / "compiled")
    assert weights_of(folder, 0) & weights_of(folder, tensor) <= {"rank_util.rank"}
    layers = [
        {int(name.split(".")[1]) for name in weights_of(folder, rank) if name[:7] == "layers."}
        for rank in range(0, tensor * stages, tensor)
    ]
    assert layers == [set(pipeline.layers_of(stage, stages, 5)) for stage in range(stages)]
    modules = staged.models[0].model.modules
    assert [len(module.kv_mgr.past_key_values) for module in modules[::tensor]] == [
        2 * len(own) for own in layers
    ]


def weights_of(folder, rank):
    path = folder / "compiled" / "weights" / f"tp{rank}_sharded_checkpoint.safetensors"
    with safe_open(path, framework="pt") as reader:
        return set(reader.keys())


@pytest.mark.parametrize(
    "options",
    [
        {"on_device": True, "output_logits": True},
        {"batch_size": 3},
        {"speculation_length": 3},
        {"save_sharded_checkpoint": False},
        pytest.param({"padding_side": "left"}, marks=pytest.mark.full),
        pytest.param({"kv_cache_quant": True}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_options_of_models_in_stages(tiny_llama, application, generate, options):
    from neuronx_distributed_inference.models.config import OnDeviceSamplingConfig

    options = {"tp_degree": 2, **options}
    if options.pop("on_device", False):
        options["on_device_sampling_config"] = OnDeviceSamplingConfig(top_k=1, do_sample=False)
    _, folder = tiny_llama(num_hidden_layers=3)
    prompts = [PROMPT, [7, 8], [100, 5, 6]][: options.get("batch_size", 1)]
    expected = generate(application(folder, **options), prompts, 6)
    found = generate(application(folder, pp_degree=2, **options), prompts, 6)
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    "option", ["sequence_parallel_enabled", "flash_decoding_enabled", "async_mode", "is_medusa"]
)
def test_what_needs_more_of_another_stage_is_refused(tiny_llama, application, monkeypatch, option):
    monkeypatch.setenv("NEURON_CPU_NXDI", "0.4")
    from neuronx_distributed_inference.models.config import OnDeviceSamplingConfig

    _, folder = tiny_llama()
    sampling = OnDeviceSamplingConfig() if option == "async_mode" else None
    with pytest.raises(NotImplementedError, match=f"pp_degree 2 meets {option}|{option}"):
        application(
            folder,
            load=False,
            pp_degree=2,
            tp_degree=4,
            on_device_sampling_config=sampling,
            **{option: True},
        )
    with pytest.raises(CompileError, match="2 layers in 3 stages"):
        application(folder, load=False, pp_degree=3)
    with pytest.raises(NotImplementedError, match="pp_degree 2 meets cp_degree"):
        application(folder, load=False, pp_degree=2, tp_degree=4, cp_degree=2)


def test_a_layer_that_fails_in_a_later_stage_is_told_and_the_next_call_works(
    tiny_llama, application
):
    _, folder = tiny_llama(num_hidden_layers=2)
    app = application(folder, pp_degree=2, tp_degree=2)
    expected = logits(app)
    layer = app.models[0].model.modules[3].layers[0]  # stage 1, rank 1
    broken = layer.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        logits(app)
    broken.remove()
    assert torch.equal(logits(app), expected)


# --- under torchrun -------------------------------------------------------------------------------
@pytest.fixture
def staged_llama(tiny_llama):
    return tiny_llama(hidden_size=64, num_hidden_layers=4, num_attention_heads=4)[1]


def expected_logits(folder):
    sys.path.insert(0, str(SCRIPT.parent))
    try:
        from generate_under_torchrun import logits as of_script
    finally:
        sys.path.pop(0)
    return of_script(folder, folder / "threads", 2)


@pytest.mark.full
def test_stages_as_processes_give_the_logits_of_one_process(staged_llama, tmp_path, monkeypatch):
    monkeypatch.setenv("PP_DEGREE", "2")
    command = torchrun_command(
        "--nproc-per-node=4", SCRIPT, staged_llama, tmp_path / "compiled", tmp_path
    )
    subprocess.run(command, check=True, timeout=300, capture_output=True)
    monkeypatch.delenv("PP_DEGREE")
    expected = expected_logits(staged_llama)
    for rank in range(4):
        assert torch.equal(torch.load(tmp_path / f"{rank}.pt"), expected)


@pytest.mark.full
def test_a_stage_on_each_of_two_nodes(staged_llama, tmp_path, monkeypatch):
    monkeypatch.setenv("PP_DEGREE", "2")
    assert two_agents(SCRIPT, staged_llama, tmp_path / "compiled", tmp_path) == [0, 0]
    monkeypatch.delenv("PP_DEGREE")
    expected = expected_logits(staged_llama)
    for rank in range(4):
        assert torch.equal(torch.load(tmp_path / f"{rank}.pt"), expected)
