"""The parser of `main.py` and its help, made from the options that `harness.settings` declares."""

import argparse
import textwrap
from collections.abc import Iterator, Sequence

from harness.declaration import options_of
from harness.settings import TOPICS

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
OF_TOPIC = {name: options_of(topic) for name, topic in TOPICS.items()}
OPTIONS = {option.flag: option for options in OF_TOPIC.values() for option in options}

EXAMPLES = """examples:
  main.py --mode generate --enable-nki --prompt "Why is the sky blue?"
  main.py --mode evaluate --enable-nki --llama my_llama.py --max-new-tokens 8
  main.py --mode profile --enable-nki --profile-model llama-3.2-1b --seq-len 640
"""
HELP = ("-h", "--help")
SCREEN = 40  # lines that a help may have
EXPERIMENTS, CONTEST = "experiments", "contest"


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
        known = [option for option in OF_TOPIC[name] if mode in (option.modes or every)]
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
