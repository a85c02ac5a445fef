"""Distil heads that guess for a model: an EAGLE draft of one layer, and Medusa heads.

    python -m lab.speculation_heads OUTPUT [--model-path DIR] [--questions 1280]

Without a model path for the embedded model. Everything is learnt from text of the model's own, so
nothing is downloaded: it samples questions, which is how a conversation begins, and answers each
greedily. OUTPUT/eagle is a folder for --draft-model-path with --enable-eagle-speculation;
OUTPUT/medusa is the model's own folder with medusa_heads.pt beside the weights, for --is-medusa. A
twentieth of the answers is kept back: what the heads would bring there is printed.

EAGLE (Li et al. 2024): the next hidden state from the last one and the newest token's embedding,
by the distance to the model's own and the cross-entropy to its distribution. A chain goes on from
the head's own states, so the head learns from those, too: a second pass over the text reads what
the first one gave, a third what the second gave, and each sees rows of the passes before as in a
chain (Zhang et al. 2024, HASS). Its first matrix begins as the least squares solution. Medusa (Cai
et al. 2024): head i guesses the token i + 2 places behind a hidden state. A residual block and a
matrix are learnt of each; the matrix goes into the head's copy of the model's output matrix.
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
from transformers import AutoTokenizer, DynamicCache, LlamaForCausalLM  # noqa: E402
from transformers.models.llama.modeling_llama import (  # noqa: E402
    LlamaDecoderLayer,
    LlamaRotaryEmbedding,
)

from harness.inputs.models import embedded_model  # noqa: E402

ROWS = 64  # questions at a time, and answers
QUESTION, ANSWER = 40, 112  # tokens at most
BATCH = 8  # rows of a step of learning
PASSES = 3  # of EAGLE over its own states
OTHERS = 2048  # tokens of the vocabulary that a loss compares beside those of the text
CORPUS_SHARE, EAGLE_SHARE = 0.55, 0.35  # of the time; the rest is Medusa's
IGNORED = -100  # where nothing is to be learnt


class Corpus(NamedTuple):
    """Text ids [N, T], the model's final hidden states [N, T, H] in front of the output matrix, and
    where a token is one of an answer [N, T]. Rows begin at place 0 and are padded behind."""

    ids: torch.Tensor
    hidden: torch.Tensor
    answer: torch.Tensor

    def split(self) -> tuple[Corpus, Corpus]:
        """What is learnt from, and a twentieth that is not."""
        kept = max(1, len(self.ids) // 20)
        return Corpus(*(part[kept:] for part in self)), Corpus(*(part[:kept] for part in self))

    def batches(self, rows: int, generator: torch.Generator) -> Iterator[Corpus]:
        """Endless, in a new order every time."""
        while True:
            for chosen in torch.randperm(len(self.ids), generator=generator).split(rows):
                part = Corpus(*(part[chosen] for part in self))
                yield part._replace(hidden=part.hidden.float())


class Vocabulary:
    """The tokens that a loss compares: those of the text, and some others."""

    def __init__(self, weight: torch.Tensor, ids: torch.Tensor) -> None:
        others = torch.randperm(len(weight))[:OTHERS]
        self.tokens = torch.unique(torch.cat((ids.flatten(), others)))
        self.weight = weight[self.tokens]  # [v, H]

    def places(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.searchsorted(self.tokens, ids)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., H] -> [..., v]"""
        return F.linear(hidden, self.weight)


def around_a_question(tokenizer: Any) -> tuple[list[int], list[int]]:
    """Token ids in front of a user's words and behind them; without a template the first token."""
    if not tokenizer.chat_template:
        return [tokenizer.bos_token_id], []
    mark = "\x00"
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": mark}], tokenize=False, add_generation_prompt=True
    )
    before, after = text.split(mark)
    return tuple(tokenizer(part, add_special_tokens=False)["input_ids"] for part in (before, after))


def clock() -> float:
    """Seconds that a quiet machine would have taken: processor time of a thread, not the clock."""
    return time.process_time() / torch.get_num_threads()


def until(row: list[int], ends: set[int]) -> list[int]:
    """The tokens in front of the first that ends a turn."""
    return row[: next((i for i, token in enumerate(row) if token in ends), len(row))]


