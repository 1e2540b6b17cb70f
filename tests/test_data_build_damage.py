"""``data build`` on input that is damaged, and on a disk that is full: what it says, and what it leaves."""

from __future__ import annotations

import errno
import gzip
import json
import os
import resource
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from corpora import as_bytes, contents, straight_loop
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from typer.testing import CliRunner, Result

from mixle_megatron.cli.main import app
from mixle_megatron.data import bad_records, building, inputs, shards
from mixle_megatron.data.pieces import cut

PER_EXAMPLE = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """A folder with one sound file, to which tests add what is not."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    (folder / "a.txt").write_text("sound")
    return folder


def build(corpus: Path, *options: str | int) -> Result:
    """``data build`` of the folder into ``out`` beside it, in this process."""
    words = ["--input", corpus, "--tokenizer", "byte", "--output", out(corpus), "--workers", 1, *options]
    result = CliRunner().invoke(app, ["data", "build", *map(str, words)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def out(corpus: Path) -> Path:
    return corpus.parent / "out"


def straight(corpus: Path, *documents: str) -> bytes:
    """The tokens that Megatron's own builder writes of the documents."""
    straight_loop(corpus.parent / "straight", as_bytes(documents))
    return (corpus.parent / "straight.bin").read_bytes()


def refused(corpus: Path, *options: str | int) -> str:
    """What is said of a build that is refused, after which nothing stands under the final name."""
    result = build(corpus, *options)
    assert result.exit_code == 2, result.output
    assert not contents(out(corpus))
    return result.stderr


# Archives


@PER_EXAMPLE
@given(st.floats(0, 1, exclude_max=True), st.sampled_from(["jsonl.gz", "txt.gz"]))
def test_a_truncated_archive_is_always_refused(corpus, share, kind):
    """Cut at any byte, its header included, and however many bad records are allowed."""
    for left in corpus.glob("b.*"):
        left.unlink()
    whole = gzip.compress(b'{"text": "some words"}\n' * 50)
    path = corpus / f"b.{kind}"
    path.write_bytes(whole[: int(share * len(whole))])
    said = refused(corpus, "--max-bad", 1000)
    one_byte = f"{path} is damaged: Not a gzipped file (b'\\x1f')"
    assert f"{path} ends before its end-of-stream marker" in said or one_byte in said


def test_every_member_of_an_archive_is_read(corpus):
    (corpus / "b.jsonl.gz").write_bytes(gzip.compress(b'{"text": "1"}\n') + gzip.compress(b'{"text": "2"}'))
    assert build(corpus).exit_code == 0
    assert (out(corpus).with_suffix(".bin")).read_bytes() == straight(corpus, "sound", "1", "2")


@pytest.mark.parametrize("damage", [b"no archive", gzip.compress(b"x" * 99)[:-8] + b"\0" * 8])
def test_a_damaged_archive_is_refused(corpus, damage):
    (corpus / "b.txt.gz").write_bytes(damage)
    assert "b.txt.gz is damaged: " in refused(corpus, "--max-bad", 1000)


@pytest.mark.parametrize("name", ["b.zip", "b.tar.gz", "b.tgz", "b.xz", "b.bin"])
def test_what_is_no_text_at_all_is_refused_by_its_name(corpus, name):
    (corpus / name).write_bytes(b"x")
    said = refused(corpus / "*")
    assert f"{name} is neither text, JSON lines nor Parquet" in said


@pytest.mark.parametrize(("name", "package"), [("b.txt.zst", "backports.zstd"), ("b.parquet", "pyarrow")])
def test_a_format_whose_package_is_missing_is_refused_with_it(corpus, name, package, monkeypatch):
    (corpus / name).write_bytes(b"x")
    monkeypatch.setattr(inputs, "_installed", lambda _package: False)
    said = refused(corpus)
    assert f"the package {package} reads, and that is not installed; pip install {package}" in said


# Records

