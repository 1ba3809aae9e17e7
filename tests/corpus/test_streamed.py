from __future__ import annotations

import gzip
import json
import pickle
from pathlib import Path

import pytest

from mens_exp.config.data import ColumnsConfig, FilterConfig, JsonlData, OnBadRow
from mens_exp.corpus.mix import RowStream
from mens_exp.corpus.source import load_rows
from mens_exp.corpus.split import Side
from mens_exp.errors import DataError, Problems


def line(number, **more):
    return json.dumps({"prompt": f"p{number}", "response": f"r{number}", **more}) + "\n"


@pytest.fixture
def files(tmp_path):
    """Write seventeen rows, and a compressed file of thirteen."""
    first, second = tmp_path / "a.jsonl", tmp_path / "b.jsonl.gz"
    first.write_text("".join(line(i) for i in range(17)), "utf-8")
    second.write_bytes(gzip.compress("".join(line(i) for i in range(17, 30)).encode()))
    return [str(first), str(second)]


def config_of(path, **values):
    usual = {"shuffle_buffer": 7, "val_frac": 0.2, "heldout_frac": 0.1}
    return JsonlData(path=path, streaming=True, **{**usual, **values})


def windows(stream, count):
    return [stream.next_window() for _ in range(count)]


def numbers(pairs):
    return [int(pair.prompt[1:]) for pair in pairs]


def all_of(window):
    return sorted(number for side in window.sides.values() for number in numbers(side))


def trained(found):
    return [number for window in found for number in numbers(window.sides[Side.TRAIN])]


def test_a_column_that_no_row_of_the_first_window_has_is_refused(tmp_path):
    """This holds for optional fields too; later windows may lack the column."""
    path = tmp_path / "rows.jsonl"
    path.write_text(line(0, lang="rust") + "".join(line(i) for i in range(1, 20)), "utf-8")
    columns = ColumnsConfig(prompt="prompt", response="response", language="lang")
    found = windows(RowStream(config_of([str(path)], columns=columns), None), 2)
    assert all_of(found[1]) == list(range(7, 14))
    columns.language = "lagn"
    with pytest.raises(DataError) as caught:
        RowStream(config_of([str(path)], columns=columns), None).next_window()
    assert "there is no column 'lagn'" in str(caught.value)
    assert "data.columns.language" in str(caught.value)


def test_windows_follow_the_rows_of_all_files(files):
    """Thirty rows in windows of seven: five windows per epoch, the last of two rows, then again."""
    found = windows(RowStream(config_of(files), None), 6)
    assert [all_of(window) for window in found[:5]] == [
        list(range(start, min(start + 7, 30))) for start in range(0, 30, 7)
    ]
    assert all_of(found[5]) == list(range(7))
    places = [(window.epoch, window.number) for window in found]
    assert places == [(0, 0), (0, 1), (0, 2), (0, 3), (0, 4), (1, 0)]


@pytest.mark.parametrize("taken", range(12))
def test_a_saved_place_goes_on_bit_for_bit(files, taken):
    """The state survives a file, across the ends of windows, files and epochs."""
    through = windows(RowStream(config_of(files), None), 14)
    stream = RowStream(config_of(files), None)
    windows(stream, taken)
    state = pickle.loads(pickle.dumps(stream.state_dict()))  # pickled above
    resumed = RowStream(config_of(files), None)
    resumed.load_state_dict(state)
    assert windows(resumed, 14 - taken) == through[taken:]


def test_sides_are_those_of_the_rows_groups(files):
    """Sides equal those of a run that reads all rows; other sides are never trained on."""
    whole = load_rows(JsonlData(path=files, val_frac=0.2, heldout_frac=0.1), Path("unused"))
    found = windows(RowStream(config_of(files), None), 5)
    assert trained(found) == numbers(whole.train)
    assert whole.val
    assert whole.heldout


