"""A wrong or refused kernel is explained by the change of its source that makes it right.

Each kernel is right as it stands; a row plants one mistake in its text, and the check names the
line, with what the author may have written.
"""

import importlib.util
import io
import random
import tokenize

import pytest

import neuron_cpu
from neuron_cpu.judge import edits, repairs, verdict
from neuron_cpu.judge.cases import case
from neuron_cpu.judge.references import Reference
from tests.crossed import full

neuron_cpu.ensure_sdk()

TODAY = """
import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np

LIMIT = 4.0

def tile(rows, columns, buffer=nl.sbuf):
    return nl.ndarray((rows, columns), dtype=nl.float32, buffer=buffer)
"""
SOFTMAX = (
    TODAY
    + """
@nki.jit
def kernel(x, up):
    n, d = x.shape
    out = nl.ndarray((n, d), dtype=x.dtype, buffer=nl.shared_hbm)
    for i in range(n // 64):
        t, u, e = tile(64, d), tile(64, d), tile(64, d)
        low, den, inv, y = tile(64, 1), tile(64, 1), tile(64, 1), tile(64, d)
        nisa.dma_copy(dst=t, src=x[i * 64:(i + 1) * 64, :])
        nisa.dma_copy(dst=u, src=up[nl.ds(i * 64, 64), :])
        nisa.tensor_reduce(dst=low, op=nl.maximum, data=t, axis=1, negate=True)
        nisa.activation(dst=e, op=nl.exp, data=t, bias=low)
        nisa.tensor_reduce(dst=den, op=nl.add, data=e, axis=1)
        nisa.reciprocal(dst=inv, data=den)
        nisa.tensor_scalar(dst=y, data=e, op0=nl.multiply, operand0=inv, op1=nl.add, operand1=1.0)
        nisa.tensor_scalar(dst=y, data=y, op0=nl.minimum, operand0=LIMIT)
        nisa.tensor_tensor(dst=e, data1=y, data2=u, op=nl.subtract)
        nisa.dma_copy(dst=out[i * 64:(i + 1) * 64, :], src=e)
    return out

def reference(x, up):
    e = np.exp(x - x.max(axis=1, keepdims=True))
    return np.minimum(e / e.sum(axis=1, keepdims=True) + 1, 4) - up
"""
)
PRODUCT = (
    TODAY
    + """
@nki.jit
def kernel(a, b):
    k, m = a.shape
    n = b.shape[1]
    out = nl.ndarray((m, n), dtype=nl.float32, buffer=nl.shared_hbm)
    acc = tile(m, n, nl.psum)
    for i in range(k // 32):
        left, right = tile(32, m), tile(32, n)
        nisa.dma_copy(dst=left, src=a[i * 32:i * 32 + 32, :])
        nisa.dma_copy(dst=right, src=b[i * 32:i * 32 + 32, :])
        nisa.nc_matmul(dst=acc, stationary=left, moving=right)
    res = tile(m, n)
    nisa.activation(dst=res, op=nl.gelu, data=acc, scale=1.0 / k)
    nisa.dma_copy(dst=out, src=res)
    return out

def reference(a, b):
    import math
    x = a.T @ b / a.shape[0]
    return 0.5 * x * (1 + np.vectorize(math.erf)(x / 2**0.5))
"""
)
BEFORE = """
import numpy as np
from neuronxcc import nki
import neuronxcc.nki.language as nl
import neuronxcc.nki.isa as nisa

@nki.jit
def kernel(x, w):
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    n, d = x.shape
    g = nl.load(w.reshape((1, d)))
    for i in nl.affine_range(n // 64):
        t = nl.load(x[nl.ds(i * 64, 64), :])
        mean = nl.sum(nl.square(t), axis=1, keepdims=True) / d
        t = nl.multiply(t, nl.rsqrt(mean))
        y = nl.multiply(t, g.broadcast_to((64, d)))
        y = nisa.activation(op=nl.tanh, data=y)
        nl.store(out[nl.ds(i * 64, 64), :], value=y)
    return out

def reference(x, w):
    return np.tanh(x / np.sqrt((x * x).mean(axis=1, keepdims=True)) * w)
"""
STEPS = (
    TODAY
    + """
@nki.jit
def kernel(x, g):
    n, d = x.shape
    out = nl.ndarray((n, d), dtype=x.dtype, buffer=nl.shared_hbm)
    late = nl.zeros((n, d + 2), dtype=nl.float32, buffer=nl.sbuf)
    rows, both = tile(n, d), tile(n, d)
    nisa.dma_copy(dst=late[:, 2:d + 2], src=x)
    w = nl.load(g)
    nisa.tensor_tensor(dst=rows, data1=late[:, 0:d], data2=nl.exp(w), op=nl.multiply)
    turned = nl.copy(nl.transpose(rows))
    low, high = turned[:, 0:d:2], turned[:, 1:d:2]
    nisa.tensor_copy(dst=both[:, 0:d:2], src=high)
    nisa.tensor_copy(dst=both[:, 1:d:2], src=low)
    y = nl.add(nl.multiply(both, w), x_of(x))
    nl.store(out, y)
    return out

def x_of(x):
    return nl.load(x)

def reference(x, g):
    late = np.zeros_like(x)
    late[:, 2:] = x[:, :-2]
    t = (late * np.exp(g)).T
    return t.reshape(len(x), -1, 2)[:, :, ::-1].reshape(x.shape) * g + x
"""
)
ONLINE = (
    TODAY
    + """
@nki.jit
def kernel(x):
    n, d = x.shape
    out = nl.ndarray((n, 1), x.dtype, buffer=nl.shared_hbm)
    top, total = tile(n, 1), tile(n, 1)
    nisa.memset(dst=top, value=-1e9)
    nisa.memset(dst=total, value=0.0)
    for i in range(d // 16):
        t, new, part = tile(n, 16), tile(n, 1), tile(n, 1)
        nisa.dma_copy(dst=t, src=x[:, i * 16:(i + 1) * 16])
        nisa.tensor_reduce(dst=part, op=nl.maximum, data=t, axis=1)
        nisa.tensor_tensor(dst=new, data1=top, data2=part, op=nl.maximum)
        nisa.tensor_scalar(dst=t, data=t, op0=nl.subtract, operand0=new)
        nisa.activation(dst=t, op=nl.exp, data=t)
        shrink = nl.exp(nl.subtract(top, new))
        nisa.tensor_tensor(dst=total, data1=total, data2=shrink, op=nl.multiply)
        nisa.tensor_reduce(dst=part, op=nl.add, data=t, axis=1)
        nisa.tensor_tensor(dst=total, data1=total, data2=part, op=nl.add)
        nisa.tensor_copy(dst=top, src=new)
    nisa.dma_copy(dst=out, src=nl.add(nl.log(total), top))
    return out

def reference(x):
    top = x.max(axis=1, keepdims=True)
    return np.log(np.exp(x - top).sum(axis=1, keepdims=True)) + top
"""
)
SWAPPED = "return np.tanh(x / np.sqrt((x * x).mean(axis=1, keepdims=True)) * w)"
KERNELS = {
    "softmax": (SOFTMAX, "128x96:f32 128x96:f32"),
    "product": (PRODUCT, "64x32:f32 64x48:f32"),
    "before": (BEFORE, "128x96:f32 96:f32"),
    "steps": (STEPS, "32x32:f32 32x32:f32"),
    "online": (ONLINE, "32x64:f32"),
}
# the kernel, what stands there, the mistake, and words of the answer ("" for the correct text)
MISTAKES = [
    ("softmax", "op=nl.subtract", "op=nl.add", ""),
    ("softmax", "data1=y, data2=u", "data1=u, data2=y", ""),
    ("product", "stationary=left, moving=right", "stationary=right, moving=left", ""),
    ("product", "op=nl.gelu", "op=nl.silu", ""),
    ("product", ", scale=1.0 / k", "", "1.0 / k"),
    ("product", "src=b[i * 32:i * 32 + 32, :]", "src=b[0:32, :]", "i * 32:"),
    ("before", "nl.rsqrt(mean)", "nl.sqrt(mean)", ""),
    ("before", "axis=1, keepdims=True) / d", "axis=1, keepdims=True)", "nl.mean"),
    ("before", "nl.multiply(t, g.b", "nl.add(t, g.b", "nl.multiply"),
    ("online", "nl.subtract(top, new)", "nl.subtract(new, top)", ""),
    ("online", "op=nl.add)\n        nisa.tensor_copy(dst=top, src=new)", "op=nl.add)", "src=new"),
]  # fmt: skip
THOROUGH = [  # these take one to four seconds each
    ("softmax", "op0=nl.multiply, operand0=inv, op1=nl.add, operand1=1.0",
     "op0=nl.add, operand0=1.0, op1=nl.multiply, operand1=inv", ""),
    ("softmax", "up[nl.ds(i * 64, 64), :]", "up[nl.ds(i, 64), :]", "i * 64"),
    ("steps", "nl.add(nl.multiply(both, w), x_of(x))", "nl.multiply(nl.add(both, x_of(x)), w)", ""),
    ("steps", "late[:, 0:d]", "late[:, 1:d + 1]", "0:d"),
    ("online", "(dst=t, op=nl.exp, data=t)", "(dst=t, op=nl.copy, data=t)", "nl.exp"),
    ("softmax", ", negate=True", "", "negate=True"),
    ("product", "range(k // 32)", "range(k // 33)", "-(-k // 33)"),
    ("product", "    acc = tile(m, n, nl.psum)\n    for i in range(k // 32):\n",
     "    for i in range(k // 32):\n        acc = tile(m, n, nl.psum)\n", "before `for i in"),
    ("softmax", "range(n // 64)", "range(1, n // 64)", "range(0, n // 64)"),
    ("softmax", "data1=y, data2=u", "data1=y, data2=t", "data2=u"),
    ("softmax", "    return out\n", "        return out\n", "behind `for i in"),
    ("before", "y = nisa.act", "nisa.act", "y = nisa.activation(op=nl.tanh"),
    ("softmax", "dst=den, op=nl.add", "dst=den, op=nl.maximum", "op=nl.add"),
    ("softmax", "x[i * 64:(i + 1) * 64, :]", "x[i:i + 64, :]", "i * 64"),
    ("before", "nl.store(out[nl.ds(i * 64, 64), :], value=y)",
     "nl.store(out[nl.ds(i * 64, 64), :], value=t)", "value=y"),
    ("product", "scale=1.0 / k", "scale=k", "1.0 / k"),
    ("before", "/ d\n", "/ n\n", "/ d"),
    ("softmax", "1) * 64, :], src=e", "1) * 64, :], src=y", "src=e"),
    ("softmax", "op=nl.maximum, data=t, axis=1", "op=nl.maximum, data=u, axis=1", "data=t"),
]  # fmt: skip


