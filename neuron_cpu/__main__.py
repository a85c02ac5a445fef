"""``neuron_cpu COMMAND``: NKI kernels without a Trainium. Also ``python -m neuron_cpu COMMAND``.

``profile FILE:KERNEL --arg ...`` traces and verifies the kernel on shapes alone and estimates its
time. ``compare FILE:KERNEL --arg ...`` runs it twice on random inputs and prints the first
instruction whose results part. ``check FILE[:KERNEL]`` lists the constructs of a kernel file, and
the sources that show them on a device. ``learn`` teaches all of it, in twelve exercises. ``run
SCRIPT ARGS...`` runs any script with the stand-in's SDK names in place.
"""

import argparse
import contextlib
import difflib
import importlib
import re
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

_on_interrupt = signal.getsignal(signal.SIGINT)
if _on_interrupt is signal.default_int_handler:  # no traceback out of the imports below
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from . import __version__, ensure_sdk  # noqa: E402
from .commands import kernels  # noqa: E402
from .console import streams, terminal  # noqa: E402
from .console.arguments import Parser, table  # noqa: E402
from .errors import CPU_TORCH, StandInError, UsageError  # noqa: E402
from .files import told  # noqa: E402
from .lessons import pointed_out, pointers, with_pointers  # noqa: E402
from .sandbox import run_script  # noqa: E402

signal.signal(signal.SIGINT, _on_interrupt)
NAMES = "learn", "check", "profile", "compare", "sweep", "tune", "judge", "oracle"
COMMANDS = {name: importlib.import_module(f"{__package__}.commands.{name}") for name in NAMES}
# commands and options by the names that other tools have for them
COMMAND_MEANT = table(
    """
profile: benchmark bench time perf estimate
check: test verify validate lint
compare: diff debug
run: simulate exec python
learn: lesson lessons tutorial
"""
)
MEANT = table(
    """
--arg: shape shapes input inputs tensor tensors size args input-shapes input-shape
--target: chip device platform arch instance
--ref: reference golden expected against
--json: output out report save o format
--tolerance: rtol atol tol eps
--grid: cores num-cores spmd programs lnc
--time-limit: timeout
--baseline: before old compare-to
--only: n name operators tasks
--range: sizes values n
--points: trials budget max-trials
"""
)
EXAMPLES = {  # of arguments that a command line lacks
    "FILE:KERNEL": "softmax.py:softmax --arg 128x512:bf16",
    "FILE[:KERNEL]": "softmax.py:softmax --arg 128x512:bf16 --ref softmax.py:reference",
    "FILE:KERNEL, --range": "softmax.py:softmax --arg Nx512:bf16 --range N=128..1024",
    "--range": "--range N=128..1024, with N in --arg",
    "DIR": "answers --template",
}
TAKES = {  # commands, of an argument too many
    "compare": "for two kernels write check and --baseline {0}, for a function --ref {0}",
    "learn": "learn takes one lesson and names its file itself",
    "oracle": "requests are lines of standard input: write oracle < {}",
}
INTERRUPTED = 130  # what a shell reports after Ctrl-C


