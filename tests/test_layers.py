"""Imports go one way, and commands that answer at once import nothing heavy."""

from __future__ import annotations

import ast
import functools
import json
import re
import subprocess
import sys
from pathlib import Path

import architecture_page
import pytest
import structure
from record import Results
from structure import imported

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "mens_exp"

# Each line may import the lines above it, but nothing on its own line. `planning` is below
# `corpus`, because it counts the rows that a run would read; `evals` is below `export`, whose
# certificates are measured by it.
LAYERS = (
    ("", "errors"),
    ("artifacts",),
    ("config",),
    ("layout", "rows", "tokenizer", "sandbox"),
    ("corpus",),
    ("planning",),
    ("model", "data"),
    ("objective", "quant", "lora"),
    ("backends",),
    ("evals",),
    ("export", "report"),
    ("training",),
    ("tasks",),
    ("sweeps",),
    ("api",),
    ("cli",),
    ("__main__",),
)
HEIGHT = {package: height for height, packages in enumerate(LAYERS) for package in packages}

LIGHT = (
    "errors",
    "artifacts",
    "config",
    "layout",
    "rows",
    "tokenizer",
    "sandbox",
    "corpus",
    "planning",
    "report",
)
HEAVY = {
    "accelerate",
    "bitsandbytes",
    "datasets",
    "lightning",
    "peft",
    "torch",
    "transformers",
    "wandb",
}

# Loads the dataset that the user names, through its library, which loads no torch.
MAY_NAME = {"corpus/hub_rows.py": {"datasets"}}

# Modules that may compose and write configurations; all others get typed objects.
KNOWS_OMEGACONF = (
    "cli.py",
    "config/",
    "sweeps/plugin_batch.py",  # hands jobs to a Hydra launcher
    "sweeps/plugin_sweeper.py",  # calls a Hydra sweeper
    "tasks/run.py",  # writes the composed configuration into the record
    "tasks/train.py",  # extends a stored one
    "training/build.py",  # instantiates classes named in the configuration
    "training/distributed.py",  # instantiates the strategy
    "training/hosted_module.py",  # instantiates the user's module
    "training/loggers.py",  # instantiates the loggers
    "training/optimizer.py",  # instantiates the optimizer
)


@functools.cache
def modules(root):
    """Return the syntax tree of each file, by its path under the root."""
    return {file: module.tree for file, module in structure.modules(root).items()}


def package_of(file):
    first = file.split("/", maxsplit=1)[0].removesuffix(".py")
    return "" if first == "__init__" else first


def own_packages(tree):
    """Return the packages of mens_exp that a file imports."""
    found = set()
    for name in imported(tree):
        parts = name.split(".")
        if parts[0] == "mens_exp":
            found.add(parts[1] if len(parts) > 1 and parts[1] in HEIGHT else "")
    return found


def violations(root):
    wrong = []
    for file, tree in modules(root).items():
        here = package_of(file)
        if file == "__init__.py":  # names the functions of api, and loads them at first use
            continue
        wrong += [
            f"{file} imports {there}"
            for there in sorted(own_packages(tree))
            if there != here and HEIGHT[there] >= HEIGHT[here]
        ]
    return wrong


def foreign(tree):
    return {name.split(".")[0] for name in imported(tree)}


def test_every_package_has_its_layer():
    """A new package must be added to the list, and a deleted one removed."""
    assert {package_of(file) for file in modules(SOURCE)} == HEIGHT.keys()


def test_packages_import_only_what_lies_above_them():
    """Imports inside functions and for type checking count, too."""
    assert violations(SOURCE) == []


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("config/up.py", "import mens_exp.planning.estimate"),
        ("artifacts/up.py", "def f():\n    from mens_exp.config.root import RunConfig\n"),
        (
            "rows/beside.py",
            "if TYPE_CHECKING:\n    from mens_exp.tokenizer.implementations import HfTokenizer\n",
        ),
        ("errors.py", "from mens_exp import artifacts"),
        ("corpus/down.py", "from mens_exp.planning import preflight"),
    ],
)
def test_import_against_the_order_is_found(tmp_path, file, source):
    """The check finds plain, nested, type-checking, package and sideways imports."""
    path = tmp_path / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source, "utf-8")
    assert len(violations(tmp_path)) == 1


