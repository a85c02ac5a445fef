"""A report as one page of Markdown: what it says, in three sentences and then in tables."""

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from lab.device.plan import CONSTRUCT, DEVICE, KERNEL, SECONDS
from lab.device.rows import ROWS

STEP = "decode_step_kernel"  # of `models/step.py`
SECOND_PLACE_MS = 7.59  # a decode step of the contest's, in the header of its file


def page(report: Mapping[str, Any]) -> str:
    """The whole page."""
    parts = ["# Report of a device", *sentences(report), "## Machine"]
    machine = {"begun": report["begun"], **report["machine"]}
    for name, told in machine.items():  # packages by their version
        machine[name] = ", ".join(map(" ".join, told.items())) if isinstance(told, dict) else told
    parts.append("\n".join(f"- {name}: {told}" for name, told in machine.items()))
    for kind in SECONDS:
        rows = [_row(name, entry) for name, entry in _of(report, kind)]
        if rows:
            parts += [f"## Entries: {kind}", _table(rows, *_HEADS)]
    parts += constants(report.get("fit") or {})
    return "\n\n".join(parts) + "\n"


def sentences(report: Mapping[str, Any]) -> list[str]:
    """The three that matter: are estimates right, is it fast, is it legal."""
    told = (
        "A rehearsal: no device was there. Times are the cost model's, and answers the simulator's."
    )
    return [*[told] * (report["source"] != DEVICE), _right(report), _fast(report), _legal(report)]


def _of(report: Mapping[str, Any], kind: str) -> list[tuple[str, Mapping[str, Any]]]:
    return [(name, entry) for name, entry in report["entries"].items() if entry["kind"] == kind]


def _right(report: Mapping[str, Any]) -> str:
    timed = [e for e in report["entries"].values() if e.get("us") and e.get("estimate")]
    timed = [e for e in timed if e["kind"] == KERNEL] or timed
    if not timed:
        return "Nothing was measured that has an estimate."
    middle = statistics.median(e["estimate"]["us"] / e["us"]["p50"] for e in timed)
    bands = ((e["us"]["p50"], *e["estimate"]["band_us"]) for e in timed)
    inside = sum(low <= us <= high for us, low, high in bands)
    changed = (report.get("fit") or {}).get("mechanisms")
    told = f" The fit finds another mechanism: {', '.join(changed)}." if changed else ""
    what = "kernels" if timed[0]["kind"] == KERNEL else "small kernels and graphs"
    return (
        f"Of {what}, the median estimate is {middle:.2f} of the measured time, and {inside} of "
        f"{len(timed)} times lie in their bands.{told}"
    )


def _fast(report: Mapping[str, Any]) -> str:
    us = report["entries"].get("whole graphs of 640", {}).get("us", {}).get("decode p50")
    if us is not None:
        side = "below" if us / 1e3 < SECOND_PLACE_MS else "above"
        return (
            f"A decode step behind 640 tokens takes {us / 1e3:.2f} ms with the host, {side} the "
            f"{SECOND_PLACE_MS} ms of the contest's second place on a trn1."
        )
    for name, entry in report["entries"].items():
        if name.startswith(STEP) and name.endswith("decode-640") and entry.get("us"):
            ms = entry["us"]["p50"] / 1e3
            return f"A decode step behind 640 tokens takes {ms:.2f} ms as one kernel on one rank."
    return "No whole decode step was measured."


def _legal(report: Mapping[str, Any]) -> str:
    tried = _of(report, CONSTRUCT)
    seen = {c for _, entry in tried if "equal" in entry for c in entry["constructs"] or ()}
    refused = [n.removeprefix("construct ") for n, e in tried if e["status"] == "refused"]
    wrong = [n for n, e in report["entries"].items() if e["status"] == "wrong"]
    named = f" ({', '.join(refused)})" if refused else ""
    told = (
        f"The compiler refuses {len(refused)} of {len(tried)} probes of constructs{named}, and "
        f"{len(seen)} constructs are seen now. " * bool(tried)
    )
    return f"{told}Results that are not the simulator's: {', '.join(wrong) or 'none'}."


# --- tables ---------------------------------------------------------------------------------------
_HEADS = ("name", "outcome", "estimated µs", "band", "estimated/measured", "note")


def _table(rows: Iterable[Sequence[object]], *heads: str) -> str:
    cells = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(str(c).replace('|', '/') for c in row)} |" for row in cells)


def _row(name: str, entry: Mapping[str, Any]) -> Sequence[object]:
    """One entry: what was measured beside what was expected, or what the compiler said."""
    isolates = ROWS[name].isolates if name in ROWS else ""
    note = entry.get("words") or isolates or "; ".join(entry.get("constructs") or ())
    if "equal" in entry:
        claim = ", claimed to the bit" if entry["exact"] else ""
        note += f" {entry['equal']:.2%} equal, error {entry['error']:.1e}{claim}"
        for side in ("device", "simulator"):
            if f"{side} to fp32" in entry:
                note += f", {side} to fp32 {entry[f'{side} to fp32']:.1e}"
        if "no fp32" in entry:
            note += f", not compared with fp32 ({entry['no fp32']})"
    for phase, expected in entry.get("expected", {}).items():
        told = f"{expected:.0f} µs estimated without the host" if expected else "no estimate"
        note += f" {phase}: {told}"
    us, estimate = entry.get("us"), entry.get("estimate")
    seen = (entry["kind"], entry["status"]) == (CONSTRUCT, "measured")
    status = "seen" if seen else entry["status"]
    told = ", ".join(f"{p} {t:.1f} µs" for p, t in us.items()) if us else status
    if not us or not estimate:
        return name, told, "", "", "", note
    low, high = estimate["band_us"]
    ratio = f"{estimate['us'] / us['p50']:.2f}"
    return name, told, f"{estimate['us']:.1f}", f"{low:.1f} to {high:.1f}", ratio, note


def constants(found: Mapping[str, Any]) -> Iterator[str]:
    if not found:
        return
    yield "## Constants fitted to the small kernels and graphs"
    rows = [
        (
            name,
            f"{one['before']:.5g}",
            f"{one['value']:.5g}",
            f"{one['error']:.2g}",
            "yes" if one["told"] else f"no: {', '.join(one['trades_with']) or 'too small'}",
        )
        for name, one in found["constants"].items()
    ]
    yield _table(rows, "constant", "cost model", "fitted", "two standard deviations", "told apart")
    changed = ", ".join(found["mechanisms"]) or "none"
    off = ", ".join(found["unexplained"]) or "none"
    alike = ", ".join(found.get("alike", ())) or "none"
    yield (
        f"Mechanisms that differ from the cost model's: {changed}. Mechanisms that explain the "
        f"times as well, so that these do not tell them: {alike}. Rows not explained: {off}."
    )
