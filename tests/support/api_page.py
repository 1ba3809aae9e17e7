"""Print docs/reference/python.md, made of the docstrings of `mens_exp.api` and of a notebook.

    python tests/support/api_page.py

The notebook is one that the tests execute; `make docs` writes the page.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mens_exp import api

if TYPE_CHECKING:
    from collections.abc import Iterator

NOTEBOOK = Path(__file__).parents[2] / "notebooks" / "04-train-and-compare.ipynb"
HEAD = """# The Python API

`from mens_exp import compose, plan, train, evaluate, compare, load_run`. Each function takes
overrides as texts, spelled as on the command line, and runs the code that the command line runs: a
run made here is the same to the bit, has the same record, and either side can continue or compare
what the other made. `import mens_exp` itself loads nothing.

- A mistake raises `mens_exp.MensError`, all problems of a call together (`error.problems`). Nothing
  calls `sys.exit`.
- Ctrl-C closes the record of a run as cancelled and raises `KeyboardInterrupt`; `train(resume=…)`
  continues the run.
- Several runs can follow each other in one process. They share its peak memory: for that figure, or
  to train in parallel, start a sweep (`-m`), whose jobs have processes of their own.
- Objects draw themselves in a notebook, and training shows a bar there.
- The package is typed (`py.typed`).

`notebooks/04-train-and-compare.ipynb` is the following code, executed by the tests:
"""
SECTIONS = {"Args": "Arguments", "Returns": "Returns", "Raises": "Raises", "Yields": "Yields"}


def page() -> str:
    """Return the page."""
    lines = [HEAD, "```python", *code(), "```", ""]
    functions = [name for name in vars(api) if name in api.__all__ and name.islower()]
    lines += ["## Functions", ""]
    for name in functions:
        lines += entry(f"### `{name}`", getattr(api, name))
    lines += ["## Objects", ""]
    for name in sorted(set(api.__all__) - set(functions)):
        lines += of_class(getattr(api, name))
    return "\n".join(lines).rstrip() + "\n"


def code() -> Iterator[str]:
    """Yield the lines of the notebook's code cells, an empty line between cells."""
    cells = json.loads(NOTEBOOK.read_text("utf-8"))["cells"]
    texts = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    yield from "\n\n".join(texts).splitlines()


def of_class(kind: type) -> Iterator[str]:
    """Yield the entry of a class: its summary, attributes, properties and methods."""
    yield from described(f"### `{kind.__name__}`", inspect.getdoc(kind) or "")
    for name, member in vars(kind).items():
        if name.startswith("_") or name in {one.name for one in dataclasses.fields(kind)}:
            continue
        if isinstance(member, property):
            yield from described(f"#### `{kind.__name__}.{name}`", inspect.getdoc(member) or "")
        elif inspect.isfunction(member):
            yield from entry(f"#### `{kind.__name__}.{name}`", member)


def entry(title: str, function: Any) -> Iterator[str]:
    """Yield the entry of a function: its signature and docstring."""
    signature = re.sub(r"\(self(, )?", "(", str(inspect.signature(function)))
    signature = re.sub(r"(: |-> )'([^']*)'", r"\1\2", signature)
    described_lines = described(title, inspect.getdoc(function) or "")
    yield next(described_lines)
    yield from ("", "```python", f"{function.__name__}{signature}", "```")
    yield from described_lines


def described(title: str, text: str) -> Iterator[str]:
    """Yield a Google-style docstring as Markdown."""
    yield title
    yield ""
    section = None
    for line in text.splitlines():
        name = line.rstrip(":")
        if line.endswith(":") and name in {*SECTIONS, "Attributes"}:
            section = name
            yield from (f"**{SECTIONS.get(name, name)}**", "")
        elif section is None or not line.strip():
            yield marked(line)
        elif (found := re.match(r" {4}(\w+): (.*)", line)) and section != "Returns":
            yield f"- `{found[1]}`: {marked(found[2])}"
        else:
            yield marked(line.strip() if section == "Returns" else f"  {line.strip()}")
    yield ""


def marked(text: str) -> str:
    """Convert reStructuredText markup of code and references to Markdown."""
    text = re.sub(r":\w+:`~?(?:[\w.]+\.)?(\w+)`", r"`\1`", text)
    return text.replace("``", "`")


if __name__ == "__main__":
    print(page(), end="")
