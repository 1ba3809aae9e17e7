"""Size and shape of the source tree, compared with an earlier commit.

    python benchmarks/structure.py --before 94c2f3d

The preamble of a module is all that comes before its first definition: docstring, imports and
`__all__`. tests/test_layers.py reads imports with the same functions.
"""

from __future__ import annotations

import ast
import functools
import io
import statistics
import subprocess
import tarfile
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import record

if TYPE_CHECKING:
    from collections.abc import Iterator

QUESTION = "How many files does a newcomer meet, and how are they connected?"
ROOT = Path(__file__).parents[1]
PACKAGE = "src/mens_exp"
SMALL = 120  # lines; a shorter module belongs in its only importer
LONG = 500  # lines; a longer module may hold several ideas
PLUGINS = "tests/plugins"
# Source files that the commits of these features touched at 94c2f3d; an objective, by reading.
_COST_BEFORE = {"quantizer": 29, "adapter": 20, "objective": 25}


@dataclass(frozen=True, kw_only=True)
class Module:
    """One source file: its lines, its syntax tree, and the package's modules that it imports."""

    lines: int
    preamble: int
    tree: ast.Module
    imports: set[str] = field(default_factory=set)


@functools.cache
def modules(root: Path) -> dict[str, Module]:
    """Read every module of a package by relative path; cached per process."""
    found = {}
    for path in sorted(root.rglob("*.py")):
        text = path.read_text("utf-8")
        tree = ast.parse(text)
        found[path.relative_to(root).as_posix()] = Module(
            lines=text.count("\n"), preamble=_preamble(tree), tree=tree
        )
    for module in found.values():
        for name in imported(module.tree):
            file = _file_of(name, found)
            if file is not None and found[file] is not module:
                module.imports.add(file)
    return found


@functools.cache
def imported(tree: ast.Module) -> tuple[str, ...]:
    """Return every dotted name that a module imports, at any nesting level."""
    return tuple(_imported(tree))


def _imported(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def importers(found: dict[str, Module]) -> dict[str, set[str]]:
    """Return the modules that import each module."""
    users: dict[str, set[str]] = {file: set() for file in found}
    for file, module in found.items():
        for other in module.imports:
            users[other].add(file)
    return users


def neighbour_only(found: dict[str, Module]) -> list[str]:
    """Return the small modules whose only importer is in the same package."""
    return sorted(
        file
        for file, users in importers(found).items()
        if found[file].lines < SMALL
        and [package(file)] == [package(user) for user in users]
        and not file.endswith("__init__.py")
    )


def circles(found: dict[str, Module]) -> list[list[str]]:
    """Return groups of modules that import each other, directly or through others.

    These are the strongly connected components with more than one member (Tarjan, 1972).
    """
    number: dict[str, int] = {}
    lowest: dict[str, int] = {}
    path: list[str] = []
    groups: list[list[str]] = []

    def visit(file: str) -> None:
        number[file] = lowest[file] = len(number)
        path.append(file)
        for other in sorted(found[file].imports):
            if other not in number:
                visit(other)
                lowest[file] = min(lowest[file], lowest[other])
            elif other in path:
                lowest[file] = min(lowest[file], number[other])
        if lowest[file] == number[file]:
            start = path.index(file)
            group = sorted(path[start:])
            del path[start:]
            if len(group) > 1:
                groups.append(group)

    for file in found:
        if file not in number:
            visit(file)
    return sorted(groups)


def package(file: str) -> str:
    """Return the package of a module; empty for the top level."""
    return file.split("/", maxsplit=1)[0] if "/" in file else ""


def main() -> None:
    """Measure the working tree and, as reference, an earlier commit."""
    parser = record.command_line(__file__, __doc__)
    parser.add_argument("--before", default="94c2f3d", metavar="COMMIT", help="the reference")
    given = record.begin(parser)
    now = measured(modules(ROOT / PACKAGE))
    with tempfile.TemporaryDirectory() as directory:
        # a clone without history, as in continuous integration, has no reference
        commit = None if given.smallest else given.before
        before = measured(modules(_checked_out(commit, Path(directory)))) if commit else now
    figures = [
        record.figure(name, value, unit, record.Better.LOWER, (f"at {commit}", before[name][0]))
        for name, (value, unit) in now.items()
    ]
    figures += [
        record.figure(
            f"files of a new {kind}",
            count,
            "files",
            record.Better.LOWER,
            (f"at {given.before}", _COST_BEFORE[kind]) if kind in _COST_BEFORE else None,
        )
        for kind, count in toys(ROOT / PLUGINS).items()
    ]
    record.finish(QUESTION, figures, given)


def measured(found: dict[str, Module]) -> dict[str, tuple[float, str]]:
    """Return each figure with its unit."""
    users = importers(found)
    sizes = [module.lines for module in found.values()]
    names = Counter(Path(file).name for file in found if not file.endswith("__init__.py"))
    return {
        "files": (len(found), "files"),
        "lines": (sum(sizes), "lines"),
        "median file": (statistics.median(sizes), "lines"),
        f"files over {LONG} lines": (sum(size > LONG for size in sizes), "files"),
        "preamble": (sum(module.preamble for module in found.values()), "lines"),
        "modules with one importer": (sum(len(one) == 1 for one in users.values()), "files"),
        "small modules that only a neighbour imports": (len(neighbour_only(found)), "files"),
        "import circles": (len(circles(found)), "circles"),
        "file names that occur more than once": (sum(n > 1 for n in names.values()), "names"),
    }


def toys(root: Path) -> dict[str, int]:
    """Return the number of files of each toy that tests add as an installed package, by kind."""
    kinds = sorted(path.parent for path in root.glob("*/toy_*.py"))
    return {
        kind.name: sum(path.is_file() and path.suffix != ".pyc" for path in kind.iterdir())
        for kind in kinds
    }


def _preamble(tree: ast.Module) -> int:
    last = 0
    for node in tree.body:
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        is_guard = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        is_exports = isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
        if not (is_text or is_guard or is_exports or isinstance(node, ast.Import | ast.ImportFrom)):
            break
        last = node.end_lineno or last
    return last


def _file_of(name: str, found: dict[str, Module]) -> str | None:
    """Return the package's module that contains a dotted name, if any."""
    parts = name.split(".")
    if parts[0] != "mens_exp":
        return None
    for length in range(len(parts), 1, -1):
        stem = "/".join(parts[1:length])
        for file in (f"{stem}.py", f"{stem}/__init__.py"):
            if file in found:
                return file
    return None


def _checked_out(commit: str, directory: Path) -> Path:
    """Write the package at a commit into a directory."""
    command = ["git", "archive", commit, PACKAGE]
    archive = subprocess.run(  # noqa: S603 (git's, with arguments of our own)
        command, cwd=ROOT, check=True, capture_output=True
    ).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        files.extractall(directory, filter="data")
    return directory / PACKAGE


if __name__ == "__main__":
    main()
