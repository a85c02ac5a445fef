"""The options of `main.py`, a table: by topic, each with its modes, its form and a line of help.

An option without modes counts in all of them; in a mode that is not among its own it is refused.
Names are the contest driver's, NxDI's (inference_demo.py), and transformers' for prompt lookup.
"""

import argparse
import ast
import math
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Optional

from harness.inputs.blocks import BLOCK
from harness.inputs.chunks import LONGEST_PREFILL
from harness.inputs.experiments import DEFAULT_HEADS, MEDUSA_FILE
from harness.inputs.model_shapes import MODEL_SHAPES
from harness.inputs.serving import SLOTS, port
from harness.inputs.speculation import DEFAULT_LENGTH, METHODS
from harness.inputs.swap import LEAST_COSINE, PLACES
from harness.settings import FUSED, OPERATOR, ROUNDINGS
from neuron_cpu.console.arguments import above_zero, at_least_zero, finite, positive, seed, shown
from neuron_cpu.processes.limits import default_memory_gib

# mode -> what it does; each is a module of harness.modes, but for the second names in ALIASES
MODES = {
    "compile": "build and check the model, print which operator ran where",
    "generate": "answer the prompts",
    "chat": "answer what you type, turn by turn",
    "serve": "answer over HTTP in the form of OpenAI, with a page at /",
    "profile": "estimate the time on Trainium, of prefill and decode",
    "validate": "compare the logits with the SDK's own Llama",
    "evaluate": "accuracy, speed, NKI share and score of the prompts",
    "evaluate_single": "another name of evaluate",
    "diff": "where NKI and PyTorch begin to differ, operator by operator",
    "perplexity": "of a text, with float and with quantised weights",
    "preflight": "the last look at a submission before its upload",
    "swap": "your kernel in any model of transformers, beside PyTorch",
    "evaluate_all": "evaluate every prompt of prompts.txt, with reports",
    "cache": "what earlier runs have left on the disk; --clear removes it",
}
ALIASES = {"evaluate_single": "evaluate"}

DEFAULT_SEQ_LEN = 128
# Some turns, longer ones are a wait on the stand-in; the least of the public flash attention.
LONGER_SEQ_LEN = 512
HUGGING_FACE_TOP_K = 50
DTYPES = ("bfloat16", "float16", "float32")
QUANTISED_AS = {"int8": "int8", "fp8": "f8e4m3"}  # --quantize -> NxDI's name
PROMPT_VALUES = "prompt_values"

_EVERY = ("evaluate_all",)
EVALUATE = ("evaluate", "evaluate_single", *_EVERY)
_COMPARE = ("validate", *EVALUATE, "preflight")
_ANSWER = ("generate", *_COMPARE, "diff")
_GUESS = ("compile", "generate", "chat", "profile", *_COMPARE)
_RUN = ("compile", "generate", "chat", "serve", "profile", *_COMPARE)
_BLOCKS = ("compile", "serve", "profile")
_PROFILE = ("profile",)


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


def tolerance_map(text: str) -> dict[Optional[int], tuple[float, float]]:
    """`{None: 0.05, 5: (1e-5, 0.03)}`: top-k (None = all) -> (absolute, relative tolerance)."""
    try:
        given = ast.literal_eval(text)
        entries = {k: v if isinstance(v, tuple) else (1e-5, v) for k, v in given.items()}
        read = {k: (float(absolute), float(rel)) for k, (absolute, rel) in entries.items()}
        whole = all(k is None or (type(k) is int and k > 0) for k in read)
        finite = all(0 <= t < math.inf for pair in read.values() for t in pair)
        if not (read and whole and finite):
            raise ValueError
    except (
        *(ValueError, SyntaxError, TypeError, AttributeError, MemoryError),
        RecursionError,
    ) as error:
        raise argparse.ArgumentTypeError(
            f"expected a dict such as '{{None: (1e-5, 0.05), 5: (1e-5, 0.03)}}' of finite "
            f"tolerances of at least 0, got {shown(text)}"
        ) from error
    return read


