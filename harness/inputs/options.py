"""The parser of `main.py` and its help, made from the options that `harness.settings` declares."""

import argparse
import textwrap
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from harness.declaration import Option, options_of
from harness.errors import UserError, at_most, refuse_any
from harness.inputs import features
from harness.inputs.chunks import MOST_PREFILL
from harness.settings import TOPICS, Arguments, Settings
from neuron_cpu.console.arguments import table

# mode -> what it does; each is a module of harness.modes, but for the second names in ALIASES
MODES = table(
    """
compile: build and check the model, print which operator ran where
generate: answer the prompts
chat: answer what you type, turn by turn
serve: answer over HTTP in the form of OpenAI, with a page at /
profile: estimate the time on Trainium, of prefill and decode
validate: compare the logits with the SDK's own Llama
evaluate: accuracy, speed, NKI share and score of the prompts
evaluate_single: another name of evaluate
diff: where NKI and PyTorch begin to differ, operator by operator
preflight: the last look at a submission before its upload
swap: your kernel in any model of transformers, beside PyTorch
evaluate_all: evaluate every prompt of prompts.txt, with reports
"""
)
ALIASES = {"evaluate_single": "evaluate"}


_PRIVATE_KERNEL = (
    "it asks for a private kernel of the SDK, and the kernels here are the submission's own "
    "(--enable-nki)"
)
_SET_PER_MODEL = (
    "the SDK sets it for each sub-model from --seq-len, --max-context-length and the bucket lists"
)
_OF_MODELS = """
--n-active-tokens --n-positions --bucket-n-active-tokens
"""
_OF_KERNELS = """
--qkv-kernel-enabled --attn-kernel-enabled --mlp-kernel-enabled --quantized-mlp-kernel-enabled
--rmsnorm-quantize-kernel-enabled --quantized-kernel-lower-bound --mlp-kernel-fuse-residual-add
"""
REFUSED = {
    **dict.fromkeys(_OF_MODELS.split(), _SET_PER_MODEL),
    **dict.fromkeys(_OF_KERNELS.split(), _PRIVATE_KERNEL),
    "--pp-degree": "no release of NxDI runs layers in stages; raise --tp-degree",
}
OF_TOPIC = {name: options_of(topic) for name, topic in TOPICS.items()}
OPTIONS = {option.flag: option for options in OF_TOPIC.values() for option in options}
_BY_WORD = {
    word: option
    for flag, option in OPTIONS.items()
    for word in (flag, f"--no-{flag[2:]}", *option.also)
}

EXAMPLES = """examples:
  main.py --mode generate --enable-nki --prompt "Why is the sky blue?"
  main.py --mode evaluate --enable-nki --llama my_llama.py --max-new-tokens 8
  main.py --mode profile --enable-nki --profile-model llama-3.2-1b --seq-len 640
"""
HELP = ("-h", "--help")
SCREEN = 40  # lines that a help may have
EXPERIMENTS, CONTEST = "experiments", "contest"


def words_of(given: Sequence[str], wanted: Callable[[Option], bool]) -> Iterator[str]:
    """The words of a command line that are options which are ``wanted``, with their values."""
    kept = False
    for word in given:
        if word.startswith("--"):
            option = _BY_WORD.get(word.split("=")[0])
            kept = option is not None and wanted(option)
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
        known = [option for option in OF_TOPIC[name] if mode in (option.modes or (mode,))]
        if topic.whole_in is None or mode in topic.whole_in:
            shown += [(option.left, option.help) for option in known]
        elif known and name != EXPERIMENTS:
            flags = " ".join(option.flag for option in known)
            named += textwrap.wrap(
                f"{name}: {flags}",
                width,
                initial_indent="  ",
                subsequent_indent="    ",
                break_on_hyphens=False,
            )
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
    for option in OF_TOPIC[name]:
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


def check_refused(words: dict[str, Any]) -> None:
    """Refuse flags that nothing here can do."""
    for flag, reason in REFUSED.items():
        if words[flag[2:].replace("-", "_")] is not None:
            raise UserError(f"{flag} is refused: {reason}; leave it out.")


def check_arguments(args: Arguments) -> None:
    """Refuse arguments that the mode would ignore, or that change nothing without others."""
    given = [o for o in OPTIONS.values() if getattr(args, o.name) != o.form["default"]]
    wrong = [option for option in given if option.modes and args.mode not in option.modes]
    said = []
    for modes in dict.fromkeys(option.modes for option in wrong):
        flags = [option.flag for option in wrong if option.modes == modes]
        anyhow = " (evaluate measures anyhow)" * ("--benchmark" in flags)
        said.append(
            f"{' and '.join(flags)} work{'s' * (len(flags) == 1)} with --mode {' or '.join(modes)}"
            f"{anyhow}, got --mode {args.mode}; leave {' and '.join(flags)} out."
        )
    for option in given:
        if option.needs is not None and not getattr(args, option.needs[0]):
            said.append(f"{option.flag} needs {option.needs[1]}.")
    if said:
        raise UserError(" ".join(said))
    if args.saved_graphs is not None:
        told = {"debug", *(o.name for o in OF_TOPIC["profile"])} - {"profile_model"}
        refuse_any(
            {option.flag: option.name not in told for option in given},
            "{} is about a model, and --saved-graphs names graphs that say it all; leave it out.",
        )
    seq_len = args.seq_len or args.default_seq_len
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


