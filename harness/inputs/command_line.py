"""The command line: the contest driver's arguments, a few more, and the checks that need no model.

Argument names follow the contest's driver (aws-samples/nki-llama, main.py). Each of its arguments
works or is refused with a reason; none is accepted and ignored.
"""

from __future__ import annotations

import argparse
import ast
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn, Optional

from harness.errors import UserError
from harness.inputs.model_shapes import MODEL_SHAPES
from harness.inputs.prompts import read_prompt_file, split_prompt_value

DEFAULT_PROMPT = "I believe the meaning of life is"  # the contest driver's, for base models
# For instruct models: along the embedded model's answer the two best logits stay 1.1 apart.
DEFAULT_QUESTION = "Name the capital of Japan."
DEFAULT_SEQ_LEN = 128

# mode -> (module of the harness whose run(args) does it, what it does)
MODES = {
    "compile": (
        "harness.modes.compile",
        "build and check the model, print which operator ran where",
    ),
    "generate": ("harness.modes.generate", "answer the prompts"),
    "profile": ("harness.modes.profile", "estimate the time on Trainium, of prefill and decode"),
    "validate": ("harness.modes.validate", "compare the logits with the SDK's own Llama"),
    "evaluate": ("harness.modes.evaluate", "accuracy, speed, NKI share and score of the prompts"),
    "evaluate_single": ("harness.modes.evaluate", "another name of evaluate"),
    "diff": ("harness.modes.diff", "where NKI and PyTorch begin to differ, operator by operator"),
    "preflight": ("harness.modes.preflight", "the last look at a submission before its upload"),
    "evaluate_all": (
        "harness.modes.evaluate_all",
        "evaluate every prompt of prompts.txt, with reports",
    ),
}

EXAMPLES = """examples:
  main.py --mode generate --enable-nki --prompt "Why is the sky blue?"
  main.py --mode evaluate --enable-nki --llama path/to/my_llama.py
  main.py --mode profile --enable-nki --profile-model llama-3.2-1b --seq-len 640
"""

_PRIVATE_KERNEL = (
    "it asks for a private kernel of the SDK, and the kernels here are the submission's own "
    "(--enable-nki)"
)
_SET_PER_MODEL = (
    "the SDK sets it for each sub-model from --seq-len, --max-context-length and the bucket lists"
)
REFUSED = {
    "--n-active-tokens": _SET_PER_MODEL,
    "--n-positions": _SET_PER_MODEL,
    "--bucket-n-active-tokens": _SET_PER_MODEL,
    "--sequence-parallel-enabled": "no layer of the submission works on a sharded sequence",
    "--flash-decoding-enabled": "no module of the submission shards the cache along the sequence",
    "--qkv-kernel-enabled": _PRIVATE_KERNEL,
    "--attn-kernel-enabled": _PRIVATE_KERNEL,
    "--mlp-kernel-enabled": _PRIVATE_KERNEL,
    "--quantized-mlp-kernel-enabled": _PRIVATE_KERNEL,
    "--rmsnorm-quantize-kernel-enabled": _PRIVATE_KERNEL,
    "--quantized-kernel-lower-bound": _PRIVATE_KERNEL,
    "--mlp-kernel-fuse-residual-add": _PRIVATE_KERNEL,
}
DTYPES = ("bfloat16", "float16", "float32")
# Arguments that the contest's driver does not have and that mean nothing in other modes.
ONLY_IN = {
    **dict.fromkeys(
        ("--limit", "--only", "--resume", "--record-baseline", "--results-path"), ("evaluate_all",)
    ),
    "--profile-model": ("profile", "evaluate_all"),
    **dict.fromkeys(
        ("--profile-bucket", "--profile-top", "--profile-output", "--dma-profile")
        + ("--kernel-launch-us", "--graph-launch-us", "--collective-us", "--collective-gb-per-s"),
        ("profile",),
    ),
}


class Parser(argparse.ArgumentParser):
    """An argument parser whose refusals are one sentence and exit status 2, without the usage."""

    def error(self, message: str) -> NoReturn:
        said = f"{message[0].upper()}{message[1:]}".rstrip(".")
        print(f"{self.prog}: {said}; see `python {self.prog} --help`.", file=sys.stderr)
        sys.exit(2)


def boolean(text: str) -> bool:
    """`--do-sample False` means False, unlike with the contest driver's `type=bool`."""
    values = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
    if text.lower() not in values:
        raise argparse.ArgumentTypeError(f"expected true or false, got {text!r}")
    return values[text.lower()]


