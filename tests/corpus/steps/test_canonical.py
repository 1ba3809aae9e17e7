"""Rust in the layout of rustfmt, compared with plain rustfmt; hostile sources in a batch."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
from types import SimpleNamespace

import pytest

from mens_exp.config.corpus import CanonicalConfig, CorpusConfig, DedupeConfig, OnUnformatted
from mens_exp.config.evaluation import BubblewrapSandbox
from mens_exp.corpus.benchmarks import OverlapIndex, texts_of
from mens_exp.corpus.rust import RustFormatter
from mens_exp.corpus.steps.dedupe import dedupe
from mens_exp.corpus.steps.step import StepInput
from mens_exp.corpus.steps.validate import canonical
from mens_exp.errors import Problems, SetupError
from mens_exp.rows.schema import TrainingPair
from mens_exp.sandbox.bubblewrap import Bubblewrap
from mens_exp.sandbox.program import Limits
from mens_exp.sandbox.supervise import Unsafe

pytestmark = pytest.mark.skipif(
    shutil.which("bwrap") is None or shutil.which("rustfmt") is None,
    reason="needs bubblewrap, rustc and rustfmt: apt-get install bubblewrap rustc rustfmt",
)
EXACT = DedupeConfig(threshold=None)
TIDY = "// Adds.\nfn add(a: i32, b: i32) -> i32 {\n    a + b /* kept */\n}"
UNTIDY = "// Adds.\nfn  add( a:i32,b:i32,)->i32{a+b/* kept */\n}\n\n\n"
SOURCES = [
    UNTIDY,
    TIDY,
    "use std::fmt;use std::collections::{HashMap};\nstruct P{x:f64}impl P{fn x(&self){}}",
    'fn s()->&\'static str{"a  b\\\n   c"}\nmacro_rules! m{($x:expr)=>{$x+1};}',
    "pub extern fn q( ){ }\n",
    "",
]
# Left unformatted, each with a word of its reason; the last two crash or hang rustfmt.
REFUSED = {
    "fn broken( {": "line 1, column 13",
    "let x = 1;\nx": "expected item",
    "mod elsewhere;\nfn g(){}": "another file",
    '#[path = "/etc/passwd"]\nmod x;': "line 2, column 1: couldn't read",
    f"fn deep() {{ {'(' * 3000}{')' * 3000} }}": "rustfmt failed",
    '#[path = "/dev/zero"]\nmod x;\nfn g(){}': "",
}


@pytest.fixture(scope="module")
def formatter():
    return RustFormatter(Bubblewrap(), Limits())


def by_rustfmt(source, directory):
    """Return a file formatted by plain rustfmt."""
    file = directory / "own.rs"
    file.write_text(source)
    (directory / "rustfmt.toml").write_text("")
    command = ["rustfmt", "--edition", "2021", "--config-path", directory / "rustfmt.toml", file]
    assert subprocess.run(command, check=False).returncode == 0
    return file.read_text()


def rust(response, prompt="p"):
    return TrainingPair(prompt=prompt, response=response, language="rust")


def do(work, step, rows, **nodes):
    """Run a step under a command that names a sandbox."""
    files = [work.file(f"{len(list(work.path.glob('out-*')))}.jsonl", rows)]
    if step is not canonical:
        return work.do(step, files, **nodes)
    work.out = work.path / f"out-{len(list(work.path.glob('out-*')))}"
    work.out.mkdir()
    given = StepInput(
        files=tuple(files),
        directory=work.out,
        scratch=work.path,
        config=CorpusConfig(**nodes),
        run=SimpleNamespace(sandbox=BubblewrapSandbox()),
    )
    return step(given)


def test_many_sources_of_one_call_are_as_rustfmt_makes_each(formatter, tmp_path):
    """A batch equals separate calls; sources that rustfmt refuses stay, with the place."""
    mixed = [one for pair in zip(SOURCES, REFUSED, strict=True) for one in pair]
    found = dict(zip(mixed, formatter.formatted(mixed), strict=True))
    for source in SOURCES:
        assert found[source].problem is None
        assert found[source].text.strip() == by_rustfmt(source, tmp_path).strip()
    for source, reason in REFUSED.items():
        assert found[source].text == source
        assert found[source].problem is not None
        assert reason in found[source].problem


def test_source_looks_like_no_other_of_its_call(formatter):
    """A file header in a comment does not start a file, and no source can name another."""
    same = "fn a(){}\n// /tmp/program/0001.rs:\n\nfn b(){}"
    first, second = formatter.formatted([same, '#[path = "0000.rs"]\nmod x;'])
    assert first.problem is None
    assert first.text.count("fn ") == 2
    assert second.problem is not None


def test_source_does_not_bring_another_files_text_into_the_rows(tmp_path):
    """Outside the sandbox rustfmt also prints files of `mod` items; these must not leak."""
    secret = tmp_path / "secret.rs"
    secret.write_text("fn  secret( ){}\n")
    source = f'#[path = "{secret}"]\nmod x;\nfn g(){{}}'
    found = RustFormatter(Unsafe(), Limits()).formatted([UNTIDY, source, UNTIDY])
    assert [one.text.strip() for one in found] == [TIDY, f"{source[:-8]}fn g() {{}}", TIDY]
    assert secret.read_text() == "fn  secret( ){}\n"


def test_step_formats_the_code_of_every_answer(work):
    """Fenced code, whole answers and earlier turns are formatted; other text stays."""
    fenced = f"Here:\n\n```rust\n{UNTIDY}```\n\n```text\nfn  no( )\n```\nDone  ."
    rows = [
        rust(UNTIDY),
        rust(fenced),
        dataclasses.replace(rust(UNTIDY), history=(("q", UNTIDY),)),
        TrainingPair(prompt="p", response="x  =  1", language="python"),
        TrainingPair(prompt="p", response="fn  f( ){}"),
    ]
    result = do(work, canonical, rows)
    first, second, third, *others = work.lines("rows.jsonl")
    assert first["response"] == TIDY
    assert second["response"] == fenced.replace(UNTIDY, f"{TIDY}\n")
    assert [turn["content"] for turn in third["messages"]] == ["q", TIDY, "p", TIDY]
    assert [one["response"] for one in others] == ["x  =  1", "fn  f( ){}"]
    assert result.facts["formatted"] == 3
    assert result.facts["other_language"] == 2
    assert result.facts["rustfmt"].startswith("rustfmt ")
    assert work.lines("unformatted.jsonl") == []


def test_formatting_hides_no_duplicate(work):
    """Two layouts of one function are two rows before the step and duplicates after it."""
    rows = [rust(TIDY), rust(UNTIDY)]
    assert do(work, dedupe, rows, dedupe=EXACT).rows_out == 2
    do(work, canonical, rows)
    made = [rust(one["response"]) for one in work.lines("rows.jsonl")]
    assert do(work, dedupe, made, dedupe=EXACT).rows_out == 1


def test_formatting_hides_no_copy_of_a_benchmark():
    """The words of a Rust task are found whatever the layout between them."""
    index = OverlapIndex([("task", TIDY), ("short", "fn f(x: i32) -> i32 { x }")])
    for text in (UNTIDY, "fn  f(x:i32)->i32{x}"):
        (found,) = index.overlaps(texts_of(rust(text)))
        assert found.share == 1


@pytest.mark.parametrize(("policy", "left"), [(OnUnformatted.keep, 2), (OnUnformatted.drop, 1)])
def test_what_rustfmt_refuses_is_listed(work, policy, left):
    """Refused rows are kept or dropped, depending on the setting."""
    rows = [rust("fn broken( {"), rust(UNTIDY)]
    result = do(work, canonical, rows, canonical=CanonicalConfig(on_bad_row=policy))
    assert result.rows_out == left
    assert result.dropped == ({} if left == 2 else {"not formatted": 1})
    (listed,) = work.lines("unformatted.jsonl")
    assert listed["row"] == rows[0].id
    assert "line 1, column 13" in listed["problem"]
    assert listed["place"].endswith(".jsonl:1")
    kept = [row["response"] for row in work.lines("rows.jsonl")]
    assert kept == (["fn broken( {", TIDY] if left == 2 else [TIDY])


def test_what_rustfmt_refuses_can_be_an_error(work):
    """All refused rows are reported at once, each with its place."""
    policy = CanonicalConfig(on_bad_row=OnUnformatted.error)
    with pytest.raises(Problems, match=r"(?s)jsonl:1: rustfmt.*jsonl:2: rustfmt.*keep or drop"):
        do(work, canonical, [rust("fn broken( {"), rust("fn ( {")], canonical=policy)


def test_missing_rustfmt_is_an_error_of_the_environment(monkeypatch):
    """The error exits with code 3 and says how to install rustfmt."""
    monkeypatch.setattr(
        "mens_exp.corpus.rust.find_rust",
        lambda: SimpleNamespace(sysroot="/nowhere", rustc="rustc"),
    )
    with pytest.raises(SetupError, match="rustup component add rustfmt") as caught:
        RustFormatter(Bubblewrap(), Limits())
    assert caught.value.exit_code == 3


def test_command_makes_a_corpus_in_canonical_form(tmp_path, capsys):
    """In task=corpus the step is refused without a sandbox or after dedupe."""
    from mens_exp import cli

    rows = tmp_path / "in.jsonl"
    lines = [{"prompt": "p", "response": text, "language": "rust"} for text in (TIDY, UNTIDY)]
    rows.write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = ["task=corpus", f"corpus.input={rows}", f"corpus.output={tmp_path / 'corpus'}"]
    assert cli.main([*command, "corpus.steps=[canonical,dedupe]", "sandbox=none"]) == 2
    assert "nothing is formatted without a sandbox" in capsys.readouterr().err
    assert cli.main([*command, "corpus.steps=[dedupe,canonical]"]) == 2
    assert "canonical cannot come after dedupe" in capsys.readouterr().err
    assert cli.main([*command, "corpus.steps=[validate,canonical,dedupe]"]) == 0
    (row,) = (tmp_path / "corpus/03-dedupe/rows.jsonl").read_text().splitlines()
    assert json.loads(row)["response"] == TIDY