class Option(NamedTuple):
    """One option.

    Attributes:
        flag: its name.
        help: what it does, for a line.
        modes: in which it means something; empty: in all.
        form: what argparse is told beside them.
        also: a second name.
    """

    flag: str
    help: str
    modes: tuple[str, ...] = ()
    form: dict[str, Any] = {}
    also: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The attribute in which argparse keeps the value."""
        return self.form.get("dest", self.flag[2:].replace("-", "_"))

    @property
    def left(self) -> str:
        """The flag and its argument, as help shows them."""
        value = self.form.get("metavar") or "|".join(self.form.get("choices", ()))
        if not value and "action" not in self.form:
            value = "PATH" if self.form.get("type") is path else "X"
        if self.form.get("action") is argparse.BooleanOptionalAction:
            return f"--[no-]{self.flag[2:]}"
        return f"{self.flag} {value}".rstrip()


class Topic(NamedTuple):
    """Options that belong together.

    Attributes:
        title: what they are about.
        options: in the order of the help.
        whole_in: modes whose help explains them; in others it names them. None: in all modes.
    """

    title: str
    options: tuple[Option, ...]
    whole_in: Optional[tuple[str, ...]] = None


def _of(kind: Any, metavar: str, **more: Any) -> dict[str, Any]:
    return {"type": kind, "metavar": metavar, **more}


def _one(*choices: str, **more: Any) -> dict[str, Any]:
    return {"choices": choices, **more}


N, PATH = _of(positive, "N"), _of(path, "PATH")
SEVERAL = {**N, "nargs": "+"}
ON = {"action": "store_true"}
ASKED = {**ON, "default": None}  # the SDK is told only where it is given
OFF_TOO = {"action": argparse.BooleanOptionalAction}
BOOL = _of(boolean, "BOOL", nargs="?", const=True)
TEXT = {"metavar": "TEXT"}

_COSTS = (
    ("kernel-launch", "between two kernels of a graph"),
    ("graph-launch", "start of a graph"),
    ("cache-update", "start of an operator on a cache"),
    ("logits", "logits to the host"),
    ("argmax", "arg-maximum on the host"),
    ("host-step", "the rest of a step on the host"),
    ("collective", "start of a collective"),
)
_RATE = _of(above_zero, "GB")

TOPICS = {
    "run": Topic("what runs", (
        Option("--llama", "submission: .py or module (several to compare)",
               form={"nargs": "+", "default": ["llama"], "metavar": "FILE"}),
        Option("--enable-nki", "use the submission's kernels", form=OFF_TOO),
        Option("--libraries", "checkouts of NxD and NxD Inference, instead of the imitation",
               form={"nargs": "+", "type": path, "metavar": "DIR"}),
        Option("--model-path", "folder of a model, .gguf, or OWNER/NAME",
               form=PATH),
        Option("--compiled-model-path", "folder for compiled models (default: cache)", form=PATH),
        Option("--clear", "remove folders of the cache: all, or names that the mode lists",
               ("cache",), {"nargs": "+", "default": [], "metavar": "NAME"}),
        Option("--recompile", "never reuse a compiled folder", form=ON),
        Option("--debug", "show tracebacks of refusals", form=ON),
    )),
    "prompts": Topic("prompts and answers", (
        Option("--prompt", "comma-separated list, quoted as in CSV; may be repeated",
               (*_ANSWER, "swap"),
               {"dest": PROMPT_VALUES, "action": "append", "metavar": "LIST"}),
        Option("--prompt-file", "prompts verbatim, blank-line separated",
               (*_ANSWER, "swap"), PATH),
        Option("--system", "what the model is to be", ("chat",), TEXT),
        Option("--raw", "do not apply the chat template", _ANSWER, ON),
        Option("--stream", "text as it comes", ("generate",), {**OFF_TOO, "default": True}),
        Option("--max-new-tokens", "default: as many as --seq-len holds",
               ("generate", "chat", *_COMPARE), N),
        Option("--pad-token-id", "fills rows that have ended", _ANSWER, _of(int, "ID")),
    )),
    "sampling": Topic("how tokens are chosen", (
        Option("--do-sample", "sample among the --top-k best tokens", form=BOOL),
        Option("--top-k", f"1 is greedy (default: 1; {HUGGING_FACE_TOP_K} with --do-sample)",
               form=N),
        Option("--top-p", "sample among this probability mass",
               form=_of(finite, "P", default=1.0)),
        Option("--temperature", "divides the logits; 0 is greedy",
               form=_of(finite, "T", default=1.0)),
        Option("--seed", "of sampling (default: 0)", form=_of(seed, "N", default=0)),
        Option("--on-device-sampling", "sample in the graph", form=ON),
        Option("--global-topk", "candidates of on-device sampling", form=N),
        Option("--dynamic", "sampling parameters per call", form=ON),
    ), ("generate", "chat")),
    "evaluation": Topic("what counts as right and fast, and reports", (
        Option("--benchmark", "measure speed in this mode too", ("generate", "validate"), ON),
        Option("--runs", "timed runs (default: 20, 1 on the stand-in)",
               ("generate", "swap", "validate", *EVALUATE), N),
        Option("--base-latency", "baseline latency in ms", EVALUATE, _of(finite, "MS")),
        Option("--base-throughput", "baseline tokens/s", EVALUATE, _of(finite, "N")),
        Option("--judge", "whether a tie within one bf16 spacing passes (contest: no)", _COMPARE,
               _one("ties", "contest")),
        Option("--baseline-rounding", "of the stand-in: fused, products, elementwise or operator",
               _COMPARE, _one(*ROUNDINGS, OPERATOR, default=FUSED, metavar="WHERE")),
        Option("--rounding", "what boundaries round that a compiler leaves in fp32", ("diff",),
               _one(*ROUNDINGS, nargs="?", const=FUSED)),
        Option("--divergence-difference-tol", "logit gap up to which another token passes (0.001)",
               _COMPARE, _of(at_least_zero, "D", default=0.001)),
        Option("--tol-map", "top-k: (absolute, relative tolerance); default: the contest's",
               _COMPARE, _of(tolerance_map, "DICT")),
        Option("--num-tokens-to-check", "compare the first tokens only", _COMPARE, N),
        Option("--limit", "the first prompts only", _EVERY, N),
        Option("--only", "prompts by number from 0", _EVERY, _of(int, "N", nargs="+")),
        Option("--resume", "go on with a run", _EVERY, ON),
        Option("--results-path", "folder of reports", _EVERY, {**PATH, "default": Path("results")}),
        Option("--record-baseline", "write prompt_data.txt", _EVERY, ON),
        Option("--contest", "clone of a contest, whose prompts and base times count", _EVERY, PATH),
    )),
    "server": Topic(f"server (--batch-size answers at once, {SLOTS} by default)", (
        Option("--host", "to listen on (default: 127.0.0.1)", ("serve",), {"metavar": "ADDRESS"}),
        Option("--port", "default: 8000; 0: a free one", ("serve",), _of(port, "N")),
        Option("--api-key-file", "its first line is the key that requests must carry", ("serve",),
               PATH),
        Option("--max-waiting", "answers in the queue, beyond which none is taken (64)",
               ("serve",), N),
        Option("--drain-seconds", "for answers that run when the server is to end (30)",
               ("serve",), _of(positive, "S")),
    )),
    "swap": Topic("a kernel in any causal LM or encoder of transformers", (
        Option("--kernel", "the kernel, or an adapter around it", ("swap",),
               {"metavar": "FILE:NAME"}),
        Option("--at", "what it replaces", ("swap",), _one(*PLACES)),
        Option("--layers", "cut the model to N layers", ("swap",), N),
        Option("--least-cosine", f"to the reference in fp32, of every token ({LEAST_COSINE})",
               ("swap",), _of(finite, "C", default=LEAST_COSINE)),
    )),
    "profile": Topic("estimates, and what they assume", (
        Option("--profile-model", f"shapes without weights: {', '.join(sorted(MODEL_SHAPES))}",
               (*_PROFILE, *_EVERY), _one(*sorted(MODEL_SHAPES), metavar="NAME")),
        Option("--profile-bucket", "lengths to profile (default: the largest)",
               _PROFILE, SEVERAL),
        Option("--profile-top", "source lines a kernel", _PROFILE, {**N, "default": 8}),
        Option("--profile-output", "folder for JSON, trace and page", _PROFILE, PATH),
        Option("--dma-profile", "how DMA is timed (default: the calibrated one)", _PROFILE,
               {"metavar": "NAME"}),
        Option("--schedule", "within an engine: compiler (list scheduling) or program-order",
               _PROFILE, {"metavar": "ORDER"}),
        *(Option(f"--{name}-us", f"assumed cost: {what}", _PROFILE, _of(at_least_zero, "US"))
          for name, what in _COSTS),
        Option("--collective-gb-per-s", "assumed rate of a collective", _PROFILE, _RATE),
    )),
    "model": Topic("the model's lengths and graphs", (
        Option("--seq-len", f"prompt and new tokens ({DEFAULT_SEQ_LEN}; chat, serve, swap: "
               f"{LONGER_SEQ_LEN})", form=N),
        Option("--max-context-length", f"of a prompt's first part (--seq-len, {LONGEST_PREFILL} "
               "at most)", form=N),
        Option("--prefill-chunk", "tokens of a longer prompt fed at a time (what a graph holds)",
               form=N),
        Option("--max-length", "must equal --seq-len", form=N),
        Option("--batch-size", "default: the number of prompts, at most 8", form=N),
        Option("--padding-side", "default: right", form=_one("right", "left", default="right")),
        Option("--enable-bucketing", "graphs for several lengths (default: true)",
               form={**BOOL, "default": True}),
        Option("--context-encoding-buckets", "prefill lengths", form=SEVERAL),
        Option("--token-generation-buckets", "decode lengths", form=SEVERAL),
        Option("--torch-dtype", "default: bfloat16",
               form=_one(*DTYPES, default="bfloat16", metavar="DTYPE")),
        Option("--fused-qkv", "one weight for the three projections", form=ON),
        Option("--output-logits", "graphs return the logits, too", form=ON),
        Option("--is-continuous-batching", "rows of a batch are requests that come and go",
               form=ASKED),
        Option("--ctx-batch-size", "prompts of one prefill (default with it: 1)", form=N),
        Option("--apply-seq-ids-mask", "requests left out keep their cache (NxDI 0.4 and later)",
               form=ASKED),
        Option("--async-mode", "begin a step before the last tokens come (with --libraries)",
               form=ASKED),
    ), ()),
    "ranks": Topic("cores that share the model", (
        Option("--tp-degree", "ranks to shard over (default: 2 where it divides the heads)",
               form=N),
        Option("--rpl-reduce-dtype", "of the all-reduce", form=_one(*DTYPES, metavar="DTYPE")),
        Option("--vocab-parallel", "shard the embedding by vocabulary", form=ON),
        Option("--sequence-parallel-enabled", "shard the prompt between the blocks of a layer",
               form=ON),
        Option("--flash-decoding-enabled", "ranks share a KV head's positions (with --libraries)",
               form=ON),
    ), ()),
    "quantisation": Topic("weights and caches of one byte (names of NxDI's inference_demo)", (
        Option("--quantize", "one byte a weight, a scale a channel; checkpoint in the cache",
               form=_one(*QUANTISED_AS)),
        Option("--quantized", "quantised weights", form=ON),
        Option("--quantized-checkpoints-path", "of --quantized: folder or file, made if missing",
               form=PATH),
        Option("--quantization-type", "default: per_tensor; per_channel with --quantize",
               form=_one("per_tensor_symmetric", "per_channel_symmetric", metavar="TYPE")),
        Option("--quantization-dtype", "default: int8",
               form=_one(*QUANTISED_AS.values(), default="int8")),
        Option("--modules-to-not-convert-file", "modules left in float",
               form=_of(path, "JSON")),
        Option("--kv-cache-quant", "keys and values in fp8", form=ON),
    ), ()),
    "speculation": Topic("several tokens a step, one prompt at a time", (
        Option("--speculate", ", ".join(METHODS), _GUESS, _one(*METHODS, metavar="METHOD")),
        Option("--prompt-lookup-num-tokens", "guess what followed the newest tokens earlier",
               _GUESS, N),
        Option("--draft-model-path", "folder of a smaller model, which guesses", _GUESS, PATH),
        Option("--speculation-length", f"tokens of a step, guesses and one ({DEFAULT_LENGTH})",
               _GUESS, _of(positive, "K")),
        Option("--enable-fused-speculation", "draft and target in one graph (with --libraries)",
               _GUESS, ON),
    ), ()),
    "adapters": Topic("adapters (LoRA; NxDI 0.2 and later)", (
        Option("--lora-ckpt-path", "an adapter as PEFT saves it, and its name; may be repeated",
               _RUN, {"action": "append", "metavar": "ID:FOLDER"}),
        Option("--adapter-id", "which of them answers (default: none)",
               ("generate", "chat", *_COMPARE), {"metavar": "ID"}),
        Option("--max-lora-rank", "default: the adapters' largest", _RUN, N),
    ), ()),
    "blocks": Topic("cache of blocks (NxDI 0.4 and later)", (
        Option("--is-block-kv-layout", "implied by the other two, of which there is one", _BLOCKS,
               ASKED, ("--enable-block-kv-layout",)),
        Option("--is-prefix-caching", "prompts begin with what others have cached", _BLOCKS, ASKED,
               ("--enable-prefix-caching",)),
        Option("--is-chunked-prefill", "prompts in parts, beside steps (with --libraries)",
               _BLOCKS, ASKED, ("--enable-chunked-prefill",)),
        Option("--pa-block-size", f"tokens of a block (default: {BLOCK})", _BLOCKS, N),
        Option("--pa-num-blocks", "default: --seq-len for each of --batch-size", _BLOCKS, N),
        Option("--kernel-q-tile-size", "queries of a chunk's tile (default: the whole chunk)",
               _BLOCKS, N),
        Option("--kernel-kv-tile-size", "cached tokens of a chunk's tile (default: 1024)",
               _BLOCKS, N),
        Option("--prefix-buckets", "lengths of cached prefixes, beside 0 (powers of two from 128)",
               _BLOCKS, SEVERAL),
    ), ("serve",)),
    "process": Topic("the submission's process", (
        Option("--isolate", "run the submission in a process of its own (off: for debuggers)",
               form={**OFF_TOO, "default": True}),
        Option("--require-isolation", "refuse to run where it cannot be confined", form=ON),
        Option("--memory-limit", "memory it may use (default: three quarters of the machine's)",
               form=_of(above_zero, "GIB", default=default_memory_gib())),
        Option("--cpu-limit", "processor time it may use (default: 10 hours)",
               form=_of(positive, "S", default=36_000)),
        Option("--time-limit", "for one compile, load or generation (default: 1 hour)",
               form=_of(above_zero, "S", default=3600.0)),
    ), ()),
    "experiments": Topic("demonstrations, with --libraries (docs/speculation.md)", (
        Option("--cp-degree", "parts of a prompt, each for tp / cp ranks (NxDI 0.4 and later)",
               form=N),
        Option("--enable-eagle-speculation", "an EAGLE head is the draft", _GUESS, ON),
        Option("--enable-eagle-draft-input-norm", "the EAGLE head's layer has a norm in front",
               _GUESS, ON),
        Option("--token-tree-json", "of an EAGLE head's guesses: children of each node", _GUESS,
               _of(path, "FILE")),
        Option("--is-medusa", f"heads from {MEDUSA_FILE}", _GUESS, ON),
        Option("--num-medusa-heads", f"default: {DEFAULT_HEADS}", _GUESS, N),
        Option("--medusa-tree-json", "list of paths (default: 15 paths)", _GUESS,
               _of(path, "FILE")),
        Option("--medusa-speculation-length", "paths of the tree, and 1", _GUESS, N),
    ), ()),
}  # fmt: skip

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
    "--pp-degree": "no release of NxDI runs layers in stages; raise --tp-degree",
}
OPTIONS = {option.flag: option for topic in TOPICS.values() for option in topic.options}
ONLY_IN = {flag: option.modes for flag, option in OPTIONS.items() if option.modes}

EXAMPLES = """examples:
  main.py --mode generate --enable-nki --prompt "Why is the sky blue?"
  main.py --mode evaluate --enable-nki --llama my_llama.py --max-new-tokens 8
  main.py --mode profile --enable-nki --profile-model llama-3.2-1b --seq-len 640
