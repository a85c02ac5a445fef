"""validate, evaluate and the benchmark run on a two-layer model, with good and bad submissions."""

import csv
import json
import textwrap

import pytest
from transformers import PreTrainedTokenizerFast

from tests.crossed import full

BASELINE = (
    "from neuronx_distributed_inference.models.llama.modeling_llama import *\n"
    "from neuronx_distributed_inference.models.llama import modeling_llama\n"
)
FORWARD = BASELINE + (
    "class NeuronLlamaModel(modeling_llama.NeuronLlamaModel):\n"
    "    def forward(self, *arguments, **settings):\n"
    "        outputs = super().forward(*arguments, **settings)\n"
    "{}"
    "        return outputs\n"
    "class NeuronLlamaForCausalLM(modeling_llama.NeuronLlamaForCausalLM):\n"
    "    _model_cls = NeuronLlamaModel\n"
)
# Swaps neighbouring logits: every greedy token differs.
WRONG = FORWARD.format(
    "        logits = outputs[0]\n"
    "        outputs[0] = logits.view(*logits.shape[:-1], -1, 2).flip(-1).flatten(-2)\n"
)
# Traces well, and raises when it runs on data.
RAISES = FORWARD.format(
    "        if not outputs[0].is_meta:\n            raise RuntimeError('boom on data')\n"
)


# Faults that a check of the first row, position or bucket does not see: lines, and prompts.
SHORT, LONG = ["--prompt", "a b c d e"], ["--prompt", "a b c d e f g h " * 5]
BUCKETS = ["--context-encoding-buckets", "32", "64", "--max-context-length", "64"]
CHUNKS = ["--max-context-length", "32", "--prefill-chunk", "24"]
FLIPPED = "logits.view(*logits.shape[:-1], -1, 2).flip(-1).flatten(-2)"
FAULTS = {
    "the second row answers with the first one's text": (
        "        outputs[0] = outputs[0][:1].expand_as(outputs[0])\n",
        [*SHORT, "--prompt", "x y z v w", "--batch-size", "2"],
    ),
    "the second row, which is shorter": (
        "        logits = outputs[0]\n"
        "        padded = (arguments[1].sum(-1) < arguments[1].sum(-1).amax())[:, None, None]\n"
        f"        outputs[0] = torch.where(padded, {FLIPPED}, logits)\n",
        [*LONG, *SHORT, "--batch-size", "2"],
    ),
    "a late position": (
        "        logits, place = outputs[0], arguments[2].amax(-1)[:, None, None]\n"
        f"        outputs[0] = torch.where(place == place * 0 + LATE, {FLIPPED}, logits)\n",
        SHORT,
    ),
    # Logits of a chunk are nobody's; its keys and values are.
    "the last chunk": (
        "        if arguments[0].shape[1] == 24:\n"
        "            first = arguments[2][:, :1, None, None]\n"
        "            for k in range(1, len(outputs)):\n"
        "                place = torch.arange(outputs[k].shape[2])[None, None, :, None]\n"
        "                late = (first >= LAST) & (place >= first)\n"
        "                outputs[k] = torch.where(late, -outputs[k], outputs[k])\n",
        ["--prompt", "a b c d e f g h " * 6, *CHUNKS],
    ),
    "the second bucket": (
        "        logits = outputs[0]\n        if 32 < arguments[0].shape[1]:\n"
        f"            outputs[0] = {FLIPPED}\n",
        ["--prompt", "a b c d e f g h " * 3, *BUCKETS],
    ),
}


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return str(tmp_path_factory.mktemp("cache"))


# What each script gives to the driver in front of its arguments.
SCRIPTS = {"main.py": (), "test.py": ("--mode", "evaluate_all", "--enable-nki")}


@pytest.fixture
def run(run_main, tiny_model, cache, tmp_path):
    """A script on the tiny model in a folder of its own; four new tokens."""

    def call(script, *arguments):
        return run_main(
            *SCRIPTS[script],
            "--model-path",
            tiny_model,
            *["--max-new-tokens", "4"],
            *arguments,
            cwd=tmp_path,
            XDG_CACHE_HOME=cache,
        )

    return call


@pytest.fixture
def submission(tmp_path):
    def write(text):
        path = tmp_path / "elsewhere" / "entry.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        return path

    return write


