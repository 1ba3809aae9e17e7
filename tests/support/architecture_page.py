"""docs/reference/architecture.md, drawn from the imports of the source tree.

    PYTHONPATH=benchmarks python tests/support/architecture_page.py

It prints the page; `make docs` writes it.
"""

from __future__ import annotations

import ast
from pathlib import Path

import structure

SOURCE = Path(__file__).parents[2] / structure.PACKAGE
HEAD = """# Architecture

mens_exp is made of packages that import each other in one direction only. The drawing and the table
come from the import statements of the source tree, including those inside functions and for type
checkers. `make docs` draws this page; do not edit it. [CONTRIBUTING](../CONTRIBUTING.md) follows a
run through these packages and says which files a new feature touches.

An arrow points to a package that is imported. Where `a` imports `b` and `b` imports `c`, the arrow
from `a` to `c` is left out.
"""
TOP = "mens_exp"  # the modules that stand beside the packages, such as errors.py


def page(root: Path) -> str:
    """Return the page of a source tree."""
    found = structure.modules(root)
    uses = packages(found)
    layers = levels(uses)
    lines = [HEAD, "```mermaid", "flowchart TD"]
    for name in sorted(uses, key=lambda one: (-layers[one], one)):
        lines += [f"    {name} --> {other}" for other in sorted(direct(name, uses))]
    lines += ["```", "", "| Layer | Package | Contents |", "|---:|---|---|"]
    for name in sorted(uses, key=lambda one: (-layers[one], one)):
        contents = summary(found[f"{name}/__init__.py"].tree)
        lines.append(f"| {layers[name]} | `{name}` | {contents} |")
    return "\n".join(lines) + "\n"


def packages(found: dict[str, structure.Module]) -> dict[str, set[str]]:
    """Return the packages that each package imports; modules of the top level are left out."""
    uses: dict[str, set[str]] = {}
    for file, module in found.items():
        here = package_of(file)
        if here == TOP:
            continue
        theirs = {package_of(other) for other in module.imports}
        uses.setdefault(here, set()).update(theirs - {here, TOP})
    return uses


def levels(uses: dict[str, set[str]]) -> dict[str, int]:
    """Return the layer of each package: 1, or one more than the highest that it imports."""
    found: dict[str, int] = {}

    def level(name: str, above: tuple[str, ...] = ()) -> int:
        if name in above:
            raise ValueError(f"the packages import each other: {' -> '.join((*above, name))}")
        if name not in found:
            found[name] = 1 + max((level(one, (*above, name)) for one in uses[name]), default=0)
        return found[name]

    for name in uses:
        level(name)
    return found


def direct(name: str, uses: dict[str, set[str]]) -> set[str]:
    """Return the imported packages that no other imported package leads to."""
    return {
        one
        for one in uses[name]
        if not any(one in reached(other, uses) for other in uses[name] - {one})
    }


def reached(name: str, uses: dict[str, set[str]]) -> set[str]:
    """Return all packages that a package imports, directly or through others."""
    return uses[name].union(*(reached(one, uses) for one in uses[name]))


def package_of(file: str) -> str:
    """Return the package of a module."""
    return structure.package(file) or TOP


def summary(tree: ast.Module) -> str:
    """Return the first line of a module's docstring."""
    return (ast.get_docstring(tree) or "").partition("\n")[0]


if __name__ == "__main__":
    print(page(SOURCE), end="")
