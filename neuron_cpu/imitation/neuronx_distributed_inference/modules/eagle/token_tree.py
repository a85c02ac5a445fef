"""A static tree of an EAGLE draft's guesses: `token_tree_config` of NxDI 0.2 and later."""

from typing import Any, Dict, List, Mapping, Sequence

import torch


class TokenTree:
    """What a tree of guesses means in tensors; node 0 is the newest token.

    `tree_config` maps a node to its children, {"0": ["1", "2"], "1": ["3", "4"]}; leaves may be
    left out. Nodes are numbered level by level, from left to right. ValueError for a graph that is
    no such tree.

    Attributes:
        num_nodes, depth: nodes, and levels with the root's.
        level: nodes of each level. level_node_ids: their numbers. level_child: their child counts.
        drafted_nums: nodes in front of each level.
        full_tree_attn_mask: bool (N, N), row i true at node i and its ancestors.
        path: int64 (leaves, depth), the nodes from the root to each leaf, shorter ones completed
            with other nodes; path_length (leaves,): how many of them are the path's own.
        rotary_position_id_offset: int64 (N,), each node's level.
    """

    def __init__(self, tree_config: Mapping[Any, Sequence[Any]]) -> None:
        children = _children(tree_config)
        self.num_nodes = len(children)
        self.level_node_ids = _levels(children)
        self.depth = len(self.level_node_ids)
        self.level = [len(nodes) for nodes in self.level_node_ids]
        self.level_child = [[len(children[n]) for n in nodes] for nodes in self.level_node_ids]
        self.drafted_nums = [nodes[0] for nodes in self.level_node_ids]
        parents = {child: node for node, own in children.items() for child in own}
        lines = {0: [0]}
        for node in range(1, self.num_nodes):
            lines[node] = [*lines[parents[node]], node]
        self.full_tree_attn_mask = torch.zeros((self.num_nodes, self.num_nodes), dtype=torch.bool)
        for node, line in lines.items():
            self.full_tree_attn_mask[node, line] = True
        leaves = [lines[node] for node, own in children.items() if not own]
        self.path = torch.tensor([self._completed(line)[: self.depth] for line in leaves])
        self.path_length = torch.tensor([len(line) for line in leaves])
        offsets = [len(lines[node]) - 1 for node in range(self.num_nodes)]
        self.rotary_position_id_offset = torch.tensor(offsets)

    def _completed(self, line: List[int]) -> List[int]:
        """The nodes of a path, and the others behind them."""
        return [*line, *(node for node in range(self.num_nodes) if node not in line)]

    @property
    def draft_tree_attn_mask(self) -> List[torch.Tensor]:
        """Of each level bool (nodes of it, N): a node's ancestors without itself."""
        others = self.full_tree_attn_mask & ~torch.eye(self.num_nodes, dtype=torch.bool)
        return [others[nodes] for nodes in self.level_node_ids]

    @property
    def path_permute_mask(self) -> torch.Tensor:
        """int64 (leaves, N): a path's nodes, and the others behind them."""
        own = zip(self.path.tolist(), self.path_length.tolist())
        return torch.tensor([self._completed(nodes[:length]) for nodes, length in own])

    @property
    def cache_scatter_indices(self) -> torch.Tensor:
        """int64 (leaves, N): where each node's row goes, for the path's to lie together."""
        return self.path_permute_mask.argsort(dim=1)

    def children_of(self, level: int) -> List[int]:
        """Where the children of a level's nodes stand among the best candidates [nodes, widest]."""
        counts = self.level_child[level]
        return [node * max(counts) + at for node, own in enumerate(counts) for at in range(own)]

    def parents_of(self, level: int) -> List[int]:
        """For each child of a level's nodes, which node of that level is its parent."""
        return [node for node, own in enumerate(self.level_child[level]) for _ in range(own)]


def _children(tree_config: Mapping[Any, Sequence[Any]]) -> Dict[int, List[int]]:
    """Every node's children by numbers."""
    try:
        given = {int(node): [int(child) for child in own] for node, own in tree_config.items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise _refused(tree_config, "an entry is no list of numbers") from error
    every = sorted({0, *given, *(child for own in given.values() for child in own)})
    if every != list(range(len(every))) or len(every) < 2:
        raise _refused(tree_config, f"its nodes are {every}")
    return {node: given.get(node, []) for node in every}


def _levels(children: Dict[int, List[int]]) -> List[List[int]]:
    """Nodes of each level, which together have to count up from 0."""
    levels, found = [[0]], [0]
    while len(found) <= len(children):
        below = [child for node in levels[-1] for child in children[node]]
        if not below:
            break
        levels.append(below)
        found += below
    if found != list(range(len(children))):
        raise _refused(children, f"level by level its nodes are {found}")
    return levels


def _refused(tree_config: Any, why: str) -> ValueError:
    return ValueError(
        f"token_tree_config {tree_config!r} is no tree whose nodes are numbered from 0 on level by "
        f'level, such as {{"0": ["1", "2"], "1": ["3"]}}: {why}; number them so.'
    )
