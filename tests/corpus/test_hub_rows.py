from __future__ import annotations

import io
import sys
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from huggingface_hub import constants

from mens_exp.config.data import ColumnsConfig, HubData
from mens_exp.corpus.hub_rows import examples, pinned
from mens_exp.corpus.mix import RowStream
from mens_exp.corpus.row_files import records
from mens_exp.corpus.source import load_rows
from mens_exp.corpus.split import Side
from mens_exp.errors import ConfigError, DataError, MensError, MissingExtra, Problems, SetupError
from mens_exp.layout import hub as hub_snapshot

NAME = "lab/rows"
CARD = """---
configs:
- config_name: code
  data_files:
  - {split: train, path: code/train.parquet}
  - {split: test, path: code/test.parquet}
- config_name: chat
  data_files:
  - {split: train, path: chat.parquet}
---
"""


def table(prompts, **columns):
    sink = io.BytesIO()
    rows = {"prompt": list(prompts), "response": ["r"] * len(prompts), **columns}
    pq.write_table(pa.table(rows), sink)
    return sink.getvalue()


def chat(prompts):
    turns = [
        [{"role": "user", "content": prompt}, {"role": "assistant", "content": "r"}]
        for prompt in prompts
    ]
    sink = io.BytesIO()
    pq.write_table(pa.table({"messages": turns}), sink)
    return sink.getvalue()


@pytest.fixture
def repository(hub, tmp_path, monkeypatch):
    """Serve a hub dataset with two subsets; both caches start empty."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    made = hub.new()
    made.commit(
        {
            "README.md": CARD.encode(),
            "code/train.parquet": table("abcdefgh"),
            "code/test.parquet": table("xy"),
            "chat.parquet": chat("klmnop"),
        }
    )
    hub.repositories[f"datasets/{NAME}"] = made
    return made


def load(tmp_path, **values):
    shares = {"id": NAME, "subset": "code", "val_frac": 0.2, "heldout_frac": 0.2}
    return load_rows(HubData(**{**shares, **values}), tmp_path / "unused")


def prompts(rows, *sides):
    return "".join(sorted(pair.prompt for side in sides for pair in getattr(rows, side)))


def refusal(tmp_path, **values):
    with pytest.raises(MensError) as caught:
        load(tmp_path, **values)
    return caught.value


def test_rows_of_a_split_are_read_and_recorded(repository, tmp_path):
    """The record has the commit; a row's place is its split and number."""
    rows = load(tmp_path)
    assert prompts(rows, "train", "val", "heldout") == "abcdefgh"
    assert {pair.place for pair in rows.train} <= {f"{NAME}/code/train:{n}" for n in range(1, 9)}
    assert records(rows.files) == {
        f"{NAME}/code/train": {
            "role": "rows",
            "form": "pair",
            "rows": 8,
            "revision": repository.refs["main"],
        }
    }


@pytest.mark.usefixtures("repository")
def test_split_may_validate(tmp_path):
    """With a validation split no row of the training split is used for validation."""
    rows = load(tmp_path, val_split="test")
    assert (prompts(rows, "val"), prompts(rows, "train", "heldout")) == ("xy", "abcdefgh")
    assert [file.role for file in rows.files] == ["rows", "validation"]


@pytest.mark.usefixtures("repository")
def test_parts_and_sums_of_splits_are_read(tmp_path):
    """The syntax is that of `datasets`: slices and sums."""
    assert prompts(load(tmp_path, split="train[:5]"), "train", "val", "heldout") == "abcde"
    every = load(tmp_path, split="all")
    assert prompts(every, "train", "val", "heldout") == "abcdefghxy"
    assert prompts(load(tmp_path, split="test+train"), "train", "val", "heldout") == "abcdefghxy"


@pytest.mark.usefixtures("repository")
def test_subset_of_another_format_is_read(tmp_path):
    """The subset has lists of turns, as chat datasets do."""
    rows = load(tmp_path, subset="chat")
    assert prompts(rows, "train", "val", "heldout") == "klmnop"
    assert rows.files[0].form == "messages"


def test_bad_rows_are_refused_with_split_and_number(repository, tmp_path):
    """Bad rows of both splits are reported together."""
    repository.commit(
        {
            "README.md": CARD.encode(),
            "code/train.parquet": table("abc", rating=[1, 9, 2]),
            "code/test.parquet": table(" y"),
            "chat.parquet": chat("k"),
        }
    )
    problem = refusal(tmp_path, val_split="test")
    assert isinstance(problem, Problems)
    assert [one.where for one in problem.problems] == [
        f"{NAME}/code/train:2",
        f"{NAME}/code/test:1",
    ]