def test_validate_passes_with_nki(run):
    done = run("main.py", "--mode", "validate", "--enable-nki", "--prompt", "hello,what is this")
    assert done.returncode == 0, done.stderr + done.stdout
    assert done.stdout.count("passed: 4 of 4 greedy tokens equal") == 2
    assert done.stdout.endswith("Validation passed.\n")


def test_validate_reports_where_a_wrong_submission_differs(run, submission):
    done = run("main.py", "--mode", "validate", "--llama", submission(WRONG), "--prompt", "hello")
    assert done.returncode == 1, done.stderr
    assert "FAILED: 0 of 4 greedy tokens equal" in done.stdout
    assert "position 0: margin" in done.stdout and "not a tie" in done.stdout
    assert done.stdout.count("  baseline: ") == done.stdout.count("  submission: ") == 4
    assert done.stdout.endswith("Validation failed.\n")


def test_evaluate_prints_the_score_with_its_sources(run, tmp_path):
    done = run("main.py", "--mode", "evaluate_single", "--enable-nki", "--prompt", "hello")
    assert done.returncode == 0, done.stderr
    assert "Final Score: " in done.stdout and "(figures: cost model; " in done.stdout
    assert "wall clock of the CPU simulator, not a device time" in done.stdout
    assert "NKI share of MACs: " in done.stdout and "MACs: 0.0000" not in done.stdout
    report = json.loads((tmp_path / "benchmark_report.json").read_text())
    assert report["measured"]["source"] == "simulator"
    for name in ("e2e_model", "context_encoding_model", "token_generation_model"):
        assert report["measured"][name]["latency_ms_p50"] > 0
        assert report["estimated"][name]["throughput"] > 0


@pytest.mark.full
def test_the_estimate_of_look_ahead_counts_the_calls_of_a_whole_run(run, tmp_path):
    """The compared tokens are the first ones, and say nothing about the rest."""
    asked = ("--mode", "evaluate", "--enable-nki", "--prompt", "hello", "--seq-len", "64")
    reports = []
    for given in ((), ("--max-new-tokens", "2")):
        done = run("main.py", *asked, *given)
        assert done.returncode == 0, done.stderr
        assert "without guesses a token takes" in done.stdout
        reports.append(json.loads((tmp_path / "benchmark_report.json").read_text())["estimated"])
    assert reports[0] == reports[1]
    spoken = reports[0]["speculation"]
    assert spoken["method"] == "look-ahead" and spoken["tokens"] == reports[0]["new_tokens"] - 1
    assert sum(spoken["accepted"]) + spoken["calls"] == spoken["tokens"]
    assert reports[0]["plain_ms"] > 0


def test_on_device_sampling_has_no_logits_to_check(run):
    done = run("main.py", "--mode", "validate", "--on-device-sampling", "--prompt", "hello")
    assert done.returncode == 2 and "--on-device-sampling" in done.stderr


def results_folder(tmp_path):
    (folder,) = (tmp_path / "results").iterdir()
    return folder


def test_benchmark_run_writes_every_report_and_lists_what_does_not_fit(run, tmp_path):
    done = run("test.py", "--only", "0", "3", "24", "--seq-len", "128")
    assert done.returncode == 0, done.stderr
    folder = results_folder(tmp_path)
    assert "Prompt 24" in done.stdout and "does not fit --seq-len 128: not run" in done.stdout
    report = json.loads((folder / "report.json").read_text())
    assert report["totals"]["prompts"] == report["totals"]["accurate"] == 2
    scores = [result["figures"]["score"]["value"] for result in report["results"]]
    assert report["totals"]["total_score"] == pytest.approx(sum(scores))
    answers = sorted(128 - result["prompt_tokens"] for result in report["results"])
    told = f"whole answers, of {answers[0]} to {answers[1]} tokens"
    assert told in " ".join(done.stdout.split())
    with open(folder / "report.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["prompt"] for row in rows] == ["0", "3"]
    assert {row["source"] for row in rows} == {"cost model"}


def test_one_failing_prompt_does_not_end_the_run(run, submission, tmp_path):
    done = run(
        *["test.py", "--no-enable-nki", "--llama"],
        submission(RAISES),
        *["--limit", "2", "--seq-len", "128"],
    )
    assert done.returncode == 1, done.stderr
    report = json.loads((results_folder(tmp_path) / "report.json").read_text())
    assert report["totals"]["failed"] == 2 and report["totals"]["total_score"] is None


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--only", "99"), "--only"),
        (("--results-path", "file/results"), "file is not a folder"),
        (("--only", "24", "--seq-len", "128"), "None of the chosen prompts fits"),
    ],
)
def test_benchmark_refusals(run, tmp_path, arguments, told):
    (tmp_path / "file").write_text("")
    done = run("test.py", *arguments)
    assert done.returncode == 2 and told in done.stderr and "Traceback" not in done.stderr