def judged(text, arguments, folder):
    """The verdict on `kernel` of a file with this text."""
    path = folder / "planted.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location("planted", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    answer = Reference(module.reference, "numpy")
    return verdict.judge(module.kernel, answer, case(arguments), verdict.Settings())


# token by token, without the tree that repairs are made of
OPERATORS = ("add", "subtract", "multiply", "maximum", "exp", "rsqrt", "gelu", "tanh", "silu")


def spoilt(text, chance):
    """The kernel with one token changed, and its line; None where the token has no other."""
    tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
    first, last = (
        text[: text.index(word)].count("\n") + 2 for word in ("def kernel", "return out")
    )
    body = [one for one in tokens if first < one.start[0] < last]
    one = chance.choice(body)
    others = {
        tokenize.NUMBER: lambda: [f"{one.string}{more}" for more in (" + 1", " * 2")],
        tokenize.OP: lambda: list("-*") if one.string == "+" else list("+/") * (one.string == "*"),
        tokenize.NAME: lambda: [
            n for n in OPERATORS if one.string in OPERATORS and n != one.string
        ],
    }.get(one.type, list)()
    if not others:
        return None
    lines = text.splitlines(keepends=True)
    (row, begin), (_, end) = one.start, one.end
    line = lines[row - 1]
    lines[row - 1] = line[:begin] + chance.choice(others) + line[end:]
    return "".join(lines), row


