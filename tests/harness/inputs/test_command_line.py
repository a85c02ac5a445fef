"""The command line: every argument of the contest's driver works or is refused with a reason."""

import json
import shlex
from pathlib import Path

import pytest

from harness.errors import UserError
from harness.figures.reference import PROMPTS_FILE
from harness.inputs import command_line, options

PROMPTS = str(PROMPTS_FILE)
ONLY_IN = {flag: option.modes for flag, option in options.OPTIONS.items() if option.modes}


def parse(*arguments):
    return command_line.parse(["--mode", "generate", *arguments])


@pytest.mark.parametrize("flag", options.REFUSED)
def test_refused_flags_name_their_reason(flag):
    with pytest.raises(UserError, match=flag):
        parse(flag)


@pytest.mark.parametrize(
    "arguments",
    [
        ("--mode", "profiling"),
        ("--top-k", "0"),
        ("--seq-len", "-3"),
        ("--do-sample", "perhaps"),
        ("--tol-map", "{-1: 0.1}"),
        ("--unknown", "1"),
        ("",),
        ("--seq", "64"),
        ("--mode", "serve", "--port", "65536"),
        ("--mode", "serve", "--port", "\u0663"),  # a digit that int() reads
    ],
)
def test_argument_errors_are_one_line_and_status_2(arguments, capsys):
    with pytest.raises(SystemExit) as exit_info:
        parse(*arguments)
    captured = capsys.readouterr()
    assert exit_info.value.code == 2
    assert captured.err.count("\n") == 1 and captured.err.startswith("main.py: ")
    assert captured.out == ""


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("--enable_nki", "--enable-nki"),
        ("--max-tokens", "--max-new-tokens"),
        ("--model", "--model-path"),
        ("--tp", "--tp-degree"),
        ("--no-nki", "--no-enable-nki"),
        ("hello", '--prompt "hello"'),
        ("--dtype", "--torch-dtype"),
        ("--tp_degree --top_k", "--top-k"),
        ("--debug k.py", "--llama k.py"),
    ],
)
def test_an_argument_with_a_typo_is_told_what_is_close(given, meant, capsys):
    with pytest.raises(SystemExit):
        parse(*given.split())
    said = capsys.readouterr().err
    assert given.split()[-1] in said and f"; write {meant}; see" in said


# A command line each.
IMPOSSIBLE = """
--prompt ''
--prompt a,,b
--max-length 63 --seq-len 64
--max-context-length 65 --seq-len 64
--sequence-parallel-enabled --padding-side left
--sequence-parallel-enabled --vocab-parallel
--flash-decoding-enabled --padding-side left
--cp-degree 2 --flash-decoding-enabled
--cp-degree 2 --sequence-parallel-enabled
--pp-degree 2
--ctx-batch-size 2
--apply-seq-ids-mask
--async-mode
--adapter-id one
--max-lora-rank 4
--lora-ckpt-path one
--lora-ckpt-path one:/no/such/folder
--lora-ckpt-path 0:.
--is-continuous-batching --padding-side left
--global-topk 8
--dynamic
--context-encoding-buckets 32 --seq-len 64
--token-generation-buckets 32 128 --seq-len 64
--enable-bucketing false --context-encoding-buckets 128
--base-latency 5
--base-throughput 5
--speculation-length 4
--speculate draft
--enable-eagle-speculation
--num-medusa-heads 3
--is-medusa --medusa-speculation-length 15
--is-medusa --do-sample
--speculate fused --draft-model-path d --do-sample
--is-medusa --quantize int8
--is-medusa --prompt-lookup-num-tokens 3
--is-medusa --speculate eagle
--is-medusa --medusa-tree-json nowhere.json
--enable-eagle-draft-input-norm --draft-model-path d
--token-tree-json nowhere.json --draft-model-path d
--speculate eagle --draft-model-path d --token-tree-json nowhere.json
--enable-fused-speculation --prompt-lookup-num-tokens 3
--speculate fused --enable-eagle-speculation --draft-model-path d
--speculate lookup --draft-model-path d
--prompt-lookup-num-tokens 3 --draft-model-path d
--prompt-lookup-num-tokens 3 --speculation-length 5
--prompt-lookup-num-tokens 128
--speculate lookup --speculation-length 1
--speculate lookup --speculation-length 64 --seq-len 64
--speculate lookup --padding-side left
--speculate lookup --on-device-sampling
--speculate lookup --batch-size 2
--speculate lookup --is-continuous-batching
--speculate lookup --max-context-length 32 --prefill-chunk 16
"""


