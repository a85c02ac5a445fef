"""`--mode disaggregate`: one process prefills, another one decodes what it was sent.

Without `--kv-role` both processes are started here. With it the drivers of two machines, or two
terminals, talk over a `Link`: the one that decodes has the prompts and prints the answers. Either
way keys and values go from the one submission's process to the other's, by torch.distributed.
"""

import contextlib
import hashlib
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from harness import console, sdk
from harness.errors import UserError, is_refusal
from harness.experiments import link
from harness.experiments.answered import Answered
from harness.experiments.link import Link, Message
from harness.experiments.prefilling import Behind, Beside, Decoder, Prefiller, Prefills, serve
from harness.experiments.report import print_report
from harness.files import read_key
from harness.inputs.disaggregation import CONSUMER, PRODUCER
from harness.modes.generate import heading
from harness.output import operators
from harness.processes import ranks
from harness.processes.workers import SubmissionFailed
from harness.serving.guard import is_loopback
from harness.session.building import Loaded, build, start
from harness.session.generation import new_token_limit
from harness.session.opening import Session, open_session
from harness.session.rows import Draw
from harness.settings import Settings
from harness.streaming import RowText
from neuron_cpu.console import terminal
from neuron_cpu.processes.torchrun import Place

PROTOCOL = 1
PREFILL_SIDE, DECODE_SIDE = "prefill side", "decode side"
# For the two processes to meet, which may wait for an import of PyTorch, and for a sequence.
TRANSFER_SECONDS = 120.0
SAMPLES, SAMPLE_BYTES = 64, 1 << 16  # of a file of weights: two models share none of them


def run(settings: Settings) -> int:
    """The side, or both sides, that the settings ask for; 0 where all prompts are answered."""
    if not sdk.platform().ranks_as_processes:
        raise UserError(
            "--mode disaggregate moves caches between processes of the stand-in for the SDK; with "
            "an SDK installed use its own connector, or set NEURON_CPU=1."
        )
    assert settings.transfer is not None
    if settings.transfer.role == PRODUCER:
        return _prefill(settings)
    return _decode(settings) if settings.transfer.role == CONSUMER else _both(settings)


# --- both sides here ------------------------------------------------------------------------------
def _both(settings: Settings) -> int:
    """Two processes of this driver."""
    session = open_session(settings)
    store = _store("127.0.0.1")
    try:
        sides = [_paired(session, rank, "127.0.0.1", store.port) for rank in range(2)]
        for side in sides:  # each waits for the other one before it does anything else
            start(side)
        prefiller, decoder = (build(side) for side in sides)
        _answer(decoder, Beside(Prefiller(prefiller)))
    finally:
        session.workers.close()  # which also ends what a thread may wait for
    return 0


def _store(address: str) -> Any:
    """Where the two processes find each other, at a free port of this machine."""
    import torch.distributed as dist  # takes seconds that other modes are spared

    wait = timedelta(seconds=TRANSFER_SECONDS)
    try:
        return dist.TCPStore(address, 0, is_master=True, wait_for_workers=False, timeout=wait)
    except RuntimeError as error:
        why = " ".join(str(error).split())[:160].rstrip(".")
        raise UserError(f"Cannot listen at {address}: {why}; name another --kv-ip.") from error


def _paired(session: Session, rank: int, address: str, port: int, interface: str = "") -> Session:
    """The session whose process is one of two: rank 0 prefills, rank 1 decodes."""
    place = Place(rank, 2, address, port, "kv", TRANSFER_SECONDS, interface or address)
    return replace(session, pair=place)


# --- the side that prefills -----------------------------------------------------------------------
def _prefill(settings: Settings) -> int:
    """Prefill for one other side, until it ends."""
    asked = settings.transfer
    assert asked is not None
    listening = link.listen(asked.kv_ip, asked.kv_port)
    arrivals = link.Arrivals(listening, DECODE_SIDE, _key(settings))
    host, port = listening.getsockname()[:2]
    with contextlib.closing(arrivals):
        session = open_session(settings, ())
        build(session)  # whatever is wrong with the submission is told before anybody waits
        session.workers.close()
        console.say(f"Waiting for the {DECODE_SIDE} at {host} port {port}")
        if not is_loopback(str(host)) and asked.kv_key_file is None:
            console.say("Anybody who reaches this port may send prompts without --kv-key-file.")
        other = _welcome(arrivals, _terms(session), time.monotonic() + asked.kv_timeout)
    session = replace(session, workers=ranks.workers())
    with _told(other), contextlib.closing(session.workers):
        store = _store(other.own_address)
        other.send("welcome", port=store.port)
        loaded = build(_paired(session, 0, other.own_address, store.port))
        serve(Prefiller(loaded), other)
    console.say(f"The {DECODE_SIDE} has ended.")
    return 0


