"""What the driver itself knows of MACs and times: below every honest count, and not far below."""

from __future__ import annotations

from typing import Any

import pytest

from harness.figures import graphs
from harness.figures.graphs import DECODE, PREFILL, Graph, Operator
from harness.processes.worker import Role
from harness.processes.workers import SubmissionFailed
from harness.session.building import construct
from tests.conftest import REPOSITORY
from tests.crossed import full
from tests.tiny_model import opened as tiny

ESTIMATE = "harness.figures.estimate:graph_milliseconds"


@pytest.fixture
def opened(tiny_model, tmp_path):
    def call(*arguments):
        given = "--mode", "evaluate", "--enable-nki", "--llama", REPOSITORY / "llama.py"
        return tiny(tiny_model, tmp_path / "c", *given, *arguments)

    return call


@pytest.mark.parametrize(
    ("role", "arguments"),
    [
        (Role.NKI, ("--tp-degree", 2, "--batch-size", 2)),
        (Role.BASELINE, ("--tp-degree", 1)),
        full(Role.NKI, ("--tp-degree", 1)),
    ],
)
def test_honest_counts_lie_above(role, arguments, opened):
    session = opened(*arguments)
    loaded = construct(session, role)
    for submodel in (PREFILL, DECODE):
        found: Any = loaded.call(ESTIMATE, "it fails", submodel=submodel, bucket=64).body
        least = graphs.floor(session, submodel, 64).macs
        # One of two layers counts in part only, and kernels fill tiles of 128.
        assert least <= found["macs"][0] <= 6 * least
        graphs.check_time(session, submodel, 64, found["ms"][0])


def test_what_cannot_be_is_refused(opened):
    session = opened("--tp-degree", 1)
    least = graphs.floor(session, DECODE, 64).macs
    for macs, refused in ((least, False), (least - 1, True)):
        graph = Graph(DECODE, 64, (Operator("mlp", True, "kernel", macs),))
        if refused:
            with pytest.raises(SubmissionFailed, match=f"expected at least {least:,}"):
                graphs.check_macs(session, [graph])
        else:
            graphs.check_macs(session, [graph])
    with pytest.raises(SubmissionFailed, match="estimates 0.001 ms, expected at least 2"):
        graphs.check_time(session, DECODE, 64, 0.001)
