from __future__ import annotations

import json

import pytest

from mens_exp.model import sources
from mens_exp.tokenizer.implementations import HfTokenizer


@pytest.fixture
def written(tmp_path):
    """Write the byte-level tokenizer's files into a directory."""
    sources.write_byte_level_tokenizer(tmp_path)
    return tmp_path


@pytest.fixture
def configured(written):
    """Change tokenizer_config.json and read the tokenizer; None removes a key."""

    def read(**changes):
        file = written / "tokenizer_config.json"
        config = json.loads(file.read_text("utf-8")) | changes
        kept = {name: value for name, value in config.items() if value is not None}
        file.write_text(json.dumps(kept), "utf-8")
        return HfTokenizer.from_directory(written)

    return read
