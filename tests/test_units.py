"""Sizes and rates: what people write is read exactly, and what cannot be meant is refused with a sentence."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from viking.units import format_bytes, parse_bytes, parse_rate


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("20GiB", 20 * 2**30),
        ("18GB", 18_000_000_000),
        ("18 gb", 18_000_000_000),
        ("1.5 TB", 1_500_000_000_000),
        ("0.1GB", 100_000_000),
        ("  512MiB ", 512 * 2**20),
        ("4096", 4096),
        ("64B", 64),
        ("1e9", 10**9),
        ("1e9 B", 10**9),
        ("10_000kB", 10_000_000),
        (".5KiB", 512),
        ("+3kB", 3000),
        ("0", 0),
        (0, 0),
        (12, 12),
        (1.5e9, 1_500_000_000),
    ],
)
def test_a_size_is_read_exactly(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        ("", "is empty"),
        ("   ", "is empty"),
        ("GB", "cannot be read"),
        ("12 apples", "unknown unit 'apples'"),
        ("12 G", "unknown unit 'G'"),
        ("1GB2", "cannot be read"),
        ("1,5GB", "cannot be read"),
        ("-1GB", "is negative"),
        (-1, "is negative"),
        (-0.5, "is negative"),
        ("nan", "cannot be read"),
        (math.nan, "not a finite number"),
        (math.inf, "not a finite number"),
        ("1e30TB", "is too large"),
        ("55GB/s", "cannot be read"),
        ("٣", "cannot be read"),
    ],
)
def test_a_size_that_cannot_be_meant_is_refused_with_a_sentence(value, complaint):
    with pytest.raises(ValueError) as caught:
        parse_bytes(value, "weights_budget")
    sentence = str(caught.value)
    assert sentence.startswith("weights_budget: ")
    assert complaint in sentence
    assert "such as" in sentence


@pytest.mark.parametrize("value", [None, True, b"1GB", [1], 1j])
def test_what_is_neither_number_nor_string_is_a_type_error(value):
    with pytest.raises(TypeError, match="accepted is"):
        parse_bytes(value)


def test_a_rate_takes_a_unit_per_second_or_none():
    assert parse_rate("55GB/s") == parse_rate("55 GB /s") == parse_rate("55GB") == parse_rate(55e9) == 55_000_000_000
    assert parse_rate("3.87TB/s") == 3_870_000_000_000


@pytest.mark.parametrize("value", ["", "/s", "0GB/s", 0, -3, "-3GB/s", math.nan, "55 furlongs/s", "55GB/h"])
def test_a_rate_that_cannot_be_meant_is_refused(value):
    with pytest.raises(ValueError, match='such as "55GB/s"'):
        parse_rate(value)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.00 kB"),
        (12_345, "12.3 kB"),
        (999_499, "999 kB"),
        (999_500, "1.00 MB"),
        (31_400_000_000, "31.4 GB"),
        (5_000_000_000_000_000, "5000 TB"),
        (-2_000_000, "-2.00 MB"),
    ],
)
def test_a_size_is_written_with_three_digits(size, text):
    assert format_bytes(size) == text


def test_a_size_is_written_in_powers_of_two_on_request():
    assert format_bytes(24 * 2**30, binary=True) == "24.0 GiB"
    assert format_bytes(1023, binary=True) == "1023 B"


@given(st.integers(min_value=0, max_value=2**53))
def test_what_is_written_reads_back_within_its_digits(size):
    assert math.isclose(parse_bytes(format_bytes(size)), size, rel_tol=6e-3, abs_tol=0.5)


@given(st.integers(min_value=0, max_value=2**63 - 1))
def test_whole_bytes_survive_as_int_and_as_text(size):
    assert parse_bytes(size) == parse_bytes(str(size)) == size
