from __future__ import annotations

import subprocess

import pytest

from mens_exp.config.corpus import ExtractConfig
from mens_exp.corpus.steps.extract import extract
from mens_exp.errors import DataError, Problems

PYTHON = '''"""A module."""


class Stack:
    """A stack of numbers."""

    def __init__(self):
        self.items = []

    def push(self, item):
        """Put a number on top."""
        self.items.append(item)
        return self


def double(x):
    """Return twice a number."""
    y = x + x
    return y


def bare(x):
    y = x
    return y
'''
RUST = """//! A crate.

/// Adds two numbers.
///
/// It wraps.
#[inline]
pub fn add(a: u8, b: u8) -> u8 {
    // wrapping
    let sum = a.wrapping_add(b);
    sum
}

/// A point.
#[derive(Clone)]
pub struct Point {
    pub x: i32,
    pub y: i32,
}

impl Point {
    /// Moves it.
    pub fn shift(&mut self, by: i32) -> &str {
        self.x += by;
        let told = "moved
  far";
        told
    }

    pub fn bare(&self) -> i32 {
        let x = self.x;
        x
    }
}

#[cfg(test)]
mod tests {
    /// Tests it.
    #[test]
    fn works() {
        let a = 1;
        assert!(a == 1);
    }
}
"""
MARKDOWN = """# Use

Call it like this:

```py
import stack
stack.Stack().push(1)
```

```
no language
at all
```

## Install ##

```bash
pip install stack
stack --version
```
"""


def git(path, *arguments):
    identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    done = subprocess.run(  # arguments are constants
        ["git", "-C", str(path), *identity, *arguments],  # git from PATH
        check=True,
        capture_output=True,
        text=True,
    )
    return done.stdout.strip()


def checkout(path):
    """Make a directory a git repository and return its first commit."""
    git(path, "init", "-q")
    git(path, "add", "-A")
    git(path, "commit", "-q", "-m", "first")
    return git(path, "rev-parse", "HEAD")


def test_python_gives_functions_methods_and_classes(work, tree):
    """Functions come in file order with language and group; undocumented ones are counted."""
    result = work.do(extract, [tree({"src/pkg/stack.py": PYTHON})])
    rows = work.lines("rows.jsonl")
    assert [row["prompt"].split("\n")[0] for row in rows] == [
        "Write the Python class `pkg.stack.Stack`.",
        "Write the method `push` of the Python class `pkg.stack.Stack`.",
        "Write the Python function `pkg.stack.double`.",
    ]
    assert {row["group"] for row in rows} == {"project::src/pkg/stack.py"}
    assert {(row["language"], row["category"]) for row in rows} == {("python", "project")}
    assert rows[0]["prompt"].endswith("```python\nclass Stack:\n```\n\nA stack of numbers.")
    assert '"""A stack' not in rows[0]["response"]
    assert '"""Put a number on top."""' in rows[0]["response"]
    assert rows[2]["response"] == "def double(x):\n    y = x + x\n    return y"
    assert (result.rows_in, result.rows_out) == (5, 3)
    assert result.dropped == {"undocumented": 2}  # __init__ and `bare`


def test_rust_gives_functions_methods_and_types(work, tree):
    """Attributes stay, doc comments move to the prompt, and strings keep their indentation."""
    result = work.do(extract, [tree({"src/geo/mod.rs": RUST})])
    rows = work.lines("rows.jsonl")
    assert [(row["prompt"], row["response"]) for row in rows] == [
        (
            (
                "Write the Rust function `crate::geo::add`.\n\n"
                "```rust\npub fn add(a: u8, b: u8) -> u8\n```\n\nAdds two numbers.\n\nIt wraps."
            ),
            (
                "#[inline]\npub fn add(a: u8, b: u8) -> u8 {\n    // wrapping\n"
                "    let sum = a.wrapping_add(b);\n    sum\n}"
            ),
        ),
        (
            (
                "Write the Rust struct `crate::geo::Point`.\n\n"
                "```rust\npub struct Point\n```\n\nA point."
            ),
            "#[derive(Clone)]\npub struct Point {\n    pub x: i32,\n    pub y: i32,\n}",
        ),
        (
            (
                "Write the method `shift` of the Rust type `crate::geo::Point`.\n\n"
                "```rust\npub fn shift(&mut self, by: i32) -> &str\n```\n\nMoves it."
            ),
            (
                "pub fn shift(&mut self, by: i32) -> &str {\n    self.x += by;\n"
                '    let told = "moved\n  far";\n    told\n}'
            ),
        ),
    ]
    assert {row["language"] for row in rows} == {"rust"}
    assert result.dropped == {"test": 1, "undocumented": 1}


