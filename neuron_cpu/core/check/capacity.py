"""On-chip memory that a program needs at its worst point, by liveness over its instructions.

A tile lives from its first to its last access. One that a loop did not create lives through the
whole loop if the loop touches it, because the device runs the loop as a loop. Tiles made inside an
iteration die with it: overlap of iterations is the compiler's choice and takes only what is free.
Each block of a tensor with block axes is a tile of its own, and one that a single iteration touches
lives no longer than that iteration: public kernels declare more blocks than memory has room for,
and ran. A tile takes its bytes on every partition. In PSUM no tile crosses a bank, but small tiles
share one: public kernels with published times keep 512 accumulators of one column. Limits: spec.py.

Tiles that exceed a memory are a warning, as the compiler spills to HBM; NKI_CPU_STRICT=1 refuses.
"""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable, Mapping
from heapq import heappop, heappush
from itertools import groupby

import numpy as np

from ..device.errors import refuse, warn
from ..device.spec import CORE, KIB
from ..program.program import Program
from ..program.regions import place
from ..program.storage import Frame, Loop, Storage

LISTED = 6  # tensors that a refusal names, largest first
Span = tuple[int, int]  # first and last instruction number
Block = tuple[Storage, int]  # a tile: its tensor, and its number in row-major order of the blocks
Spans = dict[Block, Span]


def check_capacity(program: Program) -> None:
    """Warn of programs whose live tiles exceed SBUF or PSUM: on a device they spill.

    Raises:
        NkiError: under NKI_CPU_STRICT=1, or where the kernel places its tensors itself:
            ``sim_sbuf_capacity`` or ``sim_psum_capacity``, with the largest live tiles.
    """
    spans = live_spans(program)
    most, at = sbuf_peak(program, spans)
    if most > CORE.sbuf_usable_bytes:
        _check_single_instructions(program)
        _exceeded(
            program,
            "sim_sbuf_capacity",
            f"live SBUF tensors need {most} bytes per partition, expected at most "
            f"{CORE.sbuf_usable_bytes} ({CORE.sbuf_usable_bytes // KIB} KiB), the rest is "
            "spilled to HBM and read back; tile the free axis or create tensors inside the loop "
            f"that uses them; at this line live: {_largest(_live(spans, 'sbuf', at))}",
            at,
        )
    most, at = psum_peak(program, spans)
    if most > CORE.psum_banks:
        _exceeded(
            program,
            "sim_psum_capacity",
            f"live PSUM tensors need {most} banks, expected at most {CORE.psum_banks} of "
            f"{CORE.psum_bank_bytes} bytes per partition, the rest is copied out and back; "
            "copy results to SBUF earlier or accumulate fewer tiles at a time; at this line live: "
            f"{_largest(_live(spans, 'psum', at))}",
            at,
        )


