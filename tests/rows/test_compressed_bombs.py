"""Small files that expand to much more in memory are refused by name."""

from __future__ import annotations

import gzip
import json
import zlib

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from attacks import attack

from mens_exp.errors import DataError, Problems
from mens_exp.evals.program_suite import read_tasks
from mens_exp.rows import decode, files, readers, tables
from mens_exp.rows.readers import Reading, read_rows

MIB = 2**20
ROW = b'{"prompt": "p", "response": "r"}\n'


def gzipped(path, piece, mib):
    with gzip.open(path, "wb", compresslevel=1) as file:
        for _ in range(mib):
            file.write(piece * (MIB // len(piece)))
    return path


def zstandarded(path, piece, mib):
    packer = zstandard.ZstdCompressor(level=1)
    with path.open("wb") as file, packer.stream_writer(file) as writer:
        for _ in range(mib):
            writer.write(piece * (MIB // len(piece)))
    return path


@pytest.fixture
def small(monkeypatch):
    """Divide every limit by sixteen."""
    monkeypatch.setattr(files, "_ALWAYS_BYTES", files._ALWAYS_BYTES // 16)
    monkeypatch.setattr(readers, "_MOST_BAD", readers._MOST_BAD // 16)
    for module in (decode, tables):
        monkeypatch.setattr(module, "MAX_LINE_BYTES", module.MAX_LINE_BYTES // 16)


@pytest.mark.parametrize("piece", [b"\n", b"x\n", b" "])
@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.json.gz", "a.jsonl.zst", "a.json.zst"])
def test_a_file_that_unpacks_to_far_more_is_refused(tmp_path, name, piece, small):
    """Reading stops before megabytes of repeated content are expanded."""
    make = gzipped if name.endswith("gz") else zstandarded
    path = make(tmp_path / name, piece, 20)
    for quarantine in (False, True):
        end = attack(read_rows, path, Reading(quarantine=quarantine), memory_mib=64)
        assert end.how == "refused", end
        expected = ("holds more than its size", "most rows are bad")
        assert any(one in end.message for one in expected)


def test_a_file_of_300_megabytes_is_refused(tmp_path):
    """This uses the real limits."""
    end = attack(read_rows, zstandarded(tmp_path / "a.jsonl.zst", b" ", 300))
    assert end.how == "refused", end
    assert f"more than {32 * MIB + 100 * (tmp_path / 'a.jsonl.zst').stat().st_size:,} bytes" in (
        end.message
    )


def test_a_plain_file_without_rows_is_not_read_to_its_end(tmp_path):
    """Reading two million blank lines stops early, and the first are reported."""
    path = tmp_path / "a.jsonl"
    path.write_bytes(ROW + b"\n" * 2_000_000)
    for quarantine in (False, True):
        end = attack(read_rows, path, Reading(quarantine=quarantine), seconds=40)
        assert end.how == "refused", end
        assert "most rows are bad, so the file is not read to its end" in end.message
        assert "100,001 bad ones among the first 100,002" in end.message


def test_a_file_of_good_rows_may_have_many_bad_ones(tmp_path, small):
    """Up to as many bad rows as good ones are read; data.max_bad_frac decides about fewer."""
    path, many = tmp_path / "a.jsonl", readers._MOST_BAD + 50
    path.write_bytes((ROW + b"x\n") * many)
    found = read_rows(path, Reading(quarantine=True))
    assert (len(found.pairs), len(found.bad)) == (many, many)
    path.write_bytes((ROW + b"x\n") * many + b"x\n" * 2)
    with pytest.raises(Problems, match="most rows are bad"):
        read_rows(path, Reading(quarantine=True))


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst"])
def test_rows_that_are_much_alike_are_read(tmp_path, name):
    """Similar rows may be over a hundred times as large as their compressed file."""
    content = ROW * 10_000
    pack = gzip.compress if name.endswith("gz") else zstandard.compress
    (tmp_path / name).write_bytes(pack(content))
    assert len(content) > 100 * (tmp_path / name).stat().st_size
    assert len(read_rows(tmp_path / name).pairs) == 10_000


@pytest.mark.parametrize("piece", [b"\n", b"x\n", b" "])
def test_task_files_have_the_same_bounds(tmp_path, piece, small):
    """HumanEval is distributed as a gzipped file."""
    end = attack(read_tasks, gzipped(tmp_path / "a.jsonl.gz", piece, 60), memory_mib=64)
    assert end.how == "refused", end
    assert "holds more than its size" in end.message


@pytest.mark.parametrize("damage", [lambda b: b[:-9], lambda b: b[:40] + b"xxxx" + b[44:]])
def test_a_damaged_task_file_is_an_error_of_ours(tmp_path, damage):
    """The file is truncated, or changed in the middle."""
    path = tmp_path / "a.jsonl.gz"
    packed = gzip.compress(b"".join(b'{"task_id": "%d"}\n' % n for n in range(500)))
    path.write_bytes(damage(packed))
    with pytest.raises(DataError, match="the file is not gzipped") as caught:
        read_tasks(path)
    assert isinstance(caught.value.__cause__, EOFError | OSError | zlib.error)


def test_a_long_value_that_all_rows_of_a_table_share_is_counted(tmp_path):
    """Ten thousand rows that refer to one dictionary value of a megabyte count in full."""
    path = tmp_path / "a.parquet"
    table = {"prompt": ["x" * MIB] * 10_000, "response": ["y"] * 10_000}
    column = pa.array([0] * 10_000, pa.int32())
    shared = pa.DictionaryArray.from_arrays(column, pa.array(table["prompt"][:1]))
    pq.write_table(pa.table({"prompt": shared, "response": table["response"]}), path)
    assert path.stat().st_size < 2 * MIB
    end = attack(read_rows, path)
    assert end.how == "refused", end
    assert "the table is larger than the size of its file allows" in end.message


@pytest.mark.parametrize("kind", ["dictionary", "view"])
def test_shared_values_of_arrow_files_are_counted(tmp_path, kind):
    """Values may be shared by dictionary index or by views of one buffer."""
    path = tmp_path / "a.arrow"
    long, many = "x" * MIB, 10_000
    column = pa.DictionaryArray.from_arrays(pa.array([0] * many, pa.int32()), pa.array([long]))
    if kind == "view":
        one = pa.array([long], pa.string_view()).buffers()
        views = pa.py_buffer(one[1].to_pybytes() * many)
        column = pa.Array.from_buffers(pa.string_view(), many, [None, views, *one[2:]])
    batch = pa.record_batch({"prompt": column, "response": pa.array(["y"] * many)})
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, batch.schema) as writer:
        writer.write_batch(batch)
    end = attack(read_rows, path)
    assert end.how == "refused", end
    assert "the table is larger than the size of its file allows" in end.message


def test_a_column_of_millions_of_nothing_is_refused(tmp_path):
    """Run-length encoding stores a million nulls in almost no space."""
    path = tmp_path / "a.parquet"
    many = 50_000_000
    column = pa.ListArray.from_arrays(pa.array([0, many], pa.int32()), pa.nulls(many, pa.int8()))
    pq.write_table(pa.table({"prompt": ["p"], "response": ["r"], "more": column}), path)
    assert path.stat().st_size < MIB
    end = attack(read_rows, path)
    assert end.how == "refused", end
    assert "the table is larger than the size of its file allows" in end.message


def test_long_rows_of_a_table_are_read_a_few_at_a_time(tmp_path, small):
    """Rows are read in small batches; one above the line limit is a bad row."""
    path, most = tmp_path / "a.parquet", decode.MAX_LINE_BYTES
    texts = ["a" * (most // 2), "b" * (most // 2), "c" * (most // 2), "d"]
    pq.write_table(pa.table({"prompt": ["p"] * 4, "response": texts}), path, compression="none")
    assert [pair.response for pair in read_rows(path).pairs] == texts
    texts[1] = "b" * (most + MIB)
    pq.write_table(pa.table({"prompt": ["p"] * 4, "response": texts}), path, compression="none")
    with pytest.raises(DataError, match=r"parquet:2: the row is too long"):
        read_rows(path)


def test_every_column_of_a_table_is_read_as_before(tmp_path):
    """The columns have shared strings, lists, structs, views and nulls."""
    rows = [
        {"prompt": "p", "response": "r", "meta": {"k": ["a", "b"]}},
        {"prompt": "p", "response": "r", "meta": None},
    ]
    plain = pa.Table.from_pylist(rows * 600)
    path = tmp_path / "a.parquet"
    pq.write_table(plain, path)
    from mens_exp.rows.tables import rows_of_file

    expected = [{k: v for k, v in row.items() if v is not None} for row in rows * 600]
    assert [row for _, row in rows_of_file(path, "parquet", "data.path")] == expected
    views = pa.table({"prompt": pa.array(["p", "long " * 9, None], pa.string_view())})
    with pa.ipc.new_file(str(tmp_path / "v.arrow"), views.schema) as writer:
        writer.write_table(views)
    found = [row for _, row in rows_of_file(tmp_path / "v.arrow", "arrow", "data.path")]
    assert json.dumps(found) == json.dumps([{"prompt": "p"}, {"prompt": "long " * 9}, {}])
