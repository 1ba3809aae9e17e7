from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from mens_exp.artifacts.sweep import AttemptLog
from mens_exp.errors import DataError


def test_each_begin_is_an_attempt(tmp_path):
    """With its end, if one was recorded; if none was, the next begin closes it as killed."""
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
    """A node may die in mid-write; a whole line of another form was not written by mens_exp."""
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
    """The job's next attempt appends after the torn line."""
    path = tmp_path / "attempts.jsonl"
    log = AttemptLog(path)
    log.began(7, 1.5, host="a", queue_id=None)
    with path.open("ab") as file:
        file.write(torn)
    log.began(8, 2.5, host="b", queue_id=None)
    assert [one["pid"] for one in log.attempts()] == [7, 8]


def test_an_end_whose_begin_was_torn_is_nobodys(tmp_path):
    """No recorded attempt can be assigned this end."""
    path = tmp_path / "attempts.jsonl"
    path.write_bytes(b'{"event":"beg')
    log = AttemptLog(path)
    log.ended(0)
    assert log.attempts() == []


def test_two_attempts_at_once_have_their_own_ends(tmp_path):
    """Slurm lost the first job and started a second; the first one ends while the second runs."""
    path = tmp_path / "attempts.jsonl"
    first, second = AttemptLog(path), AttemptLog(path)
    first.began(7, 1.5, host="a", queue_id="12_0")
    second.began(8, 2.5, host="b", queue_id="12_0")
    first.ended(0, peak_rss_bytes=3)
    one, other = AttemptLog(path).attempts()
    assert (one["exit_code"], one["peak_rss_bytes"], one["why"]) == (0, 3, None)
    assert (other["ended_utc"], other["exit_code"]) == (None, None)
    AttemptLog(path).ended(None, why="NODE_FAIL")  # of the last attempt
    assert [x["why"] for x in AttemptLog(path).attempts()] == [None, "NODE_FAIL"]


def test_an_end_whose_own_begin_is_not_there_is_no_other_attempt_s(tmp_path):
    """Its begin line was torn; the next attempt's begin must not be paired with it."""
    path = tmp_path / "attempts.jsonl"
    lost, other = AttemptLog(path), AttemptLog(path)
    lost.began(7, 1.5, host="a", queue_id=None)
    path.unlink()
    other.began(8, 2.5, host="a", queue_id=None)
    lost.ended(1)
    (one,) = AttemptLog(path).attempts()
    assert (one["pid"], one["exit_code"]) == (8, None)


def test_attempts_that_write_at_once_lose_no_line(tmp_path):
    """Each truncates a partial line of a dead writer, never one of a live writer."""
    path = tmp_path / "attempts.jsonl"

    def write(number):
        log = AttemptLog(path)
        for turn in range(25):
            log.began(number, float(turn), host="a" * 2_000, queue_id=None)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, range(4)))
    found = [(one["pid"], one["process_started"]) for one in AttemptLog(path).attempts()]
    assert sorted(found) == [(number, float(turn)) for number in range(4) for turn in range(25)]
