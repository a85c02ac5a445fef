"""The driver's modes over the real NxD and NxD Inference: a matrix of modes by releases.

`python tests/real/modes.py PUBLIC` (make real PUBLIC=DIR) runs every mode as a user does, on a
seeded model of two layers, with the submission's kernels and without them, each in its confined
process. A cell is what the run was asked for: how many of the tokens are those of Hugging Face in
fp32, what was accurate, how much ran in kernels; or the last line of a run that failed.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import http.client
import json
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))

from tests.real import page, releases  # noqa: E402
from tests.real.alone import alone  # noqa: E402

PROMPT = "I believe the meaning of life is"
TOKENS = 8
BASE = "0"  # the model itself
ADAPTERS = {"one": 1, "two": 2}  # their seeds
COLUMNS = page.COLUMNS[page.MODES]
LIMIT_SECONDS = 1800  # of one run; machines that build are busy
# A turn is its words, so that a chat's first answer is that of a prompt.
TEMPLATE = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"


@dataclass(frozen=True)
class Run:
    """One run that has ended."""

    status: int
    out: str
    errors: str

    def figure(self, pattern):
        """What the pattern finds in the output; ValueError where that has none."""
        found = re.search(pattern, self.out) or re.search(pattern, self.errors)
        if self.status or found is None:
            last = [line for line in (self.errors + self.out).splitlines() if line.strip()][-1:]
            raise ValueError(f"status {self.status}: {''.join(last)[:300]}")
        return found[1]


def tokens_told(text, expected):
    """How many of the characters, of which each is a token, are those expected."""
    same = 0
    for one, other in zip(text, expected):
        if one != other:
            break
        same += 1
    return f"{same} of {len(expected)} tokens"


Expected = dict[str, str]  # by adapter: the text of Hugging Face in fp32 behind PROMPT
Command = Callable[[list[str], Expected], str]


def _generate(command, expected):
    run = ended([*command, "--raw", "--prompt", PROMPT])
    text = run.figure(r"(?s)Output 0: (.*)\n?$").removeprefix(PROMPT)
    return tokens_told(text.removesuffix("\n"), expected[BASE])


def _generate_in_fp32(command, expected):
    return _generate([*command, "--torch-dtype", "float32"], expected)


def _adapted(command, expected):
    return _generate(command, {BASE: expected["two"]})


def _chat(command, expected):
    run = ended(command, said=PROMPT + "\n")
    return tokens_told(run.figure(r"(?s)\A(.*)\n\Z"), expected[BASE])


def _evaluate(command, _):
    run = ended([*command, "--raw", "--prompt", PROMPT])
    return run.figure(r"Row 0: passed: (\d+ of \d+) greedy tokens equal") + " tokens equal"


def _validate(command, _):
    run = ended([*command, "--raw", "--prompt", PROMPT])
    run.figure(r"(Validation passed)")
    return run.figure(r"(\d+ of \d+) greedy tokens equal") + " tokens equal"


def _compile(command, _):
    run = ended(command)
    if "--enable-nki" not in command:
        return run.figure(r"(?m)^(\w+_model), bucket 64") and "graphs and operators"
    return run.figure(r"token_generation_model, bucket 64: (\S+) of .*MACs") + " of MACs in NKI"


def _profile(command, _):
    run = ended(command)
    return run.figure(r"token_generation_model, bucket 64.* ([\d.]+ ms a token)") + ", estimated"


def _test(command, _):
    run = ended([*command, "--limit", "2"])
    return run.figure(r"(\d+ of \d+) prompts accurate") + " prompts accurate"


def _serve(command, expected):
    """Every model that is served has to say what it says in Hugging Face."""
    given = [entry for flag, entry in zip(command, command[1:]) if flag == LORA[0]]
    names = [BASE, *(entry.partition(":")[0] for entry in given)]
    command += ["--port", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    said = []
    try:
        for line in process.stderr:
            said.append(line)
            address = re.search(r"Serving .* at http://([\d.]+:\d+)", line)
            if address is not None:
                found = [tokens_told(_asked(address[1], name), expected[name]) for name in names]
                break
        else:
            Run(process.wait() or 1, "", "".join(said)).figure("never")
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=LIMIT_SECONDS)
    return found[0] if len(set(found)) == 1 else ", ".join(found)


def _asked(address, name):
    """A completion of the server, by the model itself or an adapter."""
    connection = http.client.HTTPConnection(address, timeout=LIMIT_SECONDS)
    asked = {"model": name if name != BASE else "tiny", "max_tokens": TOKENS, "temperature": 0}
    body = json.dumps(asked | {"prompt": PROMPT})
    connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    content = answer.read().decode()
    if answer.status != 200:
        raise ValueError(f"status {answer.status}: {content[:300]}")
    return json.loads(content)["choices"][0]["text"]


LORA = ("--lora-ckpt-path", "one:BESIDE/one", "--lora-ckpt-path", "two:BESIDE/two")
SHORT = ("--seq-len", "64", "--max-context-length", "64")
BLOCKS = ("--seq-len", "128", "--batch-size", "2", "--pa-block-size", "16")
NEW = ("--max-new-tokens", str(TOKENS))
# Row -> arguments, what reads the output, columns.
MODES: dict[str, tuple[Sequence[str], Command, Sequence[str]]] = {
    "generate": (["--mode", "generate", *SHORT, *NEW], _generate, COLUMNS),
    "generate, fp32": (["--mode", "generate", *SHORT, *NEW], _generate_in_fp32, COLUMNS[:1]),
    "evaluate": (["--mode", "evaluate", *SHORT, *NEW], _evaluate, COLUMNS),
    "validate": (["--mode", "validate", *SHORT, *NEW], _validate, COLUMNS),
    "compile": (["--mode", "compile", *SHORT], _compile, COLUMNS),
    "profile": (["--mode", "profile", *SHORT], _profile, COLUMNS),
    "serve": (["--mode", "serve", *SHORT, "--batch-size", "2"], _serve, COLUMNS),
    "serve, adapters": (["--mode", "serve", *SHORT, "--batch-size", "2", *LORA], _serve, COLUMNS),
    "serve, prefixes": (
        ["--mode", "serve", *BLOCKS, "--max-context-length", "112", "--is-prefix-caching"],
        _serve,
        COLUMNS,
    ),
    "serve, chunks": (
        ["--mode", "serve", *BLOCKS, "--max-context-length", "32", "--is-chunked-prefill"],
        _serve,
        COLUMNS,
    ),
    "generate, adapter": (
        ["--mode", "generate", *SHORT, *NEW, *LORA, "--adapter-id", "two"],
        _adapted,
        COLUMNS,
    ),
    "chat": (["--mode", "chat", *SHORT, *NEW], _chat, COLUMNS),
    "test.py": (["--max-new-tokens", "2"], _test, COLUMNS),
}


def ended(command, said=""):
    """The run of a command, fed with `said`."""
    with tempfile.TemporaryDirectory() as folder:  # reports go there
        done = subprocess.run(
            command, input=said, cwd=folder, capture_output=True, text=True, timeout=LIMIT_SECONDS
        )
    return Run(done.returncode, done.stdout, done.stderr)


def cell(mode, column, environment, model, expected):
    """What a run says, under a release's environment."""
    arguments, told, _ = MODES[mode]
    arguments = [word.replace("BESIDE", str(model.parent)) for word in arguments]
    script = "test.py" if mode == "test.py" else "main.py"
    command = ["env", *(f"{key}={value}" for key, value in environment.items())]
    command += [sys.executable, "-W", "ignore", str(REPOSITORY / script), *arguments]
    command += ["--model-path", str(model), "--require-isolation"]
    command.append("--enable-nki" if column == "kernels" else "--no-enable-nki")
    try:
        return told(command, expected)
    except (ValueError, subprocess.TimeoutExpired) as error:
        said = f"fails: {error}".replace(str(model), model.name).replace(f"{REPOSITORY}/", "")
        return re.sub(r"(?<=\.py), line \d+", "", said)  # which a change of the file moves


