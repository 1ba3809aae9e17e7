"""The mutation tool, which changes lines to see whether a test notices."""

from __future__ import annotations

import mutations
import pytest


@pytest.mark.parametrize(
    ("line", "changed"),
    [
        ("x = a + b", "x = a - b"),
        ("x = a <= b", "x = a < b"),
        ("x = a is not b", "x = a is b"),
        ("x = a and b", "x = a or b"),
        ("x = 3", "x = 4"),
        ("x = True", "x = False"),
        ("x = not a", "x = a"),
        ("x = a if b else c", "x = a if not (b) else c"),
        ("x = 'ä' + y if a else b", "x = 'ä' + y if not (a) else b"),
    ],
)
def test_a_line_is_changed_in_one_place(line, changed):
    """Expected results are by hand; columns count bytes, and strings are not subtracted."""
    ((number, first, last, new),) = mutations.changes(line)
    raw = line.encode()
    assert number == 1
    assert (raw[:first] + new.encode() + raw[last:]).decode() == changed


@pytest.mark.parametrize("line", ["x = a", "x = 'a' + b", "x = a < b < c", "'''1 + 1'''", "x: int"])
def test_what_has_no_opposite_is_left_alone(line):
    """Strings, chained comparisons and names have no mutation."""
    assert list(mutations.changes(line)) == []


def test_a_seed_draws_the_same_lines_again():
    """Lines are drawn from the listed packages, each line at most once."""
    mutants = mutations.draw(0, 60)
    assert mutants == mutations.draw(0, 60) != mutations.draw(1, 60)
    assert len({(one["file"], one["line"]) for one in mutants}) == 60
    assert all(one["file"].split("/")[2] in mutations.PACKAGES for one in mutants)


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A module of one function, and its test."""
    (tmp_path / "code.py").write_text("def f():\n    return 2 + 2\n", "utf-8")
    (tmp_path / "test_code.py").write_text(
        "import runpy\n\n\ndef test_f():\n    assert runpy.run_path('code.py')['f']() == 4\n",
        "utf-8",
    )
    (tmp_path / "pytest.ini").write_text("[pytest]\n", "utf-8")
    monkeypatch.setattr(mutations, "ROOT", tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("new", "tests", "end"),
    [
        ("2 - 2", "test_code.py::test_f", "killed"),
        ("2 * 2", "test_code.py::test_f", "survived"),
        ("2 - 2", "test_code.py::test_gone", "untried"),
        ("2 - 2", "test_gone.py", "untried"),
    ],
)
def test_only_a_test_that_fails_kills(checkout, new, tests, end):
    """A test that pytest does not find is no kill; afterwards the line is restored."""
    mutant = {"file": "code.py", "line": 2, "first": 11, "last": 16, "old": "2 + 2", "new": new}
    before = (checkout / "code.py").read_bytes()
    assert mutations.attempt(mutant, [tests])[0] == end
    assert (checkout / "code.py").read_bytes() == before


def test_another_version_of_a_line_is_refused(checkout):
    """Nothing is changed."""
    mutant = {"file": "code.py", "line": 2, "first": 11, "last": 16, "old": "3 + 3", "new": "1"}
    with pytest.raises(AssertionError, match="another version"):
        mutations.attempt(mutant, ["test_code.py"])
