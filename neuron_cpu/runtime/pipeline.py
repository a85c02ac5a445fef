"""Pipeline parallelism: layers split over stages, each a tensor-parallel group of its own.

The split and the traffic are those of transformers-neuronx: every stage has ceil(layers / stages)
layers, the first one the embedding, the last one norm and head. Hidden states go from rank i of a
stage to rank i of the next one, logits from the last stage to the others. NxDI counts `pp_degree`
into the world size and runs no pipeline. A stage works while all others wait, so a token's latency
is the sum of all stages: what a pipeline gives is memory for more layers.

A model needs to know nothing of it: `cut` takes the other stages' layers out of its module and puts
parts in the places of embedding, norm and head that receive, or hand on, what passes there.
"""

import math
from dataclasses import dataclass
from typing import Any, Callable, List, Optional, Tuple

import torch
from torch import nn
from torch.utils import _pytree as pytree

from neuron_cpu.errors import CompileError

from .processes import Processes
from .rendezvous import Rendezvous

TRANSFER = "stage-transfer"  # begins the label of a hand-over, and names it in a traced graph


def layers_of(stage: int, stages: int, layers: int) -> range:
    """The layers of one of `stages`; empty where there are too few of them."""
    each = math.ceil(layers / stages)
    return range(min(stage * each, layers), min((stage + 1) * each, layers))


def check_split(stages: int, layers: int) -> None:
    """Refuse stages without a layer."""
    if not layers_of(stages - 1, stages, layers):
        each = math.ceil(layers / stages)
        raise CompileError(
            f"{layers} layers in {stages} stages of {each} leave the last stage without one, "
            f"expected a pp_degree that gives each stage a layer, such as "
            f"{math.ceil(layers / each)}; change pp_degree."
        )


# --- one rank's place -----------------------------------------------------------------------------
class Pipeline:
    """A rank's place among the stages, in the course of one call of the model.

    Everybody meets at every hand-over, in order, so that a failure anywhere is told to all; number
    n goes from stage n to the next one, the last to all stages.
    """

    def __init__(self, stage: int, stages: int, meet: Callable[[int, Any], Any]) -> None:
        self.stage, self.stages, self._meet = stage, stages, meet

    def receive(self) -> Any:
        """Wait for what the stage before this one hands on."""
        found = None
        for number in range(self.stage):
            found = self._meet(number, None)
        return found

    def hand_on(self, hidden: Any) -> None:
        """Give what the layers of this stage have made to the next one, and wait for the others."""
        for number in range(self.stage, self.stages - 1):
            self._meet(number, hidden if number == self.stage else None)

    def outputs(self, made: List[torch.Tensor]) -> List[torch.Tensor]:
        """The last stage's outputs, on every stage."""
        return self._meet(self.stages - 1, made if self.stage == self.stages - 1 else None)