BAD = {
    b'{"text": "\xff"}': "is no UTF-8: byte 0xff at byte 11 of the line",
    b'{"text": "a"': "is no JSON: Expecting ',' delimiter at column 13",
    b'{"body": "a"}': "has no key 'text', but 'body'",
    b"{}": "has no key 'text', but none at all",
    b'{"text": 3}': "has no string under 'text' but 3",
    b'{"text": null}': "has no string under 'text' but null",
    b'["text"]': "is no object with a key 'text'",
    b'"text"': "is no object with a key 'text'",
    b"7": "is no object with a key 'text'",
    rb'{"text": "\ud800"}': "holds half of a surrogate pair",
    b'{"text": "a"} {}': "is no JSON: Extra data at column 15",
    b"[" * 100_000: "is nested too deeply",
}


@pytest.mark.parametrize("line", BAD, ids=lambda line: line[:20].decode("latin-1"))
def test_a_bad_line_is_named_with_its_place(corpus, line):
    path = corpus / "b.jsonl"
    path.write_bytes(b'{"text": "one"}\n\n' + line + b'\n{"text": "two"}\n')
    said = refused(corpus)
    assert "--max-bad=0 is exceeded by 1 bad record" in said
    assert f"{path}:3: record {BAD[line]}" in said
    allowed = build(corpus, "--max-bad", 1)
    assert allowed.exit_code == 0
    assert f"left out: {path}:3: {BAD[line]}" in allowed.stderr
    assert (out(corpus).with_suffix(".bin")).read_bytes() == straight(corpus, "sound", "one", "two")
    record = json.loads(out(corpus).with_suffix(".json").read_text())
    assert record["bad_records"] == len(record["bad"]) == 1


def test_a_text_file_that_is_no_utf8(corpus):
    (corpus / "b.txt").write_bytes("one\ntwö".encode("latin-1"))
    assert f"{corpus}/b.txt:2: record is no UTF-8: byte 0xf6 at byte 3 of the line" in refused(corpus)