# An MLP whose results are NaN.
NOT_FINITE = BASELINE + (
    "plain = modeling_llama.NeuronLlamaMLP.forward\n"
    "def forward(self, *arguments, **settings):\n"
    "    out = plain(self, *arguments, **settings)\n"
    "    (out[0] if isinstance(out, tuple) else out).mul_(float('nan'))\n"
    "    return out\n"
    "modeling_llama.NeuronLlamaMLP.forward = forward\n"
)


@pytest.mark.parametrize("mode", [full("evaluate"), "preflight"])
def test_nan_in_a_submission_is_a_finding(mode, run, submission):
    nki = ["--enable-nki"] if mode == "preflight" else []
    entry = submission(NOT_FINITE)
    done = run("main.py", "--mode", mode, "--llama", entry, "--prompt", "hello", *nki)
    assert done.returncode == 1, done.stdout + done.stderr
    told = "the submission's logits at position 0, token 0 are nan; --mode diff tells which kernel"
    assert told in " ".join(done.stdout.split())
    assert "Traceback" not in done.stderr


# Traces well, and ends its process with success when it runs on data.
EXITS = FORWARD.format(
    "        if not outputs[0].is_meta:\n            import sys\n            sys.exit(0)\n"
)
# Swaps neighbouring logits, and the driver's own check, where it can reach one.
CHEATS = WRONG + (
    "from harness.figures import accuracy\n"
    "accuracy.check_row = lambda *a, **k: accuracy.RowResult(True, '', 4, 1.0, 0, 1, 0, 0)\n"
    "accuracy.compare = accuracy.check_row\n"
    "accuracy._scores = None\n"
)


# Says of its own speed what it likes, as soon as it is imported, or when it runs on data.
FORGED = (
    "from harness.figures import estimate\n"
    "estimate.graph_milliseconds = lambda *a, **k: {'ms': [MS, MS, MS], 'macs': [1, 1]}\n"
)
FORGES = BASELINE + FORGED.replace("MS", "1e-6")
FORGES_LATE = FORWARD.format(
    "        if not outputs[0].is_meta:\n"
    + textwrap.indent(FORGED.replace("MS", "12345.0"), " " * 12)
)


@pytest.mark.full  # 3 s
def test_what_runs_while_it_generates_does_not_reach_the_estimates(run, submission):
    entry = submission(FORGES_LATE)
    done = run("main.py", "--mode", "evaluate", "--llama", entry, "--prompt", "hello")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Speed, estimated" in done.stdout and "12345" not in done.stdout


@pytest.mark.parametrize(
    ("text", "told"),
    [
        full(EXITS, "raised SystemExit: 0"),
        (CHEATS, "FAILED"),
        (FORGES, "its process estimates 1e-06 ms, expected at least 2."),
    ],
)
def test_no_submission_decides_its_own_verdict(text, told, run, submission):
    done = run("main.py", "--mode", "evaluate", "--llama", submission(text), "--prompt", "hello")
    assert done.returncode == 1 and told in done.stdout, done.stdout + done.stderr
    assert "Accuracy: True" not in done.stdout and "Traceback" not in done.stderr


@pytest.mark.parametrize("fault", [one if "shorter" in one else full(one) for one in FAULTS])
def test_every_row_position_and_bucket_counts(fault, run, submission, tiny_model):
    lines, asked = FAULTS[fault]
    room = ["--seq-len", "128", "--mode", "evaluate"]
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tiny_model)
    tokens = len(tokenizer(asked[1]).input_ids)
    lines = lines.replace("LATE", str(tokens + 2))  # the last of four new tokens
    lines = lines.replace("LAST", str(max(range(32, tokens - 1, 24), default=0)))
    path = submission("import torch\n" + FORWARD.format(lines))
    done = run("main.py", *room, *asked, "--llama", path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "FAILED" in done.stdout
