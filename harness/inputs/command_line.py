"""The command line: the contest driver's arguments, a few more, and the checks that need no model.

Argument names follow the contest's driver (aws-samples/nki-llama, main.py). Each of its arguments
works or is refused with a reason; none is accepted and ignored.
"""

import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, NoReturn

from harness.errors import UserError
from harness.inputs import features, options
from harness.inputs.options import ALIASES, MODES
from harness.inputs.prompts import read_prompt_file, split_prompt_value
from harness.inputs.quantised import read_module_list
from harness.settings import (
    EVALUATE,
    HUGGING_FACE_TOP_K,
    LONGEST_PREFILL,
    QUANTISED_AS,
    SLOTS,
    TOPICS,
    Arguments,
    Settings,
)
from neuron_cpu.console import arguments

DEFAULT_PROMPT = "I believe the meaning of life is"  # the contest driver's, for base models
# For instruct models: along the embedded model's answer the two best logits stay 1.1 apart.
DEFAULT_QUESTION = "Name the capital of Japan."
MOST_ROWS = 8  # of a batch that nobody asked for: what the shipped kernels take
MOST_COLUMNS = 100  # of help
# options by the names that other tools have for them
MEANT = arguments.table(
    """
--max-new-tokens: num-tokens n-tokens max-tokens num-new-tokens tokens max-length-new
--prompt: p text input message
--model-path: m model model-id checkpoint
--temperature: t temp
--quantize: quantization quant
--quantize int8: load-in-4bit load-in-8bit load-in-8-bit bits
--only N, the number of a prompt: k
--host: bind address ip
--port: server-port
--speculation-length: num-speculative-tokens gamma
--draft-model-path: speculative-model draft-model assistant-model
--lora-ckpt-path: lora adapter lora-modules peft lora-path lora-adapter
--compiled-model-path: compiled neuron-cache compile-dir artifacts
--recompile: force no-cache clean rebuild overwrite
--enable-nki: nki use-nki kernels with-nki
--llama: submission file kernel-file script f
--runs: repeat iters iterations repeats
--torch-dtype: precision dtype
--kv-cache-quant: kv-cache-dtype
--tol-map: tolerance rtol atol tol
--num-tokens-to-check: check-tokens
--profile-output and --mode profile: html json trace output output-json output-dir out o
--batch-size: b bs batch
--at: replace module
--prompt-file: prompts prompts-file prompt-path
--batch-size N: max-num-seqs per-device-batch-size
--mode evaluate: check-accuracy accuracy benchmark-model benchmark bench test score
--mode generate: run infer inference demo
NEURON_PLATFORM_TARGET_OVERRIDE=trn2 before the command: platform-target target chip
--tp-degree: tp tensor-parallel-size nproc-per-node num-cores ranks world-size gpus num-gpus n-gpus
--seq-len: context-length max-model-len ctx
--at mlp: ffn feedforward moe
--at rmsnorm: layernorm input_layernorm post_attention_layernorm rms
--at attention: attn self_attn sdpa
--limit: n num-prompts max-prompts num-samples samples
"""
)


class Parser(arguments.Parser):
    """An argument parser whose refusals are one line and exit status 2, without the usage."""

    meant = MEANT
    given: Sequence[str] = ()  # the command line

    def error(self, message: str) -> NoReturn:
        said = self.sentences(message).rstrip(".")
        said = f"{said[0].upper()}{said[1:]}"
        print(f"{self.prog}: {said}; see `python {self.prog} --help`.", file=sys.stderr)
        sys.exit(2)

    def lacking(self, names: Sequence[str]) -> str:
        modes = [word.lstrip("-") for word in self.given if word.lstrip("-") in MODES] or MODES
        return f"no mode is named; write --mode {' or '.join(modes)}"

    def instead(self, name: str, values: Sequence[str]) -> str:
        found = super().instead(name, values)
        option, named = options.OPTIONS.get(found.removeprefix("write ")), {*MODES} & {*self.given}
        if option and option.modes and named and not named & {*option.modes}:
            return f"{found}, which works with --mode {option.modes[0]}"
        return found

    def place(self, words: Sequence[str], before: Sequence[str]) -> str:
        first, (option, value) = words[0], ["", "", *before][-2:]
        if first.endswith(".py"):
            files = [one for one in words if one.endswith(".py")]
            return f"write {'--mode evaluate_all ' * (len(files) > 1)}--llama {' '.join(files)}"
        taken = self._option_string_actions.get(option)
        if taken and (taken.type or taken.nargs):
            return f"{option} takes one value: leave {first} out"
        given = [option, value, *words] if taken and not taken.choices else ["--prompt", *words]
        return f'write {given[0]} "{" ".join(given[1:])}"'


