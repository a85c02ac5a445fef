"""``nki.collectives``: operations between the ranks of a replica group.

A kernel runs once on each rank (``on_ranks``, or the ranks of the SDK's models); the rank's number
is known while it is recorded here. Sources leave open, and this guesses, unproven: reductions are
computed in fp32 in the order of the group, a ring goes through a group in its order on every
channel, and the counts of ``all_gather_v`` and ``all_to_all_v`` are elements.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ..device import ranks
from ..device.errors import refuse
from ..device.target import needs
from ..instructions.arguments import pairs as steps
from ..instructions.arguments import several, whole, wholes
from ..instructions.entry import FORMS, form
from ..instructions.ranks import COLLECTIVE, COMBINE, CollectiveAttrs
from ..program import trace
from ..program.view import View
from .control import VirtualRegister
from .copies import tensor_copy
from .cores import CORES, next_phase, wait
from .operands import NkiInstruction, operator, put, tensor
from .releases import released
from .transfers import dma_copy

MODULE = "nki.collectives"
collective = functools.partial(form, MODULE, named=True)
_SINCE = {"priority": "2.30", "name": "2.31"}
CHANNELS = (2, 4)  # of a ring; four where a group is all devices of a node
FOUR = 4  # ranks of all_gather_v
# They compute, or move parts whose sizes are data, where there is one rank, too.
NOT_COPIES = ("collective_permute_implicit_reduce", "all_gather_v", "all_to_all_v")


class ReplicaGroup:
    """Lists of ranks that work together; the lists are disjoint."""

    def __init__(self, groups: Any) -> None:
        self.groups = [
            wholes(members, "ranks of a ReplicaGroup")
            for members in several(groups, "ReplicaGroup")
        ]
        members = [rank for ranks in self.groups for rank in ranks]
        if len(set(members)) != len(members) or not all(self.groups):
            raise refuse(
                "sim_replica_group",
                f"ReplicaGroup({groups}), expected disjoint lists of ranks; "
                "name each rank once, as [[0, 1], [2, 3]]",
            )

    @property
    def size(self) -> int:
        """Ranks that work together."""
        return max(map(len, self.groups), default=1)


# --- who takes part, and with what ----------------------------------------------------------------
def _members(what: str, given: Any) -> tuple[tuple[int, ...], int]:
    """The group of the rank that runs the kernel, and its place in it."""
    groups = (given if isinstance(given, ReplicaGroup) else ReplicaGroup(given)).groups
    rank = ranks.own().rank
    for members in groups:
        if rank in members:
            return tuple(members), members.index(rank)
    raise refuse(
        "sim_replica_group",
        f"{what} on rank {rank} with groups {groups}, expected a group that it belongs to; name "
        "every rank of the kernel",
    )


def _tensors(what: str, given: Any) -> list[View]:
    return [tensor(one, what) for one in _listed(given)]


def _pairs(
    what: str, srcs: Any, dsts: Any, only_hbm: bool = False, single: bool = False
) -> tuple[list[View], list[View]]:
    """Sources and destinations of one kind of memory, as many of each, with equal types."""
    sources, targets = _tensors(what, srcs), _tensors(what, dsts)
    buffers = {v.storage.buffer for v in (*sources, *targets)}
    on_chip = buffers == {"sbuf"}
    wrong = ""
    if len(sources) != len(targets) or not sources:
        wrong = f"as many sources as destinations, got {len(sources)} and {len(targets)}"
    elif not on_chip and buffers & {"sbuf", "psum"}:
        wrong = "tensors that are all in HBM or all in SBUF"
    elif on_chip and only_hbm:
        wrong = "tensors in HBM"
    elif len(sources) > 1 and (on_chip or single):
        wrong = "one tensor" if single else "one tensor, as it lies in SBUF"
    elif any(s.dt is not t.dt for s, t in zip(sources, targets)):
        wrong = "equal types; cast before"
    elif any(v.by_data is not None for v in (*sources, *targets)):
        wrong = "tensors at fixed addresses"
    if wrong:
        got = ", ".join(v.label() for v in (*sources, *targets))
        raise refuse(
            "sim_collective",
            f"{what} of {got}, expected {wrong}; give srcs= and dsts= as lists of such tensors",
        )
    return sources, targets


def _shaped(
    what: str, sources: list[View], targets: list[View], ratio: tuple[int, int], axis: int = 0
) -> None:
    """Refuse destinations whose axis is not ``ratio`` times as long as the sources'."""
    up, down = ratio
    for k, source in enumerate(sources):
        shape = list(source.shape)
        whole = shape[axis] * up % down == 0
        shape[axis] = shape[axis] * up // down
        target = targets[k] if targets else None
        if whole and (target is None or target.shape == tuple(shape)):
            continue
        into = f" into {target.label()}" if target is not None else ""
        raise refuse(
            "sim_shape_mismatch",
            f"{what} of {source.label()}{into}, expected "
            + (f"a destination of {tuple(shape)}" if whole else f"axis {axis} in {down} parts")
            + "; make it of that shape",
        )


