"""The decision ledger: it is append-only, and tampering is detected."""

from __future__ import annotations

import json

import pytest

from mens_exp.artifacts.decision_ledger import EntryKind, append, cycles_of, read_ledger
from mens_exp.artifacts.digest import digest
from mens_exp.errors import DataError, RequestError


def cycle(name, *seeds):
    return {
        "cycle": name,
        "suite_digest": "ab" * 32,
        "seeds": list(seeds),
        "arms": ["a", "b"],
        "factor": "backend",
        "kpi": "task_success",
        "direction": "higher",
        "margin": 0.0,
    }


@pytest.fixture
def ledger(tmp_path):
    path = tmp_path / "deep" / "ledger.jsonl"
    for number, name in enumerate(("one", "two", "three")):
        append(path, EntryKind.CYCLE, lambda _, n=number, c=name: cycle(c, n))
    return path


def test_absent_ledger_is_empty(tmp_path):
    """The first entry creates the file."""
    assert read_ledger(tmp_path / "ledger.jsonl") == []


def test_entries_are_chained(ledger):
    """Each entry carries the digest of the previous one; the first carries none."""
    entries = read_ledger(ledger)
    assert [entry["number"] for entry in entries] == [1, 2, 3]
    assert [entry["previous"] for entry in entries] == [
        None,
        entries[0]["sha256"],
        entries[1]["sha256"],
    ]
    assert list(cycles_of(entries)) == ["one", "two", "three"]


def test_what_the_maker_sees_is_all_that_is_there(ledger):
    """The callback gets all entries, under the lock; if it raises, nothing is appended."""

    def refused(entries):
        assert len(entries) == 3
        raise RequestError("no")

    before = ledger.read_bytes()
    with pytest.raises(RequestError, match="no"):
        append(ledger, EntryKind.CYCLE, refused)
    assert ledger.read_bytes() == before


def test_an_edited_line_is_refused_by_its_number(ledger):
    """Any edit of the line is detected."""
    ledger.write_bytes(ledger.read_bytes().replace(b'"two"', b'"too"'))
    with pytest.raises(DataError, match=r"jsonl:2: the entry was modified after it was written"):
        read_ledger(ledger)


def test_an_edited_line_with_a_digest_of_its_own_breaks_the_chain(ledger):
    """A new digest in the edited entry no longer matches the next entry's `previous`."""
    lines = ledger.read_text("utf-8").splitlines()
    entry = json.loads(lines[1])
    entry["cycle"]["seeds"] = [9]
    del entry["sha256"]
    lines[1] = json.dumps({**entry, "sha256": digest(entry)})
    ledger.write_text("\n".join(lines) + "\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"jsonl:3: the entry does not follow"):
        read_ledger(ledger)


@pytest.mark.parametrize("kept", [[1, 2], [0, 2], [1, 0, 2]], ids=["first", "middle", "swapped"])
def test_dropped_and_swapped_lines_are_refused(ledger, kept):
    """The chain holds every entry, in order."""
    lines = ledger.read_text("utf-8").splitlines(keepends=True)
    ledger.write_text("".join(lines[number] for number in kept), encoding="utf-8")
    with pytest.raises(RequestError, match="does not follow"):
        read_ledger(ledger)


def test_a_torn_last_line_was_never_written(ledger):
    """A writer died in mid-line; the next entry replaces the torn line."""
    whole = ledger.read_bytes()
    ledger.write_bytes(whole + b'{"format": "mens_exp_dec')
    assert len(read_ledger(ledger)) == 3
    append(ledger, EntryKind.CYCLE, lambda _: cycle("four", 4))
    assert ledger.read_bytes().startswith(whole)
    assert [entry["number"] for entry in read_ledger(ledger)] == [1, 2, 3, 4]


def test_a_key_that_nobody_knows_is_refused(ledger):
    """The reader is as strict as for other records."""
    ledger.write_bytes(ledger.read_bytes().replace(b'"number"', b'"numbr"', 1))
    with pytest.raises(RequestError, match="unknown key"):
        read_ledger(ledger)