@pytest.mark.full
def test_random_mistakes_are_named_with_their_lines(tmp_path):
    """Of 40 wrong or refused kernels with one token changed, the line of at least 33 is named."""
    chance, named, planted = random.Random(7), 0, 0
    while planted < 40:
        text, arguments = KERNELS[chance.choice(sorted(KERNELS))]
        made = spoilt(text, chance)
        if made is None:
            continue
        folder = tmp_path / str(chance.random())
        folder.mkdir()
        try:
            found = judged(made[0], arguments, folder)
        except Exception:
            continue  # Python's own error, which stops the check
        if not found.correct:
            planted += 1
            named += any(f"planted.py:{made[1]}: with " in one for one in found.places)
    assert named >= 33


@pytest.mark.parametrize("name", KERNELS)
def test_a_right_kernel_has_no_repair(name, tmp_path):
    found = judged(*KERNELS[name], tmp_path)
    assert found.correct and not found.places


@pytest.mark.parametrize(
    "name, right, wrong, words", [*MISTAKES, *(full(*row) for row in THOROUGH)]
)
def test_a_planted_mistake_is_named_with_its_repair(name, right, wrong, words, tmp_path):
    text, arguments = KERNELS[name]
    assert text.count(right) == 1
    at = text[: text.index(right)].count("\n") + 1 + wrong.count("\n        acc")
    found = judged(text.replace(right, wrong), arguments, tmp_path)
    assert not found.correct
    told = [one for one in found.places if f"planted.py:{at}: with " in one]
    assert told and (words or right) in told[0], found.places
    assert not any("instances" in one for one in found.warnings)  # of what was tried


