"""Model FLOPs of packed documents."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeplan.flops import mean_keys_per_token, training_flops_per_token
from moeplan.packing import padding_waste_frac
from moeplan.presets import load_model

DEEPSEEK, GPT_OSS = load_model("deepseek-v3"), load_model("gpt-oss-120b")
LENGTHS = st.lists(st.integers(1, 2**17), min_size=1, max_size=20)


def test_one_document_is_no_packing() -> None:
    assert training_flops_per_token(DEEPSEEK, 4096, (4096,)) == training_flops_per_token(DEEPSEEK, 4096)


def test_packed_attention_goes_with_the_sum_of_squares() -> None:
    lengths = (4096, 8192, 32768)
    squares = sum(length**2 for length in lengths)
    assert mean_keys_per_token(DEEPSEEK, 0, sum(lengths), lengths) == squares / 2 / sum(lengths)
    windowed = mean_keys_per_token(GPT_OSS, 0, 8192, (8128, 64))  # a window of 128 keys, and a document within it
    assert windowed == pytest.approx((128 * 8128 - 128**2 / 2 + 64**2 / 2) / 8192)


@given(LENGTHS)
def test_packing_never_adds_flops(lengths: list[int]) -> None:
    whole = training_flops_per_token(DEEPSEEK, sum(lengths))
    assert training_flops_per_token(DEEPSEEK, sum(lengths), lengths) <= whole * (1 + 1e-12)


def test_padding_to_the_longest_wastes_more_than_half() -> None:
    assert padding_waste_frac(DEEPSEEK, (4096, 8192, 32768)) == pytest.approx(0.6, abs=0.05)
    assert padding_waste_frac(DEEPSEEK, (8192, 8192)) == pytest.approx(0, abs=1e-12)
