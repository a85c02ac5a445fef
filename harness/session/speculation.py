"""Several tokens a step, in front of the SDK's adapter: guesses, and one call that checks them. The
SDK's own loops end a few tokens early, and its prompt lookup fails. This loop gives all tokens of
plain decoding, on every version.
"""

import importlib
from collections.abc import Callable
from typing import Any, Protocol

import torch
from neuronx_distributed_inference.models.config import NeuronConfig, OnDeviceSamplingConfig
from neuronx_distributed_inference.modules.generation.sampling import (
    Sampler,
    prepare_sampling_params,
)
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from harness.processes.worker import check_numbers
from harness.session.adapters import named
from harness.session.chunks import PromptInChunks
from harness.settings import DRAFT, LOOKUP, MEDUSA_CANDIDATES, Speculation


class Guesser(Protocol):
    """Who guesses the next tokens."""

    calls: int  # single-token steps of a model of its own so far

    def guess(self, ids: torch.Tensor, most: int) -> list[int]:
        """At most `most` tokens behind the ids [1, L]."""


class Speculative(PromptInChunks):
    """The SDK's adapter, choosing one row's tokens several a step.

    A step gives the scores behind the newest token and behind each guess. Tokens are chosen one
    after the other as without guesses, greedily or by sampling, and the step is worth as many as
    agree with their guess, plus one: so the text, and the draws of a seed, are those of plain
    decoding.
    """

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        # of each call behind the prefill: guesses, right guesses, single-token steps of the draft
        self.steps: list[list[int]] = []

    @torch.no_grad()
    def _sample(
        self,
        input_ids: Any,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        synced_gpus: bool = False,
        streamer: Any = None,
        logits_warper: Any = None,
        **model_kwargs: Any,
    ) -> Any:
        """Ids [1, L] -> ids [1, L + new], or the adapter's own result with the scores."""
        del synced_gpus, streamer
        names = model_kwargs.get("adapter_ids")
        self.beside = {} if names is None else {"adapter_ids": named(self.neuron_model, names)}
        warp = logits_warper or (lambda _, scores: scores)
        scores: list[Any] = []
        guesses: list[int] = []
        rows, choose = self._prefill(input_ids), _chooser(generation_config)
        while True:
            agreed = 0
            check_numbers(rows)
            for row, guess in zip(rows, [*guesses, None]):
                score = warp(input_ids, logits_processor(input_ids, row[None].clone()))
                if not score.isfinite().any():  # of a graph without logits: its only token
                    score = row[None]
                scores.append(score)
                token = choose(score)
                input_ids = torch.cat([input_ids, token[:, None]], dim=-1)
                agreed += int(token) == guess
                stop = bool(torch.as_tensor(stopping_criteria(input_ids, tuple(scores))).all())
                if stop or int(token) != guess:
                    break
            if self.steps:
                self.steps[-1][1] = agreed
            if stop:
                if not generation_config.return_dict_in_generate:
                    return input_ids
                return GenerateDecoderOnlyOutput(sequences=input_ids, scores=tuple(scores))
            guesses, rows = self._step(input_ids)

    def _prefill(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits [1, V] behind the prompt."""
        return self.behind(ids, 0, ids.shape[1]).logits[0, -1:]

    def _step(self, ids: torch.Tensor) -> tuple[list[int], torch.Tensor]:
        """Guesses, and the logits [1 + guesses, V] behind the newest token and behind each.

        The cache holds every token but the newest.
        """
        raise NotImplementedError("Each way to guess has a step of its own.")

    def _scores(self, ranked: torch.Tensor) -> torch.Tensor:
        """[T, V] of tokens in their order [T, n], where a graph gives no logits."""
        scores = torch.full((len(ranked), self.config.vocab_size), -torch.inf)
        falling = -torch.arange(ranked.shape[1], dtype=torch.float32).expand(ranked.shape)
        return scores.scatter(1, ranked.long(), falling)


class Guessing(Speculative):
    """A guesser beside the model, whose sub-model for several tokens checks the guesses."""

    def __init__(self, model: Any, guesser: Guesser) -> None:
        super().__init__(model)
        self._guesser = guesser

    def _step(self, ids: torch.Tensor) -> tuple[list[int], torch.Tensor]:
        """Near the cache's end the call begins earlier and repeats tokens that are cached: their
        keys and values are written once more."""
        model, length = self.neuron_model, self.neuron_config.speculation_length
        newest = ids.shape[1] - 1
        start = min(newest, self.neuron_config.max_length - length)
        drafted = self._guesser.calls
        guesses = self._guesser.guess(ids, start + length - 1 - newest)
        self.steps.append([len(guesses), 0, self._guesser.calls - drafted])
        if not guesses and hasattr(model, "token_generation_model"):
            return guesses, self.behind(ids[:, newest:], newest).logits[0]
        known = ids[0, start:].tolist() + guesses
        tokens = ids.new_tensor([known + [0] * (length - len(known))])
        first = newest - start
        return guesses, self.behind(tokens, start).logits[0, first : first + 1 + len(guesses)]


class InGraph(Speculative):
    """Fused speculation: draft and target are one graph, which guesses and accepts.

    Where the graph gives logits (EAGLE's does), the driver chooses again from the target's, by the
    processors of transformers and by sampling if asked. A token that the graph has not accepted
    ends the step. Without logits the graph's own choice stands.
    """

    def __init__(self, model: Any, eagle: bool) -> None:
        super().__init__(model)
        self._eagle = eagle

    def _prefill(self, ids: torch.Tensor) -> torch.Tensor:
        found = self.behind(ids, 0, ids.shape[1]).fused_outputs
        if not self.neuron_config.output_logits:  # NxDI 0.1 has the draft's tokens in front
            return self._scores(found[1 if len(found) == 2 else 0].reshape(-1)[:1, None])
        return found[-1][0, -1:]

    def _step(self, ids: torch.Tensor) -> tuple[list[int], torch.Tensor]:
        newest = ids.shape[1] - 1
        outputs = self.behind(ids[:, -1:], newest).fused_outputs
        # NxDI 0.1 gives the draft's and the target's tokens, later versions what is accepted, the
        # next ids, mask and positions; both logits follow where there are any.
        logits = self.neuron_config.output_logits
        if len(outputs) == (4 if logits else 2):
            drafted = outputs[0][0, 1:] if self._eagle else outputs[0][0, :-1]
            right = (drafted == outputs[1][0, :-1]).long().cumprod(0)
            accepted, count = outputs[1][0], 1 + int(right.sum())
        else:
            accepted, count = outputs[0][0], int(outputs[3].reshape(-1)[0]) - newest
        self.steps.append([outputs[0].shape[1] - 1, 0, 0])
        taken = accepted[: count - 1].tolist()
        if not logits:
            return taken, self._scores(accepted[:count, None])
        return taken, outputs[-1][0, :count]


def _chooser(generation_config: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """Processed scores [1, V] -> int64 (1,): the arg-maximum, or a draw of the library's sampler,
    which the adapter of plain decoding takes."""
    if not generation_config.do_sample or generation_config.top_k == 1:
        return lambda scores: scores.argmax(-1)
    config = NeuronConfig(on_device_sampling_config=OnDeviceSamplingConfig(top_k=2))
    config.on_cpu = True
    sampler, asked = Sampler(config, do_sample=True), generation_config
    draw = prepare_sampling_params(1, [asked.top_k], [asked.top_p], [asked.temperature])
    return lambda scores: sampler(scores, draw).long()


class Lookup:
    """Guesses the tokens that followed an earlier place of the newest tokens (prompt lookup), by
    the rule of transformers' generate."""

    calls = 0

    def __init__(self, most: int, longest: int) -> None:
        none = torch.empty(0, dtype=torch.int64)  # end tokens are the target's business
        self._found = PromptLookupCandidateGenerator(
            eos_token_id=none, num_output_tokens=most, max_length=longest
        )

    def guess(self, ids: Any, most: int) -> list[int]:
        if most == 0:
            return []
        candidates, _ = self._found.get_candidates(ids)
        return candidates[0, ids.shape[1] :][:most].tolist()


class Draft:
    """Guesses of a smaller model: its own greedy tokens, one step each.

    Its cache keeps the tokens of the text; the mask hides wrong guesses.
    """

    def __init__(self, model: Any) -> None:
        self._adapter = PromptInChunks(model)
        self._cached: list[int] = []
        self.calls = 0

    def guess(self, ids: torch.Tensor, most: int) -> list[int]:
        if most == 0:
            return []
        text = ids[0].tolist()
        if not self._cached:
            self._adapter.neuron_model.reset()
            self._cached = text[:-1]
            self._adapter.behind(ids[:, :-1], 0, len(self._cached))
        shared = next(
            (i for i, (a, b) in enumerate(zip(self._cached, text)) if a != b),
            min(len(self._cached), len(text)),
        )
        del self._cached[min(shared, len(text) - 1) :]
        guesses: list[int] = []
        while len(guesses) < most:  # the greedy token, once everything in front of it is cached
            for token in [*text, *guesses][len(self._cached) :]:
                outputs = self._adapter.behind(torch.tensor([[token]]), len(self._cached))
                self._cached.append(token)
                self.calls += 1
            guesses.append(int(outputs.logits[0, -1].argmax()))
        return guesses


def adapter(asked: Speculation, model: Any, draft: Any) -> Speculative:
    """The adapter for a loaded model; `draft` is the loaded one that guesses, if any."""
    if asked.fused:
        return InGraph(model, asked.eagle)
    longest = model.neuron_config.max_length
    makers: dict[str, Callable[[], Guesser]] = {
        LOOKUP: lambda: Lookup(asked.length - 1, longest),
        DRAFT: lambda: Draft(draft),
    }
    return Guessing(model, makers[asked.method]())


class Tree(Speculative):
    """Medusa: a tree of guesses by the model's own heads, which one call checks.

    The cache holds every token but the newest, the tree's root. New rows are written behind the
    cached ones, node by node; the next call moves those of the tokens that were taken together.
    The graph gives the best tokens in their order, and no logits; scores fall from 0 in that order.
    """

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        library = importlib.import_module("neuronx_distributed.utils.medusa_utils")
        made = library.generate_medusa_buffers(self.neuron_config.medusa_tree)
        self._mask, self._places = made["medusa_attn_mask"], made["tree_indices"]
        self._depths, self._paths = made["medusa_position_ids"], made["retrieve_indices"]
        self._cached = 0  # tokens in front of the last call
        self._nodes: list[int] = []  # of the last call's best path, from the root on
        self._lists = torch.empty(0)  # of the heads, at each of those nodes: [heads, nodes, n]

    def _prefill(self, ids: torch.Tensor) -> torch.Tensor:
        outputs = self.behind(ids, 0, ids.shape[1])
        self._cached, self._nodes = ids.shape[1], [0]
        self._lists = outputs.hidden_states[1:, 0][:, None]
        return self._scores(outputs.tokens[0, :1])

    def _step(self, ids: torch.Tensor) -> tuple[list[int], torch.Tensor]:
        newest, most = ids.shape[1] - 1, self.neuron_config.max_length
        taken = newest - self._cached  # the prefill's own token has no row yet
        lists = self._lists[:, max(taken, 1) - 1, :MEDUSA_CANDIDATES]
        tokens = torch.cat([ids[0, -1:], lists.flatten().long()])[self._places]
        moved = self._moved(self._nodes[:taken], newest)
        self._cached = newest
        outputs = self(
            input_ids=tokens[None],
            attention_mask=torch.ones((1, newest), dtype=torch.int64),
            position_ids=(newest + self._depths).clamp_max(most - 1)[None],
            medusa_args=[part[None].to(torch.int32) for part in (*moved, self._mask, self._rows())],
        )
        ranked = outputs.tokens[0, 0]  # [nodes, n]
        self._nodes = self._best_path(tokens, ranked[:, 0])
        self._lists = outputs.hidden_states[1:, 0][:, self._nodes]
        self.steps.append([self.neuron_config.num_medusa_heads, 0, 0])
        return tokens[self._nodes[1:]].tolist(), self._scores(ranked[self._nodes])

    def _moved(self, nodes: list[int], newest: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Cache rows of the tokens that were taken, and where they belong; the rest stays."""
        still = [0] * (self.neuron_config.num_medusa_heads + 1 - len(nodes))
        rows = [self._cached + node for node in nodes]
        places = [newest - len(nodes) + step for step in range(len(nodes))]
        return torch.tensor(rows + still), torch.tensor(places + still)

    def _rows(self) -> torch.Tensor:
        """The place of each node in the cache; nodes without a place share the last one."""
        last = self.neuron_config.max_length - 1
        return (self._cached + torch.arange(len(self._mask))).clamp_max(last)

    def _best_path(self, tokens: torch.Tensor, best: torch.Tensor) -> list[int]:
        """Nodes of the longest path whose tokens are the model's, the first of equals."""
        whole = self._rows() < self.neuron_config.max_length - 1
        paths = []
        for path in self._paths.tolist():
            nodes = [0]
            for node in path[1:]:
                if node < 0 or not whole[node] or tokens[node] != best[nodes[-1]]:
                    break
                nodes.append(node)
            paths.append(nodes)
        return max(paths, key=len)
