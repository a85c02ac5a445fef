"""Owners of the cache's blocks, and blocks shared by equal prefixes. An answer takes all blocks
that it may ever fill when it begins, so none stops half-way. Where too few are free it waits, and
all behind it wait, so that nobody is overtaken for ever. When an answer ends its full blocks stay
known by their tokens, until somebody needs the room; the block used longest ago goes first. Their
contents are compared token by token.
"""

import collections
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

# What a block holds: its tokens, and the serial number of the block before, of the adapter at the
# beginning. Serial numbers are never used again, so what follows a forgotten block is not found.
_Key = tuple[int, tuple[int, ...]]


@dataclass(frozen=True)
class Lease:
    """The blocks of one answer.

    Attributes:
        blocks: in the order of its tokens.
        computed: tokens at the beginning that they hold already, whole blocks.
        adapter: number of the one with which they are computed.
    """

    blocks: tuple[int, ...]
    computed: int
    adapter: int


class BlockPool:
    """Blocks of `size` tokens, from 0 to `count` - 1; `shares`: prefixes are kept and found."""

    def __init__(self, count: int, size: int, shares: bool) -> None:
        self.count, self.size, self._shares = count, size, shares
        self.asked = self.found = 0  # tokens of prompts, and those of them that were cached
        self._serials = itertools.count(1)
        self.forget()

    def forget(self) -> None:
        """All blocks are free, and nothing is known of them."""
        self._free = list(range(self.count - 1, -1, -1))
        self._users = [0] * self.count
        self._of_key: dict[_Key, int] = {}
        self._known: dict[int, tuple[_Key, int]] = {}  # block -> what it holds, its serial number
        self._idle: collections.OrderedDict[int, None] = collections.OrderedDict()  # oldest first

    def take(self, ids: Sequence[int], most: int, adapter: int) -> Lease | None:
        """Blocks for a prompt and at most `most` new tokens; None where too few are free.

        At least the prompt's last token is computed, because its logits are needed.
        """
        shared = self._prefix(ids[:-1], adapter) if self._shares else []
        needed = -(-(len(ids) + most) // self.size) - len(shared)
        idle = len(self._idle) - sum(block in self._idle for block in shared)
        if needed > len(self._free) + idle:
            return None
        for block in shared:
            self._users[block] += 1
            self._idle.pop(block, None)
        own = [self._one() for _ in range(needed)]
        self.asked += len(ids) if self._shares else 0
        self.found += len(shared) * self.size
        return Lease((*shared, *own), len(shared) * self.size, adapter)

    def fill(self, lease: Lease, tokens: Sequence[int]) -> None:
        """The cache holds the keys of these tokens now: others may share its full blocks."""
        if not self._shares:
            return
        serial = -1 - lease.adapter
        for at, block in enumerate(lease.blocks[: len(tokens) // self.size]):
            key = (serial, tuple(tokens[at * self.size : (at + 1) * self.size]))
            if block not in self._known and key not in self._of_key:
                self._of_key[key], self._known[block] = block, (key, next(self._serials))
            # another block may hold the same, computed at the same time: it is the one to follow
            if key not in self._of_key:  # it was, and is gone
                break
            serial = self._known[self._of_key[key]][1]

    def give_back(self, lease: Lease) -> None:
        """An answer's end: blocks that hold a prefix stay known, the last ones go first."""
        for block in reversed(lease.blocks):
            self._users[block] -= 1
            if self._users[block] == 0 and block in self._known:
                self._idle[block] = None
            elif self._users[block] == 0:
                self._free.append(block)

    def state(self) -> dict[str, Any]:
        """Numbers for the page and for monitoring."""
        idle, free = len(self._idle), len(self._free)
        return {
            "size": self.size,
            "total": self.count,
            "used": self.count - idle - free,
            "kept": idle,
            "free": free,
            "asked_tokens": self.asked,
            "found_tokens": self.found,
        }

    def _prefix(self, ids: Sequence[int], adapter: int) -> list[int]:
        """The known blocks that hold the beginning of some tokens."""
        serial, found = -1 - adapter, []
        for start in range(0, len(ids) - self.size + 1, self.size):
            block = self._of_key.get((serial, tuple(ids[start : start + self.size])))
            if block is None:
                break
            found.append(block)
            serial = self._known[block][1]
        return found

    def _one(self) -> int:
        """A block for new tokens."""
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._idle.popitem(last=False)
            del self._of_key[self._known.pop(block)[0]]
        self._users[block] = 1
        return block