class Writer:
    """Questions and answers of a model, `rows` at a time, and the states that it had meanwhile."""

    def __init__(self, model: LlamaForCausalLM, tokenizer: Any) -> None:
        self.model = model
        self.before, self.after = around_a_question(tokenizer)
        ends = model.generation_config.eos_token_id
        self.ends = set(ends if isinstance(ends, list) else [ends]) - {None}

    @torch.inference_mode()
    def questions(self, rows: int) -> list[list[int]]:
        start = torch.tensor([self.before] * rows)
        text = self.model.generate(
            start,
            attention_mask=torch.ones_like(start),
            do_sample=True,
            temperature=1.0,
            top_k=50,
            max_new_tokens=QUESTION,
            pad_token_id=0,
        )
        return [until(row, self.ends) for row in text[:, len(self.before) :].tolist()]

    @torch.inference_mode()
    def answers(self, questions: list[list[int]], length: int) -> Corpus:
        """Greedy ones, up to and with the token that ends them, in rows of `length` tokens."""
        prompts = [self.before + question + self.after for question in questions]
        longest = max(map(len, prompts))
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
        ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
        states: list[torch.Tensor] = []
        hook = self.model.model.norm.register_forward_hook(lambda *given: states.append(given[2]))
        try:
            text = self.model.generate(
                ids, attention_mask=mask, do_sample=False, max_new_tokens=ANSWER, pad_token_id=0
            )
        finally:
            hook.remove()
        hidden = torch.cat(states, dim=1)  # of every token but the last
        found = Corpus(
            torch.zeros((len(prompts), length), dtype=torch.int64),
            torch.zeros((len(prompts), length, hidden.shape[-1]), dtype=torch.bfloat16),
            torch.zeros((len(prompts), length), dtype=torch.bool),
        )
        for index, prompt in enumerate(prompts):
            first = longest - len(prompt)
            new = len(until(text[index, longest:-1].tolist(), self.ends)) + 1
            size = min(length, len(prompt) + new, hidden.shape[1] - first)
            found.ids[index, :size] = text[index, first : first + size]
            found.hidden[index, :size] = hidden[index, first : first + size]
            found.answer[index, len(prompt) : size] = True
        return found


def corpus(writer: Writer, count: int, length: int, deadline: float) -> Corpus:
    """Questions with their answers, `count` of them or as many as the time allows."""
    parts: list[Corpus] = []
    while not parts or (len(parts) * ROWS < count and clock() < deadline):
        parts.append(writer.answers(writer.questions(min(ROWS, count)), length))
        tokens = sum(int(part.answer.sum()) for part in parts)
        print(f"{sum(len(part.ids) for part in parts)} answers, {tokens} tokens", flush=True)
    return Corpus(*(torch.cat(part).clone() for part in zip(*parts)))


class EagleHead(nn.Module):
    """One decoder layer over fc(embedding, hidden state), without a norm in front of it."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        size = config.hidden_size
        self.fc = nn.Linear(2 * size, size, bias=False)
        self.layer = LlamaDecoderLayer(config, 0)
        self.layer.input_layernorm = nn.Identity()
        self.rotary = LlamaRotaryEmbedding(config)

    def begin(self, embedding: torch.Tensor, hidden: torch.Tensor, truth: torch.Tensor) -> None:
        """fc as the best linear guess, the layer's blocks as nothing beside it; [N, H] thrice."""
        given = torch.cat((embedding, hidden), dim=-1)
        square = given.T @ given
        square += 1e-3 * square.diagonal().mean() * torch.eye(len(square))
        with torch.no_grad():
            self.fc.weight.copy_(torch.linalg.solve(square, given.T @ truth).T)
            for linear in (self.layer.self_attn.o_proj, self.layer.mlp.down_proj):
                nn.init.zeros_(linear.weight)

    def forward(
        self, embedding: torch.Tensor, hidden: torch.Tensor, passes: int
    ) -> Iterator[torch.Tensor]:
        """[B, T, H] twice -> the hidden states one place on, `passes` times.

        A later pass reads the states of the one before it, as the later guesses of a chain do: in
        pass j, place t sees the first pass's rows up to t - j and one row of each later pass.
        """
        length = hidden.shape[1]
        places = torch.arange(length)
        behind = places[:, None] - places  # of a row, how many places it is back
        cache = DynamicCache()
        for step in range(passes):
            seen = [behind >= step, *(behind == step - i for i in range(1, step + 1))]
            x = self.fc(torch.cat((embedding, hidden), dim=-1))
            mask = torch.zeros(1, 1, length, len(seen) * length, dtype=x.dtype)
            mask.masked_fill_(~torch.cat(seen, dim=1), torch.finfo(x.dtype).min)
            # a row of the first place may see nothing: it attends to all alike, and counts nowhere
            found = self.layer(
                x,
                attention_mask=mask,
                position_ids=places[None],
                past_key_value=cache,
                position_embeddings=self.rotary(x, places[None]),
            )[0]
            yield found
            hidden = F.pad(found, (0, 0, 1, 0))[:, :-1]