def test_light_packages_name_no_heavy_library():
    """Not even inside a function, with one exception."""
    guilty = {
        file: foreign(tree) & HEAVY
        for file, tree in modules(SOURCE).items()
        if package_of(file) in LIGHT and foreign(tree) & HEAVY
    }
    assert guilty == MAY_NAME


def test_light_packages_load_nothing_heavy():
    """Imported in a new interpreter, they load no heavy library, not even indirectly."""
    names = [
        "mens_exp." + file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for file in modules(SOURCE)
        if package_of(file) in LIGHT
    ]
    code = (
        "import importlib, json, sys\n"
        f"for name in {names!r}: importlib.import_module(name)\n"
        "print(json.dumps(sorted(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    loaded = set(json.loads(done.stdout))
    ours = {name.split(".")[1] for name in loaded if name.startswith("mens_exp.")}
    assert loaded & HEAVY == set()
    assert ours == set(LIGHT)


def test_importing_the_package_loads_none_of_its_modules():
    """`import mens_exp` is instant."""
    code = "import sys, mens_exp; print([n for n in sys.modules if n.startswith('mens_exp.')])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"


def test_few_modules_know_omegaconf_and_hydra():
    """Only the listed modules see DictConfig; one that no longer does must be removed."""
    knowing = [f for f, tree in modules(SOURCE).items() if foreign(tree) & {"hydra", "omegaconf"}]
    outside = [f for f in knowing if not f.startswith(KNOWS_OMEGACONF)]
    unused = [place for place in KNOWS_OMEGACONF if not any(f.startswith(place) for f in knowing)]
    assert outside == []
    assert unused == []


def test_packages_hold_only_a_docstring():
    """Without re-exports, importing a module loads only what it needs."""
    full = [
        file
        for file, tree in modules(SOURCE).items()
        if file.endswith("/__init__.py") and (len(tree.body) != 1 or not ast.get_docstring(tree))
    ]
    assert full == []


QUESTION = re.compile(r"(What|Which|Whose|Where|How)\b", re.IGNORECASE)


def questions(trees):
    """Return the docstrings that open with a question word, by file and line."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return {
        f"{file}:{node.body[0].lineno}": text.splitlines()[0]
        for file, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, documented)
        and (text := ast.get_docstring(node))
        and QUESTION.match(text)
    }


def test_no_docstring_opens_with_a_question_word():
    """The first line is an imperative or a noun phrase."""
    assert questions(modules(SOURCE)) == {}


def test_a_docstring_that_opens_with_a_question_word_is_found():
    """Modules, classes, functions and methods are searched; only the first word counts."""
    code = (
        '"""How it ends."""',
        'class A:\n    """Whose it is."""\n    def f(self):\n        """where\n\n        it is."""',
        'async def g():\n    """What\'s left."""\n    def h():\n        """Which one."""',
        '"""However it ends, say how."""\ndef f():\n    """Return what is left."""\nx = "What"',
    )
    trees = {name: ast.parse(text) for name, text in zip("mcgn", code, strict=True)}
    assert sorted(questions(trees)) == ["c:2", "c:4", "g:2", "g:4", "m:1"]


def test_modules_are_named_by_their_concept():
    """Vague names such as utils or helpers are refused."""
    vague = {"utils", "util", "common", "helpers", "misc"}
    parts = {part for file in modules(SOURCE) for part in file.removesuffix(".py").split("/")}
    assert {part for part in parts if part in vague or part.startswith("base_")} == set()


# Short modules that are separate from their only importer, each for a reason.
APART = {
    "quant/int8.py",  # its base class is bitsandbytes', an import that only int8 needs
}


