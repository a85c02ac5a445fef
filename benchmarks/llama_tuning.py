"""The constants of llama.py searched by `neuron_cpu tune`, kernel by kernel.

    python benchmarks/llama_tuning.py [--only mlp prefill decode chunk head] [--points 60]

One rank of two of Llama-3.2-1B. Each kernel is searched at sizes that it has in the benchmark, and
a point is kept only where the kernel agrees with tests/llama/references.py in float64; but for that
of several new tokens, whose operands random values do not make. Times are estimates; the table of
what was found stands in docs/kernels.md.
"""

import argparse
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple, Optional

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import neuron_cpu  # noqa: E402

neuron_cpu.ensure_sdk()

import llama  # noqa: E402
import llama_cached  # noqa: E402
from tests.llama.references import Reference  # noqa: E402

HIDDEN, INNER, VOCABULARY = 2048, 4096, 64128
HEADS = llama.HeadShape(16, 4, 64)
NORM = llama.Norm(features=HIDDEN, eps=1e-5)


mlp = llama.swiglu_mlp_kernel
prefill = llama.attention_prefill_kernel
decode = llama.attention_decode_kernel
chunk = llama_cached.attention_chunk_kernel
head = llama.linear_kernel


def mlp_reference(x, *arguments):
    return Reference(x.dtype).swiglu_mlp_kernel(x, *arguments)


def prefill_reference(x, *arguments):
    return Reference(x.dtype).attention_prefill_kernel(x, *arguments)


def decode_reference(x, *arguments):
    return Reference(x.dtype).attention_decode_kernel(x, *arguments)


def head_reference(x, *arguments):
    return Reference(x.dtype).linear_kernel(x, *arguments)


# --- what is searched -----------------------------------------------------------------------------
def tiled(outputs: int, inputs: int) -> str:
    """A kernel weight, of the size that keeps activations near 1."""
    most = (3 / inputs) ** 0.5
    return f"128x{outputs * inputs // 128}:bf16:{-most:.4f}..{most:.4f}"


def rows(tokens: int) -> str:
    """x, delta and norm."""
    return f"{HIDDEN}x{tokens}:bf16 {HIDDEN}x{tokens}:bf16 @NORM"


def projections(tokens: int) -> str:
    """Weights of QKV and output, cos and sin."""
    tiles = HEADS.stacks * HEADS.group
    columns = (tiles + HEADS.stacks) * llama.P_MAX + HEADS.kv_heads * HEADS.head_dim
    # The angle 0 everywhere: rows of a table repeat those of a head, the sine negated in between.
    tables = f"128x{tokens}:bf16:1..1 128x{tokens}:bf16:0..0"
    weights = f"{tiled(columns, HIDDEN)} {tiled(HIDDEN, tiles * llama.P_MAX)}"
    return f"{weights} {tables}"


def cache(past: int, batch: int = 1) -> str:
    """Keys, values and what hides them (nothing)."""
    one = f"{batch}x{HEADS.kv_heads}x{past}x{HEADS.head_dim}:bf16"
    return f"{one} {one} {batch}x{past}:bf16:0..0"


def chunk_cache(past: int) -> str:
    """The same for several new tokens: what hides keys has a second row."""
    one = f"1x{HEADS.kv_heads}x{past}x{HEADS.head_dim}:bf16"
    return f"{one} {one} 1x{past}:bf16:0..0"


class Task(NamedTuple):
    """Cases whose times add up, the constants that may matter to them, the accepted error.

    Without one points are legal, and not run.
    """

    cases: list[str]
    space: list[str]
    tolerance: Optional[float] = 2**-5


PIECES = "llama.PIECE_BYTES=8192,16384,32768"
BLOCK_PIECES = "llama.BLOCK_PIECE_BYTES=4096,8192,16384"
LONG_PIECES = "llama.LONG_PIECE_BYTES=4096,8192,16384,32768,65536"
CHUNKS = "llama.TOKEN_CHUNK=512,1024"
MLP_WEIGHTS = f"{tiled(INNER, HIDDEN)} {tiled(INNER, HIDDEN)} {tiled(HIDDEN, INNER)}"
TASKS = {
    "mlp": Task(
        [f"{rows(tokens)} {MLP_WEIGHTS}" for tokens in (1, 640)],
        [PIECES, LONG_PIECES, CHUNKS],
    ),
    "prefill": Task(
        [f"{rows(640)} {projections(640)} @HEADS 1"],
        [BLOCK_PIECES, "llama.SHORT_BLOCK=128,256,384,512"],
        tolerance=2**-4,  # PyTorch in bf16 is off by more than 2^-4 here
    ),
    "decode": Task(
        [f"{rows(batch)} {projections(batch)} {cache(past, batch)} @HEADS"
         for past, batch in ((640, 1), (2048, 1), (640, 4))],
        [LONG_PIECES, "llama.KEY_BYTES=16384,32768,65536"],
    ),
    "chunk": Task(
        [f"{rows(new)} {projections(new)} {chunk_cache(past)} None @HEADS"
         for new, past in ((8, 640), (8, 2048), (256, 2048), (256, 8192))],
        ["llama_cached.RESIDENT_BYTES=24576,49152,98304",
         "llama_cached.CACHE_ROW_BYTES=1536,3072,6144"],
        tolerance=None,
    ),
    "head": Task([f"{HIDDEN}x1:bf16 {tiled(VOCABULARY, HIDDEN)} @NORM"],
                 [LONG_PIECES]),
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--points", default="60", help="points of each kernel")
    parser.add_argument("--jobs", default="2")
    parser.add_argument("--json", type=Path, help="folder for every point tried")
    args = parser.parse_args()
    from neuron_cpu.__main__ import main as command

    folder = args.json or Path(tempfile.mkdtemp())
    folder.mkdir(parents=True, exist_ok=True)
    worst = 0
    for name in args.only:
        task = TASKS[name]
        this = str(Path(__file__).resolve())
        options = ["--points", args.points, "--jobs", args.jobs, "--time-limit", "600"]
        options += ["--json", str(folder / f"{name}.json")]
        if task.tolerance is not None:
            options += ["--ref", f"{this}:{name}_reference", "--values", "random"]
            options += ["--tolerance", str(task.tolerance)]
        for case in task.cases:
            options += ["--case", case]
        worst = max(worst, command(["tune", f"{this}:{name}", *options, "--space", *task.space]))
    return worst


if __name__ == "__main__":
    sys.exit(main())
