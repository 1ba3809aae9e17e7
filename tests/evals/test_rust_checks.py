from __future__ import annotations

import json
import shutil

import pytest

from mens_exp.errors import DataError, Problems, SetupError
from mens_exp.evals.grading import Verdict
from mens_exp.evals.rust_suite import assemble_rust, check_rust, read_rust_tasks
from mens_exp.sandbox.program import Limits, find_rust, least_rust_limits

STOP = ["\n}"]
DOUBLE = {
    "name": "HumanEval_0_double",
    "prompt": "/// Twice a number.\nfn double(x: isize) -> isize {\n",
    "tests": "}\n\nfn main() {\n    let candidate = double;\n    assert_eq!(candidate(2), 4);\n"
    "    assert_eq!(candidate(-1), -2);\n}\n\n",
    "stop_tokens": STOP,
    "language": "rs",
}
COUNT = {
    "name": "HumanEval_1_count",
    "prompt": "use std::collections::HashMap;\n\n/// How often each letter occurs.\n"
    '/// >>> count("aab")\nfn count(text: String) -> HashMap<char, isize> {\n',
    "tests": "}\n\nfn main() {\n    let candidate = count;\n"
    "    assert_eq!(candidate(String::from(\"aab\")), HashMap::from([('a', 2), ('b', 1)]));\n}\n",
    "stop_tokens": STOP,
}
BRACE = {
    "name": "HumanEval_2_brace",
    "prompt": "fn brace() -> String {\n",
    "tests": "}\n\nfn main() {\n    let candidate = brace;\n"
    '    assert_eq!(candidate(), String::from("{}}"));\n}\n',
    "stop_tokens": STOP,
}
COUNT_BODY = (
    "    let mut found = HashMap::new();\n    for letter in text.chars() {\n"
    "        *found.entry(letter).or_insert(0) += 1;\n    }\n    found\n"
)
WHOLE = "fn double(x: isize) -> isize {\n    x * 2\n}\n"
LIMITS = least_rust_limits(Limits())


def stored(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return path


@pytest.fixture(scope="module")
def rust():
    if shutil.which("rustc") is None:
        pytest.skip("rustc is missing: https://rustup.rs, or apt-get install rustc")
    return find_rust()


@pytest.fixture
def tasks(tmp_path):
    return read_rust_tasks(stored(tmp_path / "tasks.jsonl", DOUBLE, COUNT, BRACE))


def test_task_is_read(tasks):
    """The entry point is the function that the prompt leaves open."""
    assert [task.entry_point for task in tasks] == ["double", "count", "brace"]
    assert tasks[0].id == "HumanEval_0_double"
    assert tasks[0].tests.startswith("\n\nfn main() {")
    assert tasks[0].stop_tokens == ("\n}",)


@pytest.mark.parametrize(
    "row",
    [
        {"name": "x"},
        [1],
        {**DOUBLE, "tests": "fn main() {}"},
        {**DOUBLE, "tests": "}\n"},
        {**DOUBLE, "prompt": "nothing"},
        {**DOUBLE, "stop_tokens": "x"},
    ],
)
def test_line_that_is_no_task_is_refused(tmp_path, row):
    """All bad lines are reported at once, each with file and line."""
    path = stored(tmp_path / "tasks.jsonl", DOUBLE, row, row)
    with pytest.raises(Problems) as caught:
        read_rust_tasks(path)
    assert len(caught.value.problems) == 2
    assert f"{path}:2" in str(caught.value)


def test_file_without_tasks_is_refused(tmp_path):
    """An empty file is refused, since it measures nothing."""
    with pytest.raises(DataError, match="no task"):
        read_rust_tasks(stored(tmp_path / "tasks.jsonl"))


@pytest.mark.parametrize("tools", [[], ["rustc"]])
def test_missing_compiler_is_named(monkeypatch, tmp_path, tools):
    """The error exits with code 3, also if rustc has no linker."""
    for name in tools:
        (tmp_path / name).symlink_to("/bin/true")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SetupError, match=f"no {'cc' if tools else 'rustc'}") as caught:
        find_rust()
    assert "rustup.rs" in str(caught.value)