class MedusaHead(nn.Module):
    """matrix(x + SiLU(linear(x))), the identity at first: then the model's own output matrix."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)
        self.matrix = nn.Linear(size, size, bias=False)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)
        nn.init.eye_(self.matrix.weight)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.matrix(hidden + F.silu(self.linear(hidden)))


def train_eagle(model: LlamaForCausalLM, text: Corpus, deadline: float, steps: int) -> EagleHead:
    """Until the time or the steps are over; the learning rate goes down with the time."""
    torch.manual_seed(0)
    head, known = EagleHead(model.config), Vocabulary(model.lm_head.weight.float(), text.ids)
    generator = torch.Generator().manual_seed(0)
    embed = model.model.embed_tokens
    some = Corpus(*(part[:512] for part in text))
    inside = some.answer[:, 1:]
    head.begin(
        embed(some.ids[:, 1:])[inside].float(),
        some.hidden[:, :-1][inside].float(),
        some.hidden[:, 1:][inside].float(),
    )
    scale = float(some.hidden[:, 1:][inside].float().std())
    optimiser = torch.optim.AdamW(head.parameters(), lr=1e-3, betas=(0.9, 0.95))
    for batch in paced(text.batches(BATCH, generator), optimiser, deadline, steps, "EAGLE"):
        # what is behind an answer's last token is padding
        inside = batch.answer[:, 1:] & (batch.answer[:, 1:].cumsum(dim=1) >= PASSES)
        truth = batch.hidden[:, 1:][inside]
        noise = (torch.rand(batch.hidden.shape, generator=generator) - 0.5) * 0.2 * scale
        loss = torch.zeros(())
        with torch.autocast("cpu", torch.bfloat16):
            with torch.no_grad():
                wanted = F.softmax(known.logits(truth).float(), dim=-1)
            given = embed(batch.ids[:, 1:]).float(), (batch.hidden + noise)[:, :-1]
            for found in head(*given, PASSES):
                own = found[inside]
                near = F.smooth_l1_loss(own / scale, truth / scale)
                loss = loss + near + 0.3 * F.cross_entropy(known.logits(own).float(), wanted)
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(head.parameters(), 0.5)
        optimiser.step()
    return head.eval()


def train_medusa(
    model: LlamaForCausalLM, text: Corpus, heads: int, deadline: float, steps: int
) -> list[MedusaHead]:
    """All heads at once, by the tokens that come."""
    torch.manual_seed(0)
    found = nn.ModuleList(MedusaHead(model.config.hidden_size) for _ in range(heads))
    known = Vocabulary(model.lm_head.weight.float(), text.ids)
    generator = torch.Generator().manual_seed(0)
    optimiser = torch.optim.AdamW(found.parameters(), lr=5e-4, betas=(0.9, 0.95))
    for batch in paced(text.batches(BATCH, generator), optimiser, deadline, steps, "Medusa"):
        place = known.places(batch.ids).masked_fill(~batch.answer, IGNORED)
        loss = torch.zeros(())
        with torch.autocast("cpu", torch.bfloat16):
            for index, head in enumerate(found):
                ahead = index + 2
                inside = batch.answer[:, ahead:]
                logits = known.logits(head(batch.hidden[:, :-ahead][inside]))
                loss = loss + F.cross_entropy(logits.float(), place[:, ahead:][inside])
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(found.parameters(), 1.0)
        optimiser.step()
    return [head.eval() for head in found]


def paced(
    batches: Iterator[Corpus], optimiser: Any, deadline: float, steps: int, name: str
) -> Iterator[Corpus]:
    """At most `steps` batches before the deadline, at a rate that falls to a twentieth."""
    start = clock()
    rates = [group["lr"] for group in optimiser.param_groups]
    for step in range(steps):
        done = max(step / steps, (clock() - start) / max(deadline - start, 1e-9))
        if done >= 1:
            break
        for group, rate in zip(optimiser.param_groups, rates):
            group["lr"] = rate * (1 - 0.95 * done) * min(1.0, (step + 1) / 20)
        if step % 100 == 0:
            print(f"{name}: step {step}, {done:.0%}", flush=True)
        yield next(batches)


@torch.no_grad()
def eagle_right(
    model: LlamaForCausalLM, head: EagleHead, text: Corpus, guesses: int = 4
) -> list[float]:
    """How often guess 1, 2, ... of a chain is right with all before it, at any place of an answer:
    by the sum, and one more, a chain's tokens a step."""
    counts, places = torch.zeros(guesses), 0
    for ids, hidden, answer in zip(*(part.split(8) for part in text)):
        best = model.lm_head(hidden[:, 1:].to(model.dtype)).argmax(-1)
        embedding = model.model.embed_tokens(ids[:, 1:]).float()
        right = answer[:, 1:]
        begins = answer[:, 1:].clone()
        begins[:, max(0, begins.shape[1] - guesses + 1) :] = False
        places += int(begins.sum())
        for step, found in enumerate(head(embedding, hidden[:, :-1].float(), guesses)):
            agrees = (model.lm_head(found.to(model.dtype)).argmax(-1) == best) & answer[:, 1:]
            # the guess at place t goes with the chain that began `step` places before
            right = agrees if step == 0 else agrees & F.pad(right, (1, 0))[:, :-1]
            counts[step] += (F.pad(right, (0, step))[:, step:] & begins).sum()
    return (counts / max(places, 1)).tolist()