def parse(argv: Sequence[str] | None = None) -> Settings:
    """Parse and check; exits with status 2 on bad arguments, raises UserError on bad prompts."""
    given = sys.argv[1:] if argv is None else argv
    given = shlex.split(given) if isinstance(given, str) else [*map(str, given)]
    _check_text(given)
    modes = [one for one in given if one.partition("=")[0] == "--mode"]
    if modes[1:] and program() == "test.py":
        raise UserError(
            "test.py has the mode evaluate_all, expected no --mode; leave it out, or write "
            "main.py in the place of test.py."
        )
    parser = build_parser()
    _help_where_asked(given, parser)
    parser.given = given
    words = vars(parser.parse_args(given))
    options.check_refused(words)
    args = Arguments(**{field.name: words[field.name] for field in fields(Arguments)})
    options.check_arguments(args)
    prompts, notes = _prompts(args)
    values = vars(args) | {
        "prompts": tuple(prompts),
        "prompt_notes": tuple(notes),
        "asked_seq_len": args.seq_len,
        "asked_max_context_length": args.max_context_length,
        "judge": args.judge or ("contest" if args.mode in EVALUATE else "ties"),
        "llama": args.contestants[0],
        "given": tuple(given),
        **_batching(args),
        "speculation": features.speculation(args),
        "adapters": features.adapters(args),
        "blocks": features.blocks(args),
        "swap": features.swap(args),
        **_sampling(args),
        **_quantisation(args),
    }
    values |= _lengths(args, whole=values["speculation"] is not None)
    if values["blocks"] is not None:
        values |= features.lengths(args, values["blocks"], values["seq_len"])
    if args.batch_size is None:
        alone = (
            values["speculation"] is not None and ALIASES.get(args.mode, args.mode) != "evaluate"
        )
        values["batch_size"] = 1 if alone else _batch_size(args.mode, len(prompts))
    settings = Settings(**values)
    options.check(settings)
    return settings


def module_of(settings: Settings) -> str:
    """The module that carries the settings out."""
    return f"harness.modes.{ALIASES.get(settings.mode, settings.mode)}"


def _batch_size(mode: str, prompts: int) -> int:
    """All prompts at once, unless prompts run one by one or do not fit one graph."""
    if mode == "evaluate_all":
        return 1
    if mode == "serve":
        return SLOTS
    return max(1, min(prompts, MOST_ROWS) if mode == "generate" else prompts)


def _batching(args: Arguments) -> dict[str, Any]:
    """With continuous batching a prefill has one prompt, as in all versions of NxDI."""
    if not args.batches:
        return {}
    return {"is_continuous_batching": True, "ctx_batch_size": args.ctx_batch_size or 1}


def _lengths(args: Arguments, whole: bool) -> dict[str, int]:
    """`whole`: prompts are not fed in chunks."""
    seq_len = args.seq_len or args.default_seq_len
    whole |= args.padding_side == "left" or args.context_encoding_buckets is not None
    longest = seq_len if whole else min(seq_len, LONGEST_PREFILL)
    return {"seq_len": seq_len, "max_context_length": args.max_context_length or longest}


def _sampling(args: Arguments) -> dict[str, Any]:
    """Greedy unless something asks for more, as in the contest; --do-sample is Hugging Face's.

    There it samples among the 50 best tokens where no top-k is named (GenerationConfig.top_k).
    """
    if args.temperature == 0:  # the limit of ever lower ones
        return {"do_sample": False, "top_k": 1, "top_p": 1.0, "temperature": 1.0}
    top_k = args.top_k or (HUGGING_FACE_TOP_K if args.do_sample else 1)
    return {"do_sample": args.do_sample is not False, "top_k": top_k}


def _quantisation(args: Arguments) -> dict[str, Any]:
    """NxDI's settings; `--quantize` means one scale a channel and a checkpoint in the cache."""
    asked = args.quantize
    listed = args.modules_to_not_convert_file
    return {
        "quantized": args.quantises,
        "quantization_type": args.quantization_type
        or ("per_channel_symmetric" if asked is not None else "per_tensor_symmetric"),
        "quantization_dtype": QUANTISED_AS[asked] if asked is not None else args.quantization_dtype,
        "modules_to_not_convert": None if listed is None else read_module_list(listed),
    }


def program() -> str:
    """The script that was called: test.py is main.py, too."""
    return "test.py" if sys.argv[0].endswith("test.py") else "main.py"


def build_parser() -> Parser:
    """The parser of all options; `--help` does not reach it."""
    parser = Parser(prog=program(), add_help=False, allow_abbrev=False)
    options.add_options(parser)
    return parser


def _help_where_asked(argv: Sequence[str], parser: Parser) -> None:
    """Print what `--help` asks for and end: a mode's options, a topic's, or modes and topics."""
    if not any(word in options.HELP for word in argv):
        return
    width = min(MOST_COLUMNS, max(60, shutil.get_terminal_size().columns))
    finder = Parser(prog=parser.prog, add_help=False, allow_abbrev=False)
    finder.add_argument("--mode", choices=list(MODES))
    topics = [*TOPICS, options.CONTEST]
    finder.add_argument(*options.HELP, nargs="?", choices=[*topics, *MODES], metavar="TOPIC")
    asked, _ = finder.parse_known_args(argv)
    finder.refuse((), argv)
    mode = asked.help if asked.help in MODES else asked.mode
    if asked.help in topics:
        text = options.help_of_topic(asked.help, width)
    else:
        text = options.help_of_mode(mode, width) if mode else options.help_of_all(width)
    print(text)
    sys.exit(0)


def _check_text(argv: Sequence[str]) -> None:
    """Refuse arguments that are not UTF-8, which reach Python as lone surrogates."""
    for argument in argv:
        if any("\ud800" <= letter <= "\udfff" for letter in argument):
            raise UserError(f"An argument is not UTF-8 text: {argument!r}; write it as UTF-8.")


def _prompts(args: Arguments) -> tuple[list[str], list[str]]:
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
