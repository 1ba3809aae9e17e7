from __future__ import annotations

import pytest

from mens_exp.layout.checkpoint_files import attribution_required


@pytest.mark.parametrize(
    ("licence", "required"),
    [
        ("apache-2.0", True),
        ("Apache-2.0", True),
        ("MIT", True),
        ("llama3.1", True),
        ("gemma", True),
        ("cc0-1.0", False),
        ("Unlicense", False),
        ("my-own-terms", None),
        ("other", None),
        ("", None),
        (None, None),
    ],
)
def test_licence_asks_what_its_text_says(licence, required):
    """An unknown licence gives None."""
    assert attribution_required(licence) is required