"""
HELP = ("-h", "--help")
SCREEN = 40  # lines that a help may have
EXPERIMENTS, CONTEST = "experiments", "contest"


def default_seq_len(mode: str) -> int:
    """The length of the cache where nobody says one."""
    return LONGER_SEQ_LEN if mode in ("chat", "serve", "swap") else DEFAULT_SEQ_LEN


def words_for(mode: str, given: Sequence[str]) -> Iterator[str]:
    """The words of a command line that are options of ``mode``, with their values."""
    kept = False
    for word in given:
        if word.startswith("--"):
            option = OPTIONS.get(word.split("=")[0])
            kept = option is not None and mode in (option.modes or (mode,))
        if kept:
            yield word


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare every option, including refused ones."""
    parser.add_argument("--mode", choices=list(MODES), required=True, metavar="MODE")
    for option in OPTIONS.values():
        parser.add_argument(option.flag, *option.also, help=option.help, **option.form)
    for flag in REFUSED:
        parser.add_argument(flag, nargs="*", metavar="X")


def help_of_all(width: int) -> str:
    """The help page: modes, and how to get help on the rest."""
    modes = list(MODES.items())
    topics = [(name, topic.title) for name, topic in TOPICS.items()]
    lines = [
        "usage: main.py --mode MODE [--enable-nki] [options]",
        *("Compile Llama for Neuron and run it.", "modes:", *_columns(modes, width)),
        *("main.py --mode MODE --help tells its options, main.py --help TOPIC those of",),
        *_columns([*topics, (CONTEST, "what is refused of the contest's arguments")], width),
        EXAMPLES.rstrip(),
    ]
    return "\n".join(lines)


