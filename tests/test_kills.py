"""Commands that are killed at random moments: nothing lost, nothing left, the next start right."""

from __future__ import annotations

import os
from typing import Any

import pytest

from tests import kills

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not os.path.exists("/proc"), reason="children are found in /proc"),
]
TIMES = int(os.environ.get("KILLS", str(kills.BLOCK)))  # of each command; docs/strangers.md has 20


@pytest.mark.parametrize("name", kills.commands())
def test_a_kill_loses_and_leaves_nothing(name, tmp_path):
    done: dict[str, Any] = {}
    for number in range(-(-TIMES // kills.BLOCK)):
        assert len(kills.block(name, tmp_path / "place", number, done)) == kills.BLOCK
