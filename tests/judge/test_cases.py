"""Arguments as text, and the values that they are given."""

import shlex

import pytest
import torch

from neuron_cpu.errors import UsageError
from neuron_cpu.judge import cases


def test_a_line_of_arguments():
    made = cases.case("4x8:bf16 \"'two words'\" scale=2.5 index=4x1:i32:0..9")
    assert str(made) == "4x8:bf16 'two words' scale=2.5 index=4x1:i32:0..9"
    assert cases.case(shlex.join(made.words)) == made
    positional, named = made.meta()
    assert positional[0].shape == (4, 8) and positional[0].is_meta and positional[1] == "two words"
    assert named["scale"] == 2.5 and named["index"].dtype == torch.int32
    wide = made.with_floats(torch.float32)
    assert str(wide) == "4x8:f32 'two words' scale=2.5 index=4x1:i32:0..9"


@pytest.mark.parametrize(
    "text",
    ["4x8:bf16:9..1", "4:i8:0..1000", "4:i32:0..1e99", "4:bf16:1.2.3..4", "4:bool:0..1", "4x8:what",
     "9999999999x9999999999:f32", "'", "f("],
)  # fmt: skip
def test_what_is_no_argument(text):
    with pytest.raises(UsageError):
        cases.case(text)


def values(text, kind, seed=0):
    return cases.case(text).values(kind, seed)[0][0]


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16", "float8_e4m3fn"])
def test_kinds_of_floats(dtype):
    text = f"16x64:{dtype}"
    assert values(text, "zeros").to(torch.float32).abs().sum() == 0
    assert set(values(text, "ties").to(torch.float32).reshape(-1).tolist()) == {
        -1.0,
        -0.5,
        0.0,
        0.5,
    }
    large = values(text, "large").to(torch.float32)
    assert bool(large.isfinite().all()) and bool((large.abs().amax(1) > 89).all())
    assert int(values(text, "nan").to(torch.float32).isnan().sum()) == 1
    random = values(text, "random")
    assert random.equal(values(text, "random")) or dtype.startswith("float8")
    assert not random.to(torch.float32).equal(values(text, "random", 1).to(torch.float32))


@pytest.mark.parametrize(
    ("text", "nearest"), [("4:f32:-5..5", 0), ("4:f32:2..5", 2), ("4:i32:-5..-2", -2)]
)
def test_zeros_are_the_nearest_value_within_limits(text, nearest):
    assert values(text, "zeros").tolist() == [nearest] * 4


@pytest.mark.parametrize("kind", [*cases.KINDS, "nan"])
@pytest.mark.parametrize("text", ["8x9:f32:0.5..2", "8x9:i32:3..7", "8x9:i32", "8x9:u8:250..255"])
def test_limits_hold_for_every_kind(text, kind):
    made, spec = values(text, kind), cases.parse_value(text)
    low, high = (spec.low, spec.high) if spec.low is not None else cases.INTEGERS
    assert low <= float(made.min()) and float(made.max()) <= high
    if kind == "large" and spec.low is not None:
        assert set(made.reshape(-1).tolist()) == {low, high}


def test_arguments_of_one_call_differ_from_each_other():
    (a, b), _ = cases.case("8x8:f32 8x8:f32").values("random", 0)
    assert not a.equal(b)


def test_objects_of_the_kernels_file():
    made = cases.case("4x8:bf16 @NORM heads=@HEADS")
    assert str(made) == "4x8:bf16 @NORM heads=@HEADS"
    positional, named = made.resolved({"NORM": (1, 2), "HEADS": "four"}).meta()
    assert positional[1] == (1, 2) and named == {"heads": "four"}
    with pytest.raises(UsageError, match="@NORM names no object"):
        made.resolved({"HEADS": 1})


def test_other_sizes_are_those_of_all_tensors():
    made = list(map(str, cases.case("4x1:f32 4x6:bf16 4").at_other_sizes()))
    one = ["8x1:f32 8x6:bf16 4", "2x1:f32 2x6:bf16 4", "4x1:f32 4x12:bf16 4", "4x1:f32 4x3:bf16 4"]
    assert made == one
