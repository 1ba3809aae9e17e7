from __future__ import annotations

import json
import shutil
from types import SimpleNamespace

import pytest

from mens_exp.config.corpus import CorpusConfig, ValidateConfig
from mens_exp.config.data import OnBadRow
from mens_exp.config.evaluation import BubblewrapSandbox
from mens_exp.corpus.steps.step import StepInput
from mens_exp.corpus.steps.validate import validate
from mens_exp.errors import Problems
from mens_exp.rows.schema import TrainingPair

needs_bubblewrap = pytest.mark.skipif(
    shutil.which("bwrap") is None or shutil.which("rustc") is None,
    reason="needs bubblewrap and rustc: apt-get install bubblewrap rustc",
)
QUARANTINE = ValidateConfig(on_bad_row=OnBadRow.quarantine)


def row(response, language, prompt="p"):
    return TrainingPair(prompt=prompt, response=response, language=language)


GOOD = [
    row("x = 1", "python"),
    row("See:\n\n```python\nx = 1\n```\n\n```\ny = 2\n```\n\n```text\nno (code\n```", "Python"),
    row("fn f() -> u8 { 1 }", "rust"),
    row('{"a": [1]}', "json"),
    row("no (code", "cobol"),
    row("no (code", None),
]
BAD = [
    row("x = (", "python"),
    row("Fine.\n\n```py\nx = (\n```", "python"),
    row("fn f( {", "rust"),
    row('{"a": ', "json"),
]


def test_rows_whose_code_parses_pass_as_they_are(work):
    """Python, Rust and JSON are parsed; rows of other languages pass and are counted."""
    result = work.do(validate, [work.file("a.jsonl", GOOD)])
    assert (work.out / "rows.jsonl").read_bytes() == (work.path / "input/a.jsonl").read_bytes()
    assert result.facts["checked"] == {"json": 1, "not_checked": 2, "python": 2, "rust": 1}
    assert (result.rows_in, result.rows_out, result.dropped) == (6, 6, {})
    assert not (work.out / "quarantine.jsonl").exists()


@pytest.mark.parametrize("bad", BAD)
def test_code_that_does_not_parse_is_an_error(work, bad):
    """The error gives file and line, and suggests quarantine."""
    with pytest.raises(Problems, match=r"(?s)a\.jsonl:2: the \w+ code does not parse.*quarantine"):
        work.do(validate, [work.file("a.jsonl", [GOOD[0], bad])])


def test_bad_rows_are_put_aside_with_place_and_reason(work):
    """Invalid rows and code that does not parse are quarantined; the counts add up."""
    path = work.file("a.jsonl", [*GOOD, *BAD])
    with path.open("a", encoding="utf-8") as file:
        file.write('{"prompt": "p"}\nnot json\n')
    result = work.do(validate, [path], validate=QUARANTINE)
    aside = work.lines("quarantine.jsonl")
    assert [each["line"] for each in aside] == [7, 8, 9, 10, 11, 12]
    assert {each["file"] for each in aside} == {str(path)}
    assert aside[0]["problems"][0].startswith(f"{path}:7: the python code does not parse: line 1:")
    assert json.loads(aside[0]["raw"])["response"] == "x = ("
    assert (result.rows_in, result.rows_out, sum(result.dropped.values())) == (12, 6, 6)
    assert result.dropped["the python code does not parse"] == 2


def test_many_bad_rows_of_one_kind_are_told_once_and_counted(work):
    """The message gives the first places and the total."""
    path = work.file("a.jsonl", [row("x = (", "python", str(number)) for number in range(30)])
    with pytest.raises(Problems) as caught:
        work.do(validate, [path])
    assert str(caught.value).count("does not parse") == 1
    assert "here and in 29 more rows (2, 3, 4, 5, 6, …)" in str(caught.value)
    assert "30 bad rows" in str(caught.value)


def test_sides_of_a_split_are_kept(work):
    """Each row goes to the file it came from."""
    files = [work.file("train.jsonl", GOOD[:2]), work.file("val.jsonl", GOOD[2:3])]
    work.do(validate, files)
    assert {name: len(rows) for name, rows in work.rows().items()} == {
        "train.jsonl": 2,
        "val.jsonl": 1,
    }


def sandboxed(work, rows):
    out, scratch = work.path / "out", work.path / "scratch"
    out.mkdir()
    scratch.mkdir()
    work.out = out
    config = CorpusConfig(validate=ValidateConfig(on_bad_row=OnBadRow.quarantine, compile=True))
    run = SimpleNamespace(sandbox=BubblewrapSandbox())
    files = (work.file("a.jsonl", rows),)
    return StepInput(files=files, directory=out, scratch=scratch, config=config, run=run)


@needs_bubblewrap
def test_code_that_parses_and_does_not_compile_is_found(work):
    """Each language uses its own compiler; rows keep their order."""
    rows = [
        row("def f():\n    return 1", "python", "good"),
        row("return 1", "python", "bad"),
        row("pub fn f() -> u8 { 1 }", "rust", "good rust"),
        row("pub fn f() -> u8 { absent() }", "rust", "bad rust"),
        row("no code", None, "prose"),
    ]
    result = validate(sandboxed(work, rows))
    assert [each["prompt"] for each in work.lines("rows.jsonl")] == ["good", "good rust", "prose"]
    told = [each["problems"][0] for each in work.lines("quarantine.jsonl")]
    assert "the python code does not compile: line 1: 'return' outside function" in told[0]
    assert "the rust code does not compile: error[E0425]" in told[1]
    assert result.facts["compiled"] == {"python": 2, "rust": 2}


@needs_bubblewrap
def test_compiling_does_not_run_the_code(work):
    """Code that would exit the interpreter is compiled and not run."""
    result = validate(sandboxed(work, [row("import sys\nsys.exit(3)", "python")]))
    assert (result.rows_in, result.rows_out) == (1, 1)
