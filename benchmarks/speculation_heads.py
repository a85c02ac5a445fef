"""Distil heads that guess for a model: an EAGLE draft of one layer, and Medusa heads.

    python benchmarks/speculation_heads.py OUTPUT [--model-path DIR] [--tokens 60000] [--minutes 25]

Without a model path for the embedded model. Everything is learnt from text that the model samples
itself, from the beginning of a user's turn on, so nothing is downloaded. OUTPUT/eagle is a folder
for --draft-model-path with --enable-eagle-speculation; OUTPUT/medusa is the model's own folder with
medusa_heads.pt beside the weights, for --is-medusa. A tenth of the text is kept back: how often the
heads are right on it is printed, behind the model's own hidden states (so the first place of a
chain; later ones go on from the head's own).

EAGLE (Li et al. 2024): the next hidden state from the last one and the newest token's embedding,
by the distance to the model's own and the cross-entropy to its distribution. Medusa (Cai et al.
2024): head i guesses the token i + 2 places behind a hidden state; the output matrices stay the
model's, so only a residual block each is learnt.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from torch import nn  # noqa: E402
from transformers import AutoTokenizer, LlamaForCausalLM  # noqa: E402
from transformers.models.llama.modeling_llama import (  # noqa: E402
    LlamaDecoderLayer,
    LlamaRotaryEmbedding,
)

from harness.inputs.models import embedded_model  # noqa: E402

ROWS, LENGTH = 32, 256  # of text that is sampled at a time
NEGATIVES = 4096  # tokens of the vocabulary that a batch is compared with, beside its own
CORPUS_SHARE, EAGLE_SHARE = 0.45, 0.35  # of the time; the rest is Medusa's


class Corpus(NamedTuple):
    """Text ids [N, T] and the model's final hidden states [N, T, H] in front of the head."""

    ids: torch.Tensor
    hidden: torch.Tensor

    def split(self) -> tuple[Corpus, Corpus]:
        """What is learnt from, and a tenth that is not."""
        kept = max(1, len(self.ids) // 10)
        return Corpus(*(part[kept:] for part in self)), Corpus(*(part[:kept] for part in self))

    def batches(self, rows: int, generator: torch.Generator) -> Iterator[Corpus]:
        """Endless, in a new order every time."""
        while True:
            for chosen in torch.randperm(len(self.ids), generator=generator).split(rows):
                yield Corpus(self.ids[chosen], self.hidden[chosen].float())


def corpus(
    model: LlamaForCausalLM, start: list[int], tokens: int, length: int, deadline: float
) -> Corpus:
    """Sampled text behind `start`, as many rows as `tokens` need or the time allows."""
    parts: list[torch.Tensor] = []
    prompt = torch.tensor([start] * ROWS)
    while not parts or (sum(part.numel() for part in parts) < tokens and time.time() < deadline):
        with torch.inference_mode():
            part = model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                do_sample=True,
                temperature=0.8,
                top_k=50,
                min_new_tokens=length - len(start),
                max_new_tokens=length - len(start),
                pad_token_id=0,
                eos_token_id=None,
            )
        parts.append(part)
        print(f"{sum(part.numel() for part in parts)} tokens of text", flush=True)
    ids = torch.cat(parts)
    with torch.inference_mode():
        hidden = [model.model(rows).last_hidden_state.bfloat16() for rows in ids.split(ROWS)]
    return Corpus(ids.clone(), torch.cat(hidden).clone())


class EagleHead(nn.Module):
    """One decoder layer over fc(embedding, hidden state), without a norm in front of it."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        size = config.hidden_size
        self.fc = nn.Linear(2 * size, size, bias=False)
        self.layer = LlamaDecoderLayer(config, 0)
        self.layer.input_layernorm = nn.Identity()
        self.rotary = LlamaRotaryEmbedding(config)

    def forward(self, embedding: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """[B, T, H] twice -> the hidden states one place on."""
        x = self.fc(torch.cat((embedding, hidden), dim=-1))
        length = x.shape[1]
        places = torch.arange(length)[None]
        mask = torch.full((length, length), torch.finfo(x.dtype).min).triu(1)[None, None]
        angles = self.rotary(x, places)
        return self.layer(x, attention_mask=mask, position_ids=places, position_embeddings=angles)[
            0
        ]


class MedusaHead(nn.Module):
    """x + SiLU(linear(x)), zero at first: then the model's own output matrix."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + F.silu(self.linear(hidden))