def of_threads(world: Rendezvous, rank: int, size: int, stages: int) -> Pipeline:
    """The place of `rank` among `stages` times `size` threads, stage by stage, that meet."""

    def meet(number: int, given: Any) -> Any:
        def combine(parts: List[Any]) -> List[Any]:
            sent = parts[number * size : (number + 1) * size]
            if number == stages - 1:
                return sent * stages
            found: List[Any] = [None] * len(parts)
            found[(number + 1) * size : (number + 2) * size] = sent
            return found

        return world.exchange(rank, _label(number, stages), given, combine)

    return Pipeline(rank // size, stages, meet)


def of_processes(world: Processes) -> Pipeline:
    """This process's place among all ranks of a pipeline."""
    size, stages = world.stage_size, world.size // world.stage_size
    own = world.rank // size

    def meet(number: int, given: Any) -> Any:
        last = number == stages - 1
        others = range(stages) if last else [number + 1]
        receivers = [stage * size + world.rank % size for stage in others if stage != number]
        sender = number * size + world.rank % size
        if own == number:
            world.hand_over(_label(number, stages), given, receivers)
            return given
        return world.take_over(_label(number, stages), sender if own in others else None)

    return Pipeline(own, stages, meet)


def _label(number: int, stages: int) -> str:
    what = "outputs" if number == stages - 1 else "hidden states"
    return f"{TRANSFER}({what} of stage {number})"


# --- a model's module -----------------------------------------------------------------------------
class _Place(nn.Module):
    """What stands in a stage's module for a part that another stage has."""

    def __init__(self, pipeline: Pipeline) -> None:
        super().__init__()
        self._pipeline = pipeline


class Received(_Place):
    """In the place of the embedding: hidden states of the stage before."""

    def forward(self, *_: Any, **__: Any) -> Any:
        return self._pipeline.receive()


class HandedOn(_Place):
    """In the place of the final norm: hidden states go to the next stage."""

    def forward(self, hidden: Any) -> torch.Tensor:
        """`hidden` (B, T, H), or what a model has instead, of that `shape` -> zeros, for a head."""
        self._pipeline.hand_on(hidden)
        return torch.zeros(tuple(hidden.shape))


class NoHead(nn.Module):
    """In the place of a head: zeros where logits would be, which nobody reads."""

    gather_output, pad_size = True, 0

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self._vocabulary = vocabulary

    def forward(self, hidden: torch.Tensor, *_: Any) -> torch.Tensor:
        return hidden.new_zeros(*hidden.shape[:-1], self._vocabulary)


class NoSampler(nn.Module):
    """In the place of the sampler behind a head that is none."""

    def forward(self, logits: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return torch.zeros(len(logits), dtype=torch.int32)


@dataclass(frozen=True)
class Cut:
    """Which layers a stage's module has: `name` gives a parameter's name in the whole model."""

    layers: range

    def name(self, local: str) -> str:
        parts = local.split(".")
        for place, (part, number) in enumerate(zip(parts, parts[1:])):
            if number.isdigit() and part == "layers":
                parts[place + 1] = str(int(number) + self.layers.start)
                break
            if number.isdigit() and part == "past_key_values":
                parts[place + 1] = str(int(number) + 2 * self.layers.start)
                break
        return ".".join(parts)


def cut(module: Any, stage: int, stages: int, pipeline: Optional[Pipeline]) -> Cut:
    """Leave a stage's own part of a model's module, in place; all of it where there is one."""
    if pipeline is None:
        return Cut(range(0))
    own = layers_of(stage, stages, len(module.layers))
    module.layers = nn.ModuleList(list(module.layers)[own.start : own.stop])
    caches = list(module.kv_mgr.past_key_values)[2 * own.start : 2 * own.stop]
    module.kv_mgr.past_key_values = nn.ParameterList(caches)
    if stage > 0:
        module.embed_tokens = Received(pipeline)
    if stage < stages - 1:
        module.norm, module.lm_head = HandedOn(pipeline), NoHead(module.vocab_size)
        if hasattr(module, "sampler"):
            module.sampler = NoSampler()
    return Cut(own)


def has(name: str, stage: int, stages: int, layers: int) -> bool:
    """Whether a stage's weights have the tensor with a name; what is of no layer, embedding, norm
    or head (a rank's number, say) every stage has."""
    parts = name.split(".")
    if parts[0] == "layers" and len(parts) > 1 and parts[1].isdigit():
        return int(parts[1]) in layers_of(stage, stages, layers)
    if parts[0] == "embed_tokens":
        return stage == 0
    return parts[0] not in ("norm", "lm_head") or stage == stages - 1


def mark(module: Any, stages: int, note: Callable[[torch.Tensor], Any]) -> None:
    """Have `note` told of every tensor that would pass between stages, while the whole module
    runs, as it does when it is traced: hidden states, and the first output at the end."""

    def passing(_: Any, given: Tuple[Any, ...]) -> None:
        for leaf in pytree.tree_leaves(given[0]):
            if isinstance(leaf, torch.Tensor):
                note(leaf)

    def ending(_: Any, __: Any, outputs: Any) -> None:
        note(outputs[0])

    for stage in range(1, stages):
        first = layers_of(stage, stages, len(module.layers)).start
        module.layers[first].register_forward_pre_hook(passing)
    module.register_forward_hook(ending)
