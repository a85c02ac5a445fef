"""`neuron_cpu oracle`: requests as lines of JSON, each with an answer, whatever they hold."""

from __future__ import annotations

import json
import os
import random
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from neuron_cpu import suite
from neuron_cpu.__main__ import main
from neuron_cpu.core.program.digest import of_program
from neuron_cpu.judge import verdict
from neuron_cpu.oracle import forms, serve
from neuron_cpu.oracle.client import Client
from neuron_cpu.oracle.forms import Request
from tests.conftest import REPOSITORY

KERNEL = """
import neuronxcc.nki as nki
import neuronxcc.nki.language as nl

@nki.jit
def kernel(x):
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    tile = nl.load(x)
    nl.store(out, nl.add(tile, 1.0))
    return out
"""
NISA = "import neuronxcc.nki.isa as nisa\n@nki"
REFERENCE = "def reference(x):\n    return x + 1\n"


def asking(source=KERNEL, **more):
    return {
        "kernel": {"source": source, "name": "kernel"},
        "cases": ["128x64:bf16"],
        "reference": {"source": REFERENCE, "name": "reference"},
        **more,
    }


@pytest.fixture(scope="module")
def oracle():
    made = serve.Oracle(1)
    yield made
    made.close()


def asked(oracle, request):
    (form,) = forms.requests(json.dumps(request).encode())
    assert isinstance(form, Request), form
    return json.loads(json.dumps(oracle.one(form), allow_nan=False))


# --- verdicts -------------------------------------------------------------------------------------
def test_a_right_kernel_passes_with_its_estimate(oracle):
    told = asked(oracle, asking(id="a", seeds=[0, 1, 2]))
    assert (told["schema"], told["id"], told["outcome"]) == (1, "a", "passed"), told
    (case,) = told["cases"]
    assert [one["seed"] for one in case["errors"]] == [0, 1, 2]
    assert all(one["right"] and one["error"] <= one["limit"] for one in case["errors"])
    estimate = case["estimate"]
    assert estimate["band_us"][0] < estimate["time_us"] < estimate["band_us"][1]
    assert estimate["hbm_read_bytes"] == estimate["hbm_write_bytes"] == 128 * 64 * 2
    assert 0 < estimate["of_bound_percent"] < 100 and estimate["spilled_bytes"] == 0
    assert "candidate.py:8" in {line["place"] for line in estimate["lines"]}
    assert {"record", "check", "digest", "estimate", "run", "measure"} <= set(case["spent_ms"])
    again = asked(oracle, asking(id="b", seeds=[0, 1, 2]))
    assert again["cached"] and again["cases"][0]["errors"] == case["errors"]


def test_what_a_devices_compiler_refused_is_refused_with_its_source(oracle):
    rows = "i, j = nl.arange(128)[:, None], nl.arange(64)[None, :]"
    copy = "nisa.dma_copy(src=x[i * 0, j], dst=tile[i, j])"
    lines = "\n    ".join(["tile = nl.ndarray((128, 64), x.dtype)", rows, copy])
    source = KERNEL.replace("tile = nl.load(x)", lines).replace("@nki", NISA)
    told = asked(oracle, asking(source, cases=["128x64:bf16"], reference=None))["cases"][0]
    assert (told["outcome"], told["identifier"]) == ("refused", "sim_refused_on_device")
    assert "NCC_IBCG901" in told["fault"] and "kda-for-trainium" in told["fault"]
    assert told["line"] == 11 and "nl.broadcast_to" in told["mending"]
    assert asked(oracle, asking(reference=None))["cases"][0]["legality"] == "legal"


def test_a_wrong_kernel_says_how_much_and_where(oracle):
    told = asked(oracle, asking(KERNEL.replace("1.0", "1.5"), tolerance={"relative_l2": 0.02}))
    assert told["outcome"] == "wrong"
    assert "a relative L2 error of 0.3" in told["sentence"]
    assert any("first wrong element" in one for one in told["cases"][0]["places"])


@pytest.mark.parametrize(
    ("tolerance", "outcome"),
    [
        ({"relative_l2": 0.5}, "passed"),
        ({"allclose": [0.0, 0.52]}, "passed"),
        ({"allclose": [0.0, 0.4]}, "wrong"),
        ({"element": 2.0}, "passed"),
        ({}, "wrong"),
    ],
)
def test_the_asker_chooses_the_tolerance(oracle, tolerance, outcome):
    told = asked(oracle, asking(KERNEL.replace("1.0", "1.5"), tolerance=tolerance))
    assert told["outcome"] == outcome


def test_a_refusal_has_line_identifier_and_mending(oracle):
    told = asked(oracle, asking(KERNEL.replace("nl.add", "nl.dot")))
    assert (told["outcome"], told["identifier"], told["line"]) == ("refused", "sim_unknown_name", 9)
    assert told["sentence"] == f"{told['fault']}; {told['mending']}"


