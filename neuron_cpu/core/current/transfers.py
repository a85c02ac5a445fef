"""``nki.isa``: DMA."""

from dataclasses import replace
from typing import Any

from ..device.dtypes import Shape
from ..device.errors import refuse, warn
from ..device.refusals import defect
from ..device.release import nki_since, of_nki
from ..device.spec import CORE
from ..device.target import needs
from ..instructions.arguments import several
from ..instructions.copies import (
    DMA_COPY,
    DMA_SUM,
    DMA_TRANSPOSE,
    SOURCES,
    PermuteAttrs,
    transposed_axes,
)
from ..program import trace
from ..program.attributes import CAST, RAW, Attrs
from ..program.view import View, intern, reshaped_strides
from .operands import (
    NkiInstruction,
    common_part,
    dge_mode,
    engine,
    isa,
    joined,
    oob_mode,
    operator,
    put,
    refined,
    tensor,
)

_ISSUERS = {engine.sync: "sync", engine.scalar: "scalar", engine.unknown: "any"}


@isa(DMA_COPY, keywords={"engine": "2.29", "priority": "2.30"}, former={"unique_indices": None})
def dma_copy(
    dst: View,
    src: View,
    priority: int | None = None,
    oob_mode: oob_mode = oob_mode.error,
    dge_mode: dge_mode = dge_mode.unknown,
    engine: engine = engine.unknown,
) -> NkiInstruction:
    """``dst = src`` between HBM and SBUF, in any shapes with equal counts, cast through fp32.

    Either side may have run-time offsets; with ``oob_mode.skip`` rows out of bounds are left as
    they are.
    """
    _check_descriptors("dma_copy", dst, src, dge_mode, engine, priority)
    _check_known_faults(dst, src, oob_mode is _SKIP)
    attrs: Attrs = RAW if dst.dt is src.dt else CAST
    if oob_mode is _SKIP and (dst.by_data is not None or src.by_data is not None):
        attrs = Attrs(raw=attrs.raw, skip=True)
    if dge_mode is _HWDGE:
        attrs = replace(attrs, issuer=_ISSUERS[engine])
    if dst.shape != src.shape:
        dst, src = _matched("dma_copy", dst, src)
    return put(DMA_COPY, (dst,), (src,), attrs)


def _check_known_faults(dst: View, src: View, skips: bool) -> None:
    """Transfers on which compilers of some releases end."""
    frame = trace.current("nisa.dma_copy").frame if skips and CORE.number < 4 else None
    if frame is not None and any(f.loop.kind == "sequential" for f in frame.path()):
        warn(
            "sim_skip_in_loop",
            f"dma_copy of {src.label()} with oob_mode.skip inside a device loop, expected an "
            "unrolled loop; loop with Python's range",
        )
    known = defect("1373") if src.by_data is not None and src.on_chip else None
    if known is not None:
        warn("sim_dma_from_placed", f"dma_copy of {src.label()}: {known.told()}")


_SKIP = oob_mode.skip
_HWDGE, _NONE = dge_mode.hwdge, dge_mode.none
_UNKNOWN_ENGINE = engine.unknown


def _check_descriptors(
    what: str, dst: View, src: View, mode: Any, issuer: Any, priority: Any
) -> None:
    """Check who makes and who triggers the descriptors, and the options that this excludes."""
    if priority is not None:
        needs(f"{what}(priority=)", 4)
    if issuer is not _UNKNOWN_ENGINE and (issuer not in _ISSUERS or mode is not _HWDGE):
        raise refuse(
            "sim_dma_engine",
            f"{what} with engine={issuer} and {mode}, expected nisa.engine.sync or scalar together "
            "with dge_mode.hwdge; leave both open",
        )
    by_data = [v for v in (dst, src) if v.by_data is not None]
    if dst.storage.buffer == src.storage.buffer == "sbuf" and what == "dma_copy":
        warn(
            "sim_dma_on_chip",
            f"{what} of {src.label()} to {dst.label()}: it is documented, and one refusal at run "
            "time has been reported, expected HBM on one side; "
            + (
                "load these partitions from HBM into a tile of their own"
                if src.start_partition % 32 or dst.start_partition % 32
                else "copy on chip with nisa.tensor_copy(dst, src)"
            ),
            advice=True,
        )
    if CORE.number == 2:
        _warn_on_gen2(what, by_data)
    if mode is _HWDGE:
        needs(f"{what} with dge_mode.hwdge", 3)
        if src.dt is not dst.dt:
            raise refuse(
                "sim_hwdge_types",
                f"{what} of {src.label()} to {dst.label()} with dge_mode.hwdge, expected equal "
                "types: the hardware moves bytes; leave dge_mode open",
            )
        if any(v.by_data is not None and v.by_data[0].size > 1 for v in by_data):
            raise refuse(
                "sim_hwdge_offsets",
                f"{what} with dge_mode.hwdge and a vector of offsets, expected one offset; leave "
                "dge_mode open",
            )
    if mode is _NONE and by_data:
        raise refuse(
            "sim_static_descriptors",
            f"{what} of {by_data[0].label()} with dge_mode.none at a run-time offset, expected "
            "another mode: descriptors that the host makes have fixed addresses; "
            "leave dge_mode open",
        )