ACCEPTED = {
    "stopped at the brace": "    x * 2",
    "closed": "    x * 2\n}\n",
    "nested braces": "    if x > 0 {\n        return x + x;\n    }\n    x * 2\n}\n\nThat is all.",
    "braces in texts": '    let _s = "}"; let _c = \'}\'; let _r = r#"}"}"#; // }\n    x * 2\n}\n',
    "lifetimes": "    fn same<'a>(x: &'a isize) -> &'a isize { x }\n    *same(&x) * 2\n}\n",
    "helper below": "    twice(x)\n}\n\nfn twice(x: isize) -> isize {\n    x + x\n}\n",
    "main below": '    x * 2\n}\n\nfn main() {\n    println!("{}", double(2));\n}\n',
    "whole": WHOLE,
    "whole, public, documented": f"/// Twice.\n#[inline]\npub {WHOLE}",
    "whole in a conversation": f"Sure!\n\n```rust\n{WHOLE}```\n\nIt multiplies.",
    "whole, and a main in the fence": f"```rust\n{WHOLE}\nfn main() {{\n    double(1);\n}}\n```\n",
    "whole, helper above": f"const TWO: isize = 2;\n\n{WHOLE.replace('* 2', '* TWO')}",
    "whole, macro above": "macro_rules! twice {\n    ($x:expr) => { $x + $x };\n}\n\n"
    "fn double(x: isize) -> isize {\n    twice!(x)\n}\n",
    "whole, macro in parentheses above": "macro_rules! twice (($x:expr) => { $x + $x };);\n"
    "fn double(x: isize) -> isize {\n    twice!(x)\n}\n",
    "whole, macro above in a conversation": "Sure! (It is easy.)\n\nmacro_rules! twice {\n"
    "    ($x:expr) => { $x + $x };\n}\nfn double(x: isize) -> isize {\n    twice!(x)\n}\nDone!\n",
    "macro below": "    twice(x)\n}\n\nmacro_rules! define {\n    ($name:ident) => {\n"
    "        fn $name(x: isize) -> isize { x + x }\n    };\n}\n\ndefine!(twice);\n",
    "macro called above": "thread_local! {\n    static TWO: isize = const { 2 };\n}\n"
    f"{WHOLE.replace('x * 2', 'TWO.with(|two| two * x)')}",
    "imports in braces above": "use std::collections::{HashMap, HashSet};\n\n"
    "struct Two { n: isize }\nconst TWO: Two = Two { n: 2 };\n"
    f"{WHOLE.replace('x * 2', 'let _: (HashMap<u8, u8>, HashSet<u8>); x * TWO.n')}",
    "extern block above": 'extern "C" {\n    fn abs(x: i32) -> i32;\n}\n'
    f"{WHOLE.replace('x * 2', 'x * unsafe { abs(-2) } as isize')}",
    "array above": "const NUMBERS: [isize; 2] = [1, 2];\n"
    "fn second(numbers: [isize; 2]) -> isize {\n    numbers[1]\n}\n"
    f"{WHOLE.replace('* 2', '* second(NUMBERS)')}",
    "array in the signature": "fn double(x: isize) -> isize {\n    sum([x; 2])\n}\n"
    "fn sum(numbers: [isize; 2]) -> isize {\n    numbers.iter().sum()\n}\n",
    "whole between sentences": f"Here you are:\n\n{WHOLE}\nIt multiplies.\n",
    "prompt repeated": f"{DOUBLE['prompt']}    x * 2\n}}\n",
    "body in a fence": "```rust\n    x * 2\n}\n```",
    "corrected": f"```rust\n{WHOLE.replace('* 2', '* 3')}```\nNo:\n```rust\n{WHOLE}```",
    "body corrected": "```rust\n    x * 3\n}\n```\nNo:\n```rust\n    x * 2\n}\n```",
    "body, usage below": "```rust\n    x * 2\n}\n```\nUse:\n```rust\ndouble(1);\n```",
    "closing fence": "    x * 2\n}\n```\nIt multiplies.",
}


