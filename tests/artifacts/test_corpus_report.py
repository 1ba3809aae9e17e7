from __future__ import annotations

import pytest

from mens_exp.artifacts.corpus_record import CorpusReport
from mens_exp.errors import MensError


def record(**fields):
    usual = {
        "rows": 2,
        "sides": {"train": 1, "val": 1},
        "characters": {"prompts": 3},
        "lengths": {},
        "tokens": None,
        "parse": {},
        "constructs": {},
        "duplicates": None,
        "diversity": None,
        "safety": {"secrets": {}, "injections": {}, "findings": []},
        "sources": {},
        "unknown": {"tokens": "why", "duplicates": "why", "diversity": "why"},
    }
    return CorpusReport(**usual | fields)


def test_what_is_written_is_read_back(tmp_path):
    """A null value and its reason survive the round trip."""
    record().write(tmp_path / "r.json")
    assert CorpusReport.read(tmp_path / "r.json") == record()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"unknown": {}}, "null without a reason"),
        ({"sides": {"train": 5}}, "the sides do not add up to the rows"),
        ({"rows": "2"}, "rows"),
    ],
)
def test_contradictions_are_not_written(tmp_path, fields, message):
    """The reader would refuse such a report."""
    with pytest.raises(MensError, match=message):
        record(**fields).write(tmp_path / "r.json")


def test_a_key_of_another_version_is_refused(tmp_path):
    """The reader is strict about keys."""
    record().write(tmp_path / "r.json")
    text = (tmp_path / "r.json").read_text("utf-8").replace('"parse"', '"parsing"')
    (tmp_path / "r.json").write_text(text, "utf-8")
    with pytest.raises(MensError, match="parsing"):
        CorpusReport.read(tmp_path / "r.json")
