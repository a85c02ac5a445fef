"""Shortens recorded calls by what becomes of each element: moves that only rename storage go.

Elements of small tiles are numbered, and every element remembers the call that wrote it. A reader
of a copy reads what was copied; what nobody reads is not written; what is the same in every run is
written once, as long as nobody else writes there.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from numpy.lib.stride_tricks import as_strided

from .calls import MOVES, PRODUCTS, Call, Home, Place
from .packing import element_numbers

LARGEST = 1 << 18  # elements of a memory that is followed
NOBODY, SOMEBODY = -1, -2  # who wrote an element: nobody in this run; a step, or nobody knows
_WIDENED = {torch.bfloat16: torch.float32, torch.float16: torch.float32}


class Elements:
    """The elements of every home as numbers, by what its places have in common."""

    def __init__(self, calls: list[Call], largest: int) -> None:
        # A home has one size of elements, or bf16 as upper halves of fp32; others are not followed.
        sizes: dict[Home, int] = {}
        kinds: dict[Home, set[torch.dtype]] = {}
        self.twins: set[Home] = set()
        for call in calls:
            for place in (*call.places(), *call.results):
                if place.home[0] == "outer":
                    continue
                if place.twin:
                    self.twins.add(place.home)
                kinds.setdefault(place.home, set()).add(place.dtype)
        for call in calls:
            for place in (*call.places(), *call.results):
                if place.home in kinds:
                    last = int(self._last(place))
                    sizes[place.home] = max(sizes.get(place.home, 0), last + 1)
        self.sizes = {
            home: size
            for home, size in sizes.items()
            if size <= largest and (len(kinds[home]) == 1 or home in self.twins)
        }
        self._cache: dict[tuple, np.ndarray] = {}

    def _step(self, place: Place) -> int:
        return 2 if place.home in self.twins and place.dtype is torch.bfloat16 else 1

    def _last(self, place: Place) -> int:
        step = self._step(place)
        reach = sum(s * (n - 1) for s, n in zip(place.strides, place.shape))
        return (place.offset + reach) // step

    def full(self, value: int, dtype: type) -> dict[Home, np.ndarray]:
        """A value for every element of every home."""
        return {home: np.full(size, value, dtype) for home, size in self.sizes.items()}

    def of(self, place: Place) -> np.ndarray | None:
        """The numbers of a place's elements, in its shape; None where they are not followed."""
        if place.home not in self.sizes or 0 in place.shape:
            return None
        found = self._cache.get(place.key)
        if found is None:
            step = self._step(place)
            numbers = np.arange(self.sizes[place.home])
            strides = [8 * s // step for s in place.strides]
            found = as_strided(numbers[place.offset // step :], place.shape, strides)
            self._cache[place.key] = found
        return found


class Flow:
    """Calls with what they read and write, element by element.

    Args:
        largest: elements of the largest memory that is followed.
    """

    def __init__(self, calls: list[Call], largest: int) -> None:
        self.calls, self.elements = calls, Elements(calls, largest)
        self.owner = self.elements.full(NOBODY, np.int32)
        self.written: dict[Home, int] = {}  # by the last call that wrote there, followed or not

    # --- moves ------------------------------------------------------------------------------------
    def forwarded(self) -> list[Call]:
        """Readers of copies read what was copied, where nobody has changed it meanwhile."""
        made: list[Call] = []
        for at, call in enumerate(self.calls):
            if call.func is not None or call.args:
                call = call.with_reads(partial(self._source, call, made))
            made.append(call)
            self._write(at, call)
        return made

    def _write(self, at: int, call: Call) -> None:
        for home in call.touches:
            self.written[home] = at
            if home in self.owner:
                self.owner[home][:] = SOMEBODY
        for place in call.targets:
            numbers = self.elements.of(place)
            self.written[place.memory] = at
            if numbers is not None:
                self.owner[place.home][numbers] = at

    def _source(self, call: Call, made: list[Call], place: Place) -> Place:
        """Where the elements of ``place`` came from, as one view; itself where they are not one."""
        while True:
            before = self._moved(place, made)
            if before is None or not _takes(call, place, before) or self._spoils(call, before):
                return place
            place = before

    def _moved(self, place: Place, made: list[Call]) -> Place | None:
        numbers = self.elements.of(place)
        if numbers is None or place.home not in self.owner:
            return None
        who = self.owner[place.home][numbers]
        writer = int(who.flat[0])
        if writer < 0 or (who != writer).any() or made[writer].name not in MOVES:
            return None
        target, source = made[writer].moved
        exact = source.dtype is target.dtype or _WIDENED.get(source.dtype) is target.dtype
        if not exact:
            return None
        if self.written.get(source.memory, -1) >= writer and self._changed(source, writer):
            return None
        found = self._composed(place, numbers, target, source)
        if found is not None and place.dtype is not target.dtype and found.twin:
            found = found.as_fp32()  # a twin's elements, moved to a twin
        return found

    def _spoils(self, call: Call, source: Place) -> bool:
        """Whether a call writes some of the elements of ``source`` in another order."""
        for place in call.writes:
            if place.memory == source.memory and place.key != source.key:
                mine, read = self.elements.of(place), self.elements.of(source)
                if mine is None or read is None or np.isin(read, mine).any():
                    return True
        return False

    def _changed(self, source: Place, since: int) -> bool:
        """Whether the call `since`, which may copy onto itself, or a later one wrote there."""
        numbers = self.elements.of(source)
        if numbers is None:
            return True
        who = self.owner[source.home][numbers]
        return bool((who >= since).any() or (who == SOMEBODY).any())

    def _composed(
        self, place: Place, numbers: np.ndarray, target: Place, source: Place
    ) -> Place | None:
        into = self.elements.of(target)
        assert into is not None
        shape = target.shape
        lead = len(shape) - len(source.shape)
        if lead < 0:
            return None
        strides = [0] * lead + [0 if n == 1 else s for s, n in zip(source.strides, source.shape)]
        came = np.full(self.elements.sizes[place.home], -1)
        came[into] = element_numbers(source.offset, zip(shape, strides)).reshape(shape)
        found = came[numbers]
        steps = [
            int(np.diff(found, axis=axis).flat[0]) if size > 1 else 0
            for axis, size in enumerate(place.shape)
        ]
        start = int(found.flat[0])
        expected = element_numbers(start, zip(place.shape, steps))
        if min(steps, default=0) < 0 or (found.ravel() != expected).any():
            return None
        strides = [  # axes of one element have any stride: that of a tensor without gaps
            s if n > 1 else max(1, *(t * m for t, m in zip(steps, place.shape)))
            for s, n in zip(steps, place.shape)
        ]
        return source.seen_as(place.shape, tuple(strides), start)

    # --- what nobody reads, and what lasts --------------------------------------------------------
    def lasting(self) -> tuple[list[Call], list[Call]]:
        """(calls to make once, calls to make in every run)."""
        count = self.elements.full(0, np.int32)
        untold = {home for call in self.calls for home in call.touches}
        for call in self.calls:
            for place in call.targets:
                numbers = self.elements.of(place)
                if numbers is None:
                    untold.add(place.home)
                else:
                    count[place.home][numbers] += 1  # of equal numbers one counts
        changes = {p.home for c in self.calls for p in c.targets} | untold
        read = self._read_elements()
        steady: set[int] = set()  # calls
        for at, call in enumerate(self.calls):
            targets = call.targets
            if call.func is None or call.updates or not targets:
                continue
            inputs = [self._steady(place, changes, steady) for place in call.reads()]
            if not all(inputs) or any(p.home in untold or p.home[0] == "outer" for p in targets):
                continue
            if all((count[home][numbers] == 1).all() for home, numbers in read.get(at, {}).items()):
                steady.add(at)
        once = [call for at, call in enumerate(self.calls) if at in steady]
        return once, [call for at, call in enumerate(self.calls) if at not in steady]

    def _steady(self, place: Place, changes: set[Home], steady: set[int]) -> bool:
        if place.home[0] == "outer":
            return False
        if place.home not in changes:
            return True
        who = self.seen.get(id(place))
        return who is not None and all(int(w) in steady for w in np.unique(who))

    def _read_elements(self) -> dict[int, dict[Home, np.ndarray]]:
        """Of every call the elements that somebody reads as it wrote them."""
        owner = self.elements.full(NOBODY, np.int32)
        found: dict[int, dict[Home, list[np.ndarray]]] = {}
        self.seen: dict[int, np.ndarray] = {}
        for at, call in enumerate(self.calls):
            for place in (*call.reads(), *call.updates):
                numbers = self.elements.of(place)
                if numbers is None:
                    continue
                who = owner[place.home][numbers]
                self.seen[id(place)] = who
                for writer in np.unique(who).tolist():
                    part = numbers[who == writer]
                    found.setdefault(writer, {}).setdefault(place.home, []).append(part)
            for home in call.touches:  # a step may read everything there
                if home in owner:
                    for writer in np.unique(owner[home]).tolist():
                        part = np.flatnonzero(owner[home] == writer)
                        found.setdefault(writer, {}).setdefault(home, []).append(part)
                    owner[home][:] = SOMEBODY
            for place in call.targets:
                numbers = self.elements.of(place)
                if numbers is not None:
                    owner[place.home][numbers] = at
        return {
            writer: {
                home: np.concatenate([p.ravel() for p in parts]) for home, parts in homes.items()
            }
            for writer, homes in found.items()
        }

    def needed(self) -> list[Call]:
        """Calls of whose results somebody reads an element."""
        live = self.elements.full(False, bool)
        kept: list[Call] = []
        for call in reversed(self.calls):
            if call.func is not None and all(self._dead(place, live) for place in call.targets):
                continue
            kept.append(call)
            for place in call.targets:
                numbers = self.elements.of(place)
                if numbers is not None and not call.updates:
                    live[place.home][numbers] = False
            for home in call.touches:
                if home in live:
                    live[home][:] = True
            for place in (*call.reads(), *call.updates):
                numbers = self.elements.of(place)
                if numbers is not None:
                    live[place.home][numbers] = True
                elif place.home in live:
                    live[place.home][:] = True
        return kept[::-1]

    def _dead(self, place: Place, live: dict[Home, np.ndarray]) -> bool:
        numbers = self.elements.of(place)
        return numbers is not None and not live[place.home][numbers].any()


def _takes(call: Call, place: Place, source: Place) -> bool:
    """Whether a call may read ``source``, the same numbers, in place of ``place``."""
    if call.name in PRODUCTS:  # BLAS steps through one axis by one
        *_, rows, columns = zip(source.shape, source.strides)
        unit = [(n, s) for n, s in (rows, columns) if s == 1 or n == 1]
        other = max(rows[1], columns[1]) >= min(rows[0], columns[0])
        return place.dtype is source.dtype and bool(unit) and other
    return place.dtype is source.dtype or call.name in MOVES
