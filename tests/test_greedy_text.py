"""The embedded model's greedy text, stored: the same with and without NKI, today and tomorrow.

Along these answers the two best logits of the fp32 model stay at least 1.1 apart, nine times the
bf16 spacing at their magnitude (16 to 32), so another CPU's order of additions changes nothing.
"""

import pytest

PROMPTS = ("Name the capital of Japan.", "Count from 1 to 10.")
TEXT = """Output 0: The capital of Japan is Tokyo.
Output 1: 1. 1
2. 2
3. 3
4. 4
5. 5
"""


@pytest.mark.full  # 12 s
@pytest.mark.parametrize("kernels", ["--enable-nki", "--no-enable-nki"])
def test_greedy_text_is_the_stored_one(kernels, run_main, embedded_model, tmp_path):
    done = run_main(
        *["--mode", "generate"],
        kernels,
        "--prompt",
        ",".join(PROMPTS),
        *["--batch-size", "1", "--seq-len", "64", "--max-new-tokens", "24", "--model-path"],
        embedded_model,
        "--compiled-model-path",
        tmp_path / "compiled",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == TEXT
