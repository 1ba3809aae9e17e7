"""docs/reference/architecture.md and its drawing, made from the imports of the source tree.

    PYTHONPATH=benchmarks python tests/support/architecture_page.py docs/reference

It writes architecture.md and architecture.svg into that directory; `make docs` calls it.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import structure

SOURCE = Path(__file__).parents[2] / structure.PACKAGE
HEAD = """# Architecture

mens_exp is made of packages that import each other in one direction only. The drawing and the table
come from the import statements of the source tree, including those inside functions and for type
checkers. `make docs` draws this page; do not edit it. `CONTRIBUTING.md` follows a run through these
packages and says which files a new feature touches.

A line leads down to a package that is imported. If `a` imports `b` and `b` imports `c`, the line
from `a` to `c` is left out.

![The packages by layer](architecture.svg)
"""
ROW, COLUMN, BOX = 62, 132, (112, 30)  # pixels
TEXT = 'text-anchor="middle" font-family="system-ui, sans-serif"'
TOP = "mens_exp"  # top-level modules beside the packages, such as errors.py


def page(root: Path) -> str:
    """Return the page of a source tree."""
    found = structure.modules(root)
    uses = packages(found)
    layers = levels(uses)
    lines = [HEAD, "| Layer | Package | Contents | Imports |", "|---:|---|---|---|"]
    for name in sorted(uses, key=lambda one: (-layers[one], one)):
        contents = summary(found[f"{name}/__init__.py"].tree)
        imports = ", ".join(f"`{other}`" for other in sorted(direct(name, uses)))
        lines.append(f"| {layers[name]} | `{name}` | {contents} | {imports} |")
    return "\n".join(lines) + "\n"


def drawing(root: Path) -> str:
    """Return the drawing of a source tree, with a row per layer and a box per package."""
    uses = packages(structure.modules(root))
    layers = levels(uses)
    rows = [sorted(name for name in uses if layers[name] == one) for one in set(layers.values())]
    width, height = COLUMN * max(map(len, rows)), ROW * len(rows)
    place = {
        name: (width / 2 + COLUMN * (index - (len(row) - 1) / 2), height - ROW * (level + 0.5))
        for level, row in enumerate(rows)
        for index, name in enumerate(row)
    }
    shape = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {shape} role="img" font-size="13">',
        "<title>The packages by layer, and their imports</title>",
        f'<rect width="{width}" height="{height}" fill="#fbfbf9"/>',
    ]
    for name in sorted(uses):
        x, y = place[name]
        for other in sorted(direct(name, uses)):
            to_x, to_y = place[other]
            ends = f"M{x:g} {y + BOX[1] / 2:g}L{to_x:g} {to_y - BOX[1] / 2:g}"
            lines.append(f'<path d="{ends}" stroke="#8a8f8c" fill="none"/>')
    for name in sorted(uses):
        x, y = place[name]
        corner = f'x="{x - BOX[0] / 2:g}" y="{y - BOX[1] / 2:g}"'
        size = f'width="{BOX[0]}" height="{BOX[1]}" rx="6" fill="#e6f2f0" stroke="#0f766e"'
        lines += [
            f"<rect {corner} {size}/>",
            f'<text x="{x:g}" y="{y + 4.5:g}" {TEXT}>{name}</text>',
        ]
    return "\n".join([*lines, "</svg>"]) + "\n"


def packages(found: dict[str, structure.Module]) -> dict[str, set[str]]:
    """Return the packages that each package imports; top-level modules are left out."""
    uses: dict[str, set[str]] = {}
    for file, module in found.items():
        here = package_of(file)
        if here == TOP:
            continue
        theirs = {package_of(other) for other in module.imports}
        uses.setdefault(here, set()).update(theirs - {here, TOP})
    return uses


def levels(uses: dict[str, set[str]]) -> dict[str, int]:
    """Return the layer of each package: 1, or one above the highest it imports."""
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
    """Return the imported packages that no other imported package imports in turn."""
    return {
        one
        for one in uses[name]
        if not any(one in reached(other, uses) for other in uses[name] - {one})
    }


def reached(name: str, uses: dict[str, set[str]]) -> set[str]:
    """Return all packages that a package imports, directly or indirectly."""
    return uses[name].union(*(reached(one, uses) for one in uses[name]))


def package_of(file: str) -> str:
    """Return the package of a module."""
    return structure.package(file) or TOP


def summary(tree: ast.Module) -> str:
    """Return the first line of a module's docstring."""
    return (ast.get_docstring(tree) or "").partition("\n")[0]


if __name__ == "__main__":
    directory = Path(sys.argv[1])
    (directory / "architecture.md").write_text(page(SOURCE), encoding="utf-8")
    (directory / "architecture.svg").write_text(drawing(SOURCE), encoding="utf-8")