def _reducer(what: str, op: Any) -> str:
    code, known = operator(op, what), ", ".join(COMBINE)
    if code not in COMBINE:
        raise refuse(
            "sim_reduce_operator",
            f"{what} with nl.{code}, expected one of {known}; write op=nl.add for sums",
        )
    return code


def _axis(what: str, given: Any, view: View) -> int:
    allowed = (0, 1) if view.on_chip and what == "all_gather" else (0,)
    if given not in allowed:
        raise refuse(
            "sim_collective_dim",
            f"{what} of {view.label()} with collective_dim={given!r}, expected "
            f"{' or '.join(map(str, allowed))}; write collective_dim={allowed[0]}",
        )
    return int(given)


# --- recording ------------------------------------------------------------------------------------
def _issue(
    what: str,
    group: tuple[tuple[int, ...], int],
    targets: Sequence[View],
    sources: Sequence[View],
    priority: Any,
    **more: Any,
) -> NkiInstruction | None:
    """Record a rank's part. The two cores of a rank meet there, and share tensors in shared HBM.

    In a group of one rank a plain exchange copies its sources.
    """
    if priority is not None:
        needs(f"{what}(priority=)", 4)
    more = {"sent": len(sources), "raw": True} | more
    attrs = CollectiveAttrs(kind=what, members=group[0], place=group[1], **more)
    if len(attrs.members) == 1 and attrs.kind not in NOT_COPIES:
        made = None
        for source, target in zip(sources, targets):
            made = (tensor_copy if source.on_chip else dma_copy)(target, source)
        return made
    tracer = trace.current(f"{MODULE}.{attrs.kind}")
    if tracer.program.cores == 1:
        return put(COLLECTIVE, tuple(targets), tuple(sources), attrs)
    before = tracer.meetings.phase
    next_phase(attrs.kind)
    key = (before, attrs.kind, ())
    parts: Any = tracer.meetings.open.setdefault(key, [])
    parts.append((tuple(targets), tuple(sources)))
    if len(parts) < len(CORES):  # recorded when the other core is here
        wait(tracer)
        return None
    del tracer.meetings.open[key]
    frame, tracer.frame = tracer.frame, None
    first, second = ([(v.storage, v.key()) for v in (*dst, *src)] for dst, src in parts)
    same, made = first == second, None
    for number, (dst, src) in enumerate(parts[:1] if same else parts):
        made = put(COLLECTIVE, dst, src, replace(attrs, core=None if same else number))
        tracer.meetings.phases[id(made._made)] = before + 0.5
    tracer.frame = frame
    wait(tracer)
    return made


# --- the operations -------------------------------------------------------------------------------
@collective(COLLECTIVE, keywords=_SINCE)
def all_reduce(
    srcs: Any, dsts: Any, replica_group: Any, op: Any, priority: Any = None
) -> NkiInstruction | None:
    """Element-wise reduction over the ranks, to all of them."""
    return _reduction("all_reduce", (srcs, dsts), replica_group, op, priority)