@pytest.mark.parametrize("line", [*IMPOSSIBLE.split("\n")[1:-1], "--prompt '  \n '"])
def test_impossible_combinations_are_refused(line):
    with pytest.raises(UserError):
        parse(*shlex.split(line))


TREES = {
    "tree": "[[0], [2], [0, 1]]",
    "double": "[[0], [0]]",
    "torn": "[[1, 0]]",
    "none": "[]",
    "deep": "[[0], [0, 0]]",
    "wide": "[[10]]",
    "text": '["a"]',
    "bad": "[[0",
}


@pytest.mark.parametrize("name", TREES)
def test_trees_are_read_whole(tmp_path, name):
    path = tmp_path / "tree.json"
    path.write_text(TREES[name])
    heads = "1" if name == "deep" else "2"
    arguments = "--is-medusa", "--num-medusa-heads", heads, "--medusa-tree-json", str(path)
    if name != "tree":
        with pytest.raises(UserError, match="tree .*tree.json"):
            parse(*arguments)
        return
    asked = parse(*arguments).neuron_config()
    assert asked["medusa_tree"] == [[0], [2], [0, 1]] and asked["medusa_speculation_length"] == 4


LLAMA = Path(command_line.__file__).parents[2] / "llama.py"
SWAP = f"--kernel {LLAMA}:kernel --at mlp"
TOKEN_TREES = {
    "tree": '{"2": ["3"], "0": ["1", 2], "3": []}', "bare": '{"0": []}', "list": "[[0]]",
    "gap": '{"0": ["2"]}', "circle": '{"0": ["1"], "1": ["0"]}', "order": '{"0": [2, 1]}',
    "apart": '{"0": ["1"], "5": ["6"]}', "twice": '{"0": ["1", "2"], "1": ["3"], "2": ["3"]}',
    "long": json.dumps({"0": [*range(1, 129)]}),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(TOKEN_TREES))
def test_token_trees_are_read_whole(tmp_path, name):
    path = tmp_path / "tree.json"
    path.write_text(TOKEN_TREES[name])
    arguments = "--speculate", "eagle", "--draft-model-path", "d", "--token-tree-json", str(path)
    if name != "tree":
        with pytest.raises(UserError, match="tree .*tree.json"):
            parse(*arguments)
        return
    found = parse(*arguments).speculation
    asked = found.neuron_config(64, None)
    assert asked["token_tree_config"] == {"0": ["1", "2"], "2": ["3"]}
    assert asked["speculation_length"] == 4
    with pytest.raises(UserError, match="must be 4, the nodes of the tree"):
        parse(*arguments, "--speculation-length", "5")


NEED_FILES = {
    *("--medusa-tree-json", "--token-tree-json"),
    *("--adapter-id", "--lora-ckpt-path", "--max-lora-rank"),
}


