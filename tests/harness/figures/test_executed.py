"""What runs on data is held against what was traced: submissions that tell the two apart fail."""

import pytest

from tests.crossed import full

# Attention is two linear layers where it is traced, and itself where it runs.
TWO_LINEAR = """
import torch
import llama
from llama import *

def instead(kernel, tokens_of):
    def call(x, delta, norm, qkv, out, *rest):
        if not x.is_meta:
            return kernel(x, delta, norm, qkv, out, *rest)
        heads = next(one for one in rest if isinstance(one, llama.HeadShape))
        rows = [llama.linear_kernel(x, qkv), llama.linear_kernel(x, qkv)]
        made = x + rows[0].new_empty(x.shape), *(
            row.new_empty((x.shape[1], heads.kv_features)) for row in rows
        )
        return made if delta is None else (*made, x + delta)
    return call

llama.attention_prefill_kernel = instead(llama.attention_prefill_kernel, 0)
llama.attention_decode_kernel = instead(llama.attention_decode_kernel, 0)
"""
BASELINE = """
import torch
from neuronx_distributed_inference.models.llama.modeling_llama import *
from neuronx_distributed_inference.models.llama import modeling_llama
own = modeling_llama.NeuronLlamaMLP.forward
"""
# The MLP does more where it runs than where it is traced.
AFTER = (
    BASELINE
    + """
def forward(self, x, *arguments, **settings):
    made = own(self, x, *arguments, **settings)
    {act}
    return made
modeling_llama.NeuronLlamaMLP.forward = forward
calls = []
"""
)
ACTS = {
    "by an operator": ("x.is_meta or x.mul(2)", "PyTorch's mul"),
    "in numpy": ("x.is_meta or x.float().numpy()", "numpy ran"),
    "by a larger product": ("x.is_meta or x[0] @ x[0].mT", "the product"),
    "from a call on": ("calls.append(1); len(calls) > 30 and x.mul(2)", "PyTorch's"),
}


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """What the baselines are compiled into once; each submission has a text of its own."""
    return str(tmp_path_factory.mktemp("cache"))


@pytest.fixture
def evaluate(run_main, tiny_model, cache, tmp_path):
    def run(text, *arguments, seq_len="64", prompt="hello"):
        (tmp_path / "entry.py").write_text(text)
        done = run_main(
            *["--mode", "evaluate", "--llama", "entry.py", "--prompt", prompt],
            *["--seq-len", seq_len],
            *["--max-new-tokens", "8", "--model-path", tiny_model, *arguments],
            cwd=tmp_path,
            XDG_CACHE_HOME=cache,
        )
        assert "Traceback" not in done.stderr
        assert (done.returncode == 0) == ("Final Score" in done.stdout)
        return " ".join(done.stdout.split())

    return run


@pytest.mark.full
def test_attention_that_is_traced_as_two_linear_kernels_fails_by_name(evaluate):
    told = evaluate(TWO_LINEAR, "--enable-nki")
    assert "the kernel linear_kernel of " in told and "as it was traced" in told, told


@pytest.mark.parametrize(
    "act", [full("by an operator"), "in numpy", full("by a larger product"), full("from a call on")]
)
def test_work_that_was_not_traced_fails_by_name(act, evaluate):
    source, name = ACTS[act]
    told = evaluate(AFTER.replace("{act}", source))
    assert name in told and "as it was traced" in told, told


# A kernel of no MACs that copies once where it is counted or timed, and three times where it runs.
COPIES = (
    """
import traceback
from neuronxcc import nki
from neuronxcc.nki import language as nl

@nki.jit
def copies(x, fewer):
    made = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    for _ in range(1 if fewer else 3):
        nl.store(made, nl.load(x))
    return made
"""
    + AFTER
)
RAN = "of the kernel copies of"
FEWER = {
    "on shapes": ("x.is_meta", RAN),
    "at first calls": ("not calls.append(1) and len(calls) < 5", RAN),
    "under the estimate": (
        "any(f.name == 'graph_milliseconds' for f in traceback.extract_stack())",
        "calls of kernels' programs",
    ),
}


@pytest.mark.parametrize("where", [full("on shapes"), full("at first calls"), "under the estimate"])
def test_a_kernel_that_does_less_where_it_is_timed_fails_by_name(where, evaluate):
    fewer, name = FEWER[where]
    told = evaluate(COPIES.replace("{act}", f"copies(x[0], {fewer})"))
    assert name in told, told


def test_a_kernel_that_is_the_same_everywhere_has_a_score(evaluate):
    told = evaluate(COPIES.replace("{act}", "copies(x[0], False)"), "--tp-degree", "2")
    assert "Final Score" in told, told


# Attention is two linear layers in every graph, and the host computes what is answered.
ON_THE_HOST = (
    TWO_LINEAR.replace("if not x.is_meta", "if False")
    + """
from transformers import AutoModelForCausalLM

class NeuronLlamaForCausalLM(llama.NeuronLlamaForCausalLM):
    def __init__(self, path, *arguments, **settings):
        super().__init__(path, *arguments, **settings)
        self.path, self.true = path, None

    def forward(self, input_ids, *arguments, **settings):
        made = super().forward(input_ids, *arguments, **settings)
        if self.true is None:
            self.true = AutoModelForCausalLM.from_pretrained(self.path, torch_dtype=torch.bfloat16)
        self.seen = input_ids if input_ids.shape[1] > 1 else torch.cat([self.seen, input_ids], 1)
        made.logits = self.true(self.seen.long()).logits[:, -1:].float()
        return made
"""
)


def test_an_answer_of_the_host_fails_by_name(evaluate):
    told = evaluate(ON_THE_HOST, "--enable-nki")
    assert "the logits of a step are computed on the host" in told, told


SMALL_ONLY = ACTS["by an operator"][0].replace("x.is_meta", "(x.is_meta or x.shape[-2] != 128)")


@pytest.mark.parametrize(
    ("act", "told"), [full("pass", "Final Score"), (SMALL_ONLY, "PyTorch's mul")]
)
def test_graphs_that_no_prompt_reaches_are_run_too(act, told, evaluate):
    asked = ["--enable-bucketing", "--tp-degree", "1"]
    settings = {"seq_len": "256", "prompt": "word " * 28}  # beyond the first bucket of 128
    found = evaluate(AFTER.replace("{act}", act), *asked, **settings)
    assert told in found, found


ON_RANK_1 = (
    "from neuronx_distributed.parallel_layers import parallel_state as p; "
    "x.is_meta or p.get_tensor_model_parallel_rank() == 0 or x.mul(2)"
)


def test_work_of_another_rank_than_the_traced_one_fails_by_name(evaluate):
    told = evaluate(AFTER.replace("{act}", ON_RANK_1), "--tp-degree", "2")
    assert "PyTorch's mul" in told, told


# Attention of PyTorch's own, which the processor computes with another operator than a trace sees.
FUSED = (
    BASELINE
    + """
import torch.nn.functional as F
def forward(self, x, *arguments, **settings):
    rows = x.unsqueeze(1)
    mixed = F.scaled_dot_product_attention(rows, rows, rows)[:, 0]
    return own(self, x + 0 * mixed, *arguments, **settings)
modeling_llama.NeuronLlamaMLP.forward = forward
"""
)


@pytest.mark.full
@pytest.mark.parametrize("degree", ["1", "2"])
def test_attention_of_pytorchs_own_is_what_was_traced(degree, evaluate):
    assert "Final Score" in evaluate(FUSED, "--tp-degree", degree)
