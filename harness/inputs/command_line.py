"""The command line: the contest driver's arguments, a few more, and the checks that need no model.

Argument names follow the contest's driver (aws-samples/nki-llama, main.py). Each of its arguments
works or is refused with a reason; none is accepted and ignored.
"""

from __future__ import annotations

import argparse
import ast
import math
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn, Optional

from harness.errors import UserError
from harness.inputs import adapters, blocks, disaggregation, serving, speculation, swap
from harness.inputs.chunks import LONGEST_PREFILL, MOST_PREFILL
from harness.inputs.model_shapes import MODEL_SHAPES
from harness.inputs.prompts import read_prompt_file, split_prompt_value
from harness.inputs.quantised import read_module_list
from harness.settings import Settings
from neuron_cpu.console.arguments import above_zero, at_least_zero, finite, positive, seed, shown
from neuron_cpu.processes.limits import default_memory_gib

DEFAULT_PROMPT = "I believe the meaning of life is"  # the contest driver's, for base models
# For instruct models: along the embedded model's answer the two best logits stay 1.1 apart.
DEFAULT_QUESTION = "Name the capital of Japan."
DEFAULT_SEQ_LEN = 128
# Some turns, longer ones are a wait on the stand-in; the least of the public flash attention.
LONGER_SEQ_LEN = 512