def some_of_the_vocabulary(
    ids: torch.Tensor, vocabulary: int, generator: torch.Generator
) -> torch.Tensor:
    """Tokens of a batch and some others, sorted: what a loss compares, for a tenth of the time."""
    others = torch.randint(vocabulary, (min(NEGATIVES, vocabulary),), generator=generator)
    return torch.unique(torch.cat((ids.flatten(), others)))


def train_eagle(model: LlamaForCausalLM, text: Corpus, deadline: float, steps: int) -> EagleHead:
    """Until the time or the steps are over; the learning rate goes down with the time."""
    torch.manual_seed(0)
    head, weight = EagleHead(model.config), model.lm_head.weight
    generator = torch.Generator().manual_seed(0)
    scale = float(text.hidden.float().std())
    optimiser = torch.optim.AdamW(head.parameters(), lr=1e-3, betas=(0.9, 0.95))
    for batch in paced(text.batches(8, generator), optimiser, deadline, steps, "EAGLE"):
        chosen = some_of_the_vocabulary(batch.ids, len(weight), generator)
        noise = (torch.rand(batch.hidden.shape, generator=generator) - 0.5) * 0.2 * scale
        with torch.no_grad():
            embedding = model.model.embed_tokens(batch.ids[:, 1:])
            truth = F.softmax(batch.hidden[:, 1:] @ weight[chosen].T, dim=-1)
        found = head(embedding, (batch.hidden + noise)[:, :-1])
        near = F.smooth_l1_loss(found / scale, batch.hidden[:, 1:] / scale)
        wrong = F.cross_entropy(
            (found @ weight[chosen].T).flatten(0, 1), truth.flatten(0, 1).detach()
        )
        optimiser.zero_grad()
        (near + 0.1 * wrong).backward()
        nn.utils.clip_grad_norm_(head.parameters(), 0.5)
        optimiser.step()
    return head.eval()


