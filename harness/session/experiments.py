"""Guesses by Medusa's heads, an experiment (docs/speculation.md)."""

import importlib
from typing import Any

import torch

from harness.session.speculation import Speculative, Step
from harness.settings import MEDUSA_CANDIDATES


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
        outputs = self._behind(ids, 0, ids.shape[1])
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
        self.steps.append(Step(self.neuron_config.num_medusa_heads, 0, 0))
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