def references(folder):
    """A seeded model with a chat template, adapters beside it, and what Hugging Face says.

    Its head takes letters and digits only, so that each token is a character.
    """
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import AutoTokenizer, LlamaForCausalLM

    from tests.adapters import merge_adapter, write_adapter
    from tests.tiny_model import write_tiny_model

    model = write_tiny_model(folder / "tiny")
    settings = model / "tokenizer_config.json"
    content = json.loads(settings.read_text(encoding="utf-8")) | {"chat_template": TEMPLATE}
    settings.write_text(json.dumps(content), encoding="utf-8")
    tokenizer = AutoTokenizer.from_pretrained(str(model))
    file = str(model / "model.safetensors")
    tensors = load_file(file)
    shown = [tokenizer.decode([token]) for token in range(len(tensors["lm_head.weight"]))]
    spoken = torch.tensor([len(word) == 1 and word.isascii() and word.isalnum() for word in shown])
    tensors["lm_head.weight"] *= spoken[:, None]
    save_file(tensors, file, metadata={"format": "pt"})
    ids, expected = torch.tensor([tokenizer(PROMPT)["input_ids"]]), {}
    for name in (BASE, *ADAPTERS):
        llama = LlamaForCausalLM.from_pretrained(str(model), torch_dtype=torch.float32).eval()
        if name != BASE:
            merge_adapter(llama, write_adapter(folder / name, llama, seed=ADAPTERS[name]))
        made = llama.generate(ids, max_new_tokens=TOKENS, do_sample=False)
        expected[name] = tokenizer.decode(made[0, ids.shape[1] :])
    return model, expected


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("public", type=Path, help="folder of both clones")
    parser.add_argument("--releases", nargs="+", default=releases.DEFAULT)
    parser.add_argument("--modes", nargs="+", default=list(MODES))
    parser.add_argument("--workers", type=int, default=1, help="runs at a time")
    parser.add_argument("--resume", action="store_true", help="leave out what this tree found")
    parser.add_argument("--write", action="store_true", help=f"the table into {page.PAGE.name}")
    asked = parser.parse_args()
    page.keep_rows(page.MODES, list(MODES))
    known = page.done(page.MODES) if asked.resume else {}
    with (
        tempfile.TemporaryDirectory() as folder,
        concurrent.futures.ThreadPoolExecutor(asked.workers) as pool,
    ):
        model, expected = references(Path(folder))
        jobs: dict[concurrent.futures.Future[tuple[str, float]], tuple[str, str, str]] = {}
        for name in asked.releases:
            environment = releases.environment(releases.RELEASES[name], asked.public)
            environment["XDG_CACHE_HOME"] = str(Path(folder) / name)  # compiled folders
            cases = [(mode, column) for mode in asked.modes for column in MODES[mode][2]]
            for mode, column in cases:
                if column not in known.get(name, {}).get(mode, {}):
                    job = pool.submit(
                        alone, 2 * LIMIT_SECONDS, cell, mode, column, environment, model, expected
                    )
                    jobs[job] = name, mode, column
        for job in concurrent.futures.as_completed(jobs):
            page.keep(page.MODES, *jobs[job], *job.result())
    page.end(page.MODES, asked.write)
    return 0


if __name__ == "__main__":
    sys.exit(main())
