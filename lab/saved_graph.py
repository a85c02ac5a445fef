"""The estimated time of a graph that Transformers NeuronX saved (`model.save(FOLDER)`).

    python -m lab.saved_graph FILE.neff --tp-degree N [--batch B] [--prompt TOKENS]

Nothing is run: operators of HLO are timed as PyTorch's that do the same work (docs/cost_model.md,
Outside of kernels), so the estimate is of the same kind as that of `main.py --mode profile`. A
kernel of NKI is refused: a saved graph has none of its instructions.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import neuron_cpu

neuron_cpu.ensure_sdk()

from harness.figures.estimate import Estimator, GraphEstimate, events_of  # noqa: E402
from harness.figures.graphs import DECODE, PREFILL  # noqa: E402
from harness.output import profile_report  # noqa: E402
from harness.simulator import COMPILER_ORDER, cost  # noqa: E402
from neuron_cpu.console import terminal  # noqa: E402
from neuron_cpu.console.arguments import positive  # noqa: E402
from neuron_cpu.errors import StandInError  # noqa: E402
from neuron_cpu.hlo import execute, record  # noqa: E402


def estimate(neff: bytes, ranks: int, batch: int = 1, prompt: int = 0) -> GraphEstimate:
    """The estimate of one execution on each of `ranks`, of a step or a prompt of `prompt` tokens.

    Raises:
        CompileError: no graph of ours, or one with a part that cannot be timed.
    """
    tag = PREFILL if prompt else DECODE
    found = record.record(execute.module_of(neff), tag, prompt or 1)
    estimator = Estimator(cost.DEFAULT_PROFILE, cost.Overheads(), ranks)
    return estimator.graph(tag, prompt or 1, batch, events_of(found))


def main() -> int:
    """Print the tables of one graph; 2 where the file is refused."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, help="a .neff that `save` wrote")
    parser.add_argument("--tp-degree", type=positive, required=True, help="ranks")
    parser.add_argument("--batch", type=positive, default=1, help="sequences (default: 1)")
    parser.add_argument("--prompt", type=positive, default=0, help="tokens of a prompt's graph")
    asked = parser.parse_args()
    try:
        made = estimate(asked.file.read_bytes(), asked.tp_degree, asked.batch, asked.prompt)
    except (OSError, StandInError) as error:
        parser.error(str(error))
    profile_report.show([made], cost.DEFAULT_PROFILE, COMPILER_ORDER, terminal.output(120))
    return 0


if __name__ == "__main__":
    sys.exit(main())
