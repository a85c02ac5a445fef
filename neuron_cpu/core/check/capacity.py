"""On-chip memory that a program needs at its worst point, by liveness over its instructions.

A tensor lives from its first to its last access. One that a loop did not create lives through the
whole loop if the loop touches it, because the device runs the loop as a loop. Tensors made inside
an iteration die with it: overlap of iterations is the compiler's choice and takes only what is
free. A tensor takes its bytes on every partition, a PSUM tile whole banks. Limits: spec.py.
"""

from __future__ import annotations

import numpy as np

from ..device.errors import refuse
from ..device.spec import GEN2, KIB
from ..program.program import Program
from ..program.regions import place
from ..program.storage import Frame, Loop, Storage

LISTED = 6  # tensors that a refusal names, largest first


def sbuf_high_water(program: Program) -> int:
    """Most SBUF bytes per partition that are live at once."""
    return _peak(program, "sbuf")[0]


def psum_high_water(program: Program) -> int:
    """Most PSUM banks that are live at once."""
    return _peak(program, "psum")[0]


def check_capacity(program: Program) -> None:
    """Refuse programs whose live tensors exceed SBUF or PSUM.

    Raises:
        NkiError: ``sim_sbuf_capacity`` or ``sim_psum_capacity``, with the largest live tensors.
    """
    spans = live_spans(program)
    for buffer, limit in (("sbuf", GEN2.sbuf_usable_bytes), ("psum", GEN2.psum_banks)):
        most, at = _peak(program, buffer, spans)
        if most > limit:
            raise _refusal(program, buffer, limit, most, at, spans)


def live_spans(program: Program) -> dict[Storage, tuple[int, int]]:
    """First and last instruction number of every on-chip storage that is accessed."""
    first: dict[Storage, tuple[int, Frame | None]] = {}
    last: dict[Storage, tuple[int, Frame | None]] = {}
    extents: dict[Loop, list[int]] = {}
    before: Frame | None = None
    for k, instruction in enumerate(program.instructions):
        frame = instruction.frame
        if frame is not before:
            _note_loops(extents, before, k - 1)
            _note_loops(extents, frame, k)
            before = frame
        entry = (k, frame)
        for view in (*instruction.dst, *instruction.src):
            storage = view.storage
            if storage.on_chip:
                if storage not in first:
                    first[storage] = entry
                last[storage] = entry
            if view.indirect is not None:
                last[view.indirect[0].storage] = entry
    _note_loops(extents, before, len(program.instructions) - 1)
    spans = {}
    for storage, (start, entered) in first.items():
        end, left = last[storage]
        begun = _outermost(entered, storage.frame)
        ended = _outermost(left, storage.frame)
        spans[storage] = (
            start if begun is None else extents[begun][0],
            end if ended is None else extents[ended][1],
        )
    return spans


def _note_loops(extents: dict[Loop, list[int]], frame: Frame | None, k: int) -> None:
    while frame is not None:
        extent = extents.get(frame.loop)
        if extent is None:
            extents[frame.loop] = [k, k]
        else:
            extent[1] = max(extent[1], k)
        frame = frame.parent


def _outermost(frame: Frame | None, creator: Frame | None) -> Loop | None:
    """Outermost loop around ``frame`` that lies inside the iteration ``creator``."""
    depth = 0 if creator is None else creator.depth
    if frame is None or frame.depth <= depth:
        return None
    while frame.depth > depth + 1:
        assert frame.parent is not None
        frame = frame.parent
    return frame.loop


def _units(storage: Storage) -> int:
    """Bytes per partition in SBUF, banks in PSUM."""
    if storage.buffer == "sbuf":
        return storage.partition_bytes
    tile = storage.free_size * storage.dtype.itemsize
    return storage.partition_bytes // tile * -(-tile // GEN2.psum_bank_bytes)


def _peak(
    program: Program, buffer: str, spans: dict[Storage, tuple[int, int]] | None = None
) -> tuple[int, int]:
    """Most units live at once, and the first instruction where they are.

    Tensors that the kernel has placed itself count by where they end, live or not.
    """
    if program.direct_allocation:
        tiles = [t for s in program.storages if s.buffer == buffer for t in s.address or ()]
        end = max((t.stop for t in tiles), default=0)
        return (end if buffer == "sbuf" else -(-end // GEN2.psum_bank_bytes)), 0
    spans = live_spans(program) if spans is None else spans
    change = np.zeros(len(program.instructions) + 1, np.int64)
    for storage, (start, end) in spans.items():
        if storage.buffer == buffer:
            units = _units(storage)
            change[start] += units
            change[end + 1] -= units
    live = np.cumsum(change)
    at = int(np.argmax(live))
    return int(live[at]), at


def _refusal(
    program: Program,
    buffer: str,
    limit: int,
    most: int,
    at: int,
    spans: dict[Storage, tuple[int, int]],
) -> Exception:
    live = [s for s, (start, end) in spans.items() if s.buffer == buffer and start <= at <= end]
    live.sort(key=_units, reverse=True)
    unit = "bytes per partition" if buffer == "sbuf" else "banks"
    names = ", ".join(
        f"{s.label()}{f' (created at {s.source})' if s.source else ''}: {_units(s)}"
        for s in live[:LISTED]
    )
    rest = len(live) - LISTED
    names += f" and {rest} more" if rest > 0 else ""
    what = "SBUF" if buffer == "sbuf" else "PSUM"
    mend = (
        "tile the free axis or create tensors inside the loop that uses them"
        if buffer == "sbuf"
        else "copy results to SBUF earlier or accumulate fewer tiles at a time"
    )
    size = f"{limit} {unit}" + (f" ({limit // KIB} KiB)" if buffer == "sbuf" else "")
    return refuse(
        "sim_sbuf_capacity" if buffer == "sbuf" else "sim_psum_capacity",
        f"live {what} tensors need {most} {unit}, expected at most {size}; {mend}; at this line "
        f"live: {names}",
        place(program, program.instructions[at]),
    )
