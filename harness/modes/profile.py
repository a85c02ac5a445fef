"""`--mode profile`: how long prefill and decode take on Trainium, and what bounds them.

On the stand-in the times are estimates from shapes alone: no weights are read and nothing is
computed. On a Neuron instance the compiled graphs go through neuron-profile.
"""

import json
import shutil
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from harness import console, sdk
from harness.errors import UserError
from harness.files import check_writable_folder
from harness.inputs import models, schema, submission
from harness.inputs.chunks import with_chunks
from harness.model_shapes import MODEL_SHAPES
from harness.processes.worker import Role
from harness.processes.workers import SubmissionFailed, without_controls
from harness.session.building import build, construct
from harness.session.opening import Session, check_seq_len, open_session
from harness.settings import PROFILE_FILES, Settings
from neuron_cpu.console import terminal
from neuron_cpu.files import read_plain, write_bytes_atomically

WIDTH = 180  # columns of tables that go to a file
_PROFILE = "harness.output.profile_report:profile"
MOST_FILE_BYTES = 1 << 28  # of a page or trace


def run(settings: Settings) -> int:
    """Print the profile of prefill and decode; write the files that options name."""
    if not sdk.platform().simulates:
        return _run_on_device(settings)
    if settings.profile_output:
        check_writable_folder(settings.profile_output)
    if settings.saved_graphs is not None:
        return _run_saved(settings, settings.saved_graphs)
    with tempfile.TemporaryDirectory() as scratch:
        session = shapes_only_session(settings, Path(scratch))
        loaded = construct(session, Role.NKI if settings.enable_nki else Role.TORCH)
        if settings.speculation is not None and settings.speculation.own_draft is not None:
            construct(session, Role.DRAFT)
        out = terminal.output(WIDTH)
        with console.step("Tracing and scheduling"):
            answer = loaded.call(
                _PROFILE, "The model cannot be profiled", width=out.width, styled=out.is_terminal
            )
        text = answer.body
        if not isinstance(text, str):
            raise SubmissionFailed("The model cannot be profiled: its process gave no tables.")
        sys.stdout.write(without_controls(text, styled=out.is_terminal))
        if settings.profile_output:
            _copy_files(loaded.worker.job.scratch, settings.profile_output)
    return 0


def _run_saved(settings: Settings, folder: Path) -> int:
    """The profile of graphs that another program saved: there is no submission beside them."""
    from harness.figures import saved  # PyTorch's time
    from harness.output import profile_report

    assumed = profile_report.assumed(settings)
    found = saved.estimates(settings, folder, assumed)
    profile_report.show(found.graphs, assumed, terminal.output(WIDTH))
    if settings.profile_output:
        for path in profile_report.write(found, assumed, settings.profile_output):
            console.say(f"Wrote {path}")
    return 0


# --- stand-in -------------------------------------------------------------------------------------
def shapes_only_session(settings: Settings, scratch: Path) -> Session:
    """A session of a model that is configured and has no weights, tokenizer or prompts."""
    folder = _model_folder(settings, scratch)
    source = submission.find(settings.llama)
    check_seq_len(settings.seq_len, folder)
    ranks = models.choose_tp_degree(folder, settings.tp_degree, sdk.platform().default_ranks)
    if settings.speculation is not None and settings.speculation.draft_path is not None:
        draft = _shapes_of(settings.speculation.draft_path)
        models.check_draft(draft, folder, ranks, settings.seq_len)
    asked = with_chunks(replace(settings, tp_degree=ranks), folder.config)
    if asked.quantized:  # no weights are read, so there need be none
        asked = replace(asked, quantized_checkpoints_path=scratch)
    return Session(asked, folder, source, None, 0)


def _model_folder(settings: Settings, scratch: Path) -> models.ModelFolder:
    """A folder with a config.json: named shapes, the folder of --model-path, or the default's."""
    if settings.profile_model is not None:
        if settings.model_path is not None:
            raise UserError("--profile-model and --model-path name two models; give one of them.")
        config = MODEL_SHAPES[settings.profile_model]
        (scratch / "config.json").write_text(json.dumps(config), encoding="utf-8")
        console.say(f"Model: shapes of {settings.profile_model}")
        return models.ModelFolder(scratch, settings.profile_model, config)
    if settings.model_path is None:
        return models.choose_model(None)
    console.say(f"Model: shapes of {settings.model_path}")
    return _shapes_of(settings.model_path)


def _shapes_of(path: Path) -> models.ModelFolder:
    """A folder of which nothing but config.json is read."""
    config = schema.read_json(path / "config.json")
    models.check_config(path, config)
    return models.ModelFolder(path, path.name, config)


def _copy_files(source: Path, target: Path) -> None:
    """Copy what the process has written, plain files alone."""
    for name in PROFILE_FILES:
        try:
            content = read_plain(source / name, MOST_FILE_BYTES)
        except (ValueError, OSError) as error:
            raise SubmissionFailed(f"The model cannot be profiled: {error}.") from error
        write_bytes_atomically(target / name, content)
        console.say(f"Wrote {target / name}")


# --- device ---------------------------------------------------------------------------------------
def profile_commands(folder: Path) -> list[list[str]]:
    """neuron-profile's capture and summary for each compiled graph below ``folder``."""
    commands = []
    for neff in sorted(folder.rglob("*.neff")):
        files = ["-n", str(neff), "-s", str(neff.with_suffix(".ntff"))]
        commands.append(["neuron-profile", "capture", *files])
        commands.append(["neuron-profile", "view", *files, "--output-format", "summary-text"])
    return commands


def _run_on_device(settings: Settings) -> int:
    """Compile, then capture and summarise every graph with neuron-profile."""
    folder = build(open_session(settings)).folder
    commands = profile_commands(folder)
    if not commands:
        raise UserError(f"{folder} holds no .neff files to profile; run again with --recompile.")
    found = shutil.which("neuron-profile")
    for command in commands:
        print(" ".join(command), flush=True)
        if found and subprocess.run(command, check=False).returncode:
            raise UserError(f"neuron-profile failed; run it alone to see why: {' '.join(command)}")
    if not found:
        console.say("neuron-profile is not on PATH; run the commands above where it is.")
    console.say("NEURON_CPU=1 runs the simulator's estimate instead.")
    return 0