@pytest.mark.parametrize("flag", sorted(set(ONLY_IN) - NEED_FILES))
def test_arguments_of_other_modes_are_refused(flag):
    bare = flag in ("--resume", "--record-baseline", "--raw", "--benchmark")
    value = {
        "--profile-model": "llama-3.2-1b",
        "--results-path": "r",
        "--prompt-file": PROMPTS,
        "--tol-map": "{5:0.1}",
        "--judge": "ties",
        "--baseline-rounding": "operator",
        "--base-latency": "3 --base-throughput 3",
        "--base-throughput": "3 --base-latency 3",
        "--runs": "3 --benchmark",
        "--speculate": "lookup",
        "--is-medusa": "--num-medusa-heads 3",
        "--num-medusa-heads": "3 --is-medusa",
        "--medusa-speculation-length": "16 --is-medusa",
        "--enable-fused-speculation": "--draft-model-path d",
        "--enable-eagle-speculation": "--draft-model-path d",
        "--enable-eagle-draft-input-norm": "--enable-eagle-speculation --draft-model-path d",
        "--speculation-length": "3 --speculate lookup",
        "--is-block-kv-layout": "--is-prefix-caching",
        "--is-prefix-caching": "--pa-block-size 16",
        "--is-chunked-prefill": "--pa-block-size 16",
        "--pa-block-size": "16 --is-prefix-caching",
        "--pa-num-blocks": "300 --is-prefix-caching",
        "--prefix-buckets": "64 --is-prefix-caching",
        "--kernel-q-tile-size": "64 --is-chunked-prefill",
        "--kernel-kv-tile-size": "128 --is-chunked-prefill",
        "--kernel": f"{LLAMA}:kernel --at mlp",
        "--at": f"mlp --kernel {LLAMA}:kernel",
        "--layers": f"3 {SWAP}",
        "--least-cosine": f"0.5 {SWAP}",
    }.get(flag, "3")
    arguments = [flag] if bare else [flag, *value.split()]
    arguments = ["--no-stream"] if flag == "--stream" else arguments
    for mode in options.MODES:
        if mode in ONLY_IN[flag]:
            own = mode == "swap" or "evaluate" in mode
            given = [word for word in arguments if not (own and word == "--benchmark")]
            needed = SWAP.split() if mode == "swap" and "--kernel" not in given else []
            command_line.parse(["--mode", mode, *given, *needed])
            continue
        modes = {ONLY_IN[given][0] for given in arguments if given[:2] == "--" and given in ONLY_IN}
        with pytest.raises(UserError, match=f"--.* works? with --mode ({'|'.join(modes)})"):
            command_line.parse(["--mode", mode, *arguments])


def test_adapters_are_numbered_as_they_are_named(tmp_path):
    """In the modes that run a model; a server's clients name one themselves."""
    (tmp_path / "adapter_config.json").write_text("{}")
    given = [
        word for name in ("one", "two") for word in ("--lora-ckpt-path", f"{name}: {tmp_path}")
    ]
    asked = parse(*given, "--max-lora-rank", "4", "--adapter-id", "two")
    folders = {"one": str(tmp_path), "two": str(tmp_path)}
    config = {"max_loras": 2, "max_lora_rank": 4, "lora_ckpt_paths": folders}
    assert asked.neuron_config()["lora_config"] == config
    assert asked.adapters is not None and asked.adapters.chosen == "two"
    for mode, flags in (("diff", given), ("serve", [*given, "--adapter-id", "two"])):
        with pytest.raises(UserError, match="works? with --mode"):
            command_line.parse(["--mode", mode, *flags])
    with pytest.raises(UserError, match="none of one, two"):
        parse(*given, "--adapter-id", "three")


def test_sampling_is_hugging_faces():
    """Greedy unless asked; --do-sample alone is among the 50 best, as GenerationConfig has it."""
    assert not parse().samples and not parse("--do-sample", "--top-k", "1").samples
    assert parse("--top-k", "5").samples and parse("--top-k", "5").top_k == 5
    chosen = parse("--do-sample", "--temperature", "2", "--top-p", "0.5")
    assert chosen.samples and (chosen.top_k, chosen.top_p, chosen.temperature) == (50, 0.5, 2.0)