def _warn_on_gen2(what: str, by_data: list[View]) -> None:
    """Warn of forms that sources mention for later generations only, or leave open."""
    if what == "dma_transpose":
        warn(
            "sim_transpose_by_dma",
            "dma_transpose on gen2: sources leave open whether it is there, expected gen3; use "
            "nisa.nc_transpose",
        )
    for view in by_data:
        if _reaches_next_row(view):
            warn(
                "sim_vector_offsets",
                f"{what} of {view.label()} at a vector of offsets, each of which reaches into the "
                "next row: a trn1 with SDK 2.32 read other data, expected parts of single rows; "
                "reshape the tensor so that one offset selects one row",
            )


def _reaches_next_row(view: View) -> bool:
    """Whether the elements of one of several run-time offsets end beyond the row that it names.

    Transfers on gen2 stay within one row for each offset (foxl-ai/kiln, docs/neuron-notes.md: four
    rows at once came out wrong, the same as one row of a reshaped tensor exact).
    """
    if view.by_data is None or view.by_data[0].size == 1:
        return False
    row = view.by_data[1]
    last = view.offset % row + sum((n - 1) * step for n, step in zip(view.shape, view.strides))
    return last >= row


def _matched(what: str, dst: View, src: View) -> tuple[View, View]:
    """Bring both sides into one shape; the order of elements is row-major on either."""
    if dst.size != src.size:
        raise refuse(
            "err_store_dst_shape_smaller_than_other_shape",
            f"{what} of {src.label()} to {dst.label()}, expected equal element counts, got "
            f"{src.size} and {dst.size}; " + common_part(dst, src),
        )
    chip = dst if dst.on_chip else src
    lead: Shape = ()
    shapes = [(v.shape[0], *joined(v, 1)) if v.on_chip else joined(v, 0) for v in (dst, src)]
    if chip.on_chip and chip.shape[0] == 1:  # so does a single one, which the other side lacks
        lead, shapes = (1,), [joined(v, 1 if v is chip else 0) for v in (dst, src)]
    elif chip.on_chip and dst.shape[0] == src.shape[0]:  # partitions stay an axis of their own
        lead, shapes = chip.shape[:1], [joined(dst, 1), joined(src, 1)]
    sizes = refined(shapes)
    if sizes is None:
        raise refuse(
            "sim_shape_mismatch",
            f"{what} of {src.label()} to {dst.label()}, expected axes that divide each other; "
            "reshape one side, or copy in several steps",
        )
    shape = (*lead, *sizes)
    if chip.on_chip and len(shape) == 1:  # a row into a column: a tile keeps two axes
        shape = (*shape, 1)
    return _shaped(dst, shape), _shaped(src, shape)


def _shaped(view: View, shape: Shape) -> View:
    """The view with axes split; a DMA walks partitions like any other axis."""
    if view.shape == shape:
        return view
    strides = reshaped_strides(view.shape, view.strides, shape)
    assert strides is not None  # only axes that continue each other are joined
    return view._with(view.offset, intern(shape), intern(strides), None, view.by_data)


