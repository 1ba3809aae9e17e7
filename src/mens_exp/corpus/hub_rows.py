"""``data=hub``: rows of a Hugging Face Hub dataset, read with `datasets`.

The commit and its files are resolved as for a model, so a cached dataset needs no network and a
moving branch changes nothing. `datasets` then reads the directory, because it knows the files of
each subset and split, and supports every dataset format.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from mens_exp.errors import ConfigError, DataError, MissingExtra, expected_name
from mens_exp.layout.hub import commit_of, dataset_files
from mens_exp.layout.hub_errors import DATASET, translated
from mens_exp.rows.decode import Located
from mens_exp.rows.files import glob_in
from mens_exp.rows.tables import EXTRA, rows_of_batches, without_nulls

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from mens_exp.config.data import HubData

_AT_ONCE = 1_000  # rows


def pinned(config: HubData) -> str:
    """Return the current commit of the configured revision.

    Raises:
        MensError: there is no such dataset or revision, or the hub cannot be reached.
    """
    if Path(config.id).is_dir():
        raise ConfigError(
            "is a directory, and data=hub reads datasets of the hub",
            where="data.id",
            found=config.id,
            expected="an id of a dataset of the hub, or files",
            remedy=f"give its files: data=jsonl data.path='{glob_in(Path(config.id))}'",
        )
    return commit_of(config.id, config.revision, DATASET)


class Dataset:
    """The splits of one commit of a dataset."""

    def __init__(self, config: HubData, directory: str) -> None:
        """Open a directory; `opened` fetches it first."""
        self._config = config
        self._directory = directory

    def name(self, split: str) -> str:
        """Return the name of a split in messages and the record."""
        return name(self._config, split)

    def rows(self, split: str, setting: str) -> Iterator[Located]:
        """Yield the rows of a split, each with its location ``<id>/<split>:<row>``.

        Args:
            split: the split, or a slice of one.
            setting: the setting that names it.

        Raises:
            ConfigError: there is no such subset or split.
            DataError: `datasets` cannot read the files, or the split is empty.
        """
        import datasets

        builder = self._builder()
        splits = _splits(builder)
        bare = split.partition("[")[0]
        if splits and bare not in {*splits, "all"} and "+" not in split:
            raise ConfigError(
                "the dataset has no such split",
                where=setting,
                found=split,
                expected=expected_name(bare, splits),
            )
        try:
            builder.download_and_prepare()
            loaded: Any = builder.as_dataset(split=split)
        except (datasets.exceptions.DatasetsError, ValueError, OSError) as error:
            raise DataError(
                "datasets cannot read this split",
                where=f"{setting}={split}",
                found=f"{self._config.id}: {' '.join(str(error.__cause__ or error).split())[:200]}",
                remedy="choose another split or revision, or give files: data=jsonl data.path=…",
            ) from error
        called, number = self.name(split), 0
        batches = loaded.with_format("arrow").iter(_AT_ONCE)
        for number, row in rows_of_batches(loaded.column_names, batches, called):
            yield Located(f"{called}:{number}", row)
        if number == 0:
            raise DataError("the split is empty", where=called, expected="at least one row")

    def _builder(self) -> Any:
        import datasets

        subset, names = self._config.subset, []
        try:
            if subset is not None:
                names = datasets.get_dataset_config_names(self._directory)
            if subset is None or subset in names:
                return datasets.load_dataset_builder(self._directory, name=subset)
        except (datasets.exceptions.DatasetsError, ValueError, OSError) as error:
            raise DataError(
                "datasets cannot read this dataset",
                where="data.id",
                found=f"{self._config.id}: {' '.join(str(error).split())[:200]}",
                remedy="choose data.subset or another revision, or give files: data=jsonl",
            ) from error
        raise ConfigError(
            "the dataset has no such subset",
            where="data.subset",
            found=subset,
            expected=expected_name(str(subset), names),
        )


def opened(config: HubData) -> Dataset:
    """Download the missing files of a dataset, and open it.

    Raises:
        MissingExtra: `datasets` is not installed.
        MensError: there is no such dataset or revision, or the hub cannot be reached.
    """
    _datasets()
    directory = dataset_files(config.id, pinned(config))
    return Dataset(config, str(directory))


def name(config: HubData, split: str) -> str:
    """Return the name of a split in messages and the record."""
    parts = (config.id, config.subset, split)
    return "/".join(part for part in parts if part is not None)


def streamed(config: HubData, split: str, setting: str) -> Any:
    """Return a reader that streams a split from the Hub's files, without downloading them first.

    Args:
        config: the dataset.
        split: one of its splits.
        setting: the setting that names it.

    Raises:
        MissingExtra: `datasets` is not installed.
        DataError: it has no such subset or split, or `datasets` cannot read it.
        MensError: there is no such dataset or revision, or the hub cannot be reached.
    """
    datasets = _datasets()
    commit = pinned(config)
    try:
        with translated(config.id, commit, DATASET):
            return datasets.load_dataset(
                config.id, name=config.subset, split=split, revision=commit, streaming=True
            )
    except (datasets.exceptions.DatasetsError, ValueError) as error:
        raise DataError(
            "datasets cannot stream this split",
            where=f"{setting}={split}",
            found=f"{config.id}: {' '.join(str(error.__cause__ or error).split())[:200]}",
            remedy="choose another subset, split or revision, or drop data.streaming",
        ) from error


def streamed_rows(config: HubData, split: str, setting: str) -> Iterator[Located]:
    """Yield all rows of a streamed split, each with its location ``<id>/<split>:<row>``."""
    called = name(config, split)
    rows = examples(config, streamed(config, split, setting))
    for number, row in enumerate(rows, start=1):
        yield Located(f"{called}:{number}", row)


def examples(config: HubData, dataset: Any) -> Iterator[dict[str, object]]:
    """Yield the rows that `streamed` reads, without null values.

    Raises:
        DataError: a file cannot be read.
        MensError: the Hub no longer responds.
    """
    with translated(config.id, pinned(config), DATASET):
        try:
            yield from map(without_nulls, dataset)
        except ValueError as error:  # base class of pyarrow's errors
            raise DataError(
                "datasets failed while reading the split",
                where="data.id",
                found=f"{config.id}: {' '.join(str(error).split())[:200]}",
                remedy="choose another revision, or give files: data=jsonl data.path=…",
            ) from error


def generated(function: Callable[..., Any], paths: Sequence[Path]) -> Any:
    """Return a resumable reader of the examples that a function yields from files.

    Raises:
        MissingExtra: `datasets` is not installed.
    """
    datasets = _datasets("datasets is needed to stream rows", "data.streaming")
    return datasets.IterableDataset.from_generator(function, gen_kwargs={"paths": list(paths)})


def _datasets(
    what: str = "datasets is needed to read datasets of the hub", where: str = "data=hub"
) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise MissingExtra(
            what,
            where=where,
            remedy=f"run: {EXTRA}",
        ) from error
    datasets.disable_progress_bars()
    return datasets


def _splits(builder: Any) -> list[str]:
    """Return the split names; empty if they are unknown before the files are read."""
    files = builder.config.data_files
    return sorted(str(name) for name in files) if files else []
