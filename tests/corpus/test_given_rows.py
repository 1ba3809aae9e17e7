"""Rows from a class that an option in ``./conf/data`` names."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys

import pytest

from mens_exp.config.compose import compose, from_yaml, to_yaml, typed
from mens_exp.config.overrides import check
from mens_exp.corpus.source import load_rows
from mens_exp.errors import MensError
from mens_exp.planning.checks import classes
from mens_exp.planning.contract import contract_of
from mens_exp.planning.preflight import check_data

SQUARES = """
class Squares:
    def __init__(self, upto, offset=0):
        self.upto, self.offset = upto, offset
    def rows(self):
        for n in range(self.offset, self.offset + self.upto):
            yield {"prompt": f"{n} squared?", "response": str(n * n), "group": f"g{n % 10}"}
class Apart(Squares):
    def validation_rows(self):
        return [{"prompt": "1000 squared?", "response": "1000000"}]
class Leaks(Squares):
    def validation_rows(self):
        return [{"prompt": "3 squared?", "response": "9"}]
class Counts(Squares):
    calls = 0
    def rows(self):
        Counts.calls += 1
        return [{"prompt": f"{n}?", "response": f"{Counts.calls}"} for n in range(self.upto)]
class Fails(Squares):
    def rows(self):
        yield {"prompt": "a", "response": "b"}
        raise OSError("the database is away")
class NoConnection(Squares):
    def __init__(self, upto):
        raise ConnectionError("refused")
class Empty(Squares):
    def rows(self):
        return []
class Text(Squares):
    def rows(self):
        return "some rows"
class NoRows(Squares):
    def rows(self):
        return None
class Wrong(Squares):
    def rows(self):
        return [*Squares.rows(self), ["a", "b"], {"prompt": "", "response": "x"}, {"promt": "x"}]
class Objects(Squares):
    def rows(self):
        return [{"prompt": "a", "response": object()}]
class Nothing:
    def __init__(self, upto): ...
def function(upto): ...
"""


@pytest.fixture
def option(tmp_path, monkeypatch):
    """Return a function that writes an option, composes it with overrides and types the result."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    module = f"own_{tmp_path.name}"
    (tmp_path / f"{module}.py").write_text(SQUARES, encoding="utf-8")
    (tmp_path / "conf" / "data").mkdir(parents=True)

    def composed(name, *overrides, settings="upto: 40\n"):
        file = tmp_path / "conf" / "data" / "squares.yaml"
        file.write_text(f"_target_: {module}.{name}\n{settings}", "utf-8")
        (one,) = compose([["data=squares", "model=tiny_llama", *overrides]])
        return one

    composed.module = module
    yield composed
    sys.modules.pop(module, None)


def rows(config, tmp_path):
    return load_rows(config.data, tmp_path / "cache")


def said(config):
    found = []
    try:
        found += classes.check_group(config, "data")
        found += check_data(config)
    except MensError as error:
        found.append(error)
    return " | ".join(map(str, found))


def test_its_rows_are_those_of_the_class_with_the_options_settings(option, tmp_path):
    """Rows are split by group and hashed as those of a file, with their places."""
    found = rows(typed(option("Squares", "data.upto=30").values), tmp_path)
    sides = [found.train, found.val, found.heldout]
    lines = [
        f'{{"group":"g{n % 10}","prompt":"{n} squared?","response":"{n * n}"}}\n' for n in range(30)
    ]
    assert found.sha256 == hashlib.sha256("".join(lines).encode()).hexdigest()
    assert sorted(len(side) for side in sides) == [3, 3, 24]
    assert [len({pair.group for pair in side}) for side in sides] == [8, 1, 1]
    (seventh,) = (pair for side in sides for pair in side if pair.prompt == "6 squared?")
    assert seventh.place == f"{option.module}.Squares.rows:7"
    assert found.source == "squares"


def test_rows_to_validate_on_are_those_that_it_names(option, tmp_path):
    """Validation rows are exactly those that the class names; each role is recorded."""
    found = rows(typed(option("Apart").values), tmp_path)
    assert [pair.prompt for pair in found.val] == ["1000 squared?"]
    assert len(found.train) + len(found.heldout) == 40
    files = found.record()["files"]
    assert {name.rpartition(".")[2]: (one["role"], one["rows"]) for name, one in files.items()} == {
        "rows": ("rows", 40),
        "validation_rows": ("validation", 1),
    }


def test_a_share_to_validate_on_has_no_effect_beside_rows_of_its_own(option):
    """The setting is refused, as it is with data.val_path."""
    option("Apart")
    (problem,) = check(["data=squares", "data.val_frac=0.2", "model=tiny_llama"]).problems
    assert "data.val_frac" in str(problem)
    assert "names its rows to validate on" in str(problem)
    option("Squares")
    assert not check(["data=squares", "data.val_frac=0.2", "model=tiny_llama"]).problems