@collective(COLLECTIVE, keywords=_SINCE)
def reduce_scatter(
    srcs: Any, dsts: Any, replica_group: Any, collective_dim: int, op: Any, priority: Any = None
) -> NkiInstruction | None:
    """Element-wise reduction over the ranks, a part of axis 0 to each."""
    what = "reduce_scatter"
    _axis(what, collective_dim, _pairs(what, srcs, dsts)[0][0])
    return _reduction(what, (srcs, dsts), replica_group, op, priority)


def _reduction(
    what: str, tensors: tuple[Any, Any], group: Any, op: Any, priority: Any
) -> NkiInstruction | None:
    code = _reducer(what, op)
    sources, targets = _pairs(what, *tensors)
    taking = _members(what, group)
    _shaped(what, sources, targets, (1, len(taking[0]) if what == "reduce_scatter" else 1))
    if len({v.dt for v in sources}) > 1:
        raise refuse(
            "sim_collective",
            f"{what} of {', '.join(v.label() for v in sources)}, expected tensors of one type; "
            "reduce them in several calls",
        )
    return _issue(what, taking, targets, sources, priority, op=code, raw=sources[0].dt.is_int)


@collective(COLLECTIVE, keywords=_SINCE)
def all_gather(
    srcs: Any, dsts: Any, replica_group: Any, collective_dim: int, priority: Any = None
) -> NkiInstruction | None:
    """The ranks' tensors one behind the other along axis 0 (in SBUF also 1), to all of them."""
    what = "all_gather"
    sources, targets = _pairs(what, srcs, dsts)
    axis = _axis(what, collective_dim, sources[0])
    taking = _members(what, replica_group)
    _shaped(what, sources, targets, (len(taking[0]), 1), axis)
    return _issue(what, taking, targets, sources, priority, dim=axis)


@collective(COLLECTIVE, keywords=_SINCE)
def all_to_all(
    srcs: Any, dsts: Any, replica_group: Any, collective_dim: int, priority: Any = None
) -> NkiInstruction | None:
    """Part k of axis 0 of every rank's tensor to rank k."""
    what = "all_to_all"
    sources, targets = _pairs(what, srcs, dsts, only_hbm=True)
    _axis(what, collective_dim, sources[0])
    taking = _members(what, replica_group)
    _shaped(what, sources, targets, (1, 1))
    _shaped(what, sources, [], (1, len(taking[0])))
    return _issue(what, taking, targets, sources, priority)


# --- permutations ---------------------------------------------------------------------------------
@collective(COLLECTIVE, keywords=_SINCE)
def collective_permute(
    srcs: Any, dsts: Any, source_target_pairs: Any, priority: Any = None
) -> NkiInstruction | None:
    """Tensors from source to target ranks; who is no target keeps its own."""
    what = "collective_permute"
    sources, targets = _pairs(what, srcs, dsts, only_hbm=True, single=True)
    _shaped(what, sources, targets, (1, 1))
    pairs = steps(source_target_pairs, f"{what} source_target_pairs")
    if any(len(set(side)) != len(pairs) for side in zip(*pairs)):
        raise refuse(
            "sim_replica_group",
            f"{what} with pairs {pairs}, expected every rank once as a source and as a target; "
            "name each rank in two pairs, as [0, 1] and [1, 0]",
        )
    members = tuple(sorted({rank for pair in pairs for rank in pair}))
    own = ranks.own().rank
    if own not in members:
        return None
    sender = next((members.index(a) for a, b in pairs if b == own), None)
    taking, views = (members, members.index(own)), (*sources, *targets)
    return _issue(what, taking, targets, views, priority, sent=1, sender=sender)