def test_inputs_of_the_asker(oracle):
    made = REFERENCE + (
        "import numpy as np\nimport ml_dtypes\n"
        "def ones(seed):\n    return [np.full((128, 64), seed, ml_dtypes.bfloat16)]\n"
        "def few(seed):\n    return {'x': np.ones((2, 2), np.float32)}\n"
    )
    code = {"source": made, "name": "reference"}
    told = asked(oracle, asking(reference=code, inputs="ones", seeds=[3]))
    assert told["outcome"] == "passed", told
    told = asked(oracle, asking(reference=code, inputs="few"))
    assert told["outcome"] == "invalid" and "expected [((128, 64), torch.bfloat16)]" in str(told)


@pytest.mark.parametrize(
    ("made", "outcome"),
    [("got.reshape(right.shape)", "passed"), ("got", "wrong"), ("(got, got)", "invalid")],
)
def test_results_that_the_asker_makes_comparable(oracle, made, outcome):
    source = "def reference(x):\n    return (x + 1).reshape(-1)\n"
    source += f"def natural(got, right):\n    return {made}\n"
    code = {"source": source, "name": "reference"}
    told = asked(oracle, asking(reference=code, outputs="natural"))
    assert told["outcome"] == outcome, told


def test_a_target_and_what_its_kernels_may_not(oracle):
    times = {
        target: asked(oracle, asking(target=target))["cases"][0]["estimate"]
        for target in ("trn1", "trn2")
    }
    assert [times[t]["generation"] for t in times] == ["gen2", "gen3"]


# --- what costs itself alone ----------------------------------------------------------------------
@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("    import os; os._exit(3)", "status 3"),
        ("    while True: pass", "limits gives it more"),
        ("    raise SystemExit(0)", "candidate.py:7: SystemExit"),
        ("    x = (", "candidate.py:7: SyntaxError"),
        ("    x = [0] * 10**10", "MemoryError"),
        ("    open('/tmp/oracle-was-here', 'w')", "PermissionError"),
        ("    import neuron_cpu.core.time.schedule as s; s.schedule = None", ""),
    ],
)
def test_a_candidate_that_misbehaves_costs_itself(oracle, line, words):
    source = KERNEL.replace("def kernel(x):\n", f"def kernel(x):\n{line}\n")
    limits = {"seconds": 20.0, "cpu_seconds": 1, "memory_gib": 2.0}
    told = asked(oracle, asking(source, limits=limits))
    assert told["outcome"] == ("failed" if words else "passed"), told
    assert words in told["sentence"] or "processor time" in told["sentence"]
    assert asked(oracle, asking())["outcome"] == "passed"


@pytest.mark.parametrize(
    ("source", "outcome", "words"),
    [
        ("def reference(x):\n    return x[:1]\n", "wrong", "has shape"),
        ("def reference(x):\n    raise KeyError('no')\n", "invalid", "KeyError"),
        ("def other(x):\n    return x\n", "invalid", "cannot be imported"),
        ("not Python!", "invalid", "SyntaxError"),
        ("def reference(x):\n    while True: pass\n", "failed", "longer than 1 s"),
        ("import os\ndef reference(x):\n    os._exit(1)\n", "failed", "status 1"),
    ],
)
def test_a_reference_that_does_not_go(oracle, source, outcome, words):
    code = {"source": source, "name": "reference"}
    told = asked(oracle, asking(reference=code, limits={"cpu_seconds": 1}))
    assert told["outcome"] == outcome and words in told["sentence"], told
    assert asked(oracle, asking())["outcome"] == "passed"


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"target": "trn9"}, "target: Input should be"),
        ({"cases": ["128x64:bf17"]}, "bf17"),
        ({"cases": ["'"]}, "cannot be split"),
        ({"limits": {"memory_gib": 900.0}}, "at most 4"),
        ({"kernel": {"name": "kernel", "file": "/none/such.py"}}, "cannot be read"),
        ({"kernel": {"name": "kernel"}}, "source or file"),
        ({"schema": 2}, "schema: Input should be 1"),
        ({"ref": 1}, "ref: Extra inputs are not permitted; write reference"),
        ({"args": [["8x8:f32", [8]]]}, 'permitted; write cases: ["8x8:f32 8:f32"]'),
        ({"seeds": 3}, "seeds: Input should be a valid list; write [3]"),
        ({"seeds": [0.5]}, "seeds.0"),
        ({"lines": -1}, "lines"),
    ],
)
def test_a_request_that_cannot_be_met(oracle, more, words):
    (form,) = forms.requests(json.dumps(asking(id=7) | more).encode())
    told = oracle.one(form) if isinstance(form, Request) else form
    assert (told["id"], told["outcome"]) == (7, "invalid")
    assert words in told["sentence"], told


# --- any bytes ------------------------------------------------------------------------------------
_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(list(asking())), inner),
    max_leaves=10,
)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.binary() | _json.map(lambda value: json.dumps(value).encode()))
def test_any_line_has_answers(line):
    for one in forms.requests(line):
        assert isinstance(one, Request) or (one["outcome"] == "invalid" and one["sentence"])


