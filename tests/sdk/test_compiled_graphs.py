"""A traced forward as a list that ranks run: generate_hlo, libneuronxla and SPMDModel."""

import neuronxcc.nki as nki
import neuronxcc.nki.language as nl
import pytest
import torch
import torch_xla.core.xla_model as xm
from libneuronxla import neuron_xla_compile
from safetensors.torch import load_file, save_file
from torch import nn
from torch_neuronx.spmd import SPMDModel
from torch_neuronx.xla_impl.ops import nki_jit, xla_hlo_call
from torch_neuronx.xla_impl.trace import generate_hlo

from harness.figures import executed as held
from harness.figures import graphs
from neuron_cpu.errors import CheckpointError, CompileError, StandInError
from neuron_cpu.runtime import executed, graph, rounding, tape
from neuron_cpu.runtime.ranks import Group, rank_context


@nki.jit
def doubled(x):
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    tile = nl.load(x)
    nl.store(out, tile + tile)
    return out


@nki_jit
def doubled_into(x, out):
    tile = nl.load(x)
    nl.store(out, tile + tile)


def compiled(module, *inputs, states=None, ranks=1, weights=None):
    """The module as the runtime has it: through the file, on its own weights."""
    with rank_context(Group(0, ranks)):
        made = generate_hlo(module, inputs, states or {})
    neff = neuron_xla_compile(made.hlo_module.SerializeToString())
    model = SPMDModel(neff, made.metaneff.SerializeToString(), ranks, ranks)
    own = {name: value.detach() for name, value in module.named_parameters()}
    kept = {id(state): name for name, state in module.named_parameters()}
    zeros = {kept[id(s)]: torch.zeros_like(s) for s in states or {}}
    model.initialize(
        [{k: v.clone() for k, v in zeros.items()} for _ in range(ranks)],
        weights or [own] * ranks,
        0,
    )
    return model


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8, generator=torch.Generator().manual_seed(1)))

    def forward(self, x):
        return [torch.relu(x @ self.weight)]


def test_weights_stay_what_they_are_where_their_file_is_written_anew(tmp_path):
    """NxD Inference maps its files, and a second compile writes into them."""
    layer, x, file = Layer(), torch.randn(4, 8), tmp_path / "tp0.safetensors"
    save_file({"weight": layer.weight.detach()}, file)
    mapped = load_file(file)
    models = [compiled(layer, torch.zeros(4, 8), weights=[mapped]) for _ in range(2)]
    expected = layer(x)[0]
    save_file({"weight": torch.zeros(8, 8)}, file)
    assert not mapped["weight"].any()
    assert all(torch.equal(model.forward([x])[0], expected) for model in models)
    first, second = (model._weights[0]["weight"] for model in models)
    assert first.data_ptr() == second.data_ptr()  # graphs share them


@nki.jit
def of_the_name(x):
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    nl.store(out, nl.load(x))
    return out


@pytest.mark.parametrize("name", ["of_the_name", "doubled"])
def test_a_kernel_that_a_kept_graph_finds_under_another_name_is_told(name):
    """A graph keeps kernels by name: a submission may let another one stand there."""

    class Calls(nn.Module):
        def forward(self, x):
            return [of_the_name(x)]

    x, head = torch.randn(4, 8), {"submodel": "calls", "bucket": 8}
    with rank_context(Group(0, 1)):
        traced = graph.compile_graph(Calls(), [torch.zeros(4, 8)], {}, "calls", 8)
    (node,) = traced.tape.nodes
    node.call = globals()[name]
    model = SPMDModel(traced.tape.to_bytes(), b"", 1, 1)
    model.initialize([], [{}], 0)
    with executed.watching():
        model.forward([x])
    (counts,) = model.executed
    records = [head | counts.as_json(), traced.record.as_json()]
    ran, same = graphs.from_records({"graphs": records})
    told = held.difference(ran, same, same.others)
    assert (told is None) == (name == "of_the_name"), told


def test_constants_that_are_written_are_new_in_every_call():
    class Written(nn.Module):
        def forward(self, x):
            mask = torch.zeros(2, 4)
            view = mask[:, :2]
            before = mask + x[:, :1]
            view.copy_(x[:, :2])
            mask[1, 3] = 7
            return [before, mask * 1, view + 1]

    model = compiled(Written(), torch.zeros(2, 4))
    for _ in range(2):
        x = torch.randn(2, 4)
        for made, expected in zip(model.forward([x]), Written()(x), strict=True):
            assert torch.equal(made, expected)


