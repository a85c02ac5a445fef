"""A device's report becomes a profile of the cost model, or is compared with another one.

    python -m lab.device_profile REPORT [--name trn1-2026-11] [--write] [--against REPORT]

Constants are fitted to the report's times (lab/device/fit.py). ``--write`` adds them as a DMA
profile, which other profiles are never replaced by, and makes the devices of
lab/docs/calibration.md and the estimates' bands anew; rows of a device are of the class
``device``. A rehearsal is refused.
"""

import argparse
import math
import os
import sys
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any
from unittest import mock

from neuron_cpu import ensure_sdk

ensure_sdk()
from harness.errors import UserError  # noqa: E402
from harness.simulator import NkiError  # noqa: E402
from lab import DATA, calibrate, pages  # noqa: E402
from lab import calibration_rows as public_rows  # noqa: E402
from lab.device import fit, model, page, plan, results  # noqa: E402
from neuron_cpu.core.report import bands  # noqa: E402
from neuron_cpu.core.time import cost  # noqa: E402

TIMED = (plan.CONSTANT, plan.LAUNCH, plan.KERNEL)
REPORTS = DATA / "devices"  # whole reports, by the profile's name
APART = 1.05  # two devices' times that differ by less are the same


def on_target(report: Mapping[str, Any]) -> Any:
    """Inside the block kernels are traced for the chip of a report."""
    target = {"NEURON_PLATFORM_TARGET_OVERRIDE": report["machine"]["target"]}
    return mock.patch.dict(os.environ, target)


def estimates(report: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, float]:
    """Microseconds of a report's timed entries that there are still, under a fit's constants."""
    profile = cost.read_profile(fit.profile_of(found, "fitted", ""))
    costs = {name: found["constants"][name]["value"] for name in model.OVERHEADS}
    every = plan.entries(report.get("graphs", {}), results.of_today(report))
    entries = {entry.name: entry for entry in every}
    with on_target(report), mock.patch.dict(cost.PROFILES, {profile.name: profile}):
        return {
            name: model.graph_ns(entries[name].call, costs, profile.name, found["order"]) / 1e3
            for name in entries.keys() & results.measured(report, *TIMED)
        }


def table(reports: Mapping[str, Mapping[str, Any]]) -> str:
    """Markdown: every device's times beside both estimates."""
    lines = ["| Device | what | class | measured µs | estimated µs | under its profile µs |"]
    lines.append("|---|---|---|---:|---:|---:|")
    for name, report in reports.items():
        after = estimates(report, report["fit"])
        for entry in sorted(after):
            us, told = report["entries"][entry]["us"]["p50"], report["entries"][entry]["estimate"]
            before = (told or {"us": math.nan})["us"]
            times = f"{us:.1f} | {before:.1f} | {after[entry]:.1f}"
            lines.append(f"| {name} | {entry} | device | {times} |")
    return "\n".join(lines)


def outcomes(name: str, report: Mapping[str, Any]) -> Iterator[calibrate.Outcome]:
    """The kernels of a device as rows of the calibration."""
    own: dict[str, Any] = dict.fromkeys(
        (f.name for f in fields(public_rows.Row) if f.default is MISSING), name
    )
    for entry, us in results.measured(report, plan.KERNEL).items():
        told = report["entries"][entry]["estimate"]
        row = public_rows.Row(**{**own, "id": f"{name} {entry}", "measured_us": us})
        yield calibrate.Outcome(row, told["us"], told["class"])


def write(name: str, report: dict[str, Any]) -> None:
    """The profile, the report, the page's table and the bands."""
    note = f"constants fitted to times of a {report['machine']['instance']}, {report['begun']}"
    profile = fit.profile_of(report["fit"], name, note)
    for folder, told in ((REPORTS, report), (cost.MEASURED, profile)):
        folder.mkdir(exist_ok=True)
        results.write(folder / f"{name}.json", told)
    every = {path.stem: results.read(path) for path in sorted(REPORTS.glob("*.json"))}
    pages.publish(calibrate.DOCUMENT, "devices", table(every))
    rows = [calibrate.on_page(row) for row in public_rows.rows()]
    rows += [one for held, found in every.items() for one in outcomes(held, found)]
    results.write(bands.DATA, calibrate.band_data(rows))


def compare(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """Markdown: times and constants of two reports that differ."""
    lines = []
    first, second = (
        results.measured(report, *TIMED)
        | {n: c["value"] for n, c in constants.items() if c["told"]}
        for report in (one, other)
        for constants in [(report.get("fit") or {}).get("constants", {})]
    )
    for name in first.keys() & second.keys():
        ratio = second[name] / (first[name] or math.inf)
        if ratio and not 1 / APART <= ratio <= APART:
            lines.append(f"| {name} | {first[name]:.5g} | {second[name]:.5g} | {ratio:.2f} |")
    heads = ["| What | first | second | second/first |", "|---|---:|---:|---:|"]
    return "\n".join(heads + sorted(lines))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("report", type=Path, help="of -m lab.device_report")
    parser.add_argument("--name", help="of the profile (default: the instance and the month)")
    parser.add_argument("--write", action="store_true", help="add the profile, table and bands")
    parser.add_argument("--against", type=Path, help="another report, to compare with")
    args = parser.parse_args()
    warnings.simplefilter("ignore")  # a row spills on purpose
    try:
        report = results.read(args.report)
        if report["source"] != results.DEVICE:
            parser.error(f"{args.report} is a rehearsal without a device; measure on one")
        other = results.read(args.against) if args.against is not None else None
        name = args.name or f"{report['machine']['target']}-{report['begun'][:7]}"
        if args.write and name in cost.PROFILES:
            raise UserError(f"Profile {name} exists, expected a new one; give another --name.")
        times = results.measured(report, plan.CONSTANT, plan.LAUNCH)
        with on_target(report):
            report["fit"] = fit.fit(times, results.of_today(report))
        fitted = "\n\n".join(page.constants(report["fit"]))
        print(compare(report, other) if other is not None else fitted)
        if args.write:
            write(name, report)
    except UserError as error:
        parser.error(str(error))
    except (NkiError, *results.MALFORMED) as error:  # reports may be strangers'
        parser.error(f"nothing can be fitted to {args.report} ({type(error).__name__}: {error})")
    return 0


if __name__ == "__main__":
    sys.exit(pages.written(main))
