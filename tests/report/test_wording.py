from __future__ import annotations

import pytest

from mens_exp.report import wording


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0.04, "0.0 s"),
        (42.13, "42.1 s"),
        (59.96, "1 min 00 s"),
        (232, "3 min 52 s"),
        (3599.7, "1 h 00 min"),
        (7500, "2 h 05 min"),
    ],
)
def test_duration_uses_the_two_largest_units(seconds, shown):
    """Rounding carries into the next unit, so 60 seconds are never shown."""
    assert wording.duration(seconds) == shown


@pytest.mark.parametrize(
    ("size", "shown"),
    [(512, "512 B"), (78 * 1024**2, "78 MiB"), (2268000000, "2.11 GiB"), (3 * 1024**4, "3.00 TiB")],
)
def test_size_is_in_binary_units(size, shown):
    """By hand: 2,268,000,000 / 1,073,741,824 is 2.11."""
    assert wording.size(size) == shown


def test_differences_carry_their_sign():
    """A decrease has a minus sign, an increase a plus sign."""
    assert wording.percent(-0.208, signed=True) == "\N{MINUS SIGN}20.8%"
    assert wording.percent(0.875) == "87.5%"
    assert [wording.level(one) for one in (0.95, 1 - 0.001, 0.8)] == ["95%", "99.9%", "80%"]
    assert wording.points(0.25) == "+25.0 points"


def test_visible_shows_controls_instead_of_obeying_them():
    """Escape sequences become text; line breaks and tabs stay."""
    assert wording.visible("a\x1b[31mb\r\n\tc\x00") == "a\\x1b[31mb\n\tc\\x00"


def test_visible_replaces_a_lone_surrogate():
    """JSON can contain a lone surrogate, which UTF-8 cannot encode."""
    assert wording.visible("a\ud800b") == "a\ufffd\ufffd\ufffdb"


def test_as_text_tells_units_by_the_key():
    """Keys of the record end with their unit."""
    assert wording.as_text(2268000000, "peak_rss_bytes") == "2.11 GiB"
    assert wording.as_text(274.4, "train_s") == "4 min 34 s"
    assert wording.as_text(441.2, "tokens_per_s") == "441"
    assert wording.as_text(0.875, "parse_rate") == "87.5%"
    assert wording.as_text({"r": 16, "targets": ["q", "v"]}) == "r 16 · targets q, v"
    assert wording.as_text(True) == "yes"
    assert wording.as_text(None) == ""
