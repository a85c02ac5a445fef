"""What runs beside the submission where one process prefills and another one decodes."""

import time
from collections.abc import Sequence

from neuronx_distributed_inference.modules.kvcache import transfer_line
from neuronx_distributed_inference.modules.kvcache.transfer import (
    export_kv,
    import_kv,
    receive_header,
    receive_rows,
    send_kv,
)

from harness.processes.roles import Role
from harness.processes.worker import Host
from harness.session import slots
from harness.session.rows import Draw

_FAILED = "Keys and values cannot be moved"
LINE = 0  # of the cache in which prompts are prefilled, one after the other


def prefill(host: Host, role: str, ids: Sequence[int], draw: Draw, adapter: int) -> list[float]:
    """Cache a prompt; the token behind it and the seconds that took."""
    started = time.perf_counter()
    (token,) = slots.prefill(host, role, LINE, ids, draw, adapter)
    return [token, time.perf_counter() - started]


def send(host: Host, role: str, length: int, token: int) -> int:
    """Send the cached prompt's keys and values to the other process; bytes."""
    with host.told_as_the_submission(_FAILED):
        state = export_kv(host.models[Role(role)], LINE, length, token)
        send_kv(state, transfer_line.joined())
    return state.nbytes


def receive(host: Host, role: str, line: int) -> list[float]:
    """Take a sequence into a line: its tokens, the next one, bytes, and seconds from the arrival of
    its header until it stands in the caches."""
    model, other = host.models[Role(role)], transfer_line.joined()
    with host.told_as_the_submission(_FAILED):
        header = receive_header(other)
        started = time.perf_counter()
        state = receive_rows(model, header, other)
        import_kv(model, line, state)
        seconds = time.perf_counter() - started
    return [state.length, state.token, state.nbytes, seconds]