def positive(text: str) -> int:
    """A whole number of at least 1."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return value


def tolerance_map(text: str) -> dict[Optional[int], tuple[float, float]]:
    """`{None: 0.05, 5: (1e-5, 0.03)}`: top-k (None = all) -> (absolute, relative tolerance)."""
    try:
        given = ast.literal_eval(text)
        entries = {k: v if isinstance(v, tuple) else (1e-5, v) for k, v in given.items()}
        if not entries or not all(k is None or (isinstance(k, int) and k > 0) for k in entries):
            raise ValueError
        return {k: (float(absolute), float(rel)) for k, (absolute, rel) in entries.items()}
    except (ValueError, SyntaxError, TypeError, AttributeError) as error:
        raise argparse.ArgumentTypeError(
            f"expected a dict such as '{{None: (1e-5, 0.05), 5: (1e-5, 0.03)}}', got {text!r}"
        ) from error


def parse(argv: Optional[Sequence[str]] = None) -> argparse.Namespace:
    """Parse and check; exits with status 2 on bad arguments, raises UserError on bad prompts."""
    parser = build_parser()
    args = parser.parse_args(argv)
    _check_mode(args, parser)
    args.prompts, args.prompt_notes = _prompts(args)
    args.enable_nki = bool(args.enable_nki)
    args.given_seq_len = args.seq_len is not None
    args.seq_len = args.seq_len or DEFAULT_SEQ_LEN
    check(args)
    return args


def build_parser() -> Parser:
    modes = "\n".join(f"  {name:<16} {what}" for name, (_, what) in MODES.items())
    parser = Parser(
        prog="main.py",
        usage="main.py --mode MODE [--enable-nki] [options]",
        description=f"Compile Llama for Neuron and run it.\n\nmodes:\n{modes}",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--mode", choices=list(MODES), required=True, metavar="MODE", help="one of the list above"
    )
    parser.add_argument("--llama", default="llama", help="submission: module name or path to a .py")
    parser.add_argument(
        "--enable-nki", action=argparse.BooleanOptionalAction, help="use the submission's kernels"
    )
    parser.add_argument("--model-path", help="Hugging Face folder of a Llama model")
    parser.add_argument("--compiled-model-path", help="folder for compiled models (default: cache)")
    parser.add_argument("--recompile", action="store_true", help="never reuse a compiled folder")
    parser.add_argument("--debug", action="store_true", help="show tracebacks of refusals")
    _add_prompt_arguments(parser)
    _add_evaluation_arguments(parser)
    _add_model_arguments(parser)
    _add_profile_arguments(parser)
    refused = parser.add_argument_group("refused arguments of the contest's driver")
    for flag, reason in REFUSED.items():
        refused.add_argument(flag, nargs="*", metavar="X", help=reason)
    return parser


def _add_prompt_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("generation")
    group.add_argument(
        "--prompt",
        dest="prompt_values",
        action="append",
        metavar="LIST",
        help="comma-separated list in the csv module's quoting; may be repeated",
    )
    group.add_argument("--prompt-file", type=Path, help="prompts verbatim, blank-line separated")
    group.add_argument("--raw", action="store_true", help="do not apply the chat template")
    group.add_argument(
        "--stream", action=argparse.BooleanOptionalAction, default=True, help="text as it comes"
    )
    group.add_argument(
        "--max-new-tokens", type=positive, metavar="N", help="default: as many as --seq-len holds"
    )
    group.add_argument(
        "--do-sample",
        type=boolean,
        nargs="?",
        const=True,
        default=True,
        metavar="BOOL",
        help="sample where --top-k is above 1 (default: true)",
    )
    group.add_argument(
        "--top-k", type=positive, default=1, metavar="N", help="1 (default) is greedy"
    )
    group.add_argument(
        "--top-p", type=float, default=1.0, metavar="P", help="sample among this probability mass"
    )
    group.add_argument(
        "--temperature", type=float, default=1.0, metavar="T", help="divides the logits"
    )
    group.add_argument("--seed", type=int, default=0, metavar="N", help="of sampling (default: 0)")
    group.add_argument("--pad-token-id", type=int, metavar="ID", help="fills rows that have ended")
    group.add_argument("--on-device-sampling", action="store_true", help="sample in the graph")
    group.add_argument(
        "--global-topk", type=positive, metavar="N", help="candidates of on-device sampling"
    )
    group.add_argument("--dynamic", action="store_true", help="sampling parameters per call")


def _add_evaluation_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("evaluation")
    group.add_argument("--base-latency", type=float, metavar="MS", help="baseline latency in ms")
    group.add_argument("--base-throughput", type=float, metavar="N", help="baseline tokens/s")
    group.add_argument("--benchmark", action="store_true", help="measure speed in this mode too")
    group.add_argument(
        "--divergence-difference-tol",
        type=float,
        default=0.001,
        metavar="D",
        help="largest logit gap at which another greedy token passes (default: 0.001)",
    )
    group.add_argument(
        "--tol-map",
        type=tolerance_map,
        metavar="DICT",
        help="top-k: (absolute, relative tolerance); default: the contest's",
    )
    group.add_argument(
        "--num-tokens-to-check", type=positive, metavar="N", help="compare the first tokens only"
    )
    group.add_argument(
        "--runs", type=positive, metavar="N", help="timed runs (default: 20, 1 on the stand-in)"
    )
    group.add_argument(
        "--limit", type=positive, metavar="N", help="evaluate_all: the first prompts only"
    )
    group.add_argument(
        "--only", type=int, nargs="+", metavar="N", help="evaluate_all: prompts by number from 0"
    )
    group.add_argument("--resume", action="store_true", help="evaluate_all: go on with a run")
    group.add_argument("--results-path", default="results", help="evaluate_all: folder of reports")
    group.add_argument(
        "--record-baseline", action="store_true", help="evaluate_all: write prompt_data.txt"
    )


def _add_model_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model")
    whole: dict[str, Any] = {"type": positive, "metavar": "N"}
    on: dict[str, Any] = {"action": "store_true"}
    group.add_argument(
        "--torch-dtype", choices=DTYPES, default="bfloat16", help="default: bfloat16"
    )
    group.add_argument("--rpl-reduce-dtype", choices=DTYPES, help="of the all-reduce")
    group.add_argument("--batch-size", **whole, help="default: the number of prompts")
    group.add_argument(
        "--padding-side", choices=("right", "left"), default="right", help="default: right"
    )
    group.add_argument(
        "--seq-len", **whole, help=f"prompt and new tokens (default: {DEFAULT_SEQ_LEN})"
    )
    group.add_argument("--max-context-length", **whole, help="of a prompt (default: --seq-len)")
    group.add_argument("--max-length", **whole, help="must equal --seq-len")
    group.add_argument("--output-logits", **on, help="graphs return the logits, too")
    group.add_argument("--vocab-parallel", **on, help="shard the embedding by vocabulary")
    group.add_argument("--fused-qkv", **on, help="one weight for the three projections")
    group.add_argument(
        "--enable-bucketing",
        type=boolean,
        nargs="?",
        const=True,
        default=True,
        metavar="BOOL",
        help="graphs for several lengths (default: true)",
    )
    group.add_argument("--context-encoding-buckets", nargs="+", **whole, help="prefill lengths")
    group.add_argument("--token-generation-buckets", nargs="+", **whole, help="decode lengths")
    group.add_argument(
        "--tp-degree", **whole, help="ranks to shard over (default: 2 where it divides the heads)"
    )


def _add_profile_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("profile")
    group.add_argument(
        "--profile-model",
        choices=sorted(MODEL_SHAPES),
        help="public shapes instead of a model folder; no weights are needed",
    )
    group.add_argument(
        "--profile-bucket",
        type=positive,
        nargs="+",
        help="bucket lengths to profile (default: the largest of each sub-model)",
    )
    group.add_argument("--dma-profile", help="how DMA is timed (default: the calibrated one)")
    group.add_argument("--profile-top", type=positive, default=8, help="source lines a kernel")
    group.add_argument("--profile-output", type=Path, help="folder for JSON, trace and plots")
    for name, what in (
        ("kernel-launch", "between two kernels of a graph"),
        ("graph-launch", "one execution of a graph from the host"),
        ("collective", "start of one collective between the cores"),
    ):
        group.add_argument(f"--{name}-us", type=float, help=f"assumed cost in µs: {what}")
    group.add_argument("--collective-gb-per-s", type=float, help="assumed rate of a collective")


def _prompts(args: argparse.Namespace) -> tuple[list[str], list[str]]:
    """The prompts in order, none where the model is to choose the default one.

    Also one line for each `--prompt` value that was split.
    """
    prompts, notes = [], []
    for value in args.prompt_values or []:
        parts = split_prompt_value(value)
        prompts.extend(parts)
        if len(parts) > 1:
            notes.append(
                f"--prompt {value!r} splits at its commas into {len(parts)} prompts; "
                "put a prompt with commas in double quotes."
            )
    if args.prompt_file is not None:
        prompts.extend(read_prompt_file(args.prompt_file))
    if not all(prompt.strip() for prompt in prompts):
        raise UserError("A prompt is empty; give --prompt some text.")
    return prompts, notes


def check(args: argparse.Namespace) -> None:
    """Refuse with a UserError what no model could take."""
    for flag, reason in REFUSED.items():
        if getattr(args, flag[2:].replace("-", "_")) is not None:
            raise UserError(f"{flag} is refused: {reason}; leave it out.")
    if args.max_length not in (None, args.seq_len):
        raise UserError(
            f"--max-length must equal --seq-len {args.seq_len}, the length of the cache, got "
            f"{args.max_length}; leave it out."
        )
    if args.max_context_length is None:
        args.max_context_length = args.seq_len
    if args.max_context_length > args.seq_len:
        raise UserError(
            f"--max-context-length must be at most --seq-len {args.seq_len}, got "
            f"{args.max_context_length}."
        )
    if args.benchmark and args.mode not in ("generate", "validate"):
        raise UserError(
            f"--benchmark measures in the modes generate and validate, not in {args.mode}; leave "
            "it out (the modes evaluate and evaluate_all measure anyhow)."
        )
    _check_baseline(args)
    _check_base_figures(args)
    _check_sampling(args)
    _check_buckets(args)
    if args.batch_size is None:
        args.batch_size = 1 if args.mode == "evaluate_all" else len(args.prompts) or 1


def _check_mode(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Refuse arguments that the mode would ignore."""
    for flag, modes in ONLY_IN.items():
        name = flag[2:].replace("-", "_")
        if args.mode not in modes and getattr(args, name) != parser.get_default(name):
            raise UserError(
                f"{flag} works with --mode {' or '.join(modes)}, got --mode {args.mode}; leave it "
                "out."
            )


