"""Draft and target in one graph: a round of guesses, their check and, since 0.2, its verdict.

Follows `NeuronFusedSpecModel` of NxDI 0.1.0 (`models/model_base.py`) and of later versions by
contract.py. With EAGLE (Li et al. 2024, "EAGLE: Speculative Sampling Requires Rethinking Feature
Uncertainty") the draft is one layer that continues the target's own hidden states.
"""

from types import SimpleNamespace
from typing import Any, List, Optional, Sequence, Tuple

import torch
from torch import nn

from ..modules.eagle.acceptance import accept_by_sampling
from ..modules.eagle.hidden_state import HiddenState, HiddenStateRollingBuffer
from ..modules.eagle.token_tree import TokenTree
from .config import InferenceConfig, NeuronConfig

Tensors = List[torch.Tensor]


def fused_outputs(neuron_config: NeuronConfig) -> int:
    """How many outputs of the graph stand in front of caches and hidden state.

    Accepted tokens, the next ids, mask and positions; in 0.1 the draft's and the target's tokens.
    Under `output_logits` the draft's and the target's logits follow.
    """
    own = 4 if neuron_config.contract.accepts_in_graph else 2
    return own + (2 if neuron_config.output_logits else 0)


class NeuronFusedSpecModel(nn.Module):
    """What one graph of fused speculation computes: `draft_model` and `target_model`, instances of
    the class that `fused_spec_config.worker_cls` names.

    `n_positions` is the bucket of the current graph.
    """

    def __init__(self, config: InferenceConfig) -> None:
        super().__init__()
        neuron_config, fused = config.neuron_config, config.fused_spec_config
        draft_config = fused.draft_config
        draft_config.neuron_config.use_draft_group = True
        draft_config.neuron_config.quantized_mlp_kernel_enabled = False
        self.config, self.neuron_config = config, neuron_config
        self.contract = neuron_config.contract
        self.length = neuron_config.speculation_length
        self.eagle = neuron_config.enable_eagle_speculation
        tree_config = getattr(neuron_config, "token_tree_config", None)
        self.tree = TokenTree(tree_config) if tree_config else None
        self.most = self.tree.depth if self.tree else self.length  # tokens that a round may accept
        self.draft_model = fused.worker_cls(draft_config)
        self.target_model = fused.worker_cls(config)
        if self.eagle:
            made = HiddenStateRollingBuffer if self.contract.rolls_hidden_states else HiddenState
            self.hidden_state = made(neuron_config, config.hidden_size)

    @property
    def n_positions(self) -> int:
        return self.target_model.n_positions

    @n_positions.setter
    def n_positions(self, bucket: int) -> None:
        self.draft_model.n_positions = self.target_model.n_positions = bucket

    @property
    def kv_mgr(self) -> Any:
        """What outputs are aliases of: the draft's caches, the target's, EAGLE's state."""
        parts = [*self.draft_model.kv_mgr.past_key_values]
        parts += self.target_model.kv_mgr.past_key_values
        if self.eagle:
            parts.append(self.hidden_state.hidden_states)
        return SimpleNamespace(past_key_values=parts)

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        position_ids: torch.Tensor,
        seq_ids: torch.Tensor,
        sampling_params: torch.Tensor,
        *_later: Any,
    ) -> Tensors:
        """One call of one graph; inputs as of NeuronBaseModel, decode ids and positions (B, 1).

        Returns what `fused_outputs` counts, then every cache. Tokens and accepted tokens are int32
        (B, k), zeros behind what is accepted; a prefill accepts one.
        """
        rest = seq_ids, sampling_params
        if input_ids.shape[-1] > 1:
            return self._context_encoding_forward(input_ids, attention_mask, position_ids, *rest)
        if self.tree is not None:
            return self._tree_forward(input_ids, attention_mask, position_ids, *rest)
        if self.eagle:
            return self._eagle_forward(input_ids, attention_mask, position_ids, *rest)
        return self._token_gen_forward(input_ids, attention_mask, position_ids, *rest)

    # -- parts of a round ------------------------------------------------------------------------

    def _run(
        self, model: Any, *inputs: Any, prev_hidden: Any = None, **masks: Any
    ) -> SimpleNamespace:
        """One call of a child: its tokens (or logits), logits, caches and hidden states."""
        outputs = list(model(*inputs, prev_hidden=prev_hidden, **masks))
        caches = len(model.kv_mgr.past_key_values)
        first = 2 if self.neuron_config.output_logits else 1
        return SimpleNamespace(
            tokens=outputs[0],
            logits=outputs[1] if first == 2 else None,
            caches=outputs[first : first + caches],
            hidden=outputs[-1] if self.eagle else None,
        )

    def _finished(
        self,
        raw: Sequence[torch.Tensor],
        verdict: Sequence[torch.Tensor],
        draft: SimpleNamespace,
        target: SimpleNamespace,
        draft_logits: Optional[torch.Tensor],
    ) -> Tensors:
        """The outputs in the version's order: `raw` tokens, or the `verdict` on them."""
        outputs = list(verdict if self.contract.accepts_in_graph else raw)
        if self.neuron_config.output_logits:
            outputs += [draft_logits, target.logits]
        outputs += [*draft.caches, *target.caches]
        return [*outputs, self.hidden_state.hidden_states] if self.eagle else outputs

    # -- prefill ---------------------------------------------------------------------------------

    def _context_encoding_forward(
        self, ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, *rest: torch.Tensor
    ) -> Tensors:
        """Both models run the prompt; the target chooses the first token."""
        target = self._run(self.target_model, ids, mask, positions, *rest)
        next_positions = mask.sum(dim=1, keepdim=True).to(torch.int32)
        if self.eagle:
            # The draft runs one place behind: each of its inputs is a token and the hidden state
            # that the target had in front of it. The prompt's last place has no such token yet.
            last = (next_positions - 1).long()
            own_positions = positions.scatter(1, last, torch.zeros_like(last, dtype=torch.int32))
            own_ids = torch.cat((ids[:, 1:], ids[:, :1]), dim=1)
            draft = self._run(
                self.draft_model, own_ids, mask, own_positions, *rest, prev_hidden=target.hidden
            )
            index = last[:, :, None].expand(-1, 1, target.hidden.shape[-1])
            state = torch.gather(target.hidden, 1, index)
            self.hidden_state.set_state(rest[0], next_positions, state)
        else:
            draft = self._run(self.draft_model, ids, mask, positions, *rest)
        verdict = self._cte_postprocessor(target.tokens, next_positions)
        raw = draft.tokens, target.tokens
        return self._finished(raw, verdict, draft, target, draft.logits)

    def _cte_postprocessor(self, tokens: torch.Tensor, next_positions: torch.Tensor) -> Tensors:
        """Accepted (B, k): the token and zeros; next ids (B, 1), mask (B, seq_len), positions."""
        first = tokens.reshape(-1, 1).to(torch.int32)
        accepted = torch.cat((first, first.new_zeros((len(first), self.most - 1))), dim=1)
        mask = _ones_below(next_positions, self.neuron_config.seq_len)
        return [accepted, first, mask, next_positions]

    # -- decode ----------------------------------------------------------------------------------

    def _token_gen_forward(
        self, ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, *rest: torch.Tensor
    ) -> Tensors:
        """k steps of the draft, of which the last only fills its cache, and one of the target."""
        candidates: Tensors = []
        draft_logits: Tensors = []
        token, seen = ids, mask.clone()
        for step in range(self.length):
            draft = self._run(self.draft_model, token, seen, positions + step, *rest)
            token = draft.tokens.reshape(-1, 1).to(ids.dtype)
            candidates.append(token)
            draft_logits.append(draft.logits)
            seen = seen.scatter(1, (positions + step).long(), torch.ones_like(positions))
        guessed = torch.cat(candidates, dim=1)
        target_ids = torch.cat((ids, guessed[:, :-1]), dim=1)
        places = positions + torch.arange(self.length, dtype=positions.dtype)
        target = self._run(self.target_model, target_ids, mask, places, *rest)
        verdict = self._tkg_postprocessor(guessed[:, :-1], target.tokens, positions, mask)
        raw = guessed, target.tokens
        return self._finished(raw, verdict, draft, target, _joined(draft_logits))

    def _eagle_forward(
        self, ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, *rest: torch.Tensor
    ) -> Tensors:
        """k - 1 steps of the draft on its own hidden states, one of the target, and one of the
        draft on the target's hidden states, which its cache keeps."""
        before = (positions - 1).clamp_min(0)
        seen = cleared = mask.scatter(1, before.long(), torch.zeros_like(positions))
        state = self.hidden_state.get_state(rest[0], positions)
        token, hidden = ids, state
        candidates: Tensors = []
        draft_logits: Tensors = []
        for step in range(self.length - 1):
            draft = self._run(
                self.draft_model, token, seen, before + step, *rest, prev_hidden=hidden
            )
            token, hidden = draft.tokens.reshape(-1, 1).to(ids.dtype), draft.hidden
            candidates.append(token)
            draft_logits.append(draft.logits)
            seen = seen.scatter(1, (before + step).long(), torch.ones_like(positions))
        guessed = torch.cat(candidates, dim=1)
        target_ids = torch.cat((ids, guessed), dim=1)
        steps = torch.arange(self.length, dtype=positions.dtype)
        target = self._run(self.target_model, target_ids, mask, positions + steps, *rest)
        features = torch.cat((state, target.hidden[:, :-1]), dim=1)
        draft = self._run(
            self.draft_model, target_ids, cleared, before + steps, *rest, prev_hidden=features
        )
        tokens = target.tokens
        if self.target_model.samples_speculation:
            tokens = accept_by_sampling(
                self.target_model.sampler, tokens, guessed, rest[1], self.config.pad_token_id
            )
        verdict = self._tkg_postprocessor(guessed, tokens, positions, mask)
        count = _agreed(guessed, tokens)
        index = count[:, :, None].expand(-1, 1, target.hidden.shape[-1])
        kept = torch.gather(target.hidden, 1, index)
        self.hidden_state.set_state(rest[0], positions + count.to(positions.dtype) + 1, kept)
        raw = target_ids, tokens
        return self._finished(raw, verdict, draft, target, _joined(draft_logits))

    def _tree_forward(
        self, ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, *rest: torch.Tensor
    ) -> Tensors:
        """A tree of the draft's guesses, one call of the target on all of its nodes, and one of the
        draft on the path that was taken.

        Rows of a node lie behind the cached ones by its number, and the path's are moved together.
        Where NxDI hands the draft's last call the features of the rows before a path's, these are
        the features of the nodes before it.
        """
        tree = self.tree
        assert tree is not None
        before = (positions - 1).clamp_min(0)
        cleared = mask.scatter(1, before.long(), torch.zeros_like(positions))
        state = self.hidden_state.get_state(rest[0], positions)
        nodes, draft_logits = self._tree_of_guesses(ids, cleared, before, state, *rest)
        numbers = torch.arange(tree.num_nodes, dtype=positions.dtype)
        target = self._run(
            self.target_model,
            nodes,
            mask,
            positions + numbers,
            *rest,
            active_mask=tree.full_tree_attn_mask.expand(len(ids), 1, -1, -1),
            rotary_position_id=positions + tree.rotary_position_id_offset.to(positions.dtype),
        )
        path, count = _best_path(tree, nodes, target.tokens)
        steps = torch.arange(tree.depth, dtype=positions.dtype)
        self.target_model.kv_mgr.compact(positions + path, positions + steps)
        hidden = _rows_of(target.hidden, path)
        taken, tokens = torch.gather(nodes, 1, path), torch.gather(target.tokens, 1, path)
        draft = self._run(
            self.draft_model,
            taken,
            cleared,
            before + steps,
            *rest,
            prev_hidden=torch.cat((state, hidden[:, :-1]), dim=1),
            active_mask=_triangle(len(ids), tree.depth),
        )
        verdict = self._verdict(count, tokens, positions, mask)
        self.hidden_state.set_state(rest[0], verdict[-1], _rows_of(hidden, count))
        if target.logits is not None:
            target.logits = _rows_of(target.logits, path)
            last = draft_logits.shape[1] - 1
            draft_logits = _rows_of(draft_logits, path[:, :-1].clamp_max(last))
        return self._finished((taken, tokens), verdict, draft, target, draft_logits)

    def _tree_of_guesses(
        self,
        ids: torch.Tensor,
        mask: torch.Tensor,
        before: torch.Tensor,
        state: torch.Tensor,
        *rest: torch.Tensor,
    ) -> Tuple[torch.Tensor, torch.Tensor]:
        """Tokens (B, N) of the tree behind ids (B, 1), and the draft's logits behind each node but
        those of the last level. A node sees what is cached, its ancestors and itself."""
        tree, batch = self.tree, len(ids)
        assert tree is not None
        own, hidden = ids, state
        nodes, logits = [ids], []
        # prior rows, and of the tree's those of ancestors, a column each from `before` on
        prior = mask[:, None, None, :].to(torch.bool)
        for level in range(tree.depth - 1):
            numbers = torch.tensor(tree.level_node_ids[level], dtype=before.dtype)
            seen = prior.expand(batch, 1, len(numbers), -1)
            ancestors = tree.draft_tree_attn_mask[level].expand(batch, 1, -1, -1)
            places = (before + torch.arange(tree.num_nodes)).long()[:, None, None, :]
            rows = places.expand(-1, 1, len(numbers), -1)
            seen = seen | torch.zeros_like(seen).scatter(3, rows, ancestors)
            draft = self._run(
                self.draft_model,
                own,
                seen,
                before + numbers,
                *rest,
                prev_hidden=hidden,
                active_mask=torch.eye(len(numbers), dtype=torch.bool).expand(batch, 1, -1, -1),
                rotary_position_id=(before + level).expand(-1, len(numbers)),
            )
            logits.append(draft.tokens if draft.logits is None else draft.logits)
            best = self.draft_model.sampler.best(draft.tokens, max(tree.level_child[level]))
            own = best.flatten(1)[:, tree.children_of(level)].to(ids.dtype)
            hidden = draft.hidden[:, tree.parents_of(level)]
            nodes.append(own)
        return torch.cat(nodes, dim=1), torch.cat(logits, dim=1)

    def _tkg_postprocessor(
        self,
        guessed: torch.Tensor,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        mask: torch.Tensor,
    ) -> Tensors:
        """Accepted (B, k), next ids (B, 1), mask (B, P), positions (B, 1) from guesses (B, k-1)."""
        return self._verdict(_agreed(guessed, tokens), tokens, positions, mask)

    def _verdict(
        self, count: torch.Tensor, tokens: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor
    ) -> Tensors:
        """The same where `count` (B, 1) tokens stand in front of the target's own one."""
        column = torch.arange(self.most)
        accepted = torch.where(column <= count, tokens, torch.zeros_like(tokens)).to(torch.int32)
        # NxDI counts tokens that are not 0 here, and a token 0 shifts its result.
        next_ids = torch.gather(accepted, 1, count)
        next_positions = positions + count.to(positions.dtype) + 1
        return [accepted, next_ids, _ones_below(next_positions, mask.shape[1]), next_positions]