def test_a_state_that_a_view_reads_later_is_not_updated_in_place():
    class Reads(nn.Module):
        def __init__(self):
            super().__init__()
            self.cache = nn.Parameter(torch.zeros(1, 4), requires_grad=False)

        def forward(self, x, place):
            view = self.cache[:, :2]
            updated = torch.scatter(self.cache, 1, place, x)
            return [view + x, updated]

    reads = Reads()
    inputs = torch.ones(1, 1), torch.zeros(1, 1, dtype=torch.int64)
    model = compiled(reads, *inputs, states={reads.cache: 1})
    assert torch.equal(model.forward(list(inputs))[0], torch.ones(1, 2))


def test_a_graph_of_the_baseline_rounds_at_operands_and_states_only():
    class Chain(nn.Module):
        def __init__(self):
            super().__init__()
            self.cache = nn.Parameter(torch.zeros(4, 8, dtype=torch.bfloat16), requires_grad=False)

        def forward(self, x):
            product = x * x
            return [product.float() + self.cache, product]

    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1)).bfloat16()
    chain = Chain()
    model = compiled(chain, x, states={chain.cache: 1})
    with rounding.fused():
        first, second = (model.forward([x])[0] for _ in range(2))
    assert torch.equal(first, x.float() * x.float())
    assert torch.equal(second, first + (x * x))
    assert torch.equal(model.forward([x])[0], (x * x).float() + (x * x))


@pytest.mark.parametrize("kernel", [doubled, lambda x: doubled_into(x, torch.empty(4, 8))])
def test_kernels_run_from_the_file(kernel):
    class Kernels(nn.Module):
        def forward(self, x):
            return [kernel(x + 1) * 3]

    x = torch.randn(4, 8)
    assert torch.allclose(compiled(Kernels(), x).forward([x])[0], (x + 1) * 6)


ASKS = """
def forward(x, places):
    first = {first}
    return [x[:, int(first) : int(first) + 2] + (first + 1)]
"""


@pytest.mark.parametrize(
    ("package", "first"),
    [
        ("neuronx_distributed_inference", "places.min()"),
        ("neuronx_distributed_inference", "places.min().add_(0)"),
        ("mine", "places.min()"),
    ],
)
def test_a_value_that_the_library_asks_for_is_the_examples(package, first, tmp_path):
    """A trace of torch_xla computes it; what a submission asks for is refused, and what is written
    in place."""
    names = {}
    exec(compile(ASKS.format(first=first), str(tmp_path / package / "model.py"), "exec"), names)

    class Asks(nn.Module):
        def forward(self, x, places):
            return names["forward"](x, places)

    x = torch.randn(4, 8)
    if package == "mine" or "add_" in first:
        with pytest.raises(CompileError, match="reads a tensor's value"):
            compiled(Asks(), x, torch.tensor([[3, 4]]))
        return
    model = compiled(Asks(), x, torch.tensor([[3, 4]]))
    assert torch.equal(model.forward([x, torch.tensor([[5, 6]])])[0], x[:, 3:5] + 6)


def test_a_kernel_inside_a_function_cannot_be_written():
    @nki.jit
    def local(x):
        out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
        nl.store(out, nl.load(x))
        return out

    class Local(nn.Module):
        def forward(self, x):
            return [local(x)]

    made = generate_hlo(Local(), [torch.ones(4, 8)])
    with pytest.raises(CompileError, match="kernels that are functions of a module"):
        neuron_xla_compile(made.hlo_module.SerializeToString())


def test_collectives_meet_by_groups_of_global_ranks():
    class Meets(nn.Module):
        def forward(self, x):
            pairs = [[0, 1], [2, 3]]
            own = x * 1
            return [
                xm.all_gather(x, dim=0, groups=[[0, 2], [1, 3]]),
                xm.reduce_scatter("sum", x, 0.5, 1, 2, groups=pairs),
                xm.all_to_all(x, 1, 0, 2, groups=pairs),
                xm.all_reduce("max", [own], groups=[[0, 1, 2, 3]])[0] + own,
                xm.collective_permute(x, [(3, 0)]),
            ]

    model = compiled(Meets(), torch.zeros(1, 2), ranks=4)
    each = [torch.tensor([[float(r), 10.0 * r]]) for r in range(4)]
    made = model.forward_ranked([[x] for x in each])
    assert made[0][0].tolist() == [[0, 0], [2, 20]] and made[3][0].tolist() == [[1, 10], [3, 30]]
    assert made[2][1].tolist() == [[2.5]] and made[3][1].tolist() == [[25.0]]
    assert made[2][2].tolist() == [[2], [3]] and made[3][2].tolist() == [[20], [30]]
    assert all(rank[3].tolist() == [[6, 60]] for rank in made)
    assert made[0][4].tolist() == [[3, 30]] and made[1][4].tolist() == [[0, 0]]


