"""Both sides of every pair in docs/porting_pairs.md give the same results."""

import re
import textwrap
import warnings
from pathlib import Path

import neuronxcc.nki as old_nki
import neuronxcc.nki.isa as old_nisa
import neuronxcc.nki.language as old_nl
import neuronxcc.nki.typing as old_nt
import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np
import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "porting_pairs.md"
TEXT = PAGE.read_text(encoding="utf-8")
FRAME = re.search(r"```python frame\n(.*?)```", TEXT, re.S)[1]
PAIRS = {
    name: (old, new)
    for name, old, new in re.findall(
        r"^\*\*(.*?)\*\*[^`]*?(?:`[^`\n]*`[^`]*?)*```python\n# old\n(.*?)# current\n(.*?)```",
        TEXT,
        re.S | re.M,
    )
}
NAMES = {
    "old": {"nki": old_nki, "nl": old_nl, "nisa": old_nisa, "nt": old_nt, "np": np},
    "current": {"nki": nki, "nl": nl, "nisa": nisa, "np": np},
}


def kernel(side, body):
    """The kernel of one side of a pair, in its frame; or what runs a whole one."""
    source = FRAME.replace("    ...\n", textwrap.indent(body, "    "))
    scope = dict(NAMES[side])
    whole = "def run(" in body
    exec(compile(body if whole else source, side, "exec"), scope)
    return scope["run" if whole else "kernel"]


def inputs():
    random = np.random.default_rng(1)
    x, y = (random.uniform(-1, 1, (128, 512)).astype(np.float32) for _ in range(2))
    return x, y, random.permutation(128).astype(np.int32).reshape(128, 1)


def test_every_pair_is_found():
    assert len(PAIRS) == TEXT.count("# current\n") >= 45


# What a kernel file of the old language uses (the table of instructions of SDK 2.29's migration).
OLD = """
mod_alloc nl.load( mask= nl.load_transpose2d nl.store( nl.zeros nisa.nc_matmul nl.matmul
nisa.nc_transpose is_transpose nisa.activation( nisa.activation_reduce np.copy
nisa.tensor_tensor( nisa.tensor_scalar( nisa.scalar_tensor_tensor nisa.tensor_tensor_scan
nisa.tensor_reduce nl.sum nl.max nl.mean nl.softmax nl.exp nisa.reciprocal nl.rsqrt nisa.memset
nisa.tensor_copy( dynamic_src dynamic_dst nisa.iota nisa.affine_select nl.where nisa.bn_stats
nisa.bn_aggr nisa.max8 nisa.nc_find_index8 nisa.nc_match_replace8 nisa.local_gather
nisa.nc_stream_shuffle dst_rmw_op nl.affine_range nl.sequential_range nl.static_range nl.ds
nl.arange par_dim broadcast_to .reshape .astype program_id simulate_kernel mutable_tensor
shared_constant shared_identity_matrix rows[
"""


def test_every_construct_has_a_pair():
    before = "".join(old for old, _ in PAIRS.values())
    assert [name for name in OLD.split() if name not in before] == []


@pytest.mark.parametrize("name", PAIRS)
def test_both_sides_agree(name):
    results = []
    for side, body in zip(("old", "current"), PAIRS[name]):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of releases after 2.21, which the old side may need
            results.append(kernel(side, body)(*inputs()))
    assert np.allclose(results[0], results[1], rtol=0, atol=5e-5)
    assert not np.allclose(results[0], 0)