def _agreed(guessed: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """int64 (B, 1): how many guesses (B, k-1) are the target's tokens (B, k), from the first on."""
    equal = (guessed == tokens[:, :-1]).to(torch.int64)
    return equal.cumprod(dim=1).sum(dim=1, keepdim=True)


def _best_path(
    tree: TokenTree, nodes: torch.Tensor, tokens: torch.Tensor
) -> Tuple[torch.Tensor, torch.Tensor]:
    """int64 (B, depth) nodes of the path with the most guesses (B, N) that are the target's tokens
    (B, N), the first of equals, and (B, 1) how many."""
    guessed, found = nodes[:, tree.path], tokens[:, tree.path]  # (B, leaves, depth)
    equal = guessed[:, :, 1:] == found[:, :, :-1]
    equal = equal & (torch.arange(1, tree.depth) < tree.path_length[:, None])
    counts = equal.to(torch.int64).cumprod(dim=2).sum(dim=2)
    best = torch.argmax(counts, dim=1, keepdim=True)
    return tree.path[best[:, 0]], torch.gather(counts, 1, best)


def _rows_of(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Rows (B, n, ...) of x (B, T, F) by index (B, n)."""
    return torch.gather(x, 1, index[:, :, None].expand(-1, -1, x.shape[-1]))


def _triangle(batch: int, length: int) -> torch.Tensor:
    """bool (B, 1, T, T): tokens see those before and themselves."""
    return torch.ones((length, length), dtype=torch.bool).tril().expand(batch, 1, -1, -1)


def _ones_below(positions: torch.Tensor, width: int) -> torch.Tensor:
    """int32 (B, width) of ones in front of positions (B, 1)."""
    return (torch.arange(width) < positions).to(torch.int32)


def _joined(logits: Sequence[Optional[torch.Tensor]]) -> Optional[torch.Tensor]:
    """(B, steps, V), None where there are none."""
    found: Tuple[torch.Tensor, ...] = tuple(part for part in logits if part is not None)
    return torch.cat(found, dim=1) if found else None
