from __future__ import annotations

import pytest

from mens_exp.config.data import RowFormat
from mens_exp.rows.schema import KEYS, accepted_keys, format_of, joint_format


@pytest.mark.parametrize(
    ("keys", "form"),
    [
        (["prompt", "response"], RowFormat.pair),
        (["instruction", "output"], RowFormat.pair),
        (["instruction", "input", "output"], RowFormat.alpaca),
        (["messages", "source"], RowFormat.messages),
        (["turns"], RowFormat.messages),
        (["id", "conversations"], RowFormat.sharegpt),
        (["prompt", "chosen", "rejected"], RowFormat.preference),
        (["conversations", "rejected"], RowFormat.preference),
        (["prompt", "completion", "label"], RowFormat.unpaired),
        (["messages", "kto_tag"], RowFormat.unpaired),
        (["prompt", "response", "label"], RowFormat.pair),
        (["question", "answer"], None),
        ([], None),
    ],
)
def test_format_is_told_from_keys(keys, form):
    """A single key decides; without a known key the format is unknown."""
    assert format_of(keys) is form


def test_alpaca_rows_may_leave_their_input_out():
    """A file may mix pairs with Alpaca rows, and nothing else."""
    assert joint_format(RowFormat.pair, RowFormat.alpaca) is RowFormat.alpaca
    assert joint_format(RowFormat.messages, RowFormat.messages) is RowFormat.messages
    assert joint_format(RowFormat.pair, RowFormat.messages) is None


def test_every_format_says_its_keys():
    """Aliases are listed too."""
    assert set(KEYS) == set(RowFormat) - {RowFormat.auto}
    assert "'messages' (alias 'turns')" in accepted_keys(RowFormat.messages)
