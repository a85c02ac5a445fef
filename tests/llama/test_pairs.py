"""Pairs of options that NxD Inference ends in an error with, over which releases."""

from types import SimpleNamespace

import pytest

from models import extended

FIRST, THIRD = {"quantized_kernel_lower_bound": 1200.0}, {}
SEVENTH, LATER = {"chunked_prefill_config": None}, {"kv_quant_config": None}
SHARES = ("flash_decoding_enabled", "is_block_kv_layout")
NARROW = ("kv_cache_quant", "is_block_kv_layout")


@pytest.mark.parametrize(
    ("options", "release", "refused"),
    [
        (SHARES, SEVENTH, True),
        (SHARES, LATER, True),
        (NARROW, SEVENTH, True),
        (NARROW, LATER, False),
        (SHARES[:1], SEVENTH, False),
        (("quantized", "enable_fused_speculation"), LATER, True),
        (("lora_config", "quantized"), SEVENTH, True),
        (("vocab_parallel", "quantized"), FIRST, True),
        (("vocab_parallel", "quantized"), SEVENTH, False),
        (("flash_decoding_enabled", "speculation_length"), FIRST, True),
        (("flash_decoding_enabled", "speculation_length"), THIRD, True),
        (("flash_decoding_enabled", "speculation_length"), SEVENTH, False),
        (("async_mode",), FIRST, True),
        (("async_mode",), SEVENTH, False),
    ],
)
def test_options_are_refused_where_the_release_ends_in_an_error(options, release, refused):
    config = SimpleNamespace(**dict.fromkeys(options, True), **release)
    if not refused:
        extended.check_pairs(config)
        return
    with pytest.raises(ValueError, match="ends in an error .*expected it to be off; leave one of"):
        extended.check_pairs(config)
