"""The quick tests on the oldest versions that pyproject.toml states, and on other Pythons.

    make floors                      # or: python tests/support/floors.py [oldest 3.12 3.13 …]

Each environment is made in build/floors. `oldest` has the lowest versions of the direct
requirements that go together, as uv resolves them; torch stays that of constraints.txt, whose CPU
build is the one that installs everywhere. A number is a Python that pyenv or the PATH has, with the
versions of constraints.txt. What ran and what failed goes to tests/support/floors.json.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tomllib
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build" / "floors"
RESULTS = Path(__file__).with_name("floors.json")
# A subset that trains, resumes, scores, compares, merges and exports on tiny models.
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
RUNNER = ("pytest", "pytest-randomly", "pytest-timeout", "pytest-xdist", "hypothesis", "jsonschema")


def main() -> None:
    """Test the named environments and record the results."""
    found = json.loads(RESULTS.read_text("utf-8")) if RESULTS.is_file() else {}
    for name in sys.argv[1:] or ["oldest", "3.12", "3.13"]:
        found[name] = tested(name)
        RESULTS.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n", "utf-8")
        print(name, found[name]["outcome"], flush=True)


def tested(name: str) -> dict[str, object]:
    """Make one environment and run the tests in it."""
    python = interpreter("3.11" if name == "oldest" else name)
    if python is None:
        return {"outcome": f"not tested: there is no Python {name} here", "versions": {}}
    place = BUILD / name
    shutil.rmtree(place, ignore_errors=True)
    subprocess.run([python, "-m", "venv", place], check=True)
    own = place / "bin" / "python"
    install(own, "-c", ROOT / "constraints.txt", "torch")
    if name == "oldest":
        install(own, "-r", lowest(own))
        install(own, *RUNNER)
        install(own, "--no-deps", "--editable", ROOT)
    else:
        install(own, "-c", ROOT / "constraints.txt", "--editable", f"{ROOT}[dev,gguf]")
    chosen = ["-n", "2", "--dist", "loadfile", "-m", "not slow and not gpu and not soak", *TESTS]
    done = subprocess.run(
        [own, "-m", "pytest", "-q", "-p", "no:cacheprovider", *chosen],
        check=False,
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    last = done.stdout.strip().splitlines()[-1] if done.stdout.strip() else done.stderr[-200:]
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    return {
        "outcome": re.sub(r" in [\d.]+s.*", "", last.strip("= ")),
        "failed": sorted(failed),
        "utc": datetime.now(UTC).strftime("%Y-%m-%d"),
        "versions": versions(own),
    }


def interpreter(version: str) -> str | None:
    """Return a Python of a minor version, from pyenv or the PATH."""
    kept = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    return str(kept[-1]) if kept else shutil.which(f"python{version}")


def lowest(python: Path) -> Path:
    """Return a file of the lowest direct requirements that go together, without torch."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    wanted, pinned = BUILD / "wanted.txt", BUILD / "lowest.txt"
    torch = re.search(r"^torch==.*$", (ROOT / "constraints.txt").read_text("utf-8"), re.MULTILINE)
    assert torch is not None
    direct = [one for one in project["dependencies"] if not one.startswith("torch>")]
    wanted.write_text("\n".join([*direct, *project["optional-dependencies"]["gguf"], torch[0]]))
    install(python, "uv")
    command = [python, "-m", "uv", "pip", "compile", "--resolution", "lowest-direct", "--quiet"]
    subprocess.run([*command, wanted, "--output-file", pinned], check=True)
    lines = pinned.read_text("utf-8").splitlines()
    kept = [one for one in lines if not re.match(r"(torch|nvidia|cuda|triton)[-=]", one)]
    pinned.write_text("\n".join(kept))
    return pinned


def install(python: Path, *words: object) -> None:
    """Install with pip."""
    subprocess.run([python, "-m", "pip", "install", "--quiet", *map(str, words)], check=True)


def versions(python: Path) -> dict[str, str]:
    """Return the versions of the direct requirements, and that of Python."""
    code = (
        "import json, platform, re; from importlib import metadata as m;"
        "names = [re.match(r'[\\w.-]+', one)[0] for one in m.requires('mens-exp')"
        " if 'extra ==' not in one];"
        "found = {n: m.version(n) for n in names};"
        "print(json.dumps({'python': platform.python_version()} | found))"
    )
    done = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True)
    return dict(json.loads(done.stdout))


if __name__ == "__main__":
    main()