def _check_baseline(args: argparse.Namespace) -> None:
    """prompt_data.txt is replaced as a whole, so part of the prompts would lose the other rows."""
    given = {"--limit": args.limit, "--only": args.only, "--prompt": args.prompt_values}
    given["--prompt-file"] = args.prompt_file
    for flag, value in given.items():
        if args.record_baseline and value is not None:
            raise UserError(
                f"--record-baseline writes a row for every prompt of prompts.txt; leave {flag} out."
            )


def _check_base_figures(args: argparse.Namespace) -> None:
    given = {"--base-latency": args.base_latency, "--base-throughput": args.base_throughput}
    missing = [flag for flag, value in given.items() if value is None]
    if len(missing) == 1:
        raise UserError(
            f"--base-latency and --base-throughput need each other; give {missing[0]} too."
        )
    for flag, value in given.items():
        if value is not None and not 0 < value < math.inf:
            raise UserError(f"{flag} must be a number above 0, got {value:g}.")


def _check_sampling(args: argparse.Namespace) -> None:
    if not 0 < args.top_p <= 1:
        raise UserError(f"--top-p must be above 0 and at most 1, got {args.top_p}.")
    if not args.temperature > 0:
        raise UserError(f"--temperature must be above 0, got {args.temperature}.")
    if args.global_topk is not None and not args.on_device_sampling:
        raise UserError("--global-topk needs --on-device-sampling.")
    if args.dynamic and not args.on_device_sampling:
        raise UserError("--dynamic needs --on-device-sampling.")


