from __future__ import annotations

import pytest

from mens_exp.artifacts.sweep import AttemptLog
from mens_exp.errors import DataError


def test_each_begin_is_an_attempt(tmp_path):
    """With its end, where somebody saw it; the next begin says that nobody did."""
    log = AttemptLog(tmp_path / "batch" / "attempts_0.jsonl")
    assert log.attempts() == []
    log.began(7, 1.5, host="a", queue_id="12_0")
    (first,) = log.attempts()
    assert (first["pid"], first["host"], first["queue_id"]) == (7, "a", "12_0")
    assert first["ended_utc"] is None
    log.began(8, 2.5, host="b", queue_id="12_0")
    log.ended(130, peak_rss_bytes=5, why="TIMEOUT")
    first, second = log.attempts()
    assert (first["exit_code"], first["why"]) == (None, "it was killed, and began again")
    assert (second["exit_code"], second["peak_rss_bytes"], second["why"]) == (130, 5, "TIMEOUT")


def test_a_torn_line_is_dropped_and_a_wrong_one_refused(tmp_path):
    """The node may have died while it wrote; another form was not written by us."""
    path = tmp_path / "attempts.jsonl"
    log = AttemptLog(path)
    log.began(7, 1.5, host="a", queue_id=None)
    with path.open("ab") as file:
        file.write(b'{"event":"en')
    assert len(log.attempts()) == 1
    path.write_bytes(b'{"event":"began","colour":"red"}\n')
    with pytest.raises(DataError, match="colour"):
        log.attempts()


@pytest.mark.parametrize("torn", [b'{"event":"en', b'{"event":"began","pid'])
def test_what_comes_after_a_torn_line_is_read(tmp_path, torn):
    """The next start of the job writes on."""
    path = tmp_path / "attempts.jsonl"
    log = AttemptLog(path)
    log.began(7, 1.5, host="a", queue_id=None)
    with path.open("ab") as file:
        file.write(torn)
    log.began(8, 2.5, host="b", queue_id=None)
    assert [one["pid"] for one in log.attempts()] == [7, 8]


def test_an_end_whose_begin_was_torn_is_nobodys(tmp_path):
    """There is no attempt that it could be of."""
    path = tmp_path / "attempts.jsonl"
    path.write_bytes(b'{"event":"beg')
    log = AttemptLog(path)
    log.ended(0)
    assert log.attempts() == []