# mode -> what it does; each is a module of harness.modes, but for the second names in ALIASES
MODES = {
    "compile": "build and check the model, print which operator ran where",
    "generate": "answer the prompts",
    "chat": "answer what you type, turn by turn",
    "serve": "answer over HTTP in the form of OpenAI, with a page at /",
    "disaggregate": "prefill in one process, decode in another",
    "profile": "estimate the time on Trainium, of prefill and decode",
    "validate": "compare the logits with the SDK's own Llama",
    "evaluate": "accuracy, speed, NKI share and score of the prompts",
    "evaluate_single": "another name of evaluate",
    "diff": "where NKI and PyTorch begin to differ, operator by operator",
    "perplexity": "of a text, with float and with quantised weights",
    "preflight": "the last look at a submission before its upload",
    "swap": "your kernel in any model of transformers, beside PyTorch",
    "evaluate_all": "evaluate every prompt of prompts.txt, with reports",
}
ALIASES = {"evaluate_single": "evaluate"}
EXPERIMENTS = "harness.experiments"  # their modes, beside those of harness.modes

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
    "--qkv-kernel-enabled": _PRIVATE_KERNEL,
    "--attn-kernel-enabled": _PRIVATE_KERNEL,
    "--mlp-kernel-enabled": _PRIVATE_KERNEL,
    "--quantized-mlp-kernel-enabled": _PRIVATE_KERNEL,
    "--rmsnorm-quantize-kernel-enabled": _PRIVATE_KERNEL,
    "--quantized-kernel-lower-bound": _PRIVATE_KERNEL,
    "--mlp-kernel-fuse-residual-add": _PRIVATE_KERNEL,
}
HUGGING_FACE_TOP_K = 50
MOST_ROWS = 8  # of a batch that nobody asked for: what the shipped kernels take
DTYPES = ("bfloat16", "float16", "float32")
PROMPT_VALUES = "prompt_values"
_EVALUATE = ("evaluate", "evaluate_single", "evaluate_all")
_COMPARE = ("validate", *_EVALUATE, "preflight")
_ANSWER = ("generate", *_COMPARE, "diff", disaggregation.MODE)
# flag -> the modes in which it means something; in others it is refused, not ignored.
ONLY_IN = {
    **dict.fromkeys(("--limit", "--only", "--resume", "--record-baseline"), ("evaluate_all",)),
    **dict.fromkeys(("--results-path", "--workers"), ("evaluate_all",)),
    "--profile-model": ("profile", "evaluate_all"),
    **dict.fromkeys(
        ("--profile-bucket", "--profile-top", "--profile-output", "--dma-profile")
        + ("--schedule",)
        + ("--kernel-launch-us", "--graph-launch-us", "--cache-update-us")
        + ("--logits-us", "--argmax-us", "--host-step-us")
        + ("--collective-us", "--collective-gb-per-s"),
        ("profile",),
    ),
    **dict.fromkeys(("--transfer-us", "--transfer-gb-per-s"), ("profile", disaggregation.MODE)),
    **dict.fromkeys(("--prompt", "--prompt-file"), (*_ANSWER, "swap")),
    "--raw": _ANSWER,
    "--pad-token-id": _ANSWER[:-1],
    "--stream": ("generate",),
    **dict.fromkeys(swap.FLAGS, ("swap",)),
    "--max-new-tokens": ("generate", "chat", disaggregation.MODE, *_COMPARE),
    "--system": ("chat",),
    **dict.fromkeys(("--base-latency", "--base-throughput"), _EVALUATE),
    **dict.fromkeys(
        ("--judge", "--tol-map", "--divergence-difference-tol", "--num-tokens-to-check"), _COMPARE
    ),
    "--runs": ("generate", "swap", "validate", *_EVALUATE),
    **dict.fromkeys(serving.FLAGS, ("serve",)),
    **dict.fromkeys(disaggregation.FLAGS, (disaggregation.MODE,)),
    **dict.fromkeys(
        adapters.FLAGS,
        ("compile", "generate", "chat", "serve", disaggregation.MODE, "profile", *_COMPARE),
    ),
    **dict.fromkeys(blocks.FLAGS, ("compile", "serve", "profile")),
    "--pp-degree": (
        *("compile", "generate", "chat", "serve", disaggregation.MODE, "profile"),
        *_COMPARE,
    ),
    "--adapter-id": ("generate", "chat", disaggregation.MODE, *_COMPARE),
    **dict.fromkeys(speculation.FLAGS, ("compile", "generate", "chat", "profile", *_COMPARE)),
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


def path(text: str) -> Path:
    """A path with `~` resolved."""
    if not text or "\0" in text:
        raise argparse.ArgumentTypeError(f"expected a path, got {text!r}")
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise argparse.ArgumentTypeError(
            f"expected a path, got {shown(text)}: {str(error).rstrip('.')}"
        ) from error


def workers(text: str) -> str:
    """The address of a scheduler (host:port, or with a protocol), or a number of processes."""
    if text.isdigit():
        return str(positive(text))
    host, colon, port = text.rpartition("://")[2].rpartition(":")
    if not (host and colon and port.isdigit() and text.isprintable()):
        raise argparse.ArgumentTypeError(
            f"expected an address such as tcp://host:8786, or a number, got {shown(text)}"
        )
    return text


def tolerance_map(text: str) -> dict[Optional[int], tuple[float, float]]:
    """`{None: 0.05, 5: (1e-5, 0.03)}`: top-k (None = all) -> (absolute, relative tolerance)."""
    try:
        given = ast.literal_eval(text)
        entries = {k: v if isinstance(v, tuple) else (1e-5, v) for k, v in given.items()}
        read = {k: (float(absolute), float(rel)) for k, (absolute, rel) in entries.items()}
        whole = all(k is None or (type(k) is int and k > 0) for k in read)
        if (
            not read
            or not whole
            or not all(0 <= t < math.inf for pair in read.values() for t in pair)
        ):
            raise ValueError
    except (
        ValueError,
        SyntaxError,
        TypeError,
        AttributeError,
        MemoryError,
        RecursionError,
    ) as error:
        raise argparse.ArgumentTypeError(
            f"expected a dict such as '{{None: (1e-5, 0.05), 5: (1e-5, 0.03)}}' of finite "
            f"tolerances of at least 0, got {shown(text)}"
        ) from error
    return read


def parse(argv: Optional[Sequence[str]] = None) -> Settings:
    """Parse and check; exits with status 2 on bad arguments, raises UserError on bad prompts."""
    _check_text(sys.argv[1:] if argv is None else argv)
    parser = build_parser()
    args = parser.parse_args(argv)
    _check_arguments(args, parser)
    prompts, notes = _prompts(args)
    values = vars(args) | {
        "prompts": tuple(prompts),
        "prompt_notes": tuple(notes),
        "asked_seq_len": args.seq_len,
        "asked_max_context_length": args.max_context_length,
        "enable_nki": bool(args.enable_nki),
        "judge": args.judge or ("contest" if args.mode in _EVALUATE else "ties"),
        "llama": args.llama[0],
        "contestants": tuple(args.llama),
        "only": None if args.only is None else tuple(args.only),
        **_batching(args),
        "speculation": speculation.asked(args),
        "serving": serving.asked(args),
        "adapters": adapters.asked(args),
        "blocks": blocks.asked(args),
        "transfer": disaggregation.asked(args),
        "swap": swap.asked(args),
        **_sampling(args),
        **_quantisation(args),
    }
    whole = values["speculation"] is not None or values["transfer"] is not None
    values |= _lengths(args, whole=whole)
    if values["blocks"] is not None:
        values |= blocks.lengths(args, values["blocks"], values["seq_len"])
    if args.batch_size is None:
        alone = (
            values["speculation"] is not None and ALIASES.get(args.mode, args.mode) != "evaluate"
        )
        values["batch_size"] = 1 if alone else _batch_size(args.mode, len(prompts))
    settings = Settings(**{field.name: values[field.name] for field in fields(Settings)})
    check(settings)
    return settings


def module_of(settings: Settings) -> str:
    """The module that carries the settings out."""
    if settings.workers is not None:
        return f"{EXPERIMENTS}.spread"
    room = EXPERIMENTS if settings.mode == disaggregation.MODE else "harness.modes"
    return f"{room}.{ALIASES.get(settings.mode, settings.mode)}"


def _batch_size(mode: str, prompts: int) -> int:
    """All prompts at once, but for a run of prompts one by one, and for more than fit a graph."""
    if mode == "evaluate_all":
        return 1
    if mode == "serve":
        return serving.SLOTS
    return max(1, min(prompts, MOST_ROWS) if mode in ("generate", "disaggregate") else prompts)


def _batching(args: argparse.Namespace) -> dict[str, Any]:
    """One prompt a prefill with continuous batching, which is what all versions of NxDI have."""
    in_blocks = args.is_prefix_caching or args.is_chunked_prefill
    lines = args.is_continuous_batching or args.mode in ("serve", disaggregation.MODE)
    if not (lines or in_blocks):
        return {}
    return {"is_continuous_batching": True, "ctx_batch_size": args.ctx_batch_size or 1}


def _default_seq_len(mode: str) -> int:
    return LONGER_SEQ_LEN if mode in ("chat", "serve", "swap") else DEFAULT_SEQ_LEN


def _lengths(args: argparse.Namespace, whole: bool) -> dict[str, int]:
    """`whole`: prompts are not fed in chunks."""
    seq_len = args.seq_len or _default_seq_len(args.mode)
    whole |= args.padding_side == "left" or args.context_encoding_buckets is not None
    longest = seq_len if whole else min(seq_len, LONGEST_PREFILL)
    return {"seq_len": seq_len, "max_context_length": args.max_context_length or longest}


def _sampling(args: argparse.Namespace) -> dict[str, Any]:
    """Greedy unless something asks for more, as in the contest; --do-sample is Hugging Face's.

    There it samples among the 50 best tokens where no top-k is named (GenerationConfig.top_k).
    """
    top_k = args.top_k or (HUGGING_FACE_TOP_K if args.do_sample else 1)
    return {"do_sample": args.do_sample is not False, "top_k": top_k}


QUANTISED_AS = {"int8": "int8", "fp8": "f8e4m3"}  # --quantize -> NxDI's name


def _quantisation(args: argparse.Namespace) -> dict[str, Any]:
    """NxDI's settings; `--quantize` means one scale a channel and a checkpoint in the cache."""
    asked = args.quantize is not None
    listed = args.modules_to_not_convert_file
    return {
        "quantized": args.quantized or asked,
        "quantization_type": args.quantization_type
        or ("per_channel_symmetric" if asked else "per_tensor_symmetric"),
        "quantization_dtype": QUANTISED_AS[args.quantize] if asked else args.quantization_dtype,
        "modules_to_not_convert": None if listed is None else read_module_list(listed),
    }


def _check_text(argv: Sequence[str]) -> None:
    """Arguments are text: what is not UTF-8 reaches Python as lone surrogates."""
    for argument in argv:
        if any("\ud800" <= letter <= "\udfff" for letter in argument):
            raise UserError(f"An argument is not UTF-8 text: {argument!r}; write it as UTF-8.")


def build_parser() -> Parser:
    modes = "\n".join(f"  {name:<16} {what}" for name, what in MODES.items())
    parser = Parser(
        prog="main.py",
        usage="main.py --mode MODE [--enable-nki] [options]",
        description=f"Compile Llama for Neuron and run it.\n\nmodes:\n{modes}",
        epilog=f"{_refused_in_words()}\n\n{EXAMPLES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--mode", choices=list(MODES), required=True, metavar="MODE", help="one of the list above"
    )
    parser.add_argument(
        "--llama",
        nargs="+",
        default=["llama"],
        metavar="FILE",
        help="submission: module name or path to a .py (evaluate_all: several, to be compared)",
    )
    parser.add_argument(
        "--enable-nki", action=argparse.BooleanOptionalAction, help="use the submission's kernels"
    )
    parser.add_argument(
        "--model-path",
        type=path,
        help="a Llama model: Hugging Face folder, .gguf file, or OWNER/NAME of the hub",
    )
    parser.add_argument(
        "--compiled-model-path", type=path, help="folder for compiled models (default: cache)"
    )
    parser.add_argument("--recompile", action="store_true", help="never reuse a compiled folder")
    parser.add_argument("--debug", action="store_true", help="show tracebacks of refusals")
    _add_process_arguments(parser)
    _add_prompt_arguments(parser)
    _add_evaluation_arguments(parser)
    _add_model_arguments(parser)
    speculation.add_arguments(parser, positive, path)
    _add_quantisation_arguments(parser)
    serving.add_arguments(parser, positive, path)
    adapters.add_arguments(parser, positive)
    blocks.add_arguments(parser, positive)
    disaggregation.add_arguments(parser, above_zero)
    swap.add_arguments(parser, positive, finite)
    _add_profile_arguments(parser)
    for flag in REFUSED:
        parser.add_argument(flag, nargs="*", metavar="X", help=argparse.SUPPRESS)
    return parser


def _refused_in_words() -> str:
    """One paragraph: each says why when it is given."""
    names = f"Refused of the contest's arguments, each with its reason: {', '.join(REFUSED)}."
    return textwrap.fill(names, 78, break_on_hyphens=False)


def _add_process_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the submission's process")
    group.add_argument(
        "--isolate",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="run the submission in a process of its own (--no-isolate: for debuggers)",
    )
    group.add_argument(
        "--memory-limit",
        type=above_zero,
        default=default_memory_gib(),
        metavar="GIB",
        help="memory it may use (default: three quarters of the machine's)",
    )
    group.add_argument(
        "--cpu-limit",
        type=positive,
        default=36_000,
        metavar="S",
        help="processor time it may use (default: 10 hours)",
    )
    group.add_argument(
        "--time-limit",
        type=above_zero,
        default=3600.0,
        metavar="S",
        help="for one compile, load or generation (default: 1 hour)",
    )


def _add_prompt_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("generation")
    group.add_argument(
        "--prompt",
        dest=PROMPT_VALUES,
        action="append",
        metavar="LIST",
        help="comma-separated list in the csv module's quoting; may be repeated",
    )
    group.add_argument("--prompt-file", type=path, help="prompts verbatim, blank-line separated")
    group.add_argument("--system", metavar="TEXT", help="chat: what the model is to be")
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
        metavar="BOOL",
        help="sample among the --top-k best tokens",
    )
    group.add_argument(
        "--top-k",
        type=positive,
        metavar="N",
        help=f"1 is greedy (default: 1; {HUGGING_FACE_TOP_K} with --do-sample)",
    )
    group.add_argument(
        "--top-p", type=finite, default=1.0, metavar="P", help="sample among this probability mass"
    )
    group.add_argument(
        "--temperature", type=finite, default=1.0, metavar="T", help="divides the logits"
    )
    group.add_argument("--seed", type=seed, default=0, metavar="N", help="of sampling (default: 0)")
    group.add_argument("--pad-token-id", type=int, metavar="ID", help="fills rows that have ended")
    group.add_argument("--on-device-sampling", action="store_true", help="sample in the graph")
    group.add_argument(
        "--global-topk", type=positive, metavar="N", help="candidates of on-device sampling"
    )
    group.add_argument("--dynamic", action="store_true", help="sampling parameters per call")