def _check_buckets(args: argparse.Namespace) -> None:
    limits = {
        "--context-encoding-buckets": (args.context_encoding_buckets, args.max_context_length),
        "--token-generation-buckets": (args.token_generation_buckets, args.seq_len),
    }
    for flag, (buckets, limit) in limits.items():
        if buckets is None:
            continue
        if not args.enable_bucketing:
            raise UserError(f"{flag} needs --enable-bucketing true.")
        if max(buckets) != limit:
            raise UserError(
                f"The largest of {flag} must be {limit}, so that every length has a bucket, got "
                f"{max(buckets)}."
            )


def settings(args: argparse.Namespace) -> dict[str, Any]:
    """What of the arguments goes into NeuronConfig, by its own names; None values left out."""
    names = (
        "batch_size padding_side seq_len max_context_length torch_dtype rpl_reduce_dtype "
        "output_logits vocab_parallel fused_qkv enable_bucketing "
        "context_encoding_buckets token_generation_buckets tp_degree"
    )
    values = {name: getattr(args, name) for name in names.split()}
    values["max_length"] = args.seq_len
    return {name: value for name, value in values.items() if value is not None}


def sampling_settings(args: argparse.Namespace) -> Optional[dict[str, Any]]:
    """Fields of OnDeviceSamplingConfig, or None where tokens are sampled on the host."""
    if not args.on_device_sampling:
        return None
    names = ("do_sample", "top_k", "top_p", "temperature", "dynamic", "global_topk")
    values = {name: getattr(args, name) for name in names}
    return {name: value for name, value in values.items() if value is not None}
