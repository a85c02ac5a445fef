"""Names that NKI lacks, and functions of other libraries: each answer names what exists."""

import linecache
import re

import nki
import nki.isa
import nki.language
import numpy as np
import pytest
import torch
from neuronxcc import nki as old_nki
from neuronxcc.nki import isa as old_isa
from neuronxcc.nki import language as old_language

from neuron_cpu.core import NkiError, NkiWarning
from neuron_cpu.core.device import unknown

LANGUAGES = {"neuronxcc": (old_nki, old_language, old_isa), "nki": (nki, nki.language, nki.isa)}
TABLES = {"nl": unknown.ANSWERS, "nisa": unknown.ISA_ANSWERS, "gone": unknown.GONE}


def kernel_of(language, body):
    """A kernel that hands a tile of (128, 64) to `body` and returns it."""
    package, nl, nisa = LANGUAGES[language]

    def kernel(x_hbm):
        out_hbm = nl.ndarray(x_hbm.shape, x_hbm.dtype, buffer=nl.shared_hbm)
        tile = nl.ndarray(x_hbm.shape, x_hbm.dtype, buffer=nl.sbuf)
        nisa.dma_copy(dst=tile, src=x_hbm)
        body(nl, nisa, tile)
        nisa.dma_copy(dst=out_hbm, src=tile)
        return out_hbm

    return package.jit(kernel)


def told(language, body):
    with pytest.raises(NkiError) as caught:
        kernel_of(language, body)(np.ones((128, 64), np.float32))
    assert caught.value.source is not None and "test_unknown_names.py" in caught.value.source
    return str(caught.value)


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_call_of_an_answer_exists(language):
    _, nl, nisa = LANGUAGES[language]
    current = language == "nki"
    for kind, table in TABLES.items():
        for name in table:
            text = unknown.answer(name, current, kind == "nisa")
            for alias, used in re.findall(r"\b(nl|nisa)\.(\w+)", text or ""):
                assert hasattr({"nl": nl, "nisa": nisa}[alias], used), (name, text)


def written(text):
    """A body that evaluates the text: `i` is an index grid, `m` a comparison of it."""

    def body(nl, nisa, x):
        grid = old_language.arange(128)[:, None]
        names = {"nl": nl, "nisa": nisa, "x": x, "np": np, "torch": torch, "i": grid}
        eval(compile(text, __file__, "eval"), names | {"m": grid < 100})

    return body


NAMES = {
    "nl.dot(x, x)": "nc_matmul",
    "nl.clamp(x, 0, 1)": "nl.minimum",
    "nl.value": "nl.device_print",
    "nl.float64": "nl.float32",
    "nl.expp(x)": "nl.exp",
    "nisa.matmul(x, x)": "nisa.nc_matmul",
    "nisa.exp(x)": "nisa.activation",
    "nisa.tensor_copi(x)": "nisa.tensor_copy",
    "x.T": "nc_transpose",
    "x.mean()": "nl.mean",
    "x.exp()": "nl.exp",
    "x.to(nl.bfloat16)": "copy",
    "x.shap": ".shape",
}
CALLS = {
    "x @ x": "nc_matmul",
    "np.ones((4, 128)) @ x": "nl.matmul",
    "x // 2": "nl.floor",
    "x % 2": "nl.mod",
    "divmod(x, 2)": "nl.floor",
    "abs(x)": "nl.abs",
    "np.mean(x)": "nl.mean",
    "np.exp(x)": "nl.exp",
    "np.concatenate([x, x])": "joint shape",
    "torch.exp(x)": "nl.exp",
    "torch.cat([x, x])": "joint shape",
    "torch.clamp(x, min=0)": "nl.maximum",
    "torch.nn.functional.softmax(x, dim=-1)": "nl.softmax",
}


@pytest.mark.parametrize("language", LANGUAGES)
def test_the_sentence_names_the_call_that_does_it(language):
    for text, expected in (NAMES | CALLS).items():
        message = told(language, written(text))
        assert expected in message and "expected" in message and "use " in message, message
        identifier = "sim_unknown_name" if text in NAMES else "sim_foreign_call"
        assert f"[{identifier}]" in message and "Tensor" not in message, message


