"""Clippy in suite=rust: its findings, and answers that try to suppress them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from dataclasses import replace

import pytest

from mens_exp import cli
from mens_exp.config.suite import RustSuite
from mens_exp.errors import SetupError
from mens_exp.evals.rust_suite import rust_suite
from mens_exp.evals.suite import Answer
from mens_exp.sandbox.program import find_clippy, find_rust

# Clippy has two findings in the documentation, which are not the answer's fault.
TRIPLE = {
    "name": "Own_0_triple",
    "prompt": "/// Three times a number:\n/// - one\n/// two.\nfn triple(x: isize) -> isize {\n",
    "tests": "}\n\nfn main() {\n    let candidate = triple;\n    if true == true { }\n"
    "    assert_eq!(candidate(2), 6);\n}\n",
    "stop_tokens": ["\n}"],
}
CLEAN = "    x * 3\n"
DIRTY = "    return x * 3;\n"
WHOLE = "fn triple(x: isize) -> isize {\n    return x * 3;\n}\n"
TIDY = f"fn triple(x: isize) -> isize {{\n{CLEAN}}}\n"
DOCUMENTED = f"/// Three times a number:\n/// - one\n/// two.\n{TIDY}"

# Each of these compiles, passes the tests and has a needless `return`.
ATTACKS = {
    "allow on the crate": f"#![allow(warnings, clippy::all)]\n{WHOLE}",
    "allow on the function": f"#[allow(clippy::needless_return)]\n{WHOLE}",
    "allow of the old spelling": f"#[allow(clippy::style)]\n{WHOLE}",
    "allow in the body": f"    #![allow(warnings)]\n{DIRTY}",
    "allow of everything unused": f"    #![allow(unused)]\n    let mut y = 1;\n{DIRTY}",
    "expect": f"#[expect(clippy::needless_return)]\n{WHOLE}",
    "another program for clippy": f"#[cfg(not(clippy))]\n{WHOLE}\n#[cfg(clippy)]\n{TIDY}",
    "another program by attribute": f"#[cfg_attr(clippy, allow(clippy::all))]\n{WHOLE}",
    "within a macro": "    macro_rules! body { ($x:expr) => { { return $x * 3; } } }\n"
    "    body!(x)\n",
    "clippy hidden in a macro": "    macro_rules! pick { ($a:ident :: $b:ident) => {\n"
    "        #[cfg(not($a))] fn inner(x: isize) -> isize { return x * 3; }\n"
    "        #[cfg($a)] fn inner(x: isize) -> isize { x * 3 }\n"
    "    } }\n    pick!(clippy::all);\n    inner(x)\n",
    "derived": "struct S;\n#[automatically_derived]\nimpl S {\n    fn f(x: isize) -> isize {\n"
    "        return x * 3;\n    }\n}\nfn triple(x: isize) -> isize {\n    S::f(x)\n}\n",
    "lines that rustc does not count": f"    // \x0b \x0c \u2028 \x85\n{DIRTY}",
}


@pytest.fixture(scope="module")
def tools():
    for name, package in (("rustc", "rustc"), ("clippy-driver", "rust-clippy")):
        if shutil.which(name) is None:
            pytest.skip(f"{name} is missing: https://rustup.rs, or apt-get install {package}")
    toolchain = find_rust()
    return toolchain, find_clippy(toolchain)


@pytest.fixture
def suite(tmp_path, tools):
    path = tmp_path / "tasks.jsonl"
    path.write_text(json.dumps(TRIPLE) + "\n")
    return rust_suite(RustSuite(path=str(path), clippy=True))


def judged(suite, runner, *texts):
    (item,) = suite.items
    return suite.judge([Answer(item=item, text=text) for text in texts], runner)


def test_findings_of_an_answer_are_counted_and_named(suite, runner):
    """Findings in the task's own lines and tests are not counted."""
    found = judged(
        *(suite, runner, CLEAN, DOCUMENTED, DIRTY, WHOLE),
        "    let y = 1;\n    if x == 0 { return 0; }\n    return x * 3;\n",
        "    return x * 2;\n",
        "    x * y\n",
    )
    assert [one.lint_clean for one in found] == [True, True, *[False] * 5]
    assert [one.success for one in found] == [True] * 5 + [False] * 2
    assert [one.lints for one in found] == [
        *((), ()),
        *[("clippy::needless_return",)] * 2,
        ("unused_variables", "clippy::needless_return"),
        ("clippy::needless_return",),
        None,
    ]
    assert found[-1].unknown["lints"] == "it does not compile"


@pytest.mark.parametrize("attack", ATTACKS)
def test_answer_cannot_turn_the_lints_off(suite, runner, attack):
    """An answer that suppresses the lints passes its tests but is not clean."""
    (one,) = judged(suite, runner, ATTACKS[attack])
    assert one.success is True, one.errors
    assert one.lint_clean is False
    assert one.lints


