"""Acceptance by sampling: guesses are taken or replaced so that the target's distribution stays.

The rule of speculative sampling (Leviathan et al. 2023, "Fast Inference from Transformers via
Speculative Decoding") for a draft that is certain of each guess: probability 1.
"""

from typing import Any

import torch


def accept_by_sampling(
    sampler: Any,
    logits: torch.Tensor,
    guessed: torch.Tensor,
    sampling_params: torch.Tensor,
    pad_token_id: int,
) -> torch.Tensor:
    """Tokens int32 (B, k): guesses (B, k-1) as far as they are accepted, one more, then padding.

    `logits` (B, k, V or V/tp) stand behind the newest token and behind each guess. A guess is
    accepted with the probability that the target gives it. In the place of the first that is not
    comes a draw from the others, so it never equals the guess; behind the last one, a free draw.
    """
    tokens, probabilities = sampler.candidates(logits, sampling_params)  # (B, k, n) each
    hit = tokens[:, :-1] == guessed[:, :, None].to(tokens.dtype)
    chance = (probabilities[:, :-1] * hit).sum(dim=-1)  # 0 for a guess outside of the candidates
    accepted = (sampler.uniform(chance.shape, chance.device) < chance).to(torch.int64)
    count = accepted.cumprod(dim=1).sum(dim=1, keepdim=True)  # (B, 1)

    # The distribution of the one token more: at the first refused guess without that guess.
    left = torch.cat((probabilities[:, :-1] * ~hit, probabilities[:, -1:]), dim=1)
    index = count[:, :, None].expand(-1, 1, left.shape[-1])
    own, names = torch.gather(left, 1, index)[:, 0], torch.gather(tokens, 1, index)[:, 0]
    total = own.sum(dim=-1, keepdim=True)
    own = torch.where(total < 1e-30, torch.ones_like(own), own / total.clamp_min(1e-30))
    own = own / own.sum(dim=-1, keepdim=True)
    extra = torch.gather(names, 1, sampler.draw(own)).to(torch.int32)

    padded = torch.cat((guessed, guessed[:, :1]), dim=1).to(torch.int32)
    column = torch.arange(padded.shape[1], device=padded.device)
    behind = torch.where(column == count, extra, torch.full_like(padded, pad_token_id))
    return torch.where(column < count, padded, behind)