def test_the_contract_has_the_rows_and_the_record_the_class(option):
    """Other rows change the contract; the same rows read again do not."""
    one, same, other = (
        typed(option("Squares", *more, settings="upto: 40\noffset: 0\n").values)
        for more in ((), (), ("data.offset=1",))
    )
    assert contract_of(one).digest == contract_of(same).digest
    assert contract_of(one).data.generated_from.startswith("rows ")
    assert contract_of(one).data.generated_from != contract_of(other).data.generated_from
    recorded = classes.record(one)
    assert recorded["targets"] == [f"{option.module}.Squares"]
    assert list(recorded["files"]) == [f"{option.module}.py"]


def test_bad_rows_are_quarantined_on_request(option, tmp_path):
    """Bad rows are quarantined with place and reason, and the others are read."""
    given = typed(option("Wrong", "data.on_bad_row=quarantine", "data.max_bad_frac=0.1").values)
    found = rows(given, tmp_path)
    assert [bad.line for bad in found.bad] == [41, 42, 43]
    assert found.taken["quarantined"]["rows"] == 43


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Wrong", ["rows:41", "rows:42", "rows:43", "prompt"]),
        ("Objects", ["rows:1", "must be a string"]),
        ("Fails", ["Fails.rows:2", "OSError: the database is away", ".py:22)"]),
        ("NoConnection", ["ConnectionError: refused"]),
        ("Empty", ["there are no rows"]),
        ("Text", ["a str", "a list of rows"]),
        ("NoRows", ["NoneType"]),
        ("Counts", ["returns different rows when it is called again"]),
        ("Leaks", ["a validation row is trained on", "rows:4"]),
        ("Nothing", ["has the wrong type", "lacks rows"]),
        ("function", ["has the wrong type", "a function"]),
        ("Squers", ["has no Squers", "Squares"]),
    ],
)
def test_a_class_that_gives_no_usable_rows_is_refused(option, name, expected):
    """Each error comes before the run begins and says what was found."""
    text = said(typed(option(name).values))
    assert all(words in text for words in expected), text


@pytest.mark.parametrize(
    ("settings", "override", "expected"),
    [
        ("upto: 40\nrate: 1\n", None, "takes no such argument"),
        ("{}", None, "needs an argument that nothing sets"),
        ("upto: 40\n", "data.uptoo=3", "the nearest is data.upto"),
        ("upto: 40\n", "data.upto=many", "expected a whole number"),
        ("upto: 40\n", "data.path=rows.jsonl", "data.path"),
        ("upto: 40\n", "data._target_=os.system", "is set by the option"),
    ],
)
def test_settings_are_checked_like_ours(option, settings, override, expected):
    """Unknown keys and wrong types are checked against the option and the class's arguments."""
    settings = "" if settings == "{}" else settings
    if override is None:
        assert expected in said(typed(option("Squares", settings=settings).values))
        return
    option("Squares", settings=settings)
    (problem,) = check(["data=squares", override, "model=tiny_llama"]).problems
    assert expected in str(problem)


def test_a_stored_configuration_may_name_it_only_where_conf_does(option, tmp_path):
    """The option in ./conf permits the class; other classes, as torch.nn.Linear, are refused."""
    stored = tmp_path / "config.yaml"
    stored.write_text(to_yaml(option("Squares").values), "utf-8")
    assert typed(from_yaml(stored)).data.upto == 40
    (tmp_path / "conf" / "data" / "squares.yaml").unlink()
    with pytest.raises(MensError, match="may not name this class"):
        from_yaml(stored)
    text = stored.read_text("utf-8").replace(f"{option.module}.Squares", "torch.nn.Linear")
    stored.write_text(text, "utf-8")
    with pytest.raises(MensError, match="may not name this class"):
        from_yaml(stored)


def test_a_mix_takes_no_option_of_conf(option):
    """No stored file could permit its class for another run."""
    option("Squares")
    entries = "[{source:squares,weight:1},{source:stdlib,weight:1}]"
    (problem, *_) = check(["data=mix", f"data.sources={entries}", "model=tiny_llama"]).problems
    assert "an option in ./conf cannot be a source of a mix" in str(problem)


def test_it_is_planned_without_torch(option, tmp_path):
    """Planning imports the class without importing torch."""
    option("Squares")
    words = ["task=plan", "data=squares", "model=tiny_llama", "logger=none", "hydra.run.dir=plan"]
    code = (
        f"import sys\nfrom mens_exp.cli import main\ncode = main({words!r})\n"
        "assert 'torch' not in sys.modules\nsys.exit(code)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stdout + done.stderr
    plan = json.loads((tmp_path / "plan" / "plan.json").read_text("utf-8"))
    assert plan["data"]["files"][f"{option.module}.Squares.rows"]["rows"] == 40
