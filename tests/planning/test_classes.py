from __future__ import annotations

import sys

import pytest

from mens_exp.artifacts.digest import sha256_bytes
from mens_exp.config.compose import compose, typed
from mens_exp.planning.checks import classes

GOOD = """
import torch
from lightning import Callback
class Plain(Callback):
    def __init__(self, every_n): ...
class Recorded(Callback):
    def __init__(self, run, every_n=1): ...
class Opt(torch.optim.Optimizer):
    def __init__(self, params, lr, beta=0.9): ...
class Loss:
    def __init__(self, gamma): ...
    def __call__(self, hidden, targets, head): ...
class NoLoss:
    def __init__(self, gamma): ...
def function(run): ...
class Old:
    pass
"""


@pytest.fixture
def made(tmp_path, monkeypatch):
    """Compose a configuration with one option of the user's, next to the module with its class."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    name = f"own_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(GOOD, encoding="utf-8")

    def make(group, target, settings=""):
        file = tmp_path / "conf" / group / "mine.yaml"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"_target_: {target.replace('MODULE', name)}\n{settings}", "utf-8")
        option = f"{group}=[default,mine]" if group == "callbacks" else f"{group}=mine"
        return typed(compose([[option, "model=tiny_llama"]])[0].values)

    yield make
    for module in [name, "own_broken", "own_syntax"]:
        sys.modules.pop(module, None)


def said(config):
    return " | ".join(str(problem) for problem in classes.check(config))


@pytest.mark.parametrize(
    ("group", "target", "settings"),
    [
        ("callbacks", "MODULE.Plain", "every_n: 5"),
        ("callbacks", "MODULE.Recorded", "every_n: 5"),
        ("callbacks", "lightning.pytorch.callbacks.Timer", "interval: step"),
        ("optim", "MODULE.Opt", "lr: 0.1\nbeta: 0.5"),
        ("optim", "torch.optim.SGD", "lr: 0.1\nmomentum: 0.5"),
        ("objective", "MODULE.Loss", "gamma: 2.0"),
    ],
)
def test_a_class_of_the_right_kind_is_accepted(made, group, target, settings):
    """Every setting is passed; a callback may or may not take `run`."""
    assert said(made(group, target, settings)) == ""


@pytest.mark.parametrize(
    ("group", "target", "settings", "parts"),
    [
        ("callbacks", "MODULE.Plan", "every_n: 5", ["has no Plan", "the nearest is", ".Plain"]),
        ("callbacks", "MODULF.Plain", "", ["there is no module MODULF"]),
        ("callbacks", "Plain", "", ["does not name a module"]),
        ("callbacks", "MODULE.Loss", "gamma: 1", ["wrong type", "lightning.Callback"]),
        ("callbacks", "MODULE.function", "", ["wrong type", "a function"]),
        (
            "callbacks",
            "MODULE.Plain",
            "evry_n: 5",
            ["takes no such argument", "nearest is every_n"],
        ),
        ("callbacks", "MODULE.Plain", "", ["callbacks.mine.every_n", "needs an argument"]),
        ("optim", "MODULE.Loss", "", ["a subclass of torch.optim.Optimizer"]),
        ("optim", "MODULE.Opt", "betta: 1", ["optim.betta", "the nearest is beta"]),
        ("objective", "MODULE.NoLoss", "gamma: 1", ["lacks __call__"]),
        ("objective", "MODULE.Loss", "", ["objective.gamma", "needs an argument"]),
        ("backend", "torch.nn.Linear", "", ["lacks head, begin"]),
        ("backend", "MODULE.Old", "", ["a torch.nn.Module"]),
    ],
)
def test_what_is_wrong_with_a_class_is_told(made, group, target, settings, parts):
    """The message names the place and, if there is one, the nearest name."""
    text = said(made(group, target, settings))
    assert all(part in text for part in parts), text


def test_a_module_that_fails_is_told_by_its_line(made, tmp_path):
    """The message has the import's own error with its line, not "not found"."""
    (tmp_path / "own_broken.py").write_text("x = 1\nimport no_such_module_at_all\n", "utf-8")
    text = said(made("callbacks", "own_broken.A"))
    assert "cannot be imported" in text
    assert "own_broken.py:2" in text
    (tmp_path / "own_syntax.py").write_text("def f(:\n", "utf-8")
    assert "SyntaxError" in said(made("callbacks", "own_syntax.A"))


def test_our_own_classes_are_not_imported(tiny_config):
    """Planning with built-in options does not import their classes."""
    assert said(tiny_config()) == ""
    assert classes.record(tiny_config()) is None


def test_what_was_loaded_is_on_record(made, tmp_path):
    """The record has the target and the digest of its module's file."""
    config = made("objective", "MODULE.Loss", "gamma: 2.0")
    assert said(config) == ""
    name = f"own_{tmp_path.name}"
    assert classes.record(config) == {
        "targets": [f"{name}.Loss"],
        "files": {f"{name}.py": sha256_bytes(GOOD.encode())},
    }


@pytest.mark.parametrize("kind", ["AdamWScheduleFree", "SGDScheduleFree", "RAdamScheduleFree"])
def test_an_optimizer_that_leaves_another_point_in_the_model_is_refused(made, kind):
    """The message suggests optim=schedule_free, which puts the average into the model."""
    found = said(made("optim", f"schedulefree.{kind}", "lr: 0.001"))
    assert "The artifact is the model" in found
    assert "use optim=schedule_free" in found


def test_an_option_of_ones_own_with_a_class_that_ours_names_too_is_checked(made):
    """The built-in optim=sgd names torch.optim.SGD too, yet the wrong argument is found."""
    found = said(made("optim", "torch.optim.SGD", "lr: 0.1\nmomentun: 0.9"))
    assert "the nearest is momentum" in found