def test_a_rust_file_that_does_not_parse_is_counted(work, tree):
    """That file gives no rows; the other files do."""
    result = work.do(extract, [tree({"a.rs": "fn (", "b.rs": RUST})])
    assert result.dropped["file_does_not_parse"] == 1
    assert result.rows_out == 3


def test_markdown_gives_blocks_with_what_leads_to_them(work, tree):
    """Heading and paragraph form the prompt; a block without a language is counted."""
    result = work.do(extract, [tree({"README.md": MARKDOWN})])
    assert [
        (row["prompt"], row["response"], row["language"]) for row in work.lines("rows.jsonl")
    ] == [
        ("Use\n\nCall it like this:", "import stack\nstack.Stack().push(1)", "python"),
        ("Install", "pip install stack\nstack --version", "bash"),
    ]
    assert result.dropped == {"block_without_language": 1}


def test_a_commit_is_read_and_the_work_tree_left_alone(work, tree):
    """Later changes and uncommitted files are not read, and nothing is written."""
    path = tree({"a.py": PYTHON, "b.rs": RUST})
    commit = checkout(path)
    (path / "a.py").write_text("broken(", "utf-8")
    (path / "c.py").write_text(PYTHON, "utf-8")
    (path / "b.rs").unlink()
    before = git(path, "status", "--porcelain")
    result = work.do(extract, [path], extract=ExtractConfig(commit=commit[:10]))
    groups = {row["group"] for row in work.lines("rows.jsonl")}
    assert groups == {"project::a.py", "project::b.rs"}
    assert result.facts["commits"] == {"project": commit}
    assert result.rows_out == 6
    assert git(path, "status", "--porcelain") == before


def test_a_directory_of_a_checkout_is_read_by_its_own_paths(work, tree):
    """Files of the commit outside that directory are not read."""
    path = tree({"inner/a.py": PYTHON, "b.rs": RUST})
    checkout(path)
    work.do(extract, [path / "inner"], extract=ExtractConfig(commit="HEAD"))
    assert {row["group"] for row in work.lines("rows.jsonl")} == {"inner::a.py"}


@pytest.mark.parametrize(
    ("commit", "made", "told"),
    [("HEAD", False, "not in a git checkout"), ("nowhere", True, "not have this commit")],
)
def test_a_commit_that_is_not_there_is_refused(work, tree, commit, made, told):
    """A directory without a repository and an unknown revision are refused."""
    path = tree({"a.py": PYTHON})
    if made:
        checkout(path)
    with pytest.raises(DataError, match=told):
        work.do(extract, [path], extract=ExtractConfig(commit=commit))


def test_two_projects_of_one_name_are_refused(work, tree):
    """Groups of the two projects would collide."""
    one, other = tree({"a.py": PYTHON}, "x/same"), tree({"a.py": PYTHON}, "y/same")
    with pytest.raises(DataError, match="two projects have the same name"):
        work.do(extract, [one, other])


def test_everything_wrong_with_the_input_is_told(work, tmp_path):
    """Each missing path is reported."""
    with pytest.raises(Problems, match=r"(?s)absent.*away"):
        work.do(extract, [tmp_path / "absent", tmp_path / "away"])


def test_other_languages_hidden_and_vendored_files_are_not_read(work, tree):
    """Only requested languages are read, and only the project's own files."""
    files = {"a.py": PYTHON, "b.rs": RUST, ".hidden/c.py": PYTHON, "vendor/d.py": PYTHON}
    result = work.do(extract, [tree(files)], extract=ExtractConfig(languages=["python"]))
    assert result.facts["files"] == {"python": 1}