def test_every_style_passes(sandbox, rust, tasks):
    """Each style is recognized, compiled and run."""
    found = check_rust(sandbox, rust, tasks[:1] * len(ACCEPTED), list(ACCEPTED.values()), LIMITS)
    wrong = {n: one for n, one in zip(ACCEPTED, found, strict=True) if one.verdict != "passed"}
    assert wrong == {}


VERDICTS = {
    "    x * 3": (Verdict.ASSERTION, "left == right"),  # the message differs before Rust 1.73
    "    todo!()": (Verdict.EXCEPTION, "not yet implemented"),
    "    let none: Option<isize> = None;\n    none.unwrap()": (Verdict.EXCEPTION, "unwrap"),
    "    x *": (Verdict.COMPILE_ERROR, "error: "),
    "    y * 2": (Verdict.COMPILE_ERROR, "cannot find value `y`"),
    "": (Verdict.COMPILE_ERROR, "mismatched types"),
    "    std::process::exit(0)": (Verdict.EXITED, "exit code 0"),
    '    eprintln!("passed");\n    std::process::exit(0)': (Verdict.EXITED, "exit code 0"),
    "    std::process::abort()": (Verdict.CRASHED, ""),
    "    let v: Vec<u8> = vec![1; 1 << 40];\n    v.len() as isize": (Verdict.MEMORY, ""),
}


def test_verdict_says_what_happened(sandbox, rust, tasks):
    """The detail is the compiler's message, the panic's, or the limit that ended the program."""
    found = check_rust(sandbox, rust, tasks[:1] * len(VERDICTS), list(VERDICTS), LIMITS)
    for (verdict, detail), one in zip(VERDICTS.values(), found, strict=True):
        assert (one.verdict, detail in (one.detail or "")) == (verdict, True), one


def test_endless_program_and_endless_wait_end(sandbox, rust, tasks):
    """Time limits apply to compiled programs too."""
    limits = Limits(memory_mib=1024, cpu_s=2, wall_s=20, processes=64, file_mib=64)
    (found,) = check_rust(sandbox, rust, tasks[:1], ["    loop {}"], limits)
    assert found.verdict is Verdict.TIMEOUT


def test_imports_and_braces_of_other_tasks(sandbox, rust, tasks):
    """A whole function may use the prompt's imports; a brace in a string is not a block's end."""
    whole = f"fn count(text: String) -> HashMap<char, isize> {{\n{COUNT_BODY}}}\n"
    chosen = [tasks[1], tasks[1], tasks[2], tasks[2]]
    texts = [COUNT_BODY, whole, '    String::from("{}}")\n}\n', "    String::new()\n}\n"]
    found = check_rust(sandbox, rust, chosen, texts, LIMITS)
    assert [one.verdict for one in found] == [
        *(Verdict.PASSED, Verdict.PASSED, Verdict.PASSED),
        Verdict.ASSERTION,
    ]


def test_main_of_the_completion_is_left_out():
    """The completion's `main` is removed, since the tests have one; other items are kept."""
    text = f"{WHOLE}\nfn main() {{\n    if true {{ }}\n}}\n\nfn more() {{}}\n"
    items = assemble_rust(text, prompt=str(DOUBLE["prompt"]), entry_point="double")
    assert "main" not in items
    assert "fn more() {}" in items
    assert items.count("fn double") == 1


def test_limits_are_never_lowered():
    """Limits are raised to what a compiler needs; higher ones are kept."""
    assert least_rust_limits(Limits(wall_s=99, output_kib=3)) == Limits(
        memory_mib=1024, cpu_s=30, wall_s=99, processes=64, output_kib=3, file_mib=64
    )