@pytest.mark.full
def test_a_wrong_reference_is_named(tmp_path):
    text = BEFORE.replace(SWAPPED, SWAPPED.replace("x * x", "x + x"))
    found = judged(text, KERNELS["before"][1], tmp_path)
    assert any("the reference would with" in one for one in found.places)
    # NaN of the reference asks for nothing, so it is no repair
    text = BEFORE.replace(SWAPPED, SWAPPED.replace("x / np.sqrt", "x - x / np.exp"))
    found = judged(text, KERNELS["before"][1], tmp_path)
    assert not found.correct and not any("would with" in one for one in found.places)


@pytest.mark.full
def test_a_change_that_computes_less_is_no_repair(tmp_path):
    """A copy by way of a type that saturates is not to be left out."""
    text = SOFTMAX.replace("src=x[i * 64:(i + 1) * 64, :]", "src=x[0:64, :]")
    text = text[: text.index("    e = np.exp")] + "    return x - up\n"
    found = judged(text, KERNELS["softmax"][1], tmp_path)
    assert not any(": with " in one for one in found.places), found.places


LACKS = (
    TODAY
    + """
@nki.jit
def kernel(x, y):
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    a = nl.ndarray(x.shape, dtype=nl.float32, buffer=nl.sbuf)
    b = nl.ndarray(x.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.dma_copy(dst=a, src=x)
    nisa.dma_copy(dst=b, src=y)
    nisa.activation(dst=a, op=nl.exp, data=a)
    nisa.dma_copy(dst=out, src=a)
    return out

def reference(x, y):
    return np.exp(x) + y
"""
)


@pytest.mark.parametrize("module", ["nisa.", "nki.isa.", ""])
def test_what_the_reference_does_and_the_kernel_lacks_is_added(module, tmp_path):
    text = "from nki.isa import activation, dma_copy, tensor_tensor" + LACKS
    found = judged(text.replace("nisa.", module), "64x32:f32 64x32:f32", tmp_path)
    wanted = f"with `{module}tensor_tensor(dst=a, data1=a, data2=b, op=nl.add)` be"
    assert any(wanted in one for one in found.places), found.places