def train_medusa(
    model: LlamaForCausalLM, text: Corpus, heads: int, deadline: float, steps: int
) -> list[MedusaHead]:
    """All heads at once, by the tokens that come."""
    torch.manual_seed(0)
    found = nn.ModuleList(MedusaHead(model.config.hidden_size) for _ in range(heads))
    weight, generator = model.lm_head.weight.detach(), torch.Generator().manual_seed(0)
    optimiser = torch.optim.AdamW(found.parameters(), lr=1e-3)
    for batch in paced(text.batches(8, generator), optimiser, deadline, steps, "Medusa"):
        chosen = some_of_the_vocabulary(batch.ids, len(weight), generator)
        place = torch.searchsorted(chosen, batch.ids)
        loss = torch.zeros(())
        for index, head in enumerate(found):
            ahead = index + 2
            logits = head(batch.hidden[:, :-ahead]) @ weight[chosen].T
            loss = loss + F.cross_entropy(logits.flatten(0, 1), place[:, ahead:].flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return [head.eval() for head in found]


def paced(
    batches: Iterator[Corpus], optimiser: Any, deadline: float, steps: int, name: str
) -> Iterator[Corpus]:
    """At most `steps` batches before the deadline, at a rate that falls to a twentieth."""
    start = time.time()
    rates = [group["lr"] for group in optimiser.param_groups]
    for step in range(steps):
        done = max(step / steps, (time.time() - start) / max(deadline - start, 1e-9))
        if done >= 1:
            break
        for group, rate in zip(optimiser.param_groups, rates):
            group["lr"] = rate * (1 - 0.95 * done)
        if step % 100 == 0:
            print(f"{name}: step {step}, {done:.0%}", flush=True)
        yield next(batches)


@torch.no_grad()
def eagle_right(model: LlamaForCausalLM, head: EagleHead, text: Corpus) -> float:
    """How often the head's best token is the model's, behind the model's hidden states."""
    right = []
    for ids, hidden in zip(text.ids.split(8), text.hidden.float().split(8)):
        found = model.lm_head(head(model.model.embed_tokens(ids[:, 1:]), hidden[:, :-1]))
        right.append((found.argmax(-1) == model.lm_head(hidden[:, 1:]).argmax(-1)).float().mean())
    return float(torch.stack(right).mean())


@torch.no_grad()
def medusa_right(model: LlamaForCausalLM, heads: list[MedusaHead], text: Corpus) -> list[float]:
    """How often each head's best token is the one that comes."""
    hidden = text.hidden.float()
    shares = []
    for index, head in enumerate(heads):
        ahead = index + 2
        best = [model.lm_head(head(part[:, :-ahead])).argmax(-1) for part in hidden.split(8)]
        shares.append(float((torch.cat(best) == text.ids[:, ahead:]).float().mean()))
    return shares


def write_eagle(folder: Path, source: Path, model: LlamaForCausalLM, head: EagleHead) -> None:
    """A draft folder: the embedding and the output matrix of the model with the head's layer."""
    folder.mkdir(parents=True, exist_ok=True)
    state = {
        f"model.layers.0.{name}": tensor
        for name, tensor in head.layer.state_dict().items()
        if "rotary" not in name
    }
    state["model.fc.weight"] = head.fc.weight
    state["model.embed_tokens.weight"] = model.model.embed_tokens.weight
    state["lm_head.weight"] = model.lm_head.weight.clone()
    save_file(
        {name: t.detach().bfloat16().contiguous() for name, t in state.items()},
        folder / "model.safetensors",
    )
    config = json.loads((source / "config.json").read_text())
    own = {"num_hidden_layers": 1, "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(config | own, indent=1))
    link_rest(folder, source)


def write_medusa(
    folder: Path, source: Path, model: LlamaForCausalLM, heads: list[MedusaHead]
) -> None:
    """The model's folder with medusa_heads.pt, in the names of NxDI's modules."""
    folder.mkdir(parents=True, exist_ok=True)
    state = {}
    for index, head in enumerate(heads):
        state[f"medusa_head_{index}.0.linear.weight"] = head.linear.weight.detach().bfloat16()
        state[f"medusa_head_{index}.0.linear.bias"] = head.linear.bias.detach().bfloat16()
        state[f"medusa_head_{index}.1.weight"] = model.lm_head.weight.detach().bfloat16()
    torch.save(state, folder / "medusa_heads.pt")
    link_rest(folder, source)


def link_rest(folder: Path, source: Path) -> None:
    """Links to what the source has beside what was written."""
    for path in source.resolve().iterdir():
        if path.is_file() and not (folder / path.name).exists():
            os.symlink(path, folder / path.name)


def start_of_text(tokenizer: Any) -> list[int]:
    """What stands in front of a user's first words, or the token that begins a text."""
    if tokenizer.chat_template:
        mark = "\x00"
        text = tokenizer.apply_chat_template([{"role": "user", "content": mark}], tokenize=False)
        return tokenizer(text.split(mark)[0], add_special_tokens=False)["input_ids"]
    return [tokenizer.bos_token_id]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("--model-path", type=Path)
    parser.add_argument("--tokens", type=int, default=60_000)
    parser.add_argument("--length", type=int, default=LENGTH)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--minutes", type=float, default=25.0)
    args = parser.parse_args(argv)
    source = args.model_path or embedded_model()
    torch.manual_seed(0)
    model = LlamaForCausalLM.from_pretrained(source, torch_dtype=torch.float32).eval()
    model.requires_grad_(False)
    start, seconds = time.time(), 60 * args.minutes
    first = start_of_text(AutoTokenizer.from_pretrained(source))
    text = corpus(model, first, args.tokens, args.length, start + CORPUS_SHARE * seconds)
    learnt, kept = text.split()
    now = time.time()
    left = start + seconds - now
    share = EAGLE_SHARE / (1 - CORPUS_SHARE)
    head = train_eagle(model, learnt, now + share * left, args.steps)
    heads = train_medusa(model, learnt, args.heads, start + seconds, args.steps)
    write_eagle(args.output / "eagle", source, model, head)
    write_medusa(args.output / "medusa", source, model, heads)
    places = ", ".join(f"{share:.1%}" for share in medusa_right(model, heads, kept))
    print(f"EAGLE: right on {eagle_right(model, head, kept):.1%} of {kept.ids.numel()} tokens")
    print(f"Medusa: heads right on {places}")


if __name__ == "__main__":
    main()
