"""Measure everything that an hour on a device can settle, into one file.

    python -m lab.device_report [--minutes 60] [--report device-report.json]

Without a device it is a rehearsal: the same calls, answered by the stand-in with estimates.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import neuron_cpu
from harness import console
from harness.errors import is_refusal
from harness.inputs.command_line import Parser
from lab import pages
from lab.device import hour, page
from neuron_cpu.console.arguments import above_zero


def main(argv: Sequence[str] | None = None) -> int:
    """Measure as much as fits into the minutes; print the findings and the report's path."""
    parser = Parser("-m lab.device_report", description=__doc__.splitlines()[0])
    option = parser.add_argument
    option("--minutes", type=above_zero, default=60.0, help="to measure for (default: 60)")
    option(
        "--report",
        type=Path,
        default=Path("device-report.json"),
        help="the file; one that is there is gone on with (device-report.json)",
    )
    asked = parser.parse_args(argv)
    console.say(neuron_cpu.ensure_sdk())
    try:
        report = hour.run(asked.report, asked.minutes)
    except Exception as error:
        if not is_refusal(error) and not isinstance(error, OSError):
            raise
        console.say(f"lab.device_report: {' '.join(str(error).split())}")
        return 2
    print("\n".join(page.sentences(report)))
    console.say(f"Wrote {asked.report} and {asked.report.with_suffix('.md')}")
    return 0


if __name__ == "__main__":
    sys.exit(pages.written(main))