def help_of_mode(mode: str, width: int) -> str:
    """The help page of a mode, for one screen: its own options explained, others named."""
    shown: list[tuple[str, str]] = []
    named: list[str] = []
    for name, topic in TOPICS.items():
        every = () if mode == "cache" else (mode,)  # no model there: its own options alone
        known = [option for option in topic.options if mode in (option.modes or every)]
        if topic.whole_in is None or mode in topic.whole_in:
            shown += [(option.left, option.help) for option in known]
        elif known and name != EXPERIMENTS:
            flags = " ".join(option.flag for option in known)
            named += textwrap.wrap(
                f"{name}: {flags}", width, initial_indent="  ", subsequent_indent="    ",
                break_on_hyphens=False,
            )  # fmt: skip
    own = "\n".join([f"--mode {mode}: {MODES[mode]}", *_columns(shown, width)]).splitlines()
    if len(own) + 1 + len(named) > SCREEN:
        topics = ", ".join(line.split(":")[0].strip() for line in named if ":" in line)
        named = textwrap.wrap(topics, width, initial_indent="  ", subsequent_indent="  ")
    others = ["others, which main.py --help TOPIC explains:", *named] if named else []
    return "\n".join([*own, *others])


def help_of_topic(name: str, width: int) -> str:
    """Every option of a topic, with the modes in which it counts where these are not all."""
    if name == CONTEST:
        return "\n".join(_columns(list(REFUSED.items()), width))
    rows = []
    for option in TOPICS[name].options:
        modes = f" [{', '.join(option.modes)}]" if 0 < len(option.modes) <= 3 else ""
        rows.append((option.left, option.help + modes))
    return "\n".join([f"{TOPICS[name].title}:", *_columns(rows, width)])


def _columns(rows: list[tuple[str, str]], width: int) -> Iterator[str]:
    """Lines of two columns, the second one folded."""
    first = min(34, max(len(left) for left, _ in rows)) + 4
    for left, right in rows:
        begun = f"  {left}  "
        if len(begun) > first:
            begun = begun.rstrip() + "\n" + " " * first
        folded = textwrap.wrap(right, width - first, break_on_hyphens=False)
        yield begun.ljust(first) + ("\n" + " " * first).join(folded)
