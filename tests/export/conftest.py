from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from mens_exp.artifacts.run_dir import RunDir


def _stand_in() -> Any:
    spec = importlib.util.spec_from_file_location(
        "stand_in_hub", Path(__file__).with_name("stand_in_hub.py")
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    __import__("sys").modules[spec.name] = module  # its dataclass looks itself up there
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def stand_in() -> Any:
    return _stand_in()


@pytest.fixture
def hub(stand_in: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The hub's stand-in, and nobody logged in anywhere."""
    from huggingface_hub import constants

    with stand_in.stand_in_hub() as served:
        monkeypatch.setattr(constants, "ENDPOINT", served.url)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", "no such file")
        monkeypatch.delenv("HF_TOKEN", raising=False)
        monkeypatch.delenv("HUGGING_FACE_HUB_TOKEN", raising=False)
        yield served


@pytest.fixture(scope="session")
def portable(train_in: Callable[..., RunDir], tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """A run whose records name relative paths alone; only to be read."""
    place = tmp_path_factory.mktemp("portable")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        overrides = ["trainer.max_steps=1", "data=stdlib", "model=tiny_llama"]
        train_in(Path("run"), *overrides, without="data.path")
    from mens_exp.artifacts.run_dir import RunDir

    return RunDir(place / "run")