def test_columns_are_named(repository, tmp_path):
    """Columns that are not named are counted."""
    columns = ColumnsConfig(prompt="prompt", response="response")
    repository.commit({"train.parquet": table("abcdef", id=[1] * 6)})
    rows = load(tmp_path, subset=None, columns=columns)
    assert rows.files[0].ignored == {"id": 6}


@pytest.mark.parametrize(
    ("values", "where", "told"),
    [
        ({"split": "tset"}, "data.split", "the nearest is test"),
        ({"val_split": "validation"}, "data.val_split", "one of test, train"),
        ({"subset": "cde"}, "data.subset", "the nearest is code"),
        ({"revision": "man"}, "data.revision", "the nearest is main"),
        ({"id": "lab/row"}, "data.id", "the nearest is lab/rows"),
        ({"id": "no id"}, "data.id", "is not an id of the hub"),
        ({"subset": None}, "data.id", "datasets cannot read this dataset"),
        ({"split": "train[5"}, "data.split=train[5", "datasets cannot read this split"),
    ],
)
@pytest.mark.usefixtures("repository")
def test_name_that_is_not_there_is_refused_with_the_nearest(tmp_path, values, where, told):
    """The error names the setting and the nearest existing name."""
    problem = refusal(tmp_path, **values)
    assert (problem.where, problem.exit_code) == (where, 2)
    assert told in str(problem)


def test_a_directory_is_told_to_be_read_as_files(tmp_path, monkeypatch):
    """`load_dataset` reads directories too; here their tables are read by data=jsonl."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "cats" / "data"
    folder.mkdir(parents=True)
    (tmp_path / "cats" / "dataset_info.json").write_text("{}", "utf-8")
    table = pa.Table.from_pylist([{"text": "A cat."}])
    pq.write_table(table, folder / "train-00000-of-00001.parquet")
    assert refusal(tmp_path, id="cats").remedy == (
        "give its files: data=jsonl data.path='cats/data/*.parquet'"
    )


def test_gated_dataset_names_its_page_and_the_login(repository, tmp_path):
    """A dataset's page has another address than a model's."""
    repository.gated = True
    problem = refusal(tmp_path)
    assert isinstance(problem, DataError)
    assert f"/datasets/{NAME}, then run: hf auth login" in str(problem)


@pytest.mark.usefixtures("repository")
def test_cached_dataset_needs_no_network(hub, tmp_path, monkeypatch):
    """The same commit gives the same rows offline."""
    rows = load(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub_snapshot.forget()
    before = len(hub.requests)
    assert load(tmp_path).sha256 == rows.sha256
    assert len(hub.requests) == before


@pytest.mark.usefixtures("repository")
def test_dataset_that_is_not_cached_needs_a_network(tmp_path, monkeypatch):
    """The environment error gives the command that fetches the dataset."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    problem = refusal(tmp_path)
    assert isinstance(problem, SetupError)
    assert "the dataset is incomplete in the cache" in str(problem)
    assert f"hf download --repo-type dataset {NAME}; or give files instead" in str(problem)


def test_branch_is_put_down_as_its_commit(repository, tmp_path):
    """A moving branch does not affect a run that names the commit."""
    first = pinned(HubData(id=NAME))
    assert first == repository.refs["main"]
    repository.commit({"train.parquet": table("stuvwx")})
    hub_snapshot.forget()
    assert pinned(HubData(id=NAME)) != first
    assert prompts(load(tmp_path, revision=first), "train", "val", "heldout") == "abcdefgh"


@pytest.mark.usefixtures("repository")
def test_without_datasets_the_extra_is_named(tmp_path, monkeypatch):
    """The error comes before anything is fetched."""
    monkeypatch.setitem(sys.modules, "datasets", None)
    problem = refusal(tmp_path)
    assert isinstance(problem, MissingExtra)
    assert "mens-exp[datasets]" in str(problem)


def test_split_to_train_on_may_not_validate(tiny_config):
    """The same rows would be on both sides."""
    from mens_exp.config.rules.data import data_problems

    config = tiny_config("data=hub", f"data.id={NAME}")
    assert list(data_problems(config)) == []
    config.data.val_split = "train"
    (problem,) = data_problems(config)
    assert (problem.where, isinstance(problem, ConfigError)) == ("data.val_split", True)