def _channels(what: str, given: Any, *by_channel: Any) -> list[Any]:
    """One tensor for each channel of a ring; channels are numbered from 0."""
    ids = wholes(given, f"{what} channel_ids")
    flat = [[_listed(value)[0] for value in _listed(one)] for one in by_channel]
    if ids != list(range(len(ids))) or len(ids) > max(CHANNELS):
        raise refuse(
            "sim_channels",
            f"{what} with channel_ids={ids}, expected 0, 1, ... for at most {max(CHANNELS)} "
            "channels (all devices of a node; 2 otherwise)",
        )
    if any(len(one) != len(ids) for one in flat):
        raise refuse(
            "sim_channels",
            f"{what} with {[len(one) for one in flat]} tensors for channels {ids}, expected one "
            "for each; give as many tensors as channels",
        )
    return flat


def _listed(given: Any) -> list[Any]:
    return list(given) if isinstance(given, (list, tuple)) else [given]


@collective(COLLECTIVE, keywords=_SINCE)
def collective_permute_implicit(
    srcs_by_channel: Any,
    dsts_by_channel: Any,
    replica_group: Any,
    channel_ids: Any = (0,),
    priority: Any = None,
) -> NkiInstruction | None:
    """A step around the ring of the ranks: to the next one, from the one before (a guess)."""
    what = "collective_permute_implicit"
    srcs, dsts = _channels(what, channel_ids, srcs_by_channel, dsts_by_channel)
    sources, targets = _pairs(what, srcs, dsts, only_hbm=True)
    _shaped(what, sources, targets, (1, 1))
    taking = members, place = _members(what, replica_group)
    return _issue(what, taking, targets, sources, priority, sender=(place - 1) % len(members))


@collective(COLLECTIVE, keywords=_SINCE)
def collective_permute_implicit_reduce(
    srcs0_by_channel: Any,
    srcs1_by_channel: Any,
    dsts_by_channel: Any,
    replica_group: Any,
    op: Any,
    channel_ids: Any = (0,),
    priority: Any = None,
) -> NkiInstruction | None:
    """A step around the ring that reduces two local tensors first and sends the result."""
    what = "collective_permute_implicit_reduce"
    code = _reducer(what, op)
    given = _channels(what, channel_ids, srcs0_by_channel, srcs1_by_channel, dsts_by_channel)
    first, targets = _pairs(what, given[0], given[2], only_hbm=True)
    second, _ = _pairs(what, given[1], given[2], only_hbm=True)
    for sources in (first, second):
        _shaped(what, sources, targets, (1, 1))
    taking = members, place = _members(what, replica_group)
    more = {"op": code, "raw": first[0].dt.is_int, "sender": (place - 1) % len(members)}
    return _issue(what, taking, targets, (*first, *second), priority, **more)


@collective(None)
def collective_permute_implicit_current_processing_rank_id(
    iteration_id: Any, replica_group: Any, channel_id: int = 0
) -> VirtualRegister:
    """The rank whose data a ring step processes: the own one at step 0, then those before it."""
    what = "collective_permute_implicit_current_processing_rank_id"
    members, place = _members(what, replica_group)
    known = isinstance(iteration_id, VirtualRegister)
    step = iteration_id.value(what) if known else whole(iteration_id, f"{what} iteration_id")
    return VirtualRegister(members[(place - step) % len(members)], frozen=True)


# --- parts whose sizes are data -------------------------------------------------------------------
@collective(COLLECTIVE, came="2.32")
def all_gather_v(
    srcs: Any,
    dsts: Any,
    replica_group: Any,
    metadata_tensor: View,
    recv_counts_known: bool = False,
    has_rdispls: bool = False,
    priority: Any = None,
) -> NkiInstruction | None:
    """``all_gather`` of parts whose sizes are data, on two cores of each of four ranks.

    ``metadata_tensor`` uint32 (rows, ranks) in HBM or (1, rows, ranks) in SBUF: send counts and
    displacements (column 0 counts), then receive counts, which are written unless known.
    """
    what = "all_gather_v"
    cores = trace.current(f"{MODULE}.{what}").program.cores
    members, _ = _members(what, replica_group)
    if cores != len(CORES) or len(members) != FOUR or has_rdispls:
        raise refuse(
            "sim_collective",
            f"{what} over {len(members)} ranks of {cores} cores with has_rdispls={has_rdispls}, "
            "expected 4 ranks, a launch with kernel[2] and no receive displacements; leave the "
            "displacements out",
        )
    how = (recv_counts_known, has_rdispls)
    return _varying(what, (srcs, dsts), replica_group, metadata_tensor, how, priority)