class _Parser(Parser):
    """The parser of one command, or of all.

    Attributes:
        commands: the parsers by name.
        args: what the command line says otherwise.
        line: the command line.
    """

    meant = MEANT
    commands: Mapping[str, Any] = {}
    args: Any = None
    line: Sequence[str] = ()

    def error(self, message: str) -> NoReturn:
        """A refusal with the command, or the argument, that is meant."""
        given = re.match(r"argument COMMAND: invalid choice: '(.*?)'", message)
        lacks = message.rpartition("are required: ")[2]
        if given:
            word = given[1]
            meant = [f"check {word}, or run {word}"] if ".py" in word else []
            meant += [name for name, words in COMMAND_MEANT.items() if word in words.split()]
            behind = [one for one in self.line if one in COMMANDS and self.line[0][:1] == "-"]
            meant += [f"{one} first, and {self.line[0]} behind it" for one in behind]
            meant += difflib.get_close_matches(word, [*COMMANDS, "run"], 1)
            meant.append(f"one of {', '.join(COMMANDS)}, run")
            message = f"there is no command {word!r}; write {meant[0]}"
        elif lacks == "COMMAND":
            message += f"; write {self.prog} with one of {', '.join(COMMANDS)}, run"
        super().error(self.sentences(message))

    def lacking(self, names: Sequence[str]) -> str:
        whole = f"{self.prog} " * (names[0][0] != "-")
        return f"{super().lacking(names)}; write {whole}{EXAMPLES[', '.join(names)]}"

    def instead(self, name: str, values: Sequence[str]) -> str:
        if name in self._option_string_actions:
            return f"write it behind {self.args.command}"
        found, word = super().instead(name, values), name.removeprefix("--").replace("-", "_")
        if values and word in kernels.parameters(getattr(self.args, "kernel", "")):
            return f"write --arg {word}={values[0]}"
        if values and found == "write --arg":
            return _tensors(values)
        if values and found == "write --range":
            return f"write --range N={','.join(values)}"
        if word in ("dtype", "precision", "auto-cast") and values:
            return f"write the type into --arg, as in 128x512:{values[0]}"
        both = re.findall(r"--(?:file|kernel)[ =](\S+)", " ".join(self.line))
        if word in ("file", "kernel") and len(both) == 2:
            file, kernel = sorted(both, key=lambda one: ".py" not in one)
            return f"write {file}:{kernel} in the place of both"
        if any(word in str(one.metavar).lower() for one in self._get_positional_actions()):
            return "leave it out, and keep what follows it"
        if found == "leave it out" and values and "--space" in self._option_string_actions:
            space = f"{word}={','.join(values)}"
            return f"write --space {values[0] if '=' in values[0] else space}"
        others = [n for n, one in self.commands.items() if name in one._option_string_actions]
        return f"use the command {' or '.join(others)}" if others else found

    def place(self, words: Sequence[str], before: Sequence[str]) -> str:
        given, command = words[0], self.args.command
        actions, kernel = self._option_string_actions, getattr(self.args, "kernel", "")
        option = ["--", *(word for word in before if word in actions)][-1]
        action, last = actions.get(option), before[-1].rstrip("=")
        if f"--{given}" in actions:
            return f"write --{given}"
        if ".py" not in kernel and Path(f"{kernel} {given}".partition(":")[0]).is_file():
            return f"write '{kernel} {given}' in quotes"
        if kernel.endswith(".py") and given.isidentifier():
            return f"write {kernel}:{given}"
        if ".py" in given or last == kernel and given.isidentifier() or "--arg" not in actions:
            return TAKES.get(command, f"{command} takes one: run it for each").format(given)
        if option == "--case":
            if len(kernels.parameters(kernel)) == 1:
                return f"write --case {last} --case {' --case '.join(words)}"
            return f"write --case '{last} {' '.join(words)}'"
        if option == "--grid":
            return f"write --grid {last}x{'x'.join(words)}"
        if "=" in str(action and action.metavar) and (last.isidentifier() or option != "--arg"):
            value = ",".join(words).lstrip("=,")
            if ".." in last:
                return f"write {option} {last}:{words[-1]}"
            return f"write {option} {last}{'=' if last.isidentifier() else ','}{value}"
        if re.match(r"\d+x", given):
            return _tensors(words)
        if isinstance(action, argparse._AppendAction):
            return f"write {option} {f' {option} '.join(words)}"
        return f"{option} takes one value: leave {' '.join(words)} out"


def _tensors(words: Sequence[str]) -> str:
    """Shapes as arguments."""
    if re.fullmatch(r"[\dx]+:\w+(,[\dx]+:\w+)+", words[0]):
        words = words[0].split(",")
    typed = [w if ":" in w else f"{'x'.join(re.findall('[0-9]+', w))}:bf16" for w in words]
    return f"write --arg {' --arg '.join(typed)}"