def test_attacks_do_silence_plain_clippy(tools, tmp_path):
    """Control: the attacks do silence plain `clippy-driver`."""
    _, clippy = tools
    silent = []
    for name in ("allow on the crate", "another program for clippy", "clippy hidden in a macro"):
        source = tmp_path / "a.rs"
        text = ATTACKS[name]
        whole = text if "fn triple" in text else f"fn triple(x: isize) -> isize {{\n{text}}}\n"
        source.write_text(f"{whole}\nfn main() {{ triple(1); }}\n")
        done = subprocess.run(
            [clippy.driver, "--edition", "2021", "--emit", "metadata", str(source)],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            check=False,
        )
        assert done.returncode == 0
        silent.append("needless_return" not in done.stderr)
    assert silent == [True] * 3


def test_plain_clippy_agrees(suite, runner, tools, tmp_path):
    """The oracle is the warning count of `clippy-driver` on the answer alone."""
    _, clippy = tools
    body = "    let mut v: Vec<isize> = Vec::new();\n    if v.len() == 0 {}\n    return x * 3;\n"
    source = tmp_path / "a.rs"
    source.write_text(f"fn triple(x: isize) -> isize {{\n{body}}}\nfn main() {{ triple(1); }}\n")
    done = subprocess.run(
        [clippy.driver, "--edition", "2021", "--emit", "metadata", str(source)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
    )
    (one,) = judged(suite, runner, body)
    assert one.lints is not None
    assert f"{len(one.lints)} warnings emitted" in done.stderr


def test_clippy_changes_no_verdict(suite, runner):
    """Compile errors under the answer's own lint levels remain compile errors."""
    text = "    #![deny(unused)]\n    let y = 1;\n    x * 3\n"
    with_lints = judged(suite, runner, CLEAN, text)
    without = judged(replace(suite, clippy=None), runner, CLEAN, text)
    assert [one.outcome for one in with_lints] == [one.outcome for one in without]
    assert [one.outcome for one in without] == ["passed", "compile_error"]
    assert all(one.lint_clean is one.lints is None for one in without)


def test_version_and_lints_enter_the_digest(suite, tools):
    """Linting and the version of Clippy change the suite's digest."""
    _, clippy = tools
    newer = replace(suite, clippy=replace(clippy, version="clippy 9"))
    assert len({one.digest for one in (suite, newer, replace(suite, clippy=None))}) == 3
    assert suite.tools["clippy"].startswith("clippy ")
    assert suite.tools["rustc"].startswith("rustc ")


def test_suite_tests_its_linter(suite, runner, tmp_path):
    """The self-test fails if Clippy reports nothing, and then nothing is scored."""
    fine = suite.self_test(runner)
    assert fine is not None
    assert fine.problem is None
    assert fine.references["lints"] == 1
    silent = replace(suite, clippy=replace(suite.clippy, driver="/bin/true"))
    found = silent.self_test(runner)
    assert found is not None
    assert "clippy does not find clippy::needless_return" in (found.problem or "")


def test_missing_clippy_is_an_error_of_the_environment(tools, tmp_path):
    """The error exits with code 3 and says how to install it; without lints none is needed."""
    toolchain, _ = tools
    with pytest.raises(SetupError, match="rustup component add clippy") as caught:
        find_clippy(replace(toolchain, sysroot=str(tmp_path)))
    assert caught.value.exit_code == 3
    assert "rust-clippy" in str(caught.value)


def test_without_a_sandbox_nothing_is_linted(suite):
    """Without a sandbox the lints are null with a reason."""
    (one,) = suite.judge([Answer(item=suite.items[0], text=CLEAN)], None)
    assert one.lint_clean is one.lints is None
    assert "no sandbox" in one.unknown["lint_clean"]


def test_command_without_clippy_ends_with_exit_code_3(tmp_path, monkeypatch, capsys):
    """A toolchain without Clippy is reported before anything is loaded."""
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text(json.dumps(TRIPLE) + "\n")
    sysroot = tmp_path / "sysroot"
    (sysroot / "bin").mkdir(parents=True)
    for place in (tmp_path / "rustc", sysroot / "bin" / "rustc"):
        place.write_text(
            f"#!/bin/sh\ncase $1 in --print) echo {sysroot};; *) echo rustc 9;; esac\n"
        )
        place.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    command = ["task=evaluate", "path=base", "model=tiny_llama", "trainer=cpu", "suite=rust"]
    named = [f"suite.path={tasks}", "suite.clippy=true", f"hydra.run.dir={tmp_path / 'run'}"]
    assert cli.main([*command, *named]) == 3
    assert "rustup component add clippy" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