def mutated(chosen):
    """A request with bytes, fields or source changed."""
    request: Any = asking(id=0, lines=chosen.randrange(1000))
    kind = chosen.randrange(20)
    odd = [None, "", -1, 1e308, [], {}, "kernel", True, ["128x64:bf16"] * 70, 2**70, "\ud800"]
    if kind == 0:  # a source that is some other one
        at = chosen.randrange(len(KERNEL))
        request["kernel"]["source"] = KERNEL[:at] + chosen.choice("\0)(:x\ud800") + KERNEL[at + 1 :]
    elif kind < 10:
        request[chosen.choice([*request, "limits", "target", "grid"])] = chosen.choice(odd)
    elif kind < 14:
        inner = chosen.choice([request["kernel"], request["reference"]])
        inner[chosen.choice([*inner, "file"])] = chosen.choice(odd)
    line = json.dumps(request).encode()
    if kind >= 14:
        at = chosen.randrange(len(line))
        line = line[:at] + bytes([chosen.randrange(256)]) + line[at + chosen.randrange(3) :]
    return line.replace(b"\n", b" ") + b"\n"


def test_fuzzed_requests_of_a_client(capfd):
    """Each has its answers; no traceback, no end, and no more memory at the end than early on."""
    number, chosen, used = int(os.environ.get("FUZZ_EXAMPLES", "20")), random.Random(34), []
    with Client("--jobs", "1") as client:
        assert client.ask(asking())["outcome"] == "passed"
        found = {one["id"]: one["outcome"] for one in client.answers([asking(), {"cases": 1}])}
        assert found == {0: "passed", 1: "invalid"}
        process = client.process
        for _ in range(number // 20):
            process.stdin.write(b"".join(mutated(chosen) for _ in range(20)))
            process.stdin.flush()
            outcomes = [json.loads(process.stdout.readline())["outcome"] for _ in range(20)]
            assert set(outcomes) <= {"passed", "wrong", "refused", "failed", "invalid"}
            if sys.platform == "linux":
                used.append(int(Path(f"/proc/{process.pid}/statm").read_text().split()[1]))
        assert client.ask(asking())["outcome"] == "passed"
    assert process.returncode == 0
    assert "Traceback" not in capfd.readouterr().err
    if number > 1000 and used:
        assert used[-1] - used[len(used) // 5] < 16 << 20 >> 12  # pages


# --- ways in --------------------------------------------------------------------------------------
def test_a_line_of_many_requests_is_taken_one_by_one():
    """Megabytes of them would be gigabytes of answers; none is made before it is asked for."""
    line = b"[" + b",".join([b"1"] * 400_000) + b"]"
    tracemalloc.start()
    found = forms.requests(line)
    assert next(found)["outcome"] == "invalid"
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 32 << 20


@pytest.mark.full
def test_the_client_of_the_page(tmp_path, monkeypatch, capsys):
    page = (REPOSITORY / "docs" / "oracle.md").read_text()
    code = page.partition("```python\n")[2].partition("```")[0]
    (tmp_path / "softmax.py").write_text(suite.template("softmax"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    exec(compile(code, "docs/oracle.md", "exec"), {})
    assert capsys.readouterr().out == "0 passed \n"


def test_the_schema_of_a_request(capsys):
    assert main(["oracle", "--schema"]) == 0
    assert "cases" in json.loads(capsys.readouterr().out)["properties"]


def test_the_tool_over_mcp():
    """What it takes to run: `make test-mcp`."""
    pytest.importorskip("mcp")
    import anyio
    from mcp import Client as ToolClient
    from mcp import StdioServerParameters

    async def ask():
        command = ["-m", "neuron_cpu", "oracle", "--jobs", "1", "--mcp"]
        server = StdioServerParameters(command=sys.executable, args=command, env=dict(os.environ))
        async with ToolClient(server) as client:
            (tool,) = (await client.list_tools()).tools
            asked = asking(), asking(target="trn9"), 7
            return tool, [await client.call_tool(tool.name, {"request": one}) for one in asked]

    tool, answers = anyio.run(ask)
    assert tool.name == "judge_kernel"
    kernel = tool.input_schema["properties"]["request"]["properties"]["kernel"]
    assert "source" in kernel["properties"]
    found = [json.loads(one.content[0].text) for one in answers]
    assert [one["outcome"] for one in found] == ["passed", "invalid", "invalid"]
    assert "target" in found[1]["sentence"]


# --- digests --------------------------------------------------------------------------------------
def test_a_digest_is_of_what_a_program_does():
    found = {}
    for name in ("rope", "softmax", "rms_norm"):
        operator = suite.operator(name)
        for case in operator.cases:
            one, two = (of_program(verdict.traced(operator.kernel, case, ())) for _ in range(2))
            assert one == two
            found[name, str(case)] = one
    assert len(set(found.values())) == len(found)