def test_a_factor_stands_before_what_a_norm_adds(tmp_path):
    """A later scale= is right, too, on values that are much larger than the 1e-6."""
    norm = """nisa.tensor_tensor(dst=b, data1=a, data2=a, op=nl.multiply)
    n, s = x.shape[1], tile(64, 1)
    nisa.tensor_reduce(dst=s, op=nl.add, data=b, axis=1)
    nisa.tensor_scalar(dst=s, data=s, op0=nl.multiply, operand0=1.0, op1=nl.add, operand1=1e-6)
    nisa.activation(dst=s, op=nl.rsqrt, data=s)
    nisa.tensor_scalar(dst=a, data=a, op0=nl.multiply, operand0=s)"""
    text = LACKS.replace("nisa.activation(dst=a, op=nl.exp, data=a)", norm)
    wanted = "x / np.sqrt((x * x).mean(axis=1, keepdims=True) + 1e-6)"
    found = judged(text.replace("np.exp(x) + y", wanted), "64x32:f32 64x32:f32", tmp_path)
    told = " ".join(found.places)
    assert "operand0=1.0 / n" in told and "scale=" not in told


def test_tiles_of_one_letter_and_subscripts_with_calls_are_changed(tmp_path):
    """`dst=t` has two of t, and nl.ds(r, 32) a comma: both ended the whole check."""
    text = """
import numpy as np
import nki, nki.isa as nisa, nki.language as nl

@nki.jit
def kernel(x):
    out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
    for r in range(0, x.shape[0], 32):
        t = nl.ndarray((32, x.shape[1]), x.dtype, buffer=nl.sbuf)
        s = nl.ndarray((32, 1), x.dtype, buffer=nl.sbuf)
        nisa.dma_copy(dst=t, src=x[nl.ds(r, 32), :])
        nisa.tensor_reduce(dst=s, op=nl.add, data=t, axis=1)
        nisa.tensor_scalar(dst=s, data=s, op0=nl.multiply, operand0=1.0 / (x.shape[1] - 1))
        nisa.tensor_scalar(dst=t, data=t, op0=nl.subtract, operand0=s)
        nisa.dma_copy(dst=out[nl.ds(r, 32), :], src=t)
    return out

def reference(x):
    return x - x.mean(axis=1, keepdims=True)
"""
    found = judged(text, "64x32:f32", tmp_path)
    assert "1.0 / x.shape[1]" in " ".join(found.places), found.places


def test_where_the_way_of_the_reference_is_left_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(verdict, "SECONDS", 0.1)  # no change mends it
    wrong = "nisa.activation(dst=inv, op=nl.tanh, data=e[:, 0:1], scale=3.0)"
    text = SOFTMAX.replace("nisa.reciprocal(dst=inv, data=den)", wrong)
    text = text.replace("data2=u, op=nl.subtract", "data2=u, op=nl.add")
    line = text[: text.index("op=nl.exp")].count("\n") + 1
    found = judged(text, KERNELS["softmax"][1], tmp_path)
    assert f"the values of line {line} are the reference's `e`" in " ".join(found.places)


def test_a_launch_on_one_core_of_two_is_told(tmp_path):
    text, first = SOFTMAX.replace("range(n // 64)", "range(1)"), "nl.program_id(0)"
    text = text.replace("i * 64", first + " * 64").replace("(i + 1)", f"({first} + 1)")
    found = judged(text, KERNELS["softmax"][1], tmp_path)
    assert "launched with --grid 2" in found.places[-1], found.places


def from_before(rows, size):
    return rows[size - 3 : size]


def test_a_bound_that_a_formula_makes_negative_is_refused():
    strict = repairs.Source(from_before, repairs.Signs()).strict()
    assert strict("abcde", 3) == "abc"
    with pytest.raises(IndexError):
        strict("abcde", 2)


def test_of_two_changes_of_one_place_the_last_is_undone_first():
    place = [1]
    both = edits.Together([edits.Edit(0, 0, place, 0, new, ()) for new in (2, 3)])
    both.order = both.order = None
    assert place == [1]
