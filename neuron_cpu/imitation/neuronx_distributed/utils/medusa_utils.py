"""The tree of guesses that one call of a Medusa model checks, as tensors."""

from typing import Dict, List, Sequence

import torch

TOPK = 10  # candidates of each head that paths may name


def generate_medusa_buffers(medusa_choices: Sequence[Sequence[int]]) -> Dict[str, torch.Tensor]:
    """Buffers of a tree of M - 1 `medusa_choices`, each the path to a node: which candidate of the
    first head, of the second one, and so on. ValueError for a path without its beginning.

    medusa_attn_mask (M, M): row i has ones at node i and its ancestors; node 0 is the newest token.
    tree_indices (M,): each node's place in [newest token, TOPK candidates of every head].
    medusa_position_ids (M,): depths. retrieve_indices (leaves, depth + 1): nodes from the root to a
    leaf, -1 behind shorter ones.
    """
    paths: List[tuple] = [()] + sorted(map(tuple, medusa_choices), key=lambda p: (len(p), p))
    number = {path: index for index, path in enumerate(paths)}
    for path in paths[1:]:
        if path[:-1] not in number or not all(0 <= choice < TOPK for choice in path):
            raise ValueError(
                f"The tree has the path {list(path)}, expected its beginning {list(path[:-1])} in "
                f"the tree, too, and choices below {TOPK}; add or change it."
            )
    mask = torch.zeros((len(paths), len(paths)), dtype=torch.int32)
    for path, row in number.items():
        for depth in range(len(path) + 1):
            mask[row, number[path[:depth]]] = 1
    leaves = [path for path in paths if not any(p[:-1] == path and p for p in paths)]
    longest = max(map(len, paths)) + 1
    retrieve = torch.full((len(leaves), longest), -1)
    for row, leaf in enumerate(leaves):
        nodes = [number[leaf[:depth]] for depth in range(len(leaf) + 1)]
        retrieve[row, : len(nodes)] = torch.tensor(nodes)
    places = [path[-1] + TOPK * (len(path) - 1) + 1 if path else 0 for path in paths]
    return {
        "medusa_attn_mask": mask,
        "tree_indices": torch.tensor(places),
        "medusa_position_ids": torch.tensor([len(path) for path in paths]),
        "retrieve_indices": retrieve,
    }
