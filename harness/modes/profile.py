"""`--mode profile`: how long prefill and decode take on Trainium, and what bounds them.

On the stand-in the times are estimates from shapes alone: no weights are read and nothing is
computed. On a Neuron instance the compiled graphs go through neuron-profile.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from harness import console, sdk
from harness.errors import UserError
from harness.files import check_writable_folder
from harness.inputs import models, submission
from harness.inputs.model_shapes import MODEL_SHAPES

TRACED_FOR_LONG = (2048, 4096, 8192)  # prompts beyond the last are extrapolated from these
MICROSECOND = 1e3  # nanoseconds


def run(args: argparse.Namespace) -> int:
    """Print the profile of prefill and decode; write files where asked for."""
    if not sdk.is_stand_in():
        return _run_on_device(args)
    from harness.output import profile_report
    from neuron_cpu.core.time import cost

    name = args.dma_profile or cost.DEFAULT_PROFILE
    cost.dma_profile(name)  # refuse an unknown name before the model is built
    if args.profile_output:
        check_writable_folder(args.profile_output)
    with console.step("Tracing and scheduling"):
        graphs = estimates(args, name)
    profile_report.show(graphs, name, args.profile_top)
    if args.profile_output:
        profile_report.write(graphs, name, args.profile_output)
    return 0


# --- stand-in -------------------------------------------------------------------------------------
def _shapes_only_model(args: argparse.Namespace, scratch: Path) -> Any:
    """The application of the submission, configured and without weights."""
    from harness.session import building

    folder = _model_folder(args, scratch)
    source = submission.find(args.llama)
    limit = folder.config.get("max_position_embeddings")
    if limit is not None and args.seq_len > limit:
        raise UserError(f"--seq-len must be at most {limit} for {folder.name}, got {args.seq_len}.")
    args.tp_degree = models.choose_tp_degree(folder, args.tp_degree, False)
    _ask_for_buckets(args)
    opened = building.Session(args, folder, source, None, 0)
    model_class = getattr(submission.load(source), submission.MODEL_CLASS)
    role = "nki" if args.enable_nki else "torch"
    return building.construct_model(opened, model_class, role)


def _model_folder(args: argparse.Namespace, scratch: Path) -> models.ModelFolder:
    """A folder with a config.json: named shapes, the folder of --model-path, or the default's."""
    if args.profile_model is not None:
        if args.model_path is not None:
            raise UserError("--profile-model and --model-path name two models; give one of them.")
        config = MODEL_SHAPES[args.profile_model]
        (scratch / "config.json").write_text(json.dumps(config), encoding="utf-8")
        console.say(f"Model: shapes of {args.profile_model}")
        return models.ModelFolder(scratch, args.profile_model, config)
    if args.model_path is None:
        return models.choose_model(None)
    path = Path(args.model_path).expanduser()
    config = models.read_json(path / "config.json")
    models.check_config(path, config)
    console.say(f"Model: shapes of {path}")
    return models.ModelFolder(path, path.name, config)


def _ask_for_buckets(args: argparse.Namespace) -> None:
    """Make the buckets that are profiled, or traced for an extrapolation, part of the model."""
    wanted = set(args.profile_bucket or ())
    if wanted and max(wanted) > args.seq_len:
        raise UserError(
            f"--profile-bucket must be at most --seq-len {args.seq_len}, got {max(wanted)}."
        )
    if not args.enable_bucketing:
        return
    traced = set(TRACED_FOR_LONG) if args.max_context_length > TRACED_FOR_LONG[-1] else set()
    for name, limit in (
        ("context_encoding_buckets", args.max_context_length),
        ("token_generation_buckets", args.seq_len),
    ):
        given = getattr(args, name)
        if given is None and not (wanted or traced):
            continue
        extra = wanted | (traced if name == "context_encoding_buckets" else set())
        chosen = {*(given or ()), *extra, limit}
        setattr(args, name, sorted(b for b in chosen if b <= limit))


def estimates(args: argparse.Namespace, dma_profile: str) -> list[Any]:
    """One GraphEstimate for each sub-model and bucket asked for, without weights."""
    with tempfile.TemporaryDirectory() as scratch:
        return _estimates(args, _shapes_only_model(args, Path(scratch)), dma_profile)


def _estimates(args: argparse.Namespace, model: Any, dma_profile: str) -> list[Any]:
    from harness.figures import estimate

    estimator = estimate.Estimator(dma_profile, overheads(args), args.tp_degree)
    graphs = []
    for wrapper in model.models:
        buckets = list(wrapper.neuron_config.buckets)
        asked = [b for b in buckets if b in (args.profile_bucket or ())] or [buckets[-1]]

        def traced(bucket: int, wrapper: Any = wrapper) -> estimate.GraphEstimate:
            events = estimate.record(model, wrapper, bucket)
            return estimator.graph(wrapper.tag, bucket, args.batch_size, events)

        for bucket in asked:
            if wrapper.is_prefill and bucket > TRACED_FOR_LONG[-1]:
                shorter = [traced(length) for length in TRACED_FOR_LONG]
                graphs.append(estimate.extrapolate(shorter, bucket))
            else:
                graphs.append(traced(bucket))
    return graphs


def overheads(args: argparse.Namespace) -> Any:
    """Costs outside of kernels, the command line's on top of the defaults."""
    from neuron_cpu.core.time import cost

    given = {
        "kernel_ns": args.kernel_launch_us, "graph_ns": args.graph_launch_us,
        "collective_ns": args.collective_us,
    }  # fmt: skip
    values = {name: us * MICROSECOND for name, us in given.items() if us is not None}
    if args.collective_gb_per_s is not None:
        values["collective_bytes_per_ns"] = args.collective_gb_per_s  # GB/s = bytes per ns
    if any(value < 0 for value in values.values()) or args.collective_gb_per_s == 0:
        raise UserError("Assumed costs must not be negative, and a rate must be above 0.")
    return cost.Overheads(**values)


# --- device ---------------------------------------------------------------------------------------
def profile_commands(folder: Path) -> list[list[str]]:
    """neuron-profile's capture and summary for each compiled graph below ``folder``."""
    commands = []
    for neff in sorted(folder.rglob("*.neff")):
        trace = neff.with_suffix(".ntff")
        commands.append(["neuron-profile", "capture", "-n", str(neff), "-s", str(trace)])
        commands.append(["neuron-profile", "view", "-n", str(neff), "-s", str(trace),
                         "--output-format", "summary-text"])  # fmt: skip
    return commands


def _run_on_device(args: argparse.Namespace) -> int:
    """Compile, then capture and summarise every graph with neuron-profile."""
    from harness.session import building

    opened = building.open_session(args)
    folder = building.build(opened).folder
    commands = profile_commands(folder)
    if not commands:
        raise UserError(f"{folder} holds no .neff files to profile; run again with --recompile.")
    found = shutil.which("neuron-profile")
    for command in commands:
        print(" ".join(command), flush=True)
        if found and subprocess.run(command, check=False).returncode:
            raise UserError(f"neuron-profile failed: {' '.join(command)}")
    if not found:
        console.say("neuron-profile is not on PATH; run the commands above where it is.")
    console.say("NEURON_CPU=1 runs the simulator's estimate instead.")
    return 0
