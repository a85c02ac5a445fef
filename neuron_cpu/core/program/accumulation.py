"""Tracks the parts of a PSUM tile into which matmuls have begun to accumulate.

On this core the first matmul of an accumulation group overwrites and the others add, so kernels
begin with ``nl.zeros`` and never pay for a fill. That holds only while nobody looks at a part that
no matmul has written: then the fill is a real instruction after all.
"""

import numpy as np

from ..device.errors import refuse
from .regions import window
from .view import View

WHOLE: tuple = ("whole",)


class Groups:
    """The accumulation groups of one PSUM tile: regions, or a map of elements.

    Attributes:
        zeroed: the tile begins as zeros, so a read of what nothing wrote needs them.
        needs_zeros: there was such a read.
        others: elements that something else than a matmul wrote; True: all, False: none.
        only_zeros: everything that no matmul wrote was a fill with zeros.
        sums: regions of more than one product, by key.
        first: the only region of each block so far, while there is no map.
    """

    __slots__ = (
        "first",
        "flat",
        "keys",
        "needs_zeros",
        "only_zeros",
        "others",
        "size",
        "sums",
        "zeroed",
    )

    def __init__(self, size: int, zeroed: bool) -> None:
        self.keys: set[tuple] = set()
        self.size, self.zeroed = size, zeroed
        self.needs_zeros = False
        self.only_zeros = True
        # Most tiles have one group; the map is made for a second one, or for parts of the first.
        self.first: dict[int, View] = {}
        self.flat: np.ndarray | None = None
        self.others: np.ndarray | bool = False
        self.sums: dict[tuple, View] = {}

    def refine(self, parts: int) -> None:
        """Count every element as several: the memory is read as a narrower type, too."""
        self.flat = self._map().repeat(parts) if self.keys else None
        self.size *= parts
        if not isinstance(self.others, bool):
            self.others = self.others.repeat(parts)
        if self.keys:  # regions are named otherwise now
            self.keys = {WHOLE}
        self.sums.clear()

    def before_read(self, view: View) -> None:
        """Note that an instruction reads ``view``."""
        if not self.needs_zeros and not self._covers(view.grounded()):
            self.needs_zeros = self.zeroed

    def begin(self, view: View) -> bool:
        """Note that a matmul accumulates into ``view``; True when it is the first to do so."""
        view = view.grounded()
        if self._covers(view):
            return False
        if not self._add(view):
            raise refuse(
                "sim_accumulation_region",
                f"matmul accumulates into a region of {view.storage.label()} that an earlier one "
                "covered in part, expected the same or a disjoint region; use one PSUM tile for "
                "each accumulation group",
            )
        return True

    def written(self, view: View, by_matmul: bool = False, zeros: bool = False) -> None:
        """Note a write that is no accumulation, or a fill with zeros; matmuls there add to it.

        Over zeros it has to respect the groups, as a matmul would; a tile without initial value,
        which the kernel has placed itself, may be written anywhere.
        """
        view = view.grounded()
        self.only_zeros &= by_matmul or zeros
        if view.is_full():
            self.others = not by_matmul
        elif self.others is not False or not by_matmul:
            if isinstance(self.others, bool):
                self.others = np.full(self.size, self.others)
            window(self.others, view)[...] = not by_matmul
        if self.zeroed:
            self.begin(view)
        elif not self._covers(view) and not self._add(view):
            window(self._map(), view)[...] = True
            self.keys.add(view.key())

    def holds_other(self, view: View) -> bool:
        """True where something else than a matmul wrote an element of the region."""
        if isinstance(self.others, bool):
            return self.others
        return bool(window(self.others, view.grounded()).any())

    def sums_beside(self, view: View) -> bool:
        """Note that a product adds to ``view``; True where products add to another part, too."""
        view = view.grounded()
        key = view.key()
        if key in self.sums:
            return False
        here = np.zeros(self.size, bool)
        window(here, view)[...] = True
        beside = any(not window(here, other).any() for other in self.sums.values())
        self.sums[key] = view
        return beside

    def missing(self, view: View) -> np.ndarray | None:
        """Which elements no product has begun, where they are some but not all; None otherwise."""
        ground = view.grounded()
        if self._covers(ground) or not self.keys:
            return None
        parts = window(self._map(), ground).reshape((*view.shape, -1))
        begun: np.ndarray = parts.max(axis=-1)
        return ~begun if begun.any() else None

    def _covers(self, view: View) -> bool:
        if (view.offset, view.shape, view.strides) in self.keys:
            return True
        if self.flat is None:
            blocks, whole = view.blocks(), view.storage.size // view.storage.tiles
            found = [self.first[number] for number in blocks if number in self.first]
            if len(found) < len(blocks):
                return False
            if all(one.size == whole and 0 not in one.strides for one in found):
                return True
        return bool(window(self._map(), view).all())

    def _add(self, view: View) -> bool:
        """Note a region; False where it overlaps an earlier one in part."""
        block, *more = view.blocks()
        if self.flat is None and not more and block not in self.first:
            self.first[block] = view
        else:
            elements = window(self._map(), view)
            if elements.any():
                return False
            elements[...] = True
        self.keys.add(view.key())
        return True

    def _map(self) -> np.ndarray:
        """The map of elements that belong to regions."""
        if self.flat is None:
            self.flat = np.zeros(self.size, bool)
            for region in self.first.values():
                window(self.flat, region)[...] = True
        return self.flat