@pytest.mark.parametrize(
    "arguments",
    [
        ("--temperature", "2"),
        ("--top-p", "0.5"),
        ("--do-sample", "false", "--top-k", "5"),
        ("--do-sample", "false", "--temperature", "0.5"),
    ],
)
def test_what_tunes_sampling_is_refused_where_nothing_is_sampled(arguments):
    with pytest.raises(UserError, match="every token is the best one"):
        parse(*arguments)


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        *((flag, value) for flag in ("--collective-us", "--top-p", "--base-latency")
          for value in ("nan", "1e400", "x")),
        ("--tol-map", "{5: 1e400}"), ("--tol-map", "{5: -1}"),
        ("--tol-map", "[" * 5000), ("--tol-map", "{True: 0.1}"),
        ("--top-p", "0"), ("--top-p", "1.5"), ("--least-cosine", "2"), ("--temperature", "-1"),
        ("--base-latency", "0"), ("--base-throughput", "-1"),
        ("--seed", "18446744073709551616"), ("--seed", "-1"), ("--seed", "1.5"),
        ("--seq-len", "9" * 30), ("--model-path", "~nosuchuser"),
        ("--prompt-file", "a\0b"), ("--memory-limit", "0"), ("--time-limit", "nan"),
    ],
)  # fmt: skip
def test_values_that_mean_nothing_are_refused(flag, value, capsys):
    modes = ONLY_IN.get(flag, ("generate",))
    with pytest.raises(SystemExit) as exit_info:
        command_line.parse(["--mode", modes[0], flag, value])
    assert exit_info.value.code == 2 and flag in capsys.readouterr().err


@pytest.mark.parametrize("argument", ["\udcff", "--llama=\udc80.py"])
def test_arguments_must_be_text(argument):
    with pytest.raises(UserError, match="not UTF-8"):
        command_line.parse(["--mode", "generate", "--prompt", argument])


def test_tolerance_map_takes_both_forms():
    asked = ["--mode", "validate", "--tol-map", "{None: 0.05, 5: (1e-4, 0.03)}"]
    given = command_line.parse(asked).tol_map
    assert given == {None: (1e-5, 0.05), 5: (1e-4, 0.03)}


def test_batch_size_defaults_to_the_number_of_prompts():
    args = parse("--prompt", "a,b", "--prompt", '"c, d"')
    assert args.prompts == ("a", "b", "c, d")
    assert args.batch_size == 3
    assert len(args.prompt_notes) == 1 and "2 prompts" in args.prompt_notes[0]


def told(capsys, *arguments):
    with pytest.raises(SystemExit) as exit_info:
        command_line.parse(arguments)
    assert exit_info.value.code == 0
    return capsys.readouterr().out


def test_help_has_modes_first_and_a_topic_for_every_option(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    text = told(capsys, "--help")
    lines = text.splitlines()
    assert lines.index("modes:") < 4 and max(map(len, lines)) <= 80 and len(lines) <= 41
    assert all(f"  {mode} " in text for mode in options.MODES)
    assert not any(option.flag in text for option in options.OF_TOPIC["experiments"])
    for name, known in options.OF_TOPIC.items():
        assert f"  {name} " in text
        explained = told(capsys, "--help", name)
        assert all(f"  {option.left}" in explained and option.help for option in known)
    contest = told(capsys, "-h", "contest")
    assert all(flag in contest for flag in options.REFUSED)


def test_examples_of_the_help_are_accepted():
    examples = [line for line in options.EXAMPLES.splitlines() if line.startswith("  main.py ")]
    for line in examples:
        command_line.parse(shlex.split(line)[1:])
    assert len(examples) == 3


@pytest.mark.parametrize(
    "arguments",
    [("--limit", "1"), ("--only", "3"), ("--prompt", "abc"), ("--prompt-file", PROMPTS)],
)
def test_a_baseline_is_recorded_for_all_prompts_or_not_at_all(arguments):
    with pytest.raises(UserError, match=f"leave {arguments[0]} out"):
        command_line.parse(["--mode", "evaluate_all", "--record-baseline", *arguments])
