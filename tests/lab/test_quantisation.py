"""What quantised weights have to bring, and may cost: the figures of lab/docs/quantisation.md."""

import pytest

from lab import quantisation


@pytest.mark.full
def test_a_decode_step_in_fp8():
    """Of Llama-3.2-1B at degree 2: at most 0.62 of the estimate in bf16; int8 has 0.627."""
    bf16, int8, fp8 = (quantisation.step_ms(*flags) for flags in quantisation.WEIGHTS.values())
    assert fp8 <= 0.62 * bf16
    assert int8 <= 0.63 * bf16


@pytest.mark.full
def test_perplexity_of_the_embedded_model():
    """int8 with a scale a channel within 1 % of bf16, fp8, of 3 mantissa bits, within 3 %."""
    text = quantisation.driver("--mode", "perplexity", "--no-enable-nki")
    bf16, int8, fp8 = (float(value) for _, value, _ in quantisation.PERPLEXITY.findall(text))
    assert abs(int8 / bf16 - 1) < 0.01
    assert abs(fp8 / bf16 - 1) < 0.03


@pytest.mark.parametrize(("keys", "batch", "most"), [(8192, 1, 0.80), (32768, 1, 0.66)])
def test_a_cache_in_fp8_shortens_attention(keys, batch, most):
    """Half the bytes of keys and values; those of the weights, a fifth at 32K, stay."""
    dtypes = quantisation.torch.bfloat16, quantisation.torch.float8_e4m3fn
    bf16, fp8 = (quantisation.attention_us(dtype, keys, batch) for dtype in dtypes)
    assert fp8 <= most * bf16