def test_no_short_module_serves_one_neighbour():
    """Merge it into that neighbour. Callbacks are exempt, as configurations name them."""
    alone = structure.neighbour_only(structure.modules(SOURCE))
    found = {file for file in alone if not file.startswith("training/callbacks/")}
    assert found == APART


def test_a_short_module_of_one_neighbour_is_found(tmp_path):
    """A long module, or one with two importers or an importer elsewhere, is not reported."""
    short, long = "x = 1\n", "x = 1\n" * structure.SMALL
    (tmp_path / "tasks").mkdir()
    (tmp_path / "cli.py").write_text("import mens_exp.tasks.shared\n", "utf-8")
    for name, text in {
        "train": "from mens_exp.tasks import lonely, long, pair, shared\n",
        "merge": "from mens_exp.tasks.pair import x\n",
        "lonely": short,
        "long": long,
        "pair": short,
        "shared": short,
    }.items():
        (tmp_path / "tasks" / f"{name}.py").write_text(text, "utf-8")
    assert structure.neighbour_only(structure.modules(tmp_path)) == ["tasks/lonely.py"]


def test_no_modules_import_each_other():
    """Not even inside a package, in a function, or for a type checker."""
    assert structure.circles(structure.modules(SOURCE)) == []


def test_modules_that_import_each_other_are_found(tmp_path):
    """Two modules, and a circle of three; a module that only imports them is not reported."""
    lines = {
        "a": "def f():\n    from mens_exp.b import x\n",
        "b": "if TYPE_CHECKING:\n    from mens_exp.a import y\n",
        "c": "import mens_exp.d\n",
        "d": "import mens_exp.e\n",
        "e": "import mens_exp.c\n",
        "user": "import mens_exp.a\nimport mens_exp.c\n",
    }
    for name, text in lines.items():
        (tmp_path / f"{name}.py").write_text(text, "utf-8")
    assert structure.circles(structure.modules(tmp_path)) == [
        ["a.py", "b.py"],
        ["c.py", "d.py", "e.py"],
    ]


def test_a_toy_of_each_kind_has_three_files():
    """The object, its option and its test; an installed package adds them."""
    found = structure.toys(ROOT / structure.PLUGINS)
    assert found.keys() >= {"adapter", "objective", "quantizer", "suite"}
    assert set(found.values()) == {3}


def test_contributing_shows_the_last_measurement_of_the_tree():
    """`python benchmarks/structure.py` measures it; the table has the same figures."""
    latest = Results.read(ROOT / "benchmarks" / "results" / "structure.json").runs[-1]
    rows = [
        f"| {one['name']} | {'' if (old := one['reference_value']) is None else f'{old:,g}'} | "
        f"{one['value']:,g} |"
        for one in latest["figures"]
    ]
    table = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    assert [row for row in rows if row not in table] == []


def test_contributing_names_files_that_exist():
    """Of the package, or of the repository."""
    text = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    named = set(re.findall(r"`([\w/]+/\w+\.(?:py|md|txt|toml))`", text))
    assert len(named) > 20
    assert [one for one in named if not ((SOURCE / one).exists() or (ROOT / one).exists())] == []


def test_the_drawing_of_the_packages_is_that_of_their_imports():
    """`make docs` writes docs/reference/architecture.md and its drawing."""
    reference = ROOT / "docs" / "reference"
    shown = (reference / "architecture.md").read_text("utf-8")
    assert shown == architecture_page.page(SOURCE)
    drawn = (reference / "architecture.svg").read_text("utf-8")
    assert drawn == architecture_page.drawing(SOURCE)


def test_packages_are_drawn_in_layers_without_what_follows_from_other_arrows():
    """An arrow that follows from two others is left out."""
    uses = {"top": {"middle", "low"}, "middle": {"low"}, "low": set()}
    assert architecture_page.levels(uses) == {"top": 3, "middle": 2, "low": 1}
    assert architecture_page.direct("top", uses) == {"middle"}
    with pytest.raises(ValueError, match="import each other"):
        architecture_page.levels({**uses, "low": {"top"}})
