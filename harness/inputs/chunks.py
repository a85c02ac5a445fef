"""How a long prompt is cut: which calls it takes, and how large its chunks are."""

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from harness.errors import UserError
from harness.settings import Settings

MOST_PREFILL = 8192  # tokens of one prefill graph at all: longer ones take hours to trace
CHUNKS = (768, 640, 512, 384, 320, 256, 192, 160, 128, 96, 64, 32)  # tokens, best 128 n
# A graph of chunks has about so many traced instructions of llama.py's kernels per 65536 pairs of
# a query and a key (a chunk of n tokens: the first number and an n-th of the second), at a head
# dimension of 64 and beyond; the SDK's stand-in refuses a million.
PER_PAIRS = {64: (8.3, 232), 128: (10.2, 556)}
MOST_INSTRUCTIONS = 800_000  # the rest is for what does not grow with the cache
KEPT_BYTES = 96 * 1024  # SBUF per partition for what its kernels keep of a chunk's tokens


def chunk_starts(tokens: int, longest: int, chunk: int, most: int) -> list[int]:
    """Where the chunks behind the first `longest` tokens of a prompt begin.

    The last token is not among them: it is a decode step. The cache ends at `most`, so the last
    chunk may begin earlier and repeat some tokens.
    """
    return [min(start, most - chunk) for start in range(longest, tokens - 1, chunk)]


def cache_buckets(longest: int, seq_len: int) -> list[int]:
    """Lengths of the cache for which a model with chunks has graphs: powers of two up to the
    longest prefill, then sixteenths of the whole. A call attends to all of a bucket, of which a
    32nd of the whole is empty on average: 6 % of a long prompt's attention (12 % with eighths).
    """
    part = -(-seq_len // 2048) * 128
    powers = [2**n for n in range(7, 32) if 2**n <= min(longest, seq_len)]
    return sorted({*powers, *range(part, seq_len, part)} - set(range(128)) | {seq_len})


def default_chunk(
    config: dict[str, Any], ranks: int, seq_len: int, taken: Collection[int], itemsize: int = 2
) -> int:
    """The largest chunk with which a graph over the whole cache is small enough to compile, and
    whose tokens SBUF holds.

    None of `taken`, the prefill graphs' lengths: the SDK tells the two apart by their tokens.
    Beyond 512 tokens at most an eighth of the whole: half of the last chunk is empty on average.
    """
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    d = config.get("head_dim") or hidden // heads
    own = -(-heads // ranks), -(-config["num_key_value_heads"] // ranks)  # of a rank
    pairs = seq_len * own[0] * config["num_hidden_layers"] / 65536  # of a token
    per_pair, per_chunk = PER_PAIRS[64 if d <= 64 else 128]
    # x before and after its norm, queries, keys and contexts, in tiles of 128 features
    kept = itemsize * (2 * hidden + (2 * own[0] + own[1]) * d) / 128
    most = min((MOST_INSTRUCTIONS / pairs - per_chunk) / per_pair, KEPT_BYTES / kept)
    longest = min(seq_len - 1, max(512, seq_len // 8))
    fitting = [c for c in CHUNKS if c <= longest and c not in taken]
    if not fitting:
        raise UserError(
            f"--seq-len {seq_len} leaves no size for chunks of a prompt, expected one of "
            f"{', '.join(map(str, CHUNKS))} below it that no prefill graph has; raise "
            "--max-context-length to --seq-len."
        )
    return next((c for c in fitting if c <= most), fitting[-1])


def with_chunks(
    settings: Settings, config: dict[str, Any], prompts: Sequence[Sequence[int]] = ()
) -> Settings:
    """The settings with a chunk size and buckets, where a prompt may be longer than the largest
    prefill graph. That is so where one of `prompts` is longer, or where no option bounds
    prompts."""
    longest = max((len(ids) for ids in prompts), default=0)
    open_ended = settings.asked_max_context_length is None and settings.takes_chunks
    open_ended = open_ended and settings.max_context_length < settings.seq_len
    chunk, first = settings.prefill_chunk, settings.max_context_length
    if chunk is None:
        if not (open_ended or longest > first):
            return settings
        taken = {first, *(settings.context_encoding_buckets or ())}
        if settings.enable_bucketing and settings.context_encoding_buckets is None:
            taken |= {2**n for n in range(7, 14)}
        itemsize = 4 if settings.torch_dtype == "float32" else 2
        chunk = default_chunk(config, settings.tp_degree or 1, settings.seq_len, taken, itemsize)
    buckets = settings.token_generation_buckets
    if settings.enable_bucketing and buckets is None:
        buckets = cache_buckets(first, settings.seq_len)
    return replace(settings, prefill_chunk=chunk, token_generation_buckets=buckets)