def _check_quantisation(args: Arguments) -> None:
    """Refuse two options for one quantisation, and options that change nothing."""
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
    per_tensor = args.quantization_type != "per_channel_symmetric" and (
        args.quantization_type is not None or args.quantize is None
    )
    if args.modules_to_not_convert_file is not None and per_tensor:
        raise UserError(
            "--modules-to-not-convert-file needs --quantization-type per_channel_symmetric, as "
            "checkpoints with a scale a tensor ignore it."
        )


def _check_samples_at_all(args: Arguments) -> None:
    """Refuse sampling options where every token is the best one."""
    tuned = {"--top-p": args.top_p != 1, "--temperature": args.temperature not in (0, 1)}
    if args.do_sample is False:
        tuned["--top-k"] = args.top_k not in (None, 1)
    if args.do_sample is False or not (args.do_sample or args.top_k or args.dynamic):
        refuse_any(
            tuned,
            "{0} tunes sampling, and without --do-sample every token is the best one; give "
            "--do-sample too, or leave {0} out.",
        )


def _check_contestants(args: Arguments) -> None:
    if len(args.contestants) > 1 and args.mode != "evaluate_all":
        raise UserError(
            f"--llama takes one submission in --mode {args.mode}, got {len(args.contestants)}; the "
            "mode evaluate_all compares several."
        )
    if args.record_baseline and len(args.contestants) > 1:
        raise UserError("--record-baseline measures one baseline; leave further submissions out.")


def _check_baseline(args: Arguments) -> None:
    """prompt_data.txt is replaced as a whole, so part of the prompts would lose the other rows."""
    if args.record_baseline:
        part = {
            "--limit": args.limit,
            "--only": args.only,
            "--prompt": args.prompt_values,
            "--prompt-file": args.prompt_file,
            "--contest": args.contest,
        }
        refuse_any(
            {flag: value is not None for flag, value in part.items()},
            "--record-baseline writes a row for every prompt of prompts.txt; leave {} out.",
        )


def check(settings: Settings) -> None:
    """Refuse with a UserError settings that no model could take."""
    at_most("--max-context-length", settings.max_context_length, settings.seq_len, ", --seq-len")
    if settings.is_continuous_batching and settings.padding_side == "left":
        raise UserError("--is-continuous-batching needs right padding; write --padding-side right.")
    features.check_blocks(settings)
    features.check_speculation(settings)
    features.check_swap(settings)
    _check_chunks(settings)
    _check_buckets(settings)
    _check_ranks(settings)


def _check_chunks(settings: Settings) -> None:
    chunk, longest = settings.prefill_chunk, settings.max_context_length
    if settings.padding_side == "left" and chunk is None and longest != settings.seq_len:
        raise UserError(
            f"--padding-side left needs --max-context-length {settings.seq_len}, the whole "
            f"--seq-len, because NxDI fills shorter prompts up on the right; got {longest}."
        )
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


def _check_ranks(settings: Settings) -> None:
    """Refuse options that exclude ranks that share a prompt or a cache."""
    left = {"--padding-side left": settings.padding_side == "left"}
    speculation = settings.speculation
    graphs = {
        "a cache of blocks": settings.blocks is not None,
        "--is-medusa or fused speculation": speculation is not None
        and (speculation.method == "medusa" or speculation.fused),
    }
    shared = {
        "--flash-decoding-enabled": settings.flash_decoding_enabled,
        "--sequence-parallel-enabled": settings.sequence_parallel_enabled,
        "--lora-ckpt-path": settings.adapters is not None,
    }
    if settings.sequence_parallel_enabled:
        # NxDI reads a wrong row of left-padded prompts, or sums the embedding twice
        refuse_any(
            {**left, "--vocab-parallel": settings.vocab_parallel},
            "--sequence-parallel-enabled works with right padding and a whole vocabulary, got {}; "
            "leave one of them out.",
        )
    if settings.flash_decoding_enabled:
        refuse_any(
            {**left, **graphs},
            "--flash-decoding-enabled puts positions of the cache on several ranks and does not go "
            "with {}; leave one of them out.",
        )
    if (settings.cp_degree or 1) > 1:
        refuse_any(
            {**shared, "quantised weights": settings.quantized, **graphs},
            "--cp-degree gives groups of ranks parts of a prompt and does not go with {}; leave "
            "one of them out.",
        )


def _check_buckets(settings: Settings) -> None:
    limits = {
        "--context-encoding-buckets": (
            settings.context_encoding_buckets,
            settings.max_context_length,
        ),
        "--token-generation-buckets": (settings.token_generation_buckets, settings.seq_len),
    }
    for flag, (buckets, limit) in limits.items():
        if buckets is None:
            continue
        if not settings.enable_bucketing:
            raise UserError(f"{flag} needs buckets; write --enable-bucketing true.")
        if max(buckets) != limit:
            raise UserError(
                f"The largest of {flag} must be {limit}, so that every length has a bucket, got "
                f"{max(buckets)}; write {limit} last."
            )
