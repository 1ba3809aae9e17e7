from __future__ import annotations

import ast
import re

import pytest

from mens_exp.corpus import stdlib
from mens_exp.corpus.split import assert_disjoint, split
from mens_exp.corpus.stdlib import extract, load, stdlib_digest
from mens_exp.errors import SetupError

FUNCTION = 'def {0}(a):\n    """Do {0}."""\n    b = a + "{0}"\n    return b\n'


def write(root, name, *functions):
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(FUNCTION.format(function) for function in functions))


@pytest.fixture
def library(tmp_path):
    root = tmp_path / "lib"
    write(root, "zlast.py", "z")
    write(root, "json/__init__.py", "dump", "load")
    write(root, "json/decoder.py", "decode")
    return root


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


def cache_file(cache):
    (path,) = cache.iterdir()
    return path


def test_pairs_come_by_file_and_position(library):
    """The group is the file, and the prompt names the module."""
    extraction = extract(library)
    assert [(pair.group, pair.prompt.split("`")[1]) for pair in extraction.pairs] == [
        ("json/__init__.py", "json.dump"),
        ("json/__init__.py", "json.load"),
        ("json/decoder.py", "json.decoder.decode"),
        ("zlast.py", "zlast.z"),
    ]
    assert {pair.category for pair in extraction.pairs} == {"stdlib"}
    assert (extraction.files, extraction.dropped) == (3, {})


@pytest.mark.parametrize(
    "name",
    [
        "site-packages/pip/main.py",
        "dist-packages/a.py",
        "test/a.py",
        "unittest/tests/a.py",
        "idlelib/idle_test/a.py",
        "lib2to3/tests/data/a.py",
        "turtledemo/a.py",
        "json/__pycache__/a.py",
        "ensurepip/_bundled/a.py",
        "sitecustomize.py",
        "notes.txt",
    ],
)
def test_what_is_not_the_library_is_not_read(library, name):
    """Tests, installed packages and local files change neither the pairs nor the digest."""
    before = extract(library)
    write(library, name, "extra")
    assert extract(library) == before
    assert stdlib_digest(library) == before.content_sha256


def test_file_whose_name_only_contains_test_is_read(library):
    """The directory `test` is skipped; the module `doctest` is not."""
    write(library, "doctest.py", "extra")
    assert extract(library).files == 4


def test_link_to_a_directory_is_not_followed(library):
    """A symbolic link could lead into a cycle."""
    (library / "json" / "again").symlink_to(library, target_is_directory=True)
    assert extract(library).files == 3


def test_files_that_cannot_be_read_as_python_are_counted(library):
    """Files that do not parse or decode are skipped."""
    (library / "bad_syntax.py").write_text("def f(:")
    (library / "bad_bytes.py").write_bytes(b"x = '\xff'")
    extraction = extract(library)
    assert len(extraction.pairs) == 4
    assert extraction.dropped == {"file_does_not_decode": 1, "file_does_not_parse": 1}


def test_duplicates_are_dropped_across_files(library):
    """The first file in order keeps the function."""
    write(library, "copy.py", "z")
    extraction = extract(library)
    assert [pair.group for pair in extraction.pairs if "`copy.z`" in pair.prompt] == ["copy.py"]
    assert len(extraction.pairs) == 4
    assert extraction.dropped == {"duplicate": 1}


def test_invalid_escape_in_the_library_is_no_warning_to_the_user(library):
    """Warnings are errors here, so reading the library must emit none."""
    (library / "escape.py").write_text('def f():\n    """d\\d"""\n    a = "\\w"\n    return a\n')
    assert len(extract(library).pairs) == 5


def test_digest_is_the_same_for_the_same_content(library, tmp_path):
    """The digest does not depend on the library's path."""
    other = library.rename(tmp_path / "elsewhere")
    first = stdlib_digest(other)
    assert first == stdlib_digest(other.rename(tmp_path / "third"))


@pytest.mark.parametrize("change", ["content", "name", "added"])
def test_digest_depends_on_names_and_contents(library, change):
    """Another library, another digest."""
    before = stdlib_digest(library)
    if change == "content":
        write(library, "zlast.py", "y")
    elif change == "name":
        (library / "zlast.py").rename(library / "ylast.py")
    else:
        write(library, "new.py")
    assert stdlib_digest(library) != before


@pytest.mark.parametrize("name", ["missing", "empty"])
def test_library_without_sources_is_refused(tmp_path, name):
    """Some Pythons ship the library as a zip archive; the message suggests another source."""
    (tmp_path / "empty").mkdir()
    with pytest.raises(SetupError, match=r"no standard library in source form.*data=jsonl"):
        extract(tmp_path / name)


def test_second_load_reads_the_cache(library, cache, monkeypatch):
    """The cached pairs equal the extracted ones."""
    first = load(cache, library)
    assert first == extract(library)
    monkeypatch.setattr(stdlib, "extract", None)
    assert load(cache, library) == first


def test_cache_is_named_by_the_content(library, cache):
    """The name has twelve digits of the digest and the version of the extraction."""
    load(cache, library)
    assert cache_file(cache).name == f"stdlib-{stdlib_digest(library)[:12]}-v1.jsonl"


def test_changed_library_is_extracted_anew(library, cache):
    """The old cache stays."""
    load(cache, library)
    write(library, "new.py", "new")
    assert len(load(cache, library).pairs) == 5
    assert len(list(cache.iterdir())) == 2


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-20],
        lambda data: data[: data.index(b"\n") + 1],
        lambda data: data.replace(b"Do z", b"Do y"),
        lambda data: data[10:],
        lambda data: b"",
        lambda data: b"[]\n",
        lambda data: b"\xff\n" + data,
        lambda data: data.replace(b'"files":3', b'"files":null'),
    ],
)
def test_damaged_cache_is_made_anew(library, cache, damage):
    """Whatever the damage, the result is that of a fresh extraction."""
    first = load(cache, library)
    path = cache_file(cache)
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    assert load(cache, library) == first
    assert path.read_bytes() == whole


def test_cache_that_cannot_be_written_is_refused(library, tmp_path):
    """The cache directory's path is a file; the message names the setting."""
    (tmp_path / "cache").write_text("")
    with pytest.raises(SetupError, match="the cache cannot be written"):
        load(tmp_path / "cache", library)


def test_standard_library_keeps_every_promise(cache, monkeypatch):
    """On this interpreter every response parses without a docstring, and no file is split."""
    extraction = load(cache)
    assert len(extraction.pairs) > 3_000
    assert "cut_changes_code" not in extraction.dropped
    for pair in extraction.pairs:
        (function,) = ast.parse(pair.response).body
        assert isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        assert ast.get_docstring(function) is None
        header = re.search(r"```python\n(.*?:)\n```", pair.prompt, re.DOTALL)
        assert header
        ast.parse(f"{header[1]}\n    pass")
        assert header[1] in pair.response
        assert 0 < len(pair.response) <= 4_000
        assert not re.search(r"(^|/)(tests?|site-packages)/", pair.group)
    sides = split(extraction.pairs, 0.05, 0.05)
    assert all(sides.values())
    assert_disjoint(sides)
    monkeypatch.setattr(ast, "parse", None)  # what the cache has read
    assert load(cache) == extraction
