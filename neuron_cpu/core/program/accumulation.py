"""Tracks the parts of a PSUM tile into which matmuls have begun to accumulate.

On this core the first matmul of an accumulation group overwrites and the others add, so kernels
begin with ``nl.zeros`` and never pay for a fill. That holds only while nobody looks at a part that
no matmul has written: then the fill is a real instruction after all.
"""

import math
from itertools import chain

import numpy as np

from ..device.errors import refuse
from .regions import box_of, contains, overlap, window
from .view import View

WHOLE: tuple = ("whole",)
FEW = 16  # regions of a block that are compared one by one


class Groups:
    """The accumulation groups of one PSUM tile: regions, or a map of elements.

    Attributes:
        zeroed: the tile begins as zeros, so a read of what nothing wrote needs them.
        needs_zeros: there was such a read.
        others: elements that something else than a matmul wrote; True: all, False: none.
        only_zeros: everything that no matmul wrote was a fill with zeros.
        sums: regions of more than one product, by key.
        regions: of each block, disjoint, while there is no map.
    """

    __slots__ = (
        "flat",
        "keys",
        "needs_zeros",
        "only_zeros",
        "others",
        "regions",
        "size",
        "sums",
        "zeroed",
    )

    def __init__(self, size: int, zeroed: bool) -> None:
        self.keys: set[tuple] = set()
        self.size, self.zeroed = size, zeroed
        self.needs_zeros = False
        self.only_zeros = True
        # Most tiles have few groups; the map is made for many, and for parts of several.
        self.regions: dict[int, list[View]] = {}
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

    def goes_on(self, view: View) -> bool:
        """True where products alone wrote, and one of them wrote this very region."""
        products = self.others is False and view.storage.ground is view.by_data is None
        return products and (view.offset, view.shape, view.strides) in self.keys

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
        beside = any(not overlap(box_of(view), box_of(other)) for other in self.sums.values())
        self.sums[key] = view
        return beside

    def missing(self, view: View) -> np.ndarray | None:
        """Which elements no product has begun, where they are some but not all; None otherwise."""
        ground = view.grounded()
        if not self.keys or self._relation(ground) is not None:
            return None
        begun: np.ndarray = window(self._map(), ground).reshape((*view.shape, -1)).max(axis=-1)
        return ~begun if begun.any() and not begun.all() else None

    def _relation(self, view: View) -> bool | None:
        """True in one region, False where no box of one is met; None: elements may tell."""
        if (view.offset, view.shape, view.strides) in self.keys:
            return True
        if self.flat is not None:
            return None
        known = [self.regions.get(block, ()) for block in view.blocks()]
        whole = view.storage.size // view.storage.tiles
        sizes = [0 if 0 in one.strides else one.size for some in known for one in some]
        if not sizes or sizes.count(whole) == len(known):
            return bool(sizes)
        own = box_of(view)
        for one in known[0] if len(known) == 1 else ():
            box = box_of(one)
            if overlap(box, own):
                dense = 0 not in one.strides and one.size == math.prod(n - k + 1 for k, n, _ in box)
                return True if dense and contains(box, own) else None
        return False if len(known) == 1 else None

    def _covers(self, view: View) -> bool:
        found = self._relation(view)
        return bool(window(self._map(), view).all()) if found is None else found

    def _add(self, view: View) -> bool:
        """Note a region; False where it overlaps an earlier one in part."""
        block, *more = view.blocks()
        known = self.regions.setdefault(block, [])
        if not more and len(known) < FEW and self._relation(view) is False:
            known.append(view)
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
            for region in chain.from_iterable(self.regions.values()):
                window(self.flat, region)[...] = True
        return self.flat