def test_all_ranks_draw_what_rank_0_draws_and_anew_in_every_call():
    class Draws(nn.Module):
        def forward(self, x):
            return [torch.rand(x.shape) + x]

    model = compiled(Draws(), torch.zeros(3), ranks=2)
    first, second = model.forward_ranked([[torch.zeros(3)]] * 2)
    assert torch.equal(first[0], second[0])
    assert not torch.equal(first[0], model.forward([torch.zeros(3)])[0])


def test_hlo_that_is_written_by_hand():
    @xla_hlo_call
    def write(tensor, update, start):
        zero = tensor.scribe.u32.Constant(constant_value=0)
        return tensor.dtype[tensor.sizes].DynamicUpdateSlice(tensor, update, zero, start)

    made = write(torch.zeros(2, 5), torch.ones(2, 2), torch.tensor(4))
    assert made.tolist() == [[0, 0, 0, 1, 1]] * 2  # a start beyond the end is moved back


def test_markers_of_layers_change_nothing():
    from torch_neuronx.xla_impl.custom_call_targets import AwsNeuronModuleMarkerStartForward

    @xla_hlo_call
    def mark(*given):
        kind = given[0] if len(given) == 1 else given[0].scribe.tuple(*given)
        return kind.CustomCall(*given, custom_call_target=AwsNeuronModuleMarkerStartForward)

    x, y = torch.ones(2), torch.zeros(3)
    assert mark(x) is x and mark(x, y) == (x, y)

    @xla_hlo_call
    def other(given):
        return given.CustomCall(given, custom_call_target="AwsNeuronTopK")

    with pytest.raises(NotImplementedError, match="CustomCall of AwsNeuronTopK"):
        other(x)


def test_a_condition_of_integers_counts_where_it_is_not_zero():
    class Where(nn.Module):
        def forward(self, mask, x):
            return [torch.where(mask, x, -1.0)]

    mask, x = torch.tensor([[0, 2]], dtype=torch.int32), torch.randn(1, 2)
    made = compiled(Where(), mask, x).forward([mask, x])[0]
    assert torch.equal(made, torch.where(mask != 0, x, -1.0))


def test_inputs_and_weights_of_another_form_are_refused():
    model = compiled(Layer(), torch.zeros(4, 8))
    with pytest.raises(StandInError, match=r"Input 0 .* has shape \[4, 8\] and torch.int32"):
        model.forward([torch.zeros(4, 8, dtype=torch.int32)])
    with pytest.raises(CheckpointError, match=r"rank 0 lack 1 tensors .*\(weight\)"):
        model.initialize([], [{}], 0)
    with pytest.raises(StandInError, match=r"weight of rank 0 has shape \[8, 8\] and .*bfloat16"):
        model.initialize([], [{"weight": torch.zeros(8, 8, dtype=torch.bfloat16)}], 0)


def test_a_file_of_another_form_is_refused():
    import pickle

    with pytest.raises(CompileError, match="compile again"):
        tape.Tape.from_bytes(pickle.dumps(("graph 0", None)))


@pytest.mark.parametrize("kept", [0, 30, 0.5, 0.99, "NEFF", "a pickle"])
def test_a_graph_from_elsewhere_or_cut_short_is_told(kept):
    with rank_context(Group(0, 1)):
        made = generate_hlo(Layer(), torch.zeros(4, 8))
    whole = neuron_xla_compile(made.hlo_module.SerializeToString())
    foreign = {"NEFF": b"NEFF" * 99, "a pickle": b"cneuronx_of_another\nGraph\n."}
    if kept in foreign:
        content = foreign[kept]
    else:
        content = whole[: int(kept * len(whole)) if kept < 1 else kept]
    model = SPMDModel(content, b"", 1, 1)
    with pytest.raises(CompileError, match="not one of neuron_cpu or is cut short"):
        model.initialize([], [{}], 0)


def test_rows_of_an_earlier_graph_are_not_those_of_the_last():
    one, other = torch.ones(1, 4), torch.zeros(1, 4)
    with rank_context(Group(0, 1)), executed.watching():
        executed.counted([], lambda: one)
        assert executed.made(one) and not executed.made(other)
        executed.counted([], lambda: other)
        assert executed.made(other) and not executed.made(one)