@pytest.mark.parametrize("language", LANGUAGES)
def test_sizes_one_by_one_and_arrays_of_others_get_a_sentence(language):
    assert "expected view(self, dtype)" in told(language, lambda nl, nisa, x: x.view(64, 128))
    message = told(language, lambda nl, nisa, x: nl.add(x, torch.ones(128, 64)))
    assert "torch.Tensor, expected a" in message and "sim_operand_type" in message


@pytest.mark.parametrize("language", LANGUAGES)
def test_values_are_none_while_a_kernel_is_traced(language):
    assert "NKI_CPU_EAGER=1" in told(language, lambda nl, nisa, x: np.array(x))


def test_numbers_of_numpy_stand_on_the_left_of_a_tile():
    package, nl, _ = LANGUAGES["neuronxcc"]

    @package.jit
    def kernel(x_hbm):
        out_hbm = nl.ndarray(x_hbm.shape, x_hbm.dtype, buffer=nl.shared_hbm)
        nl.store(out_hbm, np.float32(3) - np.float32(2) * nl.load(x_hbm))
        return out_hbm

    assert (kernel(np.ones((128, 64), np.float32)) == 1).all()


@pytest.mark.parametrize("language", LANGUAGES)
def test_outside_of_kernels_a_missing_name_is_an_attribute_error(language):
    _, nl, nisa = LANGUAGES[language]
    assert not hasattr(nl, "dot") and getattr(nisa, "matmul", None) is None
    with pytest.raises(AttributeError, match=r"nl.dot does not exist.*nc_matmul"):
        _ = nl.dot
    with pytest.raises(AttributeError, match="no attribute '__path_'"):
        _ = nl.__path_


CELL = """
@nki.jit
def kernel(x):
    out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
    tile = nl.load(x)
    nl.store(out, np.mean(tile))
    return out
"""


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("cell", [CELL, CELL.replace("np.mean(tile)", "nl.clamp(tile)")])
def test_a_cell_of_a_notebook_gets_the_sentence_too(language, cell):
    """A cell of IPython is no file: its source stands in linecache under a name of its own."""
    name = f"<ipython-input-{abs(hash(cell))}>"
    linecache.cache[name] = (len(cell), None, cell.splitlines(keepends=True), name)
    package, nl, _ = LANGUAGES[language]
    room = {"nki": package, "nl": nl, "np": np, "__name__": "__main__"}
    exec(compile(cell, name, "exec"), room)
    with pytest.raises(NkiError, match="nl.mean|nl.minimum") as caught:
        room["kernel"](np.ones((128, 64), np.float32))
    assert ":6)" in str(caught.value) and "Tensor" not in str(caught.value)