@settings(PER_EXAMPLE, max_examples=10)
@given(bad=st.sets(st.integers(1, 40), min_size=1), size=st.integers(20, 400))
def test_places_are_those_of_the_file_however_it_is_cut(corpus, bad, size):
    lines = [b"?" if number in bad else b'{"text": "abcdefgh"}' for number in range(1, 41)]
    (corpus / "b.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(building, "cut", partial(cut, smallest=size))
        patch.setattr(bad_records, "_BUFFER", 7)
        built = build(corpus, "--max-bad", 40, "--overwrite")
    assert built.exit_code == 0
    record = json.loads(out(corpus).with_suffix(".json").read_text())
    assert [line.split(": ")[0] for line in record["bad"]] == [f"{corpus}/b.jsonl:{n}" for n in sorted(bad)]


def test_many_bad_lines_are_counted_and_the_first_listed(corpus):
    (corpus / "b.jsonl").write_bytes(b"?\n" * 3000)
    said = refused(corpus, "--max-bad", 2999)
    assert "is exceeded by 3000 bad records" in said
    assert "2980 more are not listed" in said
    assert said.count("b.jsonl:") == 20
    assert build(corpus, "--max-bad", 3000).exit_code == 0
    record = json.loads(out(corpus).with_suffix(".json").read_text())
    assert (record["bad_records"], len(record["bad"])) == (3000, 1000)


def test_lines_that_are_mended_are_read_again(corpus):
    path = corpus / "b.jsonl"
    path.write_bytes(b'{"text": "one"}\n?\n')
    refused(corpus)
    path.write_bytes(b'{"text": "one"}\n{"text": "two"}\n')
    assert build(corpus).exit_code == 0
    assert (out(corpus).with_suffix(".bin")).read_bytes() == straight(corpus, "sound", "one", "two")


def test_empty_documents_are_left_out_and_counted(corpus):
    (corpus / "b.txt").touch()
    (corpus / "c.jsonl").write_bytes(b'{"text": ""}\n{"text": "two"}\n')
    built = build(corpus)
    assert "2 empty documents were left out" in built.stdout
    assert (out(corpus).with_suffix(".bin")).read_bytes() == straight(corpus, "sound", "two")


def test_a_corpus_without_a_token_is_refused(corpus):
    (corpus / "a.txt").write_text("")
    assert "holds no document with a token" in refused(corpus)


def test_a_line_of_ten_megabytes(corpus):
    long = "0123456789" * 1_000_000
    (corpus / "b.jsonl").write_text(json.dumps({"text": long}) + '\n{"text": "after"}\n')
    assert build(corpus).exit_code == 0
    assert (out(corpus).with_suffix(".bin")).read_bytes() == straight(corpus, "sound", long, "after")


def test_a_document_too_long_for_megatrons_index_is_refused(corpus, monkeypatch):
    monkeypatch.setattr(shards, "LONGEST", 5)
    assert "holds a document of 5 tokens, and Megatron's index counts up to 5" in refused(corpus)


def test_a_file_that_changes_while_it_is_read_is_refused(corpus, monkeypatch):
    find = building.find_inputs

    def found(*arguments):
        answer = find(*arguments)
        (corpus / "a.txt").write_text("longer than before")
        return answer

    monkeypatch.setattr(building, "find_inputs", found)
    assert f"{corpus}/a.txt changed while it was read" in refused(corpus)


def test_a_file_that_goes_away_is_refused(corpus, monkeypatch):
    find = building.find_inputs

    def found(*arguments):
        answer = find(*arguments)
        (corpus / "a.txt").unlink()
        return answer

    monkeypatch.setattr(building, "find_inputs", found)
    assert "a.txt cannot be read: No such file or directory" in refused(corpus)


def test_paths_that_hold_nothing_are_refused(corpus, tmp_path):
    (tmp_path / "empty").mkdir()
    assert "holds no files" in refused(tmp_path / "empty")
    assert "does not exist; did you mean" in refused(tmp_path / "corpas")
    (tmp_path / "empty" / "x.csv").write_text("1,2")
    assert "--input" in (said := refused(tmp_path / "empty"))
    assert "name its files by a glob" in said
    assert "data.suffixes" not in said


# The disk


def full(*_arguments, **_options):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (IndexedDatasetBuilder, "add_document"),
        (IndexedDatasetBuilder, "finalize"),
        (os, "fsync"),
        (os, "replace"),
        (shards.json, "dump"),
    ],
)
def test_a_full_disk_is_said_and_leaves_nothing(corpus, monkeypatch, owner, name):
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, full)
        result = build(corpus)
    assert result.exit_code == 1, result.output
    assert "failed: " in result.stderr
    assert "No space left on device" in result.stderr
    assert "the same command goes on from there" in result.stderr
    assert not contents(out(corpus))
    assert not list(corpus.parent.glob("out*/*.aside*"))
    assert build(corpus).exit_code == 0
    assert (out(corpus).with_suffix(".bin")).read_bytes() == straight(corpus, "sound")


@pytest.mark.parametrize("limit", [200, 30_000, 60_000])
def test_a_disk_that_fills_up_while_it_is_written(corpus, limit):
    """The kernel's limit on the size of files, which is met by pieces or only by the whole."""
    document = "x" * 20_000
    (corpus / "b.jsonl").write_text(json.dumps({"text": document}))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        result = build(corpus)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    if limit < 2 * len(document):
        assert result.exit_code == 1
        assert "File too large" in result.stderr
        assert not contents(out(corpus))
    assert build(corpus).exit_code == 0
    assert (out(corpus).with_suffix(".bin")).read_bytes() == straight(corpus, "sound", document)


def test_an_output_that_cannot_be_written_is_refused(corpus):
    (corpus.parent / "out.building").write_text("no folder")
    assert "cannot be written: File exists" in refused(corpus)


def test_a_worker_says_what_went_wrong(corpus, monkeypatch):
    """In a process of its own, of which only the message comes back."""
    for number in range(3):
        (corpus / f"c{number}.jsonl").write_text('{"text": "a"}\n' * 9)
    (corpus / "d.jsonl.gz").write_bytes(gzip.compress(b"x")[:-1])
    monkeypatch.setattr(building, "cut", partial(cut, smallest=50))
    assert "d.jsonl.gz ends before its end-of-stream marker" in refused(corpus, "--workers", 2)


def test_the_smallest_dtype_is_megatrons():
    from mixle_megatron.data.megatron_dataset import DType

    assert DType.optimal_dtype(65_499) is np.uint16
    assert DType.optimal_dtype(65_500) is np.int32
