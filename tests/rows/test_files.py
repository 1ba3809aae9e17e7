from __future__ import annotations

import pytest

from mens_exp.errors import DataError, Problems
from mens_exp.rows.files import resolve_files


@pytest.fixture
def folder(tmp_path):
    """Write three files of rows, one in a subdirectory, and a directory that a glob matches."""
    for name in ("b.jsonl", "a.jsonl", "c[1].jsonl"):
        (tmp_path / name).write_text("{}")
    (tmp_path / "deep.jsonl").mkdir()
    (tmp_path / "deep.jsonl" / "d.jsonl").write_text("{}")
    return tmp_path


def names(folder, *patterns):
    given = [f"{folder}/{pattern}" for pattern in patterns]
    found = resolve_files(given if len(given) > 1 else given[0], "data.path")
    return [path.relative_to(folder).as_posix() for path in found]


def test_one_file_is_itself_whether_it_is_there_or_not(folder):
    """A missing file is reported when it is read."""
    assert names(folder, "a.jsonl") == ["a.jsonl"]
    assert names(folder, "nothing.jsonl") == ["nothing.jsonl"]


def test_list_keeps_its_order(folder):
    """Rows are in the order of the list."""
    assert names(folder, "b.jsonl", "a.jsonl") == ["b.jsonl", "a.jsonl"]


def test_glob_is_sorted_and_has_files_only(folder):
    """The order does not depend on the file system."""
    assert names(folder, "*.jsonl") == ["a.jsonl", "b.jsonl", "c[1].jsonl"]
    assert names(folder, "**/d.jsonl") == ["deep.jsonl/d.jsonl"]


def test_file_with_a_globs_characters_in_its_name_is_found(folder):
    """An existing name is not treated as a pattern."""
    assert names(folder, "c[1].jsonl") == ["c[1].jsonl"]


def test_home_is_expanded(folder, monkeypatch):
    """This holds for globs too."""
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.setenv("USERPROFILE", str(folder))
    assert resolve_files("~/a*.jsonl", "data.path") == [folder / "a.jsonl"]


def test_glob_that_matches_nothing_is_refused_with_the_nearest(folder):
    """An empty match is treated as a mistake."""
    with pytest.raises(DataError, match="no file matches") as caught:
        resolve_files(f"{folder}/a*.json", "data.val_path")
    assert (caught.value.where, caught.value.exit_code) == ("data.val_path", 2)
    assert "the nearest there is a.jsonl" in str(caught.value)


def test_file_named_twice_is_refused(folder):
    """Its rows would count twice; both errors of the list are reported."""
    with pytest.raises(DataError, match="named twice"):
        names(folder, "a.jsonl", "a*.jsonl")
    with pytest.raises(Problems) as caught:
        names(folder, "a.jsonl", "*.txt", "a.jsonl")
    assert len(caught.value.problems) == 2
