"""Estimates of the graphs that Transformers NeuronX saved (`model.save(FOLDER)`).

Nothing is run: operators of HLO are timed as PyTorch's that do the same work (docs/cost_model.md,
Outside of kernels), and kernels of NKI as everywhere.
"""

from dataclasses import replace
from pathlib import Path

from harness import console
from harness.errors import UserError
from harness.figures.estimate import Estimates, Estimator, GraphEstimate, events_of, overheads
from harness.figures.graphs import DECODE, PREFILL
from harness.settings import Settings
from neuron_cpu.errors import CompileError
from neuron_cpu.files import read_plain
from neuron_cpu.hlo import execute, record

MOST_BYTES = 1 << 28  # of a graph, whose weights are not in it


def estimates(settings: Settings, folder: Path, dma_profile: str) -> Estimates:
    """The largest graphs of each kind, prompts first.

    Raises:
        UserError: the folder has no graphs, or one that cannot be read or timed.
    """
    files = sorted(folder.glob("*.neff"))
    if not files:
        raise UserError(
            f"{folder} has no .neff file, expected a folder that model.save(FOLDER) of "
            "Transformers NeuronX wrote; name that folder."
        )
    found: dict[str, GraphEstimate] = {}
    with console.step("Scheduling the saved graphs", len(files)) as step:
        for file in files:
            try:
                graph = _estimate(settings, read_plain(file, MOST_BYTES), dma_profile)
            except (CompileError, ValueError, OSError) as error:
                raise UserError(f"{file.name}: {error}") from error
            except (LookupError, StopIteration) as error:
                raise UserError(
                    f"{file.name}: the parts of the graph do not fit each other, expected what "
                    "`save` wrote; save the model again."
                ) from error
            known = found.setdefault(graph.submodel, graph)
            if graph.bucket + graph.prior >= known.bucket + known.prior:
                found[graph.submodel] = graph
            step.advance()
    return Estimates(sorted(found.values(), key=lambda g: (g.submodel == DECODE, g.submodel)))


def _estimate(settings: Settings, neff: bytes, dma_profile: str) -> GraphEstimate:
    """One execution of a graph on each rank."""
    module = execute.module_of(neff)
    call = record.call_of(module)
    tag = PREFILL if call.tokens > 1 else DECODE
    estimator = Estimator(dma_profile, overheads(settings), call.ranks, samples=not call.logits)
    bucket = call.tokens if call.tokens > 1 else max(call.cached, 1)
    made = estimator.graph(tag, bucket, call.batch, events_of(record.record(module)), call.logits)
    if call.name != record.WHOLE:
        return replace(made, submodel=call.name)
    return replace(made, prior=max(call.cached - bucket, 0))