def test_with_all_rows_in_the_buffer_rows_are_those_that_are_read_at_once(
    files,
):
    """If the first window has all rows, sides and order are the same as without streaming."""
    whole = load_rows(JsonlData(path=files, val_frac=0.2, heldout_frac=0.1), Path("unused"))
    first = load_rows(config_of(files, shuffle_buffer=30), Path("unused"))
    assert (first.train, first.val, first.heldout) == (whole.train, whole.val, whole.heldout)


@pytest.mark.parametrize("count", [2, 3, 6, 9])
@pytest.mark.parametrize("taken", [0, 1])
def test_few_rows_are_split_as_those_that_are_read_at_once(tmp_path, count, taken):
    """Splitting by hash would leave a side empty; this also holds after resuming."""
    path = tmp_path / "few.jsonl"
    path.write_text("".join(line(i) for i in range(count)), "utf-8")
    whole = load_rows(JsonlData(path=str(path), val_frac=0.2, heldout_frac=0.1), Path("unused"))
    config = config_of(str(path), shuffle_buffer=20)
    first = load_rows(config, Path("unused"))
    assert (first.train, first.val, first.heldout) == (whole.train, whole.val, whole.heldout)
    assert bool(whole.heldout) == (count > 2)
    stream = RowStream(config, None)
    windows(stream, taken)
    resumed = RowStream(config, None)
    resumed.load_state_dict(pickle.loads(pickle.dumps(stream.state_dict())))  # pickled above
    for window in windows(resumed, 3):
        assert window.sides == {
            Side.TRAIN: whole.train,
            Side.VAL: whole.val,
            Side.HELDOUT: whole.heldout,
        }


def test_few_rows_beside_others_to_validate_on_are_held_out_too(tmp_path):
    """Rows that share a group with validation rows are dropped, and the others are split."""
    path, apart = tmp_path / "few.jsonl", tmp_path / "val.jsonl"
    path.write_text("".join(line(i) for i in range(6)), "utf-8")
    apart.write_text("".join(line(i) for i in range(40, 43)), "utf-8")
    values = {"val_path": str(apart), "heldout_frac": 0.1}
    whole = load_rows(JsonlData(path=str(path), **values), Path("unused"))
    first = load_rows(config_of(str(path), shuffle_buffer=20, **values), Path("unused"))
    assert (first.train, first.val, first.heldout) == (whole.train, whole.val, whole.heldout)
    assert first.heldout


def test_the_first_rows_are_all_that_is_read_at_first(files):
    """Errors in later rows are not found yet."""
    Path(files[1]).write_bytes(b"no gzip")
    rows = load_rows(config_of(files, shuffle_buffer=14), Path("unused"))
    assert rows.streamed
    assert len(rows.train) + len(rows.val) + len(rows.heldout) == 14
    record = rows.record()["streaming"]
    assert record["first_rows"]["rows"] == 14
    assert record["file_bytes"] == {file: Path(file).stat().st_size for file in files}
    with pytest.raises(DataError, match="damaged"):
        windows(RowStream(config_of(files), None), 3)


def test_rows_to_validate_on_are_not_trained_on(files, tmp_path):
    """Two of four validation rows also occur in training data; they are skipped and counted."""
    val = tmp_path / "val.jsonl"
    val.write_text("".join(line(number) for number in (3, 12, 100, 101)), "utf-8")
    config = config_of(files, val_path=str(val), heldout_frac=0.1)
    rows = load_rows(config, Path("unused"))
    assert numbers(rows.val) == [3, 12, 100, 101]
    found = windows(RowStream(config, rows.val), 5)
    assert set(trained(found)) & {3, 12} == set()
    assert found[-1].totals["validated_on"] == 2
    assert found[-1].totals["trained_on"] == len(trained(found))
    assert [file.role for file in rows.files] == ["validation"]


def test_filters_pass_rows_over(tmp_path):
    """Every third row has the category; the others are counted."""
    path = tmp_path / "a.jsonl"
    path.write_text("".join(line(i, category="ab"[i % 3 > 0]) for i in range(21)), "utf-8")
    config = config_of(str(path), filter=FilterConfig(category="a"))
    found = windows(RowStream(config, None), 3)
    assert [all_of(window) for window in found] == [[0, 3, 6], [9, 12], [15, 18]]
    assert found[-1].totals["filtered"] == 14


