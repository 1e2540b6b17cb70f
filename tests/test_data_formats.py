"""What input files hold, told by their names; Zstandard and Parquet, skipped without their packages."""

from __future__ import annotations

from pathlib import Path

import pytest
from corpora import as_bytes, contents, straight_loop
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mixle_megatron.data import shards
from mixle_megatron.data.building import BuildRequest, build_corpus
from mixle_megatron.data.inputs import Compression, Format, find_inputs
from mixle_megatron.errors import Refused

DOCUMENTS = [f"document {number} é" * (number % 5) for number in range(700)]


def built(path: Path, **options) -> dict[str, bytes]:
    """What a build of one file writes, Megatron's own two files of it."""
    prefix = path.parent / "out"
    build_corpus(BuildRequest([str(path)], "byte", str(prefix), workers=1, overwrite=True, **options))
    return {ending: raw for ending, raw in contents(prefix).items() if ending != ".json"}


def straight(folder: Path) -> dict[str, bytes]:
    straight_loop(folder / "straight", as_bytes(DOCUMENTS))
    return contents(folder / "straight")


@pytest.mark.parametrize(
    ("name", "form", "compression"),
    [
        ("a.txt", Format.TEXT, Compression.NONE),
        ("a", Format.TEXT, Compression.NONE),
        ("a.json", Format.JSON_LINES, Compression.NONE),
        ("A.JSONL.GZ", Format.JSON_LINES, Compression.GZIP),
        ("b.jsonl.txt", Format.TEXT, Compression.NONE),
        ("a.md.gz", Format.TEXT, Compression.GZIP),
        ("a.gz", Format.TEXT, Compression.GZIP),
    ],
)
def test_names_say_what_files_hold(tmp_path, name, form, compression):
    (tmp_path / name).write_text("x")
    (found,), faults = find_inputs([str(tmp_path / name)])
    assert (found.format, found.compression, faults) == (form, compression, [])
    (found,), faults = find_inputs([str(tmp_path / name)], Format.JSON_LINES)
    assert (found.format, found.compression, faults) == (Format.JSON_LINES, compression, [])


def test_a_folder_gives_every_kind_and_each_file_once(tmp_path):
    names = ["a.txt", "b.jsonl", "c/d.md.gz", "c/e.json.gz"]
    for name in [*names, "f.csv", ".hidden.txt"]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    found, faults = find_inputs(
        [str(tmp_path / "c" / "e.json.gz"), str(tmp_path), str(tmp_path / "**/*.txt")]
    )
    assert faults == []
    assert [each.path for each in found] == [str(tmp_path / name) for name in [names[3], *names[:3]]]


def test_zstandard(tmp_path):
    zstd = pytest.importorskip("backports.zstd", reason="the package backports.zstd is not installed")
    lines = [f'{{"text": "{text}"}}\n'.encode() for text in DOCUMENTS]
    path = tmp_path / "a.jsonl.zst"
    path.write_bytes(zstd.compress(b"".join(lines[:300])) + zstd.compress(b"".join(lines[300:])))
    assert built(path) == straight(tmp_path)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(share=st.floats(0, 1, exclude_max=True))
def test_truncated_zstandard_is_always_refused(tmp_path, share):
    zstd = pytest.importorskip("backports.zstd", reason="the package backports.zstd is not installed")
    whole = zstd.compress(b"".join(b"%d\n" % number for number in range(5000)))
    path = tmp_path / "a.txt.zst"
    path.write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(Refused, match="ends before its end-of-stream marker"):
        built(path, max_bad=1000)
    path.write_bytes(b"nothing of the kind")
    with pytest.raises(Refused, match="is damaged"):
        built(path, max_bad=1000)


@pytest.fixture
def parquet():
    """pyarrow, and its module of Parquet."""
    arrow = pytest.importorskip("pyarrow", reason="the package pyarrow is not installed")
    return arrow, pytest.importorskip("pyarrow.parquet")


@pytest.mark.parametrize("compression", ["none", "snappy", "zstd"])
def test_parquet(parquet, tmp_path, monkeypatch, compression):
    monkeypatch.setattr(shards, "DOCUMENTS_OF_A_PART", 100)
    arrow, module = parquet
    table = arrow.table({"id": list(range(700)), "text": DOCUMENTS})
    module.write_table(table, tmp_path / "a.parquet", row_group_size=250, compression=compression)
    assert built(tmp_path / "a.parquet") == straight(tmp_path)


def test_rows_without_a_value_are_bad_records(parquet, tmp_path):
    arrow, module = parquet
    module.write_table(arrow.table({"text": ["a"] * 300 + [None] + ["b"]}), tmp_path / "a.parquet")
    with pytest.raises(Refused, match=r"a\.parquet:301: record has no value under 'text'"):
        built(tmp_path / "a.parquet")
    assert len(built(tmp_path / "a.parquet", max_bad=1)[".bin"]) == 301 * 4


@pytest.mark.parametrize(
    ("columns", "rule"),
    [({"body": ["a"]}, "has no column 'text', but 'body'"), ({"text": [3]}, "has no strings in its column")],
)
def test_columns_that_hold_no_text_are_refused(parquet, tmp_path, columns, rule):
    arrow, module = parquet
    module.write_table(arrow.table(columns), tmp_path / "a.parquet")
    with pytest.raises(Refused, match=rule):
        built(tmp_path / "a.parquet", max_bad=1000)


def test_truncated_parquet_is_refused(parquet, tmp_path):
    arrow, module = parquet
    path = tmp_path / "a.parquet"
    module.write_table(arrow.table({"text": DOCUMENTS}), path)
    whole = path.read_bytes()
    for size in (4, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(Refused, match="is damaged"):
            built(path, max_bad=1000)