# What a language model writes that knows CUDA, Triton, PyTorch and an older SDK: for both
# languages, for the older one, for the newer one.
INVENTED = {
    "both": {
        "nl.outer_product(x, x)": "nisa.nc_matmul",
        "nl.cast_to(x, nl.bfloat16)": "copy(",
        "nl.bitcast(x, nl.int32)": "tile.view(dtype)",
        "nl.silu_and_mul(x, x)": "nl.silu",
        "nl.apply_rotary_pos_emb(x, x, x)": "two products with cos and sin",
        "nl.NUM_PARTITIONS": "nl.tile_size.pmax",
        "nl.tile_size.partitions": "nl.tile_size.pmax",
        "nl.hbm_tensor((128, 64))": "buffer=nl.sbuf",
        "nl.inf": "float('inf')",
        "nl.newaxis": "None in subscripts",
        "nl.dtype.float32": "nl.float32",
        "nl.parallel(4)": "nl.affine_range",
        "nl.unroll(4)": "Python's range",
        "nl.program_ids()": "nl.program_id(axis)",
        "nl.sync_cores()": "nothing",
        "nl.prefetch(x)": "nisa.dma_copy",
        "nl.all_gather(x)": "collective",
        "nl.static_assert(1 == 1)": "Python's assert",
        "nl.constexpr": "Python numbers, BLOCK = 512",
        "nl.Engine.Vector": "engine=",
        "nl.ALU.add": "op=nl.add",
        "nl.dequantize(x, 0.1)": "nisa.tensor_scalar",
        "nl.psum_to_sbuf(x)": "nisa.tensor_copy",
        "nisa.partition_all_reduce(x, nl.add)": "nisa.tensor_partition_reduce",
        "nisa.vector_add(x, x)": "nisa.tensor_tensor",
        "nisa.load_weights(x)": "nisa.nc_matmul",
        "nisa.reduce_max(x)": "nisa.tensor_reduce",
        "nisa.max_pool(x, 2)": "nisa.tensor_reduce",
        "nisa.dma_wait()": "nothing",
        "x.numel()": "tile.size",
        "x.device": "nothing",
        "x.store(x)": "nisa.dma_copy",
        "x.expand(128, 64)": "nl.broadcast_to",
        "x.relu_()": "x = nl.add(x, y)",
        "+x": "copy",
    },
    "neuronxcc": {
        "x.stride(0)": "nl.copy makes it dense",
        "x.fill_(0)": "use nl.zeros(shape, dtype), or tile[...] = 0",
        "i.T": "nisa.iota",
        "i.astype(nl.float32)": "nisa.iota",
        "i * 0.5": "split the axis",
        "m[:, 0]": "before they are compared",
        "m | m": "write the opposite comparison",
        "~m": "or make two calls with one mask each [sim_mask_operator]",
        "nl.max(x, axis=1, keep_dims=True)": "keepdims=",
        "nl.dropout(x, p=0.5)": "rate=",
        "nl.scalar_register(0)": "nl.load of the number",
        "x[:, [0, 2]]": "one slice at a time",
        "nisa.partition_broadcast(x)": "nl.broadcast_to",
        "nisa.dma_gather(x, x)": "rows that an index tile names",
    },
    "nki": {
        "x.stride(0)": "tile.get_pattern()",
        "x.fill_(0)": "use nisa.memset(dst, value)",
        "nisa.dma_copy(dest=x, source=x)": "dst=",
        "nisa.activation(dst=x, op=np.exp, data=x)": "write nl.exp",
        "nisa.activation(dst=x, op='gelu', data=x)": "write nl.gelu",
        "nisa.activation(dst=x, func=nl.exp, data=x)": "op=",
        "nisa.tensor_tensor(dst=x, lhs=x, data2=x, op=nl.add)": "data1=",
        "nisa.tensor_scalar(dst=x, data=x, op=nl.add, operand0=1.0)": "op0=",
        "nisa.nc_matmul(x, x, x, start=True)": "accumulate=",
        "nisa.memset(dst=x, val=0.0)": "value=",
        "nisa.memset(x)": "add value=",
        "nisa.engine.vectr": "nisa.engine.vector",
        "nisa.matmul_perf_mode.double_row_gen3": "nisa.matmul_perf_mode.double_row",
        "nl.register(0)": "nisa.register_alloc",
        "nisa.partition_broadcast(x)": "nisa.nc_stream_shuffle",
        "nisa.dma_gather(x, x)": ".ap(vector_offset=...)",
    },
}


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("form", ["both", "own"])
def test_inventions_of_a_language_model_are_answered(language, form):
    for text, expected in INVENTED[language if form == "own" else form].items():
        message = told(language, written(text))
        mend = message.partition("expected")[2].partition("; ")[2]  # not the fault's words
        assert expected in mend, (text, message)


def test_a_keyword_that_nothing_reads_is_told():
    body = kernel_of("neuronxcc", lambda nl, _, x: nl.ndarray(x.shape, x.dtype, memory=nl.psum))
    with pytest.warns(NkiWarning, match="memory=.*sim_ignored_keyword"):
        body(np.ones((128, 64), np.float32))