def _check_single_instructions(program: Program) -> None:
    """Warn of an instruction that has no room for its own operands, which no spill helps."""
    limit = CORE.sbuf_usable_bytes
    for instruction in program.instructions:
        views = [v for v in (*instruction.dst, *instruction.src) if v.storage.buffer == "sbuf"]
        if sum([v.storage.tile_bytes * len(v.blocks()) for v in views]) <= limit:
            continue  # even if no two share a tile
        tiles = {(view.storage.memory, number) for view in views for number in view.blocks()}
        needed = sum(storage.tile_bytes for storage, _ in tiles)
        if needed > limit:
            columns = max(view.storage.free_size for view in views)
            sbuf = (one for one in program.storages if one.buffer == "sbuf")
            every = {(one.name, one.tile_bytes) for one in sbuf}  # of later lines, too
            parts = -(-sum(size for _, size in every) // limit)
            step = columns >> (parts - 1).bit_length()
            warn(
                "sim_instruction_capacity",
                f"the operands of {instruction.op.name} need {needed} bytes per partition together,"
                f" expected at most {limit}; make tiles of {step} columns, and load x_hbm[:, j:j + "
                f"{step}] for j in range(0, {columns}, {step}), or x_hbm[i] where axis 0 counts "
                "batches",
                place(program, instruction),
            )


def _exceeded(program: Program, identifier: str, message: str, at: int) -> None:
    """Refuse where the kernel places tensors; the compiler can spill others, so warn."""
    where = place(program, program.instructions[at])
    if program.direct_allocation:
        raise refuse(identifier, message, where)
    warn(identifier, message, where)


# --- liveness -------------------------------------------------------------------------------------
def live_spans(program: Program) -> Spans:
    """First and last instruction number of every on-chip tile that is accessed."""
    uses: dict[Block, list[tuple[int, Frame | None]]] = {}  # first and last
    inner: dict[tuple[Loop, Frame | None], list[int]] = {}  # by the iteration around the loop, too
    # One pass notes the accesses, and where each execution of an innermost loop begins and ends.
    before, extent = None, [0, 0]
    for k, instruction in enumerate(program.instructions):
        frame = instruction.frame
        if frame is not None:
            if frame is not before:
                before, extent = frame, inner.setdefault((frame.loop, frame.parent), [k, k])
            extent[1] = k
        entry = (k, frame)
        for view in (*instruction.dst, *instruction.src):
            storage = view.storage
            if storage.on_chip:
                for number in view.blocks():
                    block = storage.ground or storage, number
                    ends = uses.get(block)
                    if ends is None:
                        uses[block] = [entry, entry]
                    else:
                        ends[1] = entry
    extents = _of_all_loops(inner)
    # A loop runs as a loop on the device: what is older than it stays for all of its iterations.
    spans = {}
    for block, ((start, entered), (end, left)) in uses.items():
        storage = block[0]
        home = storage.frame
        if entered is left and (left is home or (storage.paxis and left)):  # one iteration
            spans[block] = (start, end)
            continue
        begun, ended = _outermost(entered, home), _outermost(left, home)
        spans[block] = (
            start if begun is None else extents[begun][0],
            end if ended is None else extents[ended][1],
        )
    return spans


def _of_all_loops(inner: dict[tuple[Loop, Frame | None], list[int]]) -> dict[Loop, list[int]]:
    """First and last instruction of each loop: of those inside of it, too."""
    extents: dict[Loop, list[int]] = {}
    while inner:  # from the innermost ones on
        around: dict[tuple[Loop, Frame | None], list[int]] = {}
        for (loop, parent), (start, end) in inner.items():
            found = [extents.setdefault(loop, [start, end])]
            if parent is not None:
                found.append(around.setdefault((parent.loop, parent.parent), [start, end]))
            for extent in found:
                extent[:] = min(extent[0], start), max(extent[1], end)
        inner = around
    return extents


def _outermost(frame: Frame | None, creator: Frame | None) -> Loop | None:
    """Outermost loop around ``frame`` that lies inside the iteration ``creator``."""
    depth = 0 if creator is None else creator.depth
    if frame is None or frame.depth <= depth:
        return None
    while frame.depth > depth + 1:
        assert frame.parent is not None
        frame = frame.parent
    return frame.loop


def _live(spans: Spans, buffer: str, at: int) -> list[Block]:
    return [t for t, (start, end) in spans.items() if t[0].buffer == buffer and start <= at <= end]


# --- peaks ----------------------------------------------------------------------------------------
def sbuf_peak(program: Program, spans: Spans) -> tuple[int, int]:
    """Most bytes live at once, and the first instruction where they are."""
    if program.direct_allocation:
        return _placed_end(program, "sbuf"), 0
    change = [0] * (len(program.instructions) + 1)
    for (storage, _), (start, end) in spans.items():
        if storage.buffer == "sbuf":
            change[start] += storage.tile_bytes
            change[end + 1] -= storage.tile_bytes
    live = np.cumsum(change)
    at = int(np.argmax(live))
    return int(live[at]), at


def psum_peak(program: Program, spans: Spans) -> tuple[int, int]:
    """Most banks needed at once, and the first instruction where they are."""
    if program.direct_allocation:
        return -(-_placed_end(program, "psum") // CORE.psum_bank_bytes), 0
    # A bank for each tile is an upper bound, and exact for the usual tile of 512 fp32 columns.
    # Live tiles are packed only where that bound exceeds what has been found so far.
    tiles = [
        (*span, tile[0].tile_bytes) for tile, span in spans.items() if tile[0].buffer == "psum"
    ]
    most, where = 0, 0
    live: list[tuple[int, int]] = []  # (last use, bytes), the first to die first
    sizes: Counter[int] = Counter()
    for start, born in groupby(sorted(tiles), key=lambda tile: tile[0]):
        while live and live[0][0] < start:
            sizes[heappop(live)[1]] -= 1
        for _, end, size in born:
            heappush(live, (end, size))
            sizes[size] += 1
        if len(live) > most or max(sizes, default=0) > CORE.psum_bank_bytes:
            bank = CORE.psum_bank_bytes
            full = sum(-(-n // bank) * k for n, k in sizes.items() if n >= bank)
            needed = full + banks({n: k for n, k in sizes.items() if n < bank})
            if needed > most:
                most, where = needed, start
    return most, where


def banks(sizes: Iterable[int] | Mapping[int, int]) -> int:
    """PSUM banks for tiles of these bytes: largest first, each into the fullest bank with room.

    Optimal for sizes that divide each other, such as powers of two; never more than 11/9 of the
    optimum and a bank (best-fit decreasing).
    """
    room: list[int] = []  # bytes left in each bank that has some, in order
    opened, bank = 0, CORE.psum_bank_bytes
    for size, count in sorted(Counter(sizes).items(), reverse=True):
        while count and (at := bisect_left(room, size)) < len(room):
            count -= 1
            insort(room, room.pop(at) - size)
        whole, rest = divmod(count, bank // size)  # new ones take tiles of one size alike
        opened += whole + (rest > 0)
        room += [bank % size] * whole + [bank - rest * size] * (rest > 0)
        room = sorted(filter(None, room))
    return opened


def _placed_end(program: Program, buffer: str) -> int:
    """Bytes up to the end of the last tensor; tensors that the kernel places count even when
    dead."""
    tiles = (t for s in program.storages if s.buffer == buffer for t in s.address or ())
    return max((tile.stop for tile in tiles), default=0)


def _largest(live: list[Block]) -> str:
    """The tensors with the most live bytes: name, place, bytes per partition."""
    taken: Counter[Storage] = Counter()
    for storage, _ in live:
        taken[storage] += storage.tile_bytes
    names = [
        f"{s.label()}{f' (created at {s.source})' if s.source else ''}: {size} bytes"
        for s, size in taken.most_common(LISTED)
    ]
    rest = len(taken) - LISTED
    return ", ".join(names) + (f" and {rest} more" if rest > 0 else "")