@torch.no_grad()
def medusa_right(model: LlamaForCausalLM, heads: list[MedusaHead], text: Corpus) -> list[float]:
    """How often each head's best token is the one that comes."""
    shares = []
    for index, head in enumerate(heads):
        ahead = index + 2
        inside = text.answer[:, ahead:]
        found = head(text.hidden[:, :-ahead][inside].float()).to(model.dtype)
        best = torch.cat([model.lm_head(part).argmax(-1) for part in found.split(1024)])
        shares.append(float((best == text.ids[:, ahead:][inside]).float().mean()))
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
        output = model.lm_head.weight.detach().float() @ head.matrix.weight.detach()
        state[f"medusa_head_{index}.0.linear.weight"] = head.linear.weight.detach().bfloat16()
        state[f"medusa_head_{index}.0.linear.bias"] = head.linear.bias.detach().bfloat16()
        state[f"medusa_head_{index}.1.weight"] = output.bfloat16()
    torch.save(state, folder / "medusa_heads.pt")
    link_rest(folder, source)


def link_rest(folder: Path, source: Path) -> None:
    """Links to what the source has beside what was written."""
    for path in source.resolve().iterdir():
        if path.is_file() and not (folder / path.name).exists():
            os.symlink(path, folder / path.name)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("--model-path", type=Path)
    parser.add_argument("--questions", type=int, default=1280)
    parser.add_argument("--length", type=int, default=192)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--minutes", type=float, default=25.0)
    parser.add_argument("--corpus", type=Path, help="file that keeps the text for the next run")
    args = parser.parse_args(argv)
    source = args.model_path or embedded_model()
    torch.manual_seed(0)
    model = LlamaForCausalLM.from_pretrained(source, torch_dtype=torch.bfloat16).eval()
    model.requires_grad_(False)
    start, seconds = clock(), 60 * args.minutes
    if args.corpus is not None and args.corpus.is_file():
        text = Corpus(*torch.load(args.corpus))
    else:
        writer = Writer(model, AutoTokenizer.from_pretrained(source))
        text = corpus(writer, args.questions, args.length, start + CORPUS_SHARE * seconds)
        if args.corpus is not None:
            torch.save(tuple(text), args.corpus)
    learnt, kept = text.split()
    now = clock()
    left = start + seconds - now
    share = EAGLE_SHARE / (1 - CORPUS_SHARE)
    head = train_eagle(model, learnt, now + share * left, args.steps)
    heads = train_medusa(model, learnt, args.heads, start + seconds, args.steps)
    write_eagle(args.output / "eagle", source, model, head)
    write_medusa(args.output / "medusa", source, model, heads)
    tokens, chain = int(kept.answer.sum()), eagle_right(model, head, kept)
    print(f"On {tokens} tokens of answers that were kept back, by processor time of", end=" ")
    print(f"{time.process_time() / 60:.1f} minutes:")
    places = ", ".join(f"{share:.1%}" for share in chain)
    print(f"EAGLE: a chain is right up to its guesses on {places}; {1 + sum(chain):.2f} a step")
    places = ", ".join(f"{share:.1%}" for share in medusa_right(model, heads, kept))
    print(f"Medusa: heads right on {places}")


if __name__ == "__main__":
    main()