@collective(COLLECTIVE, keywords=_SINCE)
def all_to_all_v(
    srcs: Any,
    dsts: Any,
    replica_group: Any,
    metadata_tensor: View,
    recv_counts_known: bool = False,
    has_rdispls: bool = False,
    priority: Any = None,
) -> NkiInstruction | None:
    """``all_to_all`` of parts whose sizes are data; metadata as in ``all_gather_v``.

    With ``has_rdispls`` a fourth row of the metadata says where each part goes; without it parts
    follow each other.
    """
    how = (recv_counts_known, has_rdispls)
    return _varying("all_to_all_v", (srcs, dsts), replica_group, metadata_tensor, how, priority)


def _in_halves(whole: Callable) -> None:
    """Enter a collective's two halves (SDK 2.33): its arguments, and what issues it with them.

    The second half reads all of its tensors; devices read the metadata in the first. One
    collective is prepared at a time.
    """
    call, name = released(FORMS[MODULE][whole.__name__]), whole.__name__

    def prepare(*args: Any, **given: Any) -> Callable:
        tracer = trace.current(f"{MODULE}.{name}_prepare")
        if tracer.prepared is not None:
            raise refuse(
                "sim_collective",
                f"{name}_prepare while {tracer.prepared.func.__name__} is prepared, "
                "expected its trigger before; one collective is prepared at a time",
            )
        tracer.prepared = functools.partial(call, *args, **given)
        return tracer.prepared

    def trigger(prepare_instr: Any) -> NkiInstruction | None:
        tracer = trace.current(f"{MODULE}.{name}_trigger")
        waiting = tracer.prepared
        if waiting is None or prepare_instr is not waiting or waiting.func is not call:
            raise refuse(
                "sim_collective",
                f"{name}_trigger of {type(prepare_instr).__name__}, expected what the last "
                f"{name}_prepare returned, once; trigger each preparation once",
            )
        tracer.prepared = None
        return waiting()

    prepare.__doc__ = f"The arguments of ``{name}``, which its trigger issues."
    trigger.__doc__ = f"Issue the ``{name}`` that was prepared last."
    for half in (prepare, trigger):
        half.__name__ = f"{name}_{half.__name__}"
        collective(COLLECTIVE, came="2.33", named=half is trigger)(half)


for _whole in (all_gather_v, all_to_all_v):
    _in_halves(_whole)


def _varying(
    what: str,
    tensors: tuple[Any, Any],
    group: Any,
    told: Any,
    how: tuple[bool, bool],
    priority: Any,
) -> NkiInstruction | None:
    sources, targets = _pairs(what, *tensors, only_hbm=True, single=True)
    taking = members, _ = _members(what, group)
    known, placed = how
    shapes = [(*lead, rows, len(members)) for lead in ((), (1,)) for rows in (3, 4)]
    least = 4 if placed else 3
    if told.dt.name != "uint32" or told.shape not in shapes or told.shape[-2] < least:
        raise refuse(
            "sim_collective",
            f"{what} with metadata {told.label()}, expected uint32 of shape ({least}, "
            f"{len(members)}) in HBM or (1, {least}, {len(members)}) in SBUF; make it of that "
            "shape and "
            "dtype=nl.uint32",
        )
    views, more = (
        (sources[0], told[..., 0:2, :], targets[0], told),
        dict(known=known, placed=placed),
    )
    return _issue(what, taking, (targets[0], told), views, priority, sent=2, **more)


@collective(None)
def rank_id() -> VirtualRegister:
    """The rank that runs the kernel."""
    trace.current("nki.collectives.rank_id")
    return VirtualRegister(ranks.own().rank, frozen=True)