def test_command_puts_branches_down_as_commits(repository, tiny_config):
    """This holds for data=hub and for sources of a mix; unknown names are left to preflight."""
    from omegaconf import OmegaConf

    from mens_exp.tasks.resolve_references import pin_rows

    def settled(*overrides):
        config = tiny_config(*overrides)
        cell = SimpleNamespace(
            config=config, composed=SimpleNamespace(values=OmegaConf.structured(config))
        )
        pin_rows(cell)
        return OmegaConf.to_object(cell.composed.values.data)

    commit = repository.refs["main"]
    assert settled("data=hub", f"data.id={NAME}").revision == commit
    assert settled("data=hub", "data.id=lab/none").revision is None
    sources = f"[{{path:a.jsonl,weight:1}},{{id:{NAME},weight:1}}]"
    assert settled("data=mix", f"data.sources={sources}").sources == [
        {"path": "a.jsonl", "weight": 1},
        {"id": NAME, "weight": 1, "revision": commit},
    ]


@pytest.fixture
def streaming(hub, repository, monkeypatch):
    """Return the same dataset as read by streaming."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_ENDPOINT", hub.url)
    return hub


def stream_of(**values):
    usual = {"id": NAME, "subset": "code", "val_frac": 0.2, "heldout_frac": 0.2}
    config = HubData(**{**usual, "streaming": True, "shuffle_buffer": 3, **values})
    return RowStream(config, None)


def test_a_split_is_streamed_by_windows(streaming):
    """Eight rows in windows of three, from a Parquet file that is never stored, then again."""
    stream = stream_of()
    seen = []
    for _ in range(4):
        sides = stream.next_window().sides
        seen.append("".join(sorted(pair.prompt for side in sides.values() for pair in side)))
    assert seen == ["abc", "def", "gh", "abc"]
    assert not streaming.asked("GET /api/datasets/lab/rows/tree/main")
    assert not streaming.asked("test.parquet")


@pytest.mark.usefixtures("streaming")
@pytest.mark.parametrize("taken", [0, 1, 2, 3, 4])
def test_a_streamed_split_goes_on_from_a_saved_place(taken):
    """The saved place may be inside a file or at the end of an epoch."""
    through = stream_of()
    windows = [through.next_window() for _ in range(6)]
    stream = stream_of()
    for _ in range(taken):
        stream.next_window()
    resumed = stream_of()
    resumed.load_state_dict(stream.state_dict())
    assert [resumed.next_window() for _ in range(6 - taken)] == windows[taken:]
    places = [pair.place for window in windows for pair in window.sides[Side.TRAIN]]
    assert all(place.startswith(f"{NAME}/code/train:") for place in places)


@pytest.mark.usefixtures("streaming")
def test_a_streamed_split_has_the_rows_of_one_that_is_fetched(tmp_path):
    """With all rows in the buffer and a validation split, rows and commit are the same."""
    whole = load(tmp_path, val_split="test")
    rows = load(tmp_path, val_split="test", streaming=True, shuffle_buffer=8)
    assert (rows.train, rows.val, rows.heldout) == (whole.train, whole.val, whole.heldout)
    assert rows.record()["streaming"]["revision"] == pinned(HubData(id=NAME))


@pytest.mark.usefixtures("streaming")
def test_a_split_that_cannot_be_streamed_is_refused(tmp_path):
    """The message has the error of `datasets` and a remedy."""
    told = str(refusal(tmp_path, split="trian", streaming=True))
    assert "data.split=trian: datasets cannot stream this split" in told
    assert "train" in told


@pytest.mark.usefixtures("streaming")
@pytest.mark.parametrize(
    ("error", "kind", "told"),
    [
        (ConnectionError("reset"), SetupError, "hub"),
        (pa.ArrowInvalid("no magic bytes"), DataError, "failed while reading.*no magic bytes"),
    ],
)
def test_a_stream_that_breaks_off_is_told(error, kind, told):
    """A connection lost during the run is an environment error, not a bug."""

    def breaking():
        yield {"prompt": "a", "rating": None}
        raise error

    rows = examples(HubData(id=NAME), breaking())
    assert next(rows) == {"prompt": "a"}
    with pytest.raises(kind, match=told):
        next(rows)