def parser() -> _Parser:
    top = _Parser(prog=_name(), description=__doc__.splitlines()[0].replace("``", ""))
    top.add_argument("--version", action="version", version=f"neuron_cpu {__version__}")
    top.add_argument(
        "--print-completion",
        choices=("bash", "zsh", "tcsh"),
        action=_Completion,
        help="print a shell's completion of this command",
    )
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        made = commands.add_parser(
            name, help=command.HELP, description=command.HELP, allow_abbrev=False
        )
        command.declare(made)
        # options are listed below: a usage line that repeats them pushes them off the screen
        words = [
            f"[{action.metavar}]" if action.nargs == "?" else str(action.metavar)
            for action in made._get_positional_actions()
        ]
        made.usage = " ".join(["%(prog)s", *words, "[options]"])
    said = f"run a script without the SDK: {run_script.USAGE}"
    commands.add_parser("run", help=said, description=said, usage="%(prog)s SCRIPT ARGS...")
    _Parser.commands = commands.choices
    return top


def _parsed(arguments: Sequence[str]) -> argparse.Namespace:
    """The arguments; what a command does not take is answered with what it has instead."""
    top, _Parser.line = parser(), arguments
    args, unknown = top.parse_known_args(arguments)
    command = _Parser.commands[args.command]
    command.args, command.told = args, [*top.told, *command.told]
    command.refuse(unknown, arguments)
    if getattr(args, "ref", None) and args.ref.isidentifier():  # of the kernel's file
        args.ref = f"{args.kernel.partition(':')[0]}:{args.ref}"
    return args


class _Completion(argparse.Action):
    """Prints the completion of a shell, as shtab makes it of the parser."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        try:
            shtab = importlib.import_module("shtab")
        except ModuleNotFoundError:
            parser.error(f"{option_string} needs shtab, which is not installed: pip install shtab")
        print(shtab.complete(parser, values))
        parser.exit()


def _name() -> str:
    """How this command was called."""
    return "neuron_cpu" if Path(sys.argv[0]).stem == "neuron_cpu" else "python -m neuron_cpu"


def run(arguments: Sequence[str]) -> int:
    """Run a script; its own errors are its own and end as they end without this command."""
    try:
        with pointed_out():
            run_script.run(arguments)
    except UsageError as error:
        print(error, file=sys.stderr)
        return 2
    except Exception as error:
        shown = run_script.from_scripts_line(error)
        _print_as_scripts(shown, pointers(str(error)))
        raise
    return 0


def _print_as_scripts(shown: TracebackType | None, lines: Sequence[str]) -> None:
    """Let the exception that ends this process show this traceback, and lines behind it."""
    usual = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, _: TracebackType | None) -> None:
        usual(kind, error.with_traceback(shown), shown)
        for line in lines:
            print(line, file=sys.stderr)

    sys.excepthook = hook


def main(arguments: Sequence[str] | None = None) -> int:
    streams.open_closed()
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if arguments[:1] == ["run"] and arguments[1:2] not in (["-h"], ["--help"]):
        return run(arguments[1:])  # everything after the script is the script's, options too
    args = _parsed(arguments)
    refusals: tuple[type[Exception], ...] = (StandInError, OSError, MemoryError)
    try:
        with streams.uninterrupted():
            said = ensure_sdk()
            if not getattr(args, "quiet", False):
                _say(said)
            from .core import NkiError
        refusals = (*refusals, NkiError)
        with pointed_out(), kernels.targeted(args):
            status = COMMANDS[args.command].run(args)
        sys.stdout.flush()
        return status
    except KeyboardInterrupt as error:
        _say(f"{_name()}: interrupted{f' {error}' if str(error) else ''}.")
        return INTERRUPTED
    except BrokenPipeError:  # the reader of standard output has what it wanted
        streams.abandon()
        return streams.READER_GONE
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        _say(CPU_TORCH)
        return 2
    except refusals as error:
        said = told(error) if isinstance(error, OSError) else str(error)
        _say(with_pointers(said or type(error).__name__))
        streams.abandon()
        return 2


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # nobody reads it
        print(terminal.folded(terminal.printable(terminal.here(text)), sys.stderr), file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