def test_a_wrong_row_is_told_with_its_place(files):
    """Errors of a window are reported together when it is read; repeated ones only once."""
    with Path(files[0]).open("a", encoding="utf-8") as file:
        file.write('{"prompt": 3}\n{"prompt": "x"}\n')
    stream = RowStream(config_of(files), None)
    windows(stream, 2)
    with pytest.raises(Problems) as caught:
        stream.next_window()
    assert [(problem.where, problem.what) for problem in caught.value.problems] == [
        (f"{files[0]}:18", "'prompt' must be a string"),
        (f"{files[0]}:18", "the row has no 'response', here and in 1 more row at least (19)"),
    ]


def test_wrong_rows_are_put_aside_and_counted(files):
    """Two of thirty-two, in the third window, are quarantined; the others are unchanged."""
    before = trained(windows(RowStream(config_of(files), None), 5))
    with Path(files[0]).open("a", encoding="utf-8") as file:
        file.write("{\nnothing\n")
    config = config_of(files, on_bad_row=OnBadRow.quarantine, max_bad_frac=0.1)
    found = windows(RowStream(config, None), 5)
    assert trained(found) == before
    assert [window.totals["bad"] for window in found] == [0, 0, 2, 2, 2]
    assert [row.line for row in found[2].bad] == [18, 19]


def test_too_many_wrong_rows_are_refused(files):
    """Two of twenty-one exceed 5 %; the message has the last place and the reasons."""
    with Path(files[0]).open("a", encoding="utf-8") as file:
        file.write("{\nnothing\n")
    config = config_of(files, on_bad_row=OnBadRow.quarantine, max_bad_frac=0.05)
    with pytest.raises(DataError, match=r"found 2 of 21, at last in .*a\.jsonl:19"):
        windows(RowStream(config, None), 3)


def test_an_epoch_without_a_row_to_train_on_ends(tmp_path):
    """Otherwise the same rows would be read forever."""
    path = tmp_path / "a.jsonl"
    path.write_text(line(0), "utf-8")
    config = config_of(str(path), filter=FilterConfig(category="none"))
    stream = RowStream(config, None)
    stream.next_window()
    with pytest.raises(DataError, match="no row is left to train on"):
        stream.next_window()


@pytest.mark.parametrize("side", ["train", "val"])
def test_first_rows_without_a_side_are_refused(tmp_path, side):
    """The message says how to get a group for them."""
    path = tmp_path / "a.jsonl"
    path.write_text("".join(line(i, group="one") for i in range(9)), "utf-8")
    share = 0.999 if side == "train" else 0.0001
    with pytest.raises(DataError, match=rf"no row is left for {side}.*raise data.shuffle_buffer"):
        load_rows(config_of(str(path), val_frac=share, heldout_frac=0.0005), Path("unused"))


def test_the_digest_is_of_all_rows_so_far(files):
    """The digest changes with each window and with any change of a row."""
    found = windows(RowStream(config_of(files), None), 3)
    assert len({window.rows_sha256 for window in found}) == 3
    text = Path(files[0]).read_text("utf-8")
    Path(files[0]).write_text(text.replace('"r9"', '"other"'), "utf-8")
    other = windows(RowStream(config_of(files), None), 3)
    same = [a.rows_sha256 == b.rows_sha256 for a, b in zip(found, other, strict=True)]
    assert same == [True, False, False]


def test_no_row_is_lost_or_read_twice_whatever_the_buffer(files):
    """Buffers of one row, some, all and more than all are tried."""
    for size in (1, 4, 30, 31, 100):
        stream = RowStream(config_of(files, shuffle_buffer=size), None)
        seen = []
        window = stream.next_window()
        while window.epoch == 0:
            seen += all_of(window)
            window = stream.next_window()
        assert seen == list(range(30))