@isa(DMA_TRANSPOSE, keywords={"priority": "2.30"})
def dma_transpose(
    dst: View,
    src: View,
    axes: Any = None,
    priority: int | None = None,
    dge_mode: dge_mode = dge_mode.unknown,
    oob_mode: oob_mode = oob_mode.error,
) -> NkiInstruction:
    """Axes of ``src`` (HBM or SBUF) in the order (1, 0), (2, 1, 0) or (3, 1, 2, 0) into SBUF."""
    what = "dma_transpose"
    order = transposed_axes(src, None if axes is None else several(axes, f"{what} axes"))
    if src.ndim != 4 and not nki_since("2.29"):
        raise refuse(
            "sim_dma_transpose_axes",
            f"{what} of {src.label()} with SDK {of_nki()}, whose compiler said 'source tensor "
            "must have 4 dimensions' (aws-neuron-sdk issue 1301), expected four; use "
            "nisa.nc_transpose",
        )
    shape = tuple(src.shape[a] for a in order)
    if dst.shape != shape or dst.dt is not src.dt:
        raise refuse(
            "sim_shape_mismatch",
            f"{what} of {src.label()} into {dst.label()}, expected a dst of {shape} {src.dt}; "
            f"make it with nl.ndarray({shape}, dtype=nl.{src.dt}, buffer=nl.{dst.storage.buffer})",
        )
    _check_descriptors(what, dst, src, dge_mode, _UNKNOWN_ENGINE, priority)
    if dge_mode is _HWDGE and src.dt.itemsize != 2:
        raise refuse(
            "sim_hwdge_types",
            f"{what} of {src.label()} with hwdge, expected a 2-byte type; leave dge_mode open",
        )
    skips = oob_mode is _SKIP and src.by_data is not None
    issuer = "any" if dge_mode is _HWDGE else ""
    attrs = PermuteAttrs(raw=True, order=order, skip=skips, issuer=issuer)
    return put(DMA_TRANSPOSE, (dst,), (src,), attrs)


@isa(DMA_SUM, keywords={"oob_mode": "2.30"}, order=("dst", "srcs", "scales", "reduce_op", "name"))
def dma_compute(
    dst: View,
    srcs: Any,
    reduce_op: Any,
    scales: Any = None,
    unique_indices: bool = True,
    oob_mode: oob_mode = oob_mode.error,
) -> NkiInstruction:
    """``dst`` = the sum of ``srcs`` in fp32, by the DMA engines' adders.

    With run-time rows: two sources, one of which is the destination itself (scatter-add into HBM,
    gather-add into SBUF).
    """
    what = "dma_compute"
    sources = [tensor(s, what) for s in several(srcs, f"{what} srcs")]
    if operator(reduce_op, what) != "add" or any(s != 1.0 for s in scales or ()):
        raise refuse(
            "sim_rmw_operator",
            f"{what} with {reduce_op!r} and scales {scales}, expected nl.add and scales of 1.0; "
            "combine in SBUF with nisa.tensor_tensor, and copy the result",
        )
    if not 1 <= len(sources) <= SOURCES:
        raise refuse(
            "sim_dma_sources",
            f"{what} of {len(sources)} sources, expected 1 to {SOURCES}; "
            "split them over several calls",
        )
    if len(sources) == 1:
        warn(
            "sim_dma_one_source",
            f"dma_compute of one source into {dst.label()}: sources disagree whether it adds to "
            "the destination, expected two or more; here it replaces it, name the destination "
            "among srcs to add",
        )
    if dst.by_data is not None:
        return _scatter_add(dst, sources, unique_indices, oob_mode)
    matched = [s if s.shape == dst.shape else _matched(what, dst, s)[1] for s in sources]
    views = [s if s.shape == dst.shape else _shaped(s, dst.shape) for s in matched]
    skips = oob_mode is _SKIP and any(s.by_data is not None for s in sources)
    return put(DMA_SUM, (dst,), tuple(views), Attrs(skip=skips))


def _scatter_add(target: View, sources: list[View], unique: bool, mode: Any) -> NkiInstruction:
    """Add the rows of an SBUF tile to rows that data choose."""
    added = [s for s in sources if not _same_access(s, target)]
    if len(sources) != 2 or len(added) != 1 or not unique:
        raise refuse(
            "sim_dma_sources",
            f"dma_compute into {target.label()}, whose rows data choose, expected two sources of "
            "which one is the same access, and unique_indices=True; name dst among srcs",
        )
    return put(DMA_COPY, (target,), tuple(added), Attrs(accumulate=True, skip=mode is _SKIP))


def _same_access(a: View, b: View) -> bool:
    if a.by_data is None or b.by_data is None:
        return False
    tiles = a.by_data[0], b.by_data[0]
    same = tiles[0].storage is tiles[1].storage and tiles[0].key() == tiles[1].key()
    return a.storage is b.storage and a.key() == b.key() and same