def _key(settings: Settings) -> bytes:
    """What both sides have to know; empty without --kv-key-file."""
    assert settings.transfer is not None
    return (read_key(settings.transfer.kv_key_file) or "").encode()


def _welcome(arrivals: link.Arrivals, terms: dict[str, Any], deadline: float) -> Link:
    """The first that comes as a decode side of the same model and sizes; others are sent away."""
    while True:
        other = arrivals.next(deadline)
        try:
            hello = other.receive(link.MUTE_SECONDS)
            if hello["kind"] != "hello" or not isinstance(hello.get("terms"), dict):
                raise link.LinkLost("It does not say hello.")
        except link.LinkLost as error:
            console.say(f"Somebody came who is no {DECODE_SIDE}: {error}")
            other.close()
            continue
        try:
            with _told(other):
                _compare(terms, hello)
        except UserError as error:
            console.say(str(error))
            continue
        return other


def _compare(terms: dict[str, Any], hello: Message) -> None:
    """Refuse a side whose caches are others, or whose model is."""
    theirs = {"version of the driver": hello.get("protocol"), **hello["terms"]}
    for name, value in {"version of the driver": PROTOCOL, **terms}.items():
        if theirs.get(name) != value:
            raise UserError(
                f"The two sides differ in {name}: {_word(value)} where prompts are prefilled, "
                f"{_word(theirs.get(name))} where they are decoded; start both with one value."
            )


def _word(value: Any) -> str:
    return str(value)[:100]


def _terms(session: Session) -> dict[str, Any]:
    """What has to be the same on both sides, by the names that a user would know."""
    settings = session.settings
    adapters = [
        [name, _digest(path)] for name, path in settings.adapter_folders.items() if path.is_dir()
    ]
    return {
        "the files of the model (a checksum)": _digest(session.model.path),
        "NEURON_CPU_NXDI": sdk.version() or "0.1",
        "--tp-degree": settings.tp_degree,
        "--cp-degree": settings.cp_degree or 1,
        "--pp-degree": settings.pp_degree,
        "--torch-dtype": settings.torch_dtype,
        "--kv-cache-quant": settings.kv_cache_quant,
        "quantised weights": settings.quantised_words,
        "--seq-len": settings.seq_len,
        "--max-context-length": settings.max_context_length,
        "--lora-ckpt-path": adapters,
    }


