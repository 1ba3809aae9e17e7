"""The results of probes that tests share."""

from __future__ import annotations

import json
from types import SimpleNamespace

import probe_cache
import pytest
import torch

from mens_exp.data.batch import packed_batch


class Stream:
    """Micro-batches of one document each."""

    total = 2

    def __init__(self, random_documents, *, seed=0):
        self.documents = random_documents([9, 7], [4, 3], seed=seed)

    def batch(self, number):
        return packed_batch(self.documents, [[number]], index=number)


@pytest.fixture
def module(tiny_config, tiny_backend):
    """Build what a training module shows of itself."""

    def built(*overrides):
        backend, config = tiny_backend(*overrides), tiny_config(*overrides)
        return SimpleNamespace(backend=backend, config=config, teacher=None, known_teachers=None)

    return built


def digest(module, stream):
    batches = [stream.batch(number) for number in range(stream.total)]
    return probe_cache.digest_of("probe", module, batches)


def test_a_result_is_made_once_for_equal_models_and_rows(module, random_documents, tmp_path):
    """A second model with the same tensors, and the same rows elsewhere, have the same result."""
    made = []
    for path in ("/a/rows.jsonl", "/b/rows.jsonl"):
        one = module(f"data.path={path}", "data=jsonl")
        found = probe_cache.known(
            tmp_path, "probe", one, Stream(random_documents), lambda: made.append(1) or {"x": 0.1}
        )
        assert found == {"x": 0.1}
    assert made == [1]


def test_another_setting_row_or_tensor_has_another_digest(module, random_documents):
    """One changed bit of an adapter, of a quantized weight or of its scales is enough."""
    stream, one = Stream(random_documents), module()
    first = digest(one, stream)
    assert digest(module(), stream) == first
    others = [
        digest(module("lora.variant=dora"), stream),
        digest(module("quant.double_quant=false"), stream),
        digest(module("objective.label_smoothing=0.1"), stream),
        digest(one, Stream(random_documents, seed=1)),
        probe_cache.digest_of("view", one, [stream.batch(0)]),
    ]
    tensors = dict(probe_cache.tensors_of(one.backend))
    (codes, scales), adapter = (
        next(
            (codes, tensors[f"{name} scales"])
            for name, codes in tensors.items()
            if f"{name} scales" in tensors
        ),
        next(iter(one.backend.trainable().values())),
    )
    for tensor in (codes, scales, adapter):
        raw = tensor.detach().view(-1)[:1].view(torch.uint8)
        raw[0] ^= 1
        others.append(digest(one, stream))
    assert len({first, *others}) == 1 + len(others)


def test_a_refusal_is_not_kept(module, random_documents, tmp_path):
    """The next run is probed again."""

    def refuse():
        raise ValueError

    with pytest.raises(ValueError):  # noqa: PT011  # the one above
        probe_cache.known(tmp_path, "probe", module(), Stream(random_documents), refuse)
    assert list(tmp_path.iterdir()) == []


def test_a_run_is_probed_once_and_anew_where_code_may_differ(train_in, probes, tmp_path):
    """The second run's record is the first one's; under `probes` it is computed again."""

    def seconds(name):
        run = train_in(tmp_path / name, "seed=31")
        return json.loads(run.manifest.read_text("utf-8"))["data_contract"]["probe"]["seconds"]

    before = {*probes.iterdir()}
    first = seconds("first")
    assert seconds("second") == first
    kept = {path: path.read_text("utf-8") for path in {*probes.glob("*.json")} - before}
    (place,) = (path for path, text in kept.items() if f'"seconds": {first}' in text)
    place.write_text(kept[place].replace(f'"seconds": {first}', '"seconds": 12345'), "utf-8")
    assert seconds("third") == 12345
    probe_cache.is_usable = lambda: False
    assert seconds("fourth") != 12345
    place.write_text(kept[place], "utf-8")


@pytest.mark.probes
def test_a_test_with_the_marker_probes_anew():
    """Whatever it patches."""
    assert not probe_cache.is_usable()


def test_a_test_that_has_changed_code_probes_anew(monkeypatch):
    """Until it undoes the change; a directory or a variable is no code."""
    monkeypatch.setenv("HERE", "there")
    monkeypatch.chdir("/")
    assert probe_cache.is_usable()
    monkeypatch.setattr(probe_cache, "FIRST", {})
    assert not probe_cache.is_usable()
    monkeypatch.undo()
    assert probe_cache.is_usable()
    monkeypatch.setitem(probe_cache.FIRST, "probe", 1)
    assert not probe_cache.is_usable()