def _add_evaluation_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("evaluation")
    group.add_argument("--base-latency", type=finite, metavar="MS", help="baseline latency in ms")
    group.add_argument("--base-throughput", type=finite, metavar="N", help="baseline tokens/s")
    group.add_argument("--benchmark", action="store_true", help="measure speed in this mode too")
    group.add_argument(
        "--judge",
        choices=("ties", "contest"),
        help="whether another token in a tie within one bf16 spacing passes (default: ties; "
        "contest, which fails it, where a score is made)",
    )
    group.add_argument(
        "--divergence-difference-tol",
        type=at_least_zero,
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
    group.add_argument(
        "--results-path", type=path, default=Path("results"), help="evaluate_all: folder of reports"
    )
    group.add_argument(
        "--workers",
        type=workers,
        metavar="ADDRESS",
        help="evaluate_all: spread prompts over a Dask cluster, or over as many processes here",
    )
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
    group.add_argument("--batch-size", **whole, help="default: the number of prompts, at most 8")
    group.add_argument(
        "--is-continuous-batching",
        action="store_true",
        default=None,
        help="rows of a batch are requests that come and go",
    )
    group.add_argument(
        "--ctx-batch-size", **whole, help="prompts of one prefill (default with it: 1)"
    )
    group.add_argument(
        "--apply-seq-ids-mask",
        action="store_true",
        default=None,
        help="requests that a step leaves out keep their cache (NxDI 0.4 and later)",
    )
    group.add_argument(
        "--async-mode",
        action="store_true",
        default=None,
        help="begin a step before the last one's tokens reach the host (NxDI 0.2 and later)",
    )
    group.add_argument(
        "--padding-side", choices=("right", "left"), default="right", help="default: right"
    )
    group.add_argument(
        "--seq-len",
        **whole,
        help=f"prompt and new tokens (default: {DEFAULT_SEQ_LEN}; chat, serve, swap: "
        f"{LONGER_SEQ_LEN})",
    )
    group.add_argument(
        "--max-context-length",
        **whole,
        help=f"of a prompt's first part, prefilled at once (default: --seq-len, {LONGEST_PREFILL} "
        "at most)",
    )
    group.add_argument(
        "--prefill-chunk",
        **whole,
        help="tokens of a longer prompt that are fed at a time (default: what a graph holds)",
    )
    group.add_argument("--max-length", **whole, help="must equal --seq-len")
    group.add_argument("--output-logits", **on, help="graphs return the logits, too")
    group.add_argument("--vocab-parallel", **on, help="shard the embedding by vocabulary")
    group.add_argument("--fused-qkv", **on, help="one weight for the three projections")
    group.add_argument(
        "--sequence-parallel-enabled",
        **on,
        help="shard the prompt over the ranks between the blocks of a layer",
    )
    group.add_argument(
        "--flash-decoding-enabled",
        **on,
        help="ranks that share a KV head keep its positions among them (degree above the KV heads)",
    )
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
    group.add_argument(
        "--cp-degree",
        **whole,
        help="parts of a prompt, each attended to by tp / cp of the ranks (NxDI 0.4 and later)",
    )
    group.add_argument(
        "--pp-degree",
        type=positive,
        default=1,
        metavar="N",
        help="stages to split the layers over, each of --tp-degree ranks (default: 1)",
    )


def _add_quantisation_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("quantisation (names of NxDI's inference_demo)")
    group.add_argument(
        "--quantize",
        choices=tuple(QUANTISED_AS),
        help="weights of one byte, a scale a channel; the checkpoint is made once and kept",
    )
    group.add_argument("--quantized", action="store_true", help="weights of one byte")
    group.add_argument(
        "--quantized-checkpoints-path",
        type=path,
        metavar="PATH",
        help="of --quantized: a folder or a file of save_quantized_state_dict, made where missing",
    )
    group.add_argument(
        "--quantization-type",
        choices=("per_tensor_symmetric", "per_channel_symmetric"),
        help="default: per_tensor_symmetric; per_channel_symmetric with --quantize",
    )
    group.add_argument(
        "--quantization-dtype",
        choices=tuple(QUANTISED_AS.values()),
        default="int8",
        help="default: int8",
    )
    group.add_argument(
        "--modules-to-not-convert-file", type=path, metavar="JSON", help="modules left in float"
    )
    group.add_argument("--kv-cache-quant", action="store_true", help="keys and values in fp8")


def _add_profile_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("profile")
    group.add_argument(
        "--profile-model",
        choices=sorted(MODEL_SHAPES),
        metavar="NAME",
        help="public shapes instead of a model folder, without weights: "
        + ", ".join(sorted(MODEL_SHAPES)),
    )
    group.add_argument(
        "--profile-bucket",
        type=positive,
        nargs="+",
        help="bucket lengths to profile (default: the largest of each sub-model)",
    )
    group.add_argument("--dma-profile", help="how DMA is timed (default: the calibrated one)")
    group.add_argument(
        "--schedule",
        metavar="ORDER",
        help="order within an engine: compiler (list scheduling, the default) or program-order",
    )
    group.add_argument("--profile-top", type=positive, default=8, help="source lines a kernel")
    group.add_argument("--profile-output", type=path, help="folder for JSON, trace and plots")
    for name, what in (
        ("kernel-launch", "between two kernels of a graph"),
        ("graph-launch", "one execution of a graph from the host"),
        ("cache-update", "start of an operator that writes or reads rows of a cache or table"),
        ("logits", "logits to the host, once a graph"),
        ("argmax", "arg-maximum over the vocabulary on the host, once a graph"),
        ("host-step", "the rest of the host's work for a step, once a graph"),
        ("collective", "start of one collective between the cores"),
        ("transfer", "start of one transfer between instances"),
    ):
        group.add_argument(f"--{name}-us", type=at_least_zero, help=f"assumed cost in µs: {what}")
    group.add_argument(
        "--collective-gb-per-s", type=above_zero, help="assumed rate of a collective"
    )
    group.add_argument(
        "--transfer-gb-per-s", type=above_zero, help="assumed rate of one rank's transfer"
    )


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


def check(settings: Settings) -> None:
    """Refuse with a UserError what no model could take."""
    if settings.max_context_length > settings.seq_len:
        raise UserError(
            f"--max-context-length must be at most --seq-len {settings.seq_len}, got "
            f"{settings.max_context_length}."
        )
    _check_batching(settings)
    blocks.check(settings)
    speculation.check(settings)
    swap.check(settings)
    disaggregation.check(settings)
    _check_chunks(settings)
    _check_base_figures(settings)
    _check_sampling(settings)
    _check_buckets(settings)
    _check_sequence(settings)
    _check_stages(settings)


def _check_arguments(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Refuse arguments that the mode would ignore, and those that nothing here can do."""
    for flag, reason in REFUSED.items():
        if getattr(args, _name(flag)) is not None:
            raise UserError(f"{flag} is refused: {reason}; leave it out.")
    for flag, modes in ONLY_IN.items():
        if args.mode not in modes and getattr(args, _name(flag)) != parser.get_default(_name(flag)):
            raise UserError(
                f"{flag} works with --mode {' or '.join(modes)}, got --mode {args.mode}; leave it "
                "out."
            )
    if args.benchmark and args.mode not in ("generate", "validate"):
        raise UserError(
            f"--benchmark measures in the modes generate and validate, not in {args.mode}; leave "
            "it out (the modes evaluate and evaluate_all measure anyhow)."
        )
    if args.runs is not None and args.mode in ("generate", "validate") and not args.benchmark:
        raise UserError(f"--runs needs --benchmark in --mode {args.mode}.")
    seq_len = args.seq_len or _default_seq_len(args.mode)
    if args.max_length not in (None, seq_len):
        raise UserError(
            f"--max-length must equal --seq-len {seq_len}, the length of the cache, got "
            f"{args.max_length}; leave it out."
        )
    if args.mode == "chat" and args.batch_size not in (None, 1):
        raise UserError(
            f"--mode chat holds one conversation, got --batch-size {args.batch_size}; leave it out."
        )
    _check_contestants(args)
    _check_baseline(args)
    _check_samples_at_all(args)
    _check_quantisation(args)


def _check_quantisation(args: argparse.Namespace) -> None:
    """Two ways to ask for one thing exclude each other; what tunes nothing is refused."""
    if args.quantize is not None and (args.quantized or args.quantization_dtype != "int8"):
        raise UserError(
            f"--quantize {args.quantize} says all of --quantized and --quantization-dtype; leave "
            "these out."
        )
    if args.quantized and args.quantized_checkpoints_path is None:
        raise UserError(
            "--quantized needs --quantized-checkpoints-path; name a folder, or give --quantize "
            "int8, which keeps one in the cache."
        )
    quantised = args.quantized or args.quantize is not None
    tuning = ("quantized_checkpoints_path", "quantization_type", "modules_to_not_convert_file")
    for name in tuning:
        if not quantised and getattr(args, name) is not None:
            flag = f"--{name.replace('_', '-')}"
            raise UserError(f"{flag} needs --quantized or --quantize; give one of them too.")
    per_tensor = args.quantization_type != "per_channel_symmetric" and (
        args.quantization_type is not None or args.quantize is None
    )
    if args.modules_to_not_convert_file is not None and per_tensor:
        raise UserError(
            "--modules-to-not-convert-file needs --quantization-type per_channel_symmetric, as "
            "checkpoints with a scale a tensor ignore it."
        )


def _name(flag: str) -> str:
    """The attribute in which argparse keeps a flag's value."""
    return PROMPT_VALUES if flag == "--prompt" else flag[2:].replace("-", "_")


def _check_samples_at_all(args: argparse.Namespace) -> None:
    """Refuse what tunes sampling where every token is the best one."""
    tuned = {"--top-p": args.top_p != 1, "--temperature": args.temperature != 1}
    if args.do_sample is False:
        tuned["--top-k"] = args.top_k not in (None, 1)
    greedy = args.do_sample is False or not (args.do_sample or args.top_k or args.dynamic)
    for flag, given in tuned.items():
        if given and greedy:
            raise UserError(
                f"{flag} tunes sampling, and without --do-sample every token is the best one; give "
                f"--do-sample too, or leave {flag} out."
            )


def _check_contestants(args: argparse.Namespace) -> None:
    if len(args.llama) > 1 and args.mode != "evaluate_all":
        raise UserError(
            f"--llama takes one submission in --mode {args.mode}, got {len(args.llama)}; the mode "
            "evaluate_all compares several."
        )
    if args.record_baseline and (len(args.llama) > 1 or args.workers is not None):
        raise UserError(
            "--record-baseline measures one baseline in this process; leave --workers and further "
            "submissions out."
        )


def _check_baseline(args: argparse.Namespace) -> None:
    """prompt_data.txt is replaced as a whole, so part of the prompts would lose the other rows."""
    for flag in ("--limit", "--only", "--prompt", "--prompt-file"):
        if args.record_baseline and getattr(args, _name(flag)) is not None:
            raise UserError(
                f"--record-baseline writes a row for every prompt of prompts.txt; leave {flag} out."
            )


def _check_base_figures(settings: Settings) -> None:
    given = {
        "--base-latency": settings.base_latency,
        "--base-throughput": settings.base_throughput,
    }
    missing = [flag for flag, value in given.items() if value is None]
    if len(missing) == 1:
        raise UserError(
            f"--base-latency and --base-throughput need each other; give {missing[0]} too."
        )
    for flag, value in given.items():
        if value is not None and not value > 0:
            raise UserError(f"{flag} must be a number above 0, got {value:g}.")


def _check_sampling(settings: Settings) -> None:
    if not 0 < settings.top_p <= 1:
        raise UserError(f"--top-p must be above 0 and at most 1, got {settings.top_p}.")
    if not settings.temperature > 0:
        raise UserError(f"--temperature must be above 0, got {settings.temperature}.")
    if settings.global_topk is not None and not settings.on_device_sampling:
        raise UserError("--global-topk needs --on-device-sampling.")
    if settings.async_mode and not settings.on_device_sampling:
        raise UserError("--async-mode needs --on-device-sampling.")
    if settings.dynamic and not settings.on_device_sampling:
        raise UserError("--dynamic needs --on-device-sampling.")


def _check_batching(settings: Settings) -> None:
    """Continuous batching, and what only it has."""
    if not settings.is_continuous_batching:
        for flag in ("--ctx-batch-size", "--apply-seq-ids-mask"):
            if getattr(settings, _name(flag)) is not None:
                raise UserError(f"{flag} needs --is-continuous-batching.")
    elif settings.padding_side == "left":
        raise UserError("--is-continuous-batching needs --padding-side right.")


def _check_chunks(settings: Settings) -> None:
    chunk, longest = settings.prefill_chunk, settings.max_context_length
    if longest > MOST_PREFILL:
        raise UserError(
            f"--max-context-length must be at most {MOST_PREFILL}, got {longest}; a longer prompt "
            "is fed in chunks, padded on the right."
        )
    if chunk is None:
        return
    if settings.whole_because is not None:
        raise UserError(
            f"--prefill-chunk does not go with {settings.whole_because}; leave one of them out."
        )
    if not (1 < chunk < settings.seq_len and chunk != longest < settings.seq_len):
        raise UserError(
            f"--prefill-chunk must be above 1, below --seq-len {settings.seq_len} and not "
            f"--max-context-length {longest}, which must be below --seq-len, too; got {chunk}."
        )


def _check_sequence(settings: Settings) -> None:
    """A sharded prompt: NxDI reads a wrong row of left-padded ones, or sums the embedding twice."""
    others = {
        "--padding-side left": settings.padding_side == "left",
        "--vocab-parallel": settings.vocab_parallel,
    }
    for flag, given in others.items():
        if settings.sequence_parallel_enabled and given:
            raise UserError(
                f"--sequence-parallel-enabled works with right padding and a whole vocabulary, got "
                f"{flag}; leave one of them out."
            )
    graphs = {
        "a cache of blocks": settings.blocks is not None,
        "--is-medusa or fused speculation": settings.speculation is not None
        and (settings.speculation.method == "medusa" or settings.speculation.fused),
    }
    others = {"--padding-side left": settings.padding_side == "left", **graphs}
    for flag, given in others.items():
        if settings.flash_decoding_enabled and given:
            raise UserError(
                f"--flash-decoding-enabled puts positions of the cache on several ranks and does "
                f"not go with {flag}; leave one of them out."
            )
    others = {
        "--flash-decoding-enabled": settings.flash_decoding_enabled,
        "--sequence-parallel-enabled": settings.sequence_parallel_enabled,
        "quantised weights": settings.quantized,
        "adapters": settings.adapters is not None,
        **graphs,
    }
    for flag, given in others.items():
        if (settings.cp_degree or 1) > 1 and given:
            raise UserError(
                f"--cp-degree gives groups of ranks parts of a prompt and does not go with {flag}; "
                "leave one of them out."
            )


def _check_stages(settings: Settings) -> None:
    """What needs more from another stage than hidden states."""
    others = {
        "--sequence-parallel-enabled": settings.sequence_parallel_enabled,
        "--flash-decoding-enabled": settings.flash_decoding_enabled,
        "--cp-degree": (settings.cp_degree or 1) > 1,
        "--async-mode": settings.async_mode,
        "--lora-ckpt-path": settings.adapters is not None,
        "a cache of blocks": settings.blocks is not None,
        "--is-medusa or fused speculation": settings.speculation is not None
        and (settings.speculation.method == "medusa" or settings.speculation.fused),
    }
    for flag, given in others.items():
        if settings.pp_degree > 1 and given:
            raise UserError(
                f"--pp-degree splits layers over stages, which exchange hidden states alone, and "
                f"does not go with {flag}; leave one of them out."
            )


def _check_buckets(settings: Settings) -> None:
    limits = {
        "--context-encoding-buckets": (
            settings.context_encoding_buckets,
            settings.max_context_length,
        ),
        "--token-generation-buckets": (settings.token_generation_buckets, settings.seq_len),
        "--profile-bucket": (settings.profile_bucket, None),
    }
    for flag, (buckets, limit) in limits.items():
        if buckets is None:
            continue
        if not settings.enable_bucketing:
            raise UserError(f"{flag} needs --enable-bucketing true.")
        if limit is not None and max(buckets) != limit:
            raise UserError(
                f"The largest of {flag} must be {limit}, so that every length has a bucket, got "
                f"{max(buckets)}."
            )
        if max(buckets) > settings.seq_len:
            raise UserError(
                f"{flag} must be at most --seq-len {settings.seq_len}, got {max(buckets)}."
            )