def _digest(folder: Path) -> str:
    """A name of a checkpoint's content that is the same on every machine: configuration, sizes and
    samples of the weights, as whole ones would take minutes."""
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.suffix not in (".safetensors", ".bin") and path.name != "config.json":
            continue
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            for sample in range(SAMPLES):
                file.seek(sample * max(size - SAMPLE_BYTES, 0) // (SAMPLES - 1))
                digest.update(file.read(SAMPLE_BYTES))
                if size <= SAMPLE_BYTES:
                    break
    return digest.hexdigest()[:12]


# --- the side that decodes ------------------------------------------------------------------------
def _decode(settings: Settings) -> int:
    """Answer the prompts with what the other side prefills."""
    asked = settings.transfer
    assert asked is not None
    session = open_session(settings)
    where = asked.kv_ip, asked.kv_port
    other = link.connect(*where, asked.kv_timeout, PREFILL_SIDE, _key(settings))
    with _told(other), contextlib.closing(session.workers):
        other.send("hello", protocol=PROTOCOL, terms=_terms(session))
        console.say(f"The {PREFILL_SIDE} is at {where[0]} port {where[1]}")
        port = _port(other, settings.time_limit)
        paired = _paired(session, 1, other.other_address, port, other.own_address)
        _answer(build(paired), Behind(other, settings.time_limit))
        with contextlib.suppress(link.LinkLost):  # it has ended, and all answers are whole
            other.send("end")
    return 0


def _port(other: Link, seconds: float) -> int:
    """Where the processes of both sides meet."""
    answer = other.receive(seconds)
    if answer["kind"] == "failed":
        raise UserError(f"The {other.other} has failed: {answer.get('why')}")
    port = answer.get("port")
    if answer["kind"] != "welcome" or type(port) is not int or not 0 < port < 1 << 16:
        raise UserError(f"The {other.other} gives an answer of another form; update both sides.")
    return port


@contextlib.contextmanager
def _told(other: Link) -> Iterator[None]:
    """What goes wrong inside is told to the other side, which ends, too."""
    try:
        yield
    except BaseException as error:
        with contextlib.suppress(link.LinkLost):
            other.send("failed", why=_reason(error))
        other.close()
        raise


def _reason(error: BaseException) -> str:
    """What the other side is told."""
    if isinstance(error, (KeyboardInterrupt, SystemExit)):
        return "it was interrupted"
    return str(error) if is_refusal(error) else type(error).__name__


# --- answers --------------------------------------------------------------------------------------
def _answer(loaded: Loaded, prefills: Prefills) -> None:
    """Answer the session's prompts, print them in their order, and what was moved for them."""
    session, settings = loaded.session, loaded.session.settings
    if settings.enable_nki:
        operators.report_outside_nki(loaded.folder)
    decoder = Decoder(loaded, prefills, lambda number: _draw(settings, number), _adapter(settings))
    texts = _Texts(session)
    started = time.monotonic()
    found = decoder.run(
        session.prompt_ids, lambda length: new_token_limit(settings, [[0] * length]), texts.add
    )
    texts.finish()
    tokens, seconds = sum(answered.tokens for answered in found), time.monotonic() - started
    console.say(f"{tokens} tokens in {seconds:.2f} s ({sdk.platform().times.label})")
    print_report(found, *_on_device(loaded, found))


def _draw(settings: Settings, number: int) -> Draw:
    """How the token with a number is chosen, as the server draws it."""
    temperature = settings.temperature if settings.samples else 0.0
    return Draw(temperature, settings.top_k, settings.top_p, settings.seed, number)


def _adapter(settings: Settings) -> int:
    """The number of the adapter that answers, 0 for the model itself."""
    names = ["0", *settings.adapter_folders]
    return names.index(settings.adapters.chosen) if settings.adapters is not None else 0


def _on_device(loaded: Loaded, found: list[Answered]) -> tuple[list[float], str]:
    """What the transfers would take between instances, in ms, and what that assumes."""
    sizes = [answered.nbytes for answered in found]
    what = "The transfers cannot be estimated"
    body = loaded.call("harness.figures.estimate:transfers", what, sizes=sizes).body
    times = body.get("ms") if isinstance(body, dict) else None
    if not isinstance(times, list) or not all(type(ms) is float for ms in times):
        raise SubmissionFailed(f"{what}: expected times in ms, got {str(body)[:80]}.")
    return times, str(body.get("assumed"))


class _Texts:
    """Answers as text: the first one that is not whole grows, later ones wait for their turn."""

    def __init__(self, session: Session) -> None:
        self._rows = [RowText(session.tokenizer) for _ in session.prompt_ids]
        self._pending = [""] * len(self._rows)
        self._headings = [heading(session, n, ids) for n, ids in enumerate(session.prompt_ids)]
        self._ended = [False] * len(self._rows)
        self._current = 0
        self._out = terminal.Running()

    def add(self, number: int, token: int, last: bool) -> None:
        """A token of an answer."""
        text, self._headings[number] = self._headings[number], ""
        self._pending[number] += text + self._rows[number].add(token)
        if last:
            self._pending[number] += self._rows[number].rest() + "\n"
            self._ended[number] = True
        while self._current < len(self._rows):
            self._out.write(self._pending[self._current])
            self._pending[self._current] = ""
            if not self._ended[self._current]:
                return
            self._current += 1

    def finish(self) -> None:
        """All answers are whole."""
        self._out.finish()
