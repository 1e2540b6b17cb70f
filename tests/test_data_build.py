"""``data build``: the bytes that it writes, whoever works on them and however often it is stopped."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import signal
import tempfile
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from corpora import as_bytes, contents, corpora, straight_loop, texts, write_corpus
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
from typer.testing import CliRunner

from mixle_megatron.cli.main import app
from mixle_megatron.data import building, shards
from mixle_megatron.data.build_errors import BuildFailed, BuildStopped
from mixle_megatron.data.building import BuildRequest, build_corpus
from mixle_megatron.data.concatenation import concatenate
from mixle_megatron.data.corpus_record import read_record
from mixle_megatron.data.counts import BuildWatch
from mixle_megatron.data.inputs import find_inputs
from mixle_megatron.data.pieces import cut
from mixle_megatron.data.span_reading import SpanReader
from mixle_megatron.errors import Refused


@pytest.fixture
def folder():
    """A folder of its own for each example of a property."""
    with tempfile.TemporaryDirectory() as path:
        yield Path(path)


@pytest.fixture
def small_pieces(monkeypatch):
    """Pieces of a hundred bytes and parts of three documents, so that a small corpus has many."""
    monkeypatch.setattr(building, "cut", partial(cut, smallest=100))
    monkeypatch.setattr(shards, "DOCUMENTS_OF_A_PART", 3)


def request_of(folder: Path, name: str = "out", **options) -> BuildRequest:
    return BuildRequest(
        inputs=[str(folder / "corpus")],
        tokenizer="byte",
        output=str(folder / name),
        **{"workers": 1, **options},
    )


def expected(folder: Path, documents: list[str]) -> dict[str, bytes]:
    """Megatron's own files of the documents."""
    straight_loop(folder / "straight", as_bytes(documents))
    return contents(folder / "straight")


def corpus_in(folder: Path, documents: list[str]) -> dict[str, bytes]:
    write_corpus(folder / "corpus", [("jsonl", documents)])
    return expected(folder, documents)


def without_record(files: dict[str, bytes]) -> dict[str, bytes]:
    return {ending: raw for ending, raw in files.items() if ending != ".json"}


DOCUMENTS = [f"document {number} " * (number % 7) for number in range(60)]


@settings(max_examples=25, deadline=None)
@given(corpora)
def test_the_bytes_are_those_of_a_straight_loop(files):
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        folder = Path(name)
        patch.setattr(building, "cut", partial(cut, smallest=100))
        patch.setattr(shards, "DOCUMENTS_OF_A_PART", 3)
        documents = write_corpus(folder / "corpus", files)
        assume(any(documents))
        built = build_corpus(request_of(folder))
        assert without_record(contents(folder / "out")) == expected(folder, documents)
        assert built.record == read_record(str(folder / "out"))
        assert built.record.empty_documents == documents.count("")
        assert built.record.text_bytes == sum(len(text.encode()) for text in documents)
        assert sorted(path.name for path in folder.iterdir())[:3] == ["corpus", "out.bin", "out.idx"]


@settings(max_examples=5, deadline=None)
@given(files=corpora, workers=st.integers(2, 4))
def test_the_number_of_workers_changes_no_byte(files, workers):
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        folder = Path(name)
        patch.setattr(building, "cut", partial(cut, smallest=60))
        documents = write_corpus(folder / "corpus", files)
        assume(any(documents))
        build_corpus(request_of(folder, "one"))
        build_corpus(request_of(folder, "many", workers=workers))
        assert contents(folder / "many") == contents(folder / "one")


class StopsAfter(BuildWatch):
    """Stops a build when it has been told something so many times."""

    def __init__(self, times: int) -> None:
        self.left = times

    def advance(self, done) -> None:
        self.left -= 1
        if self.left < 0:
            raise BuildStopped("by the test")


@settings(max_examples=25, deadline=None)
@given(files=corpora, stops=st.lists(st.integers(0, 8), max_size=4))
def test_stopping_and_going_on_changes_no_byte(files, stops):
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        folder = Path(name)
        patch.setattr(building, "cut", partial(cut, smallest=60))
        documents = write_corpus(folder / "corpus", files)
        assume(any(documents))
        for times in stops:
            try:
                build_corpus(request_of(folder), StopsAfter(times))
            except BuildStopped:
                assert not contents(folder / "out")
        build_corpus(request_of(folder))
        build_corpus(request_of(folder, "at_once"))
        assert contents(folder / "out") == contents(folder / "at_once")


def test_what_is_done_stays_done(folder, small_pieces, monkeypatch):
    corpus_in(folder, DOCUMENTS)
    with pytest.raises(BuildStopped):
        build_corpus(request_of(folder), StopsAfter(5))
    kept = {path: path.stat().st_mtime_ns for path in (folder / "out.building").glob("*.json")}
    assert len(kept) == 5
    again = []
    write = shards.ShardWriting.write
    monkeypatch.setattr(
        shards.ShardWriting, "write", lambda self, key, *rest: again.append(key) or write(self, key, *rest)
    )
    built = build_corpus(request_of(folder))
    assert built.kept == 5
    assert len(again) == built.pieces - 5
    assert not {path.stem for path in kept} & set(again)


class Kills(BuildWatch):
    """Kills every worker process as soon as one has said anything."""

    def advance(self, done) -> None:
        if done is not None:
            for child in multiprocessing.active_children():
                os.kill(child.pid, signal.SIGKILL)


def test_killed_workers_end_the_build_and_not_its_result(folder, small_pieces):
    files = corpus_in(folder, DOCUMENTS)
    with pytest.raises(BuildFailed, match="killed by SIGKILL"):
        build_corpus(request_of(folder, workers=2), Kills())
    assert not contents(folder / "out")
    build_corpus(request_of(folder, workers=2))
    assert without_record(contents(folder / "out")) == files
    assert not (folder / "out.building").exists()


class Crash(BaseException):
    """What nothing in the code expects."""


@pytest.mark.parametrize("overwrite", [False, True])
@settings(max_examples=15, deadline=None)
@given(at=st.integers(0, 40))
def test_a_crash_anywhere_leaves_no_half_corpus(overwrite, at):
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        folder = Path(name)
        patch.setattr(building, "cut", partial(cut, smallest=200))
        before = {}
        if overwrite:
            write_corpus(folder / "corpus", [("jsonl", ["another corpus"])])
            build_corpus(request_of(folder))
            before = contents(folder / "out")
        files = corpus_in(folder, DOCUMENTS[:20])
        with crashing_at(at):
            try:
                build_corpus(request_of(folder, overwrite=overwrite))
            except Crash:
                left = contents(folder / "out")
                assert ".idx" not in left or left == before or without_record(left) == files
        build_corpus(request_of(folder, overwrite=overwrite))
        assert without_record(contents(folder / "out")) == files
        assert not list(folder.glob("*.writing"))
        assert not (folder / "out.building").exists()


class crashing_at:
    """Every change of a name and every wait for the disk may be the last: this ends the one numbered so."""

    def __init__(self, at: int) -> None:
        self.calls = itertools.count()
        self.at = at
        self.patch = pytest.MonkeyPatch()

    def __enter__(self) -> None:
        for name in ("replace", "fsync"):
            self.patch.setattr(os, name, partial(self.call, getattr(os, name)))

    def call(self, function, *arguments):
        if next(self.calls) >= self.at:
            raise Crash
        return function(*arguments)

    def __exit__(self, *_error) -> None:
        self.patch.undo()


def test_parts_are_joined_as_megatron_joins_them(folder):
    parts = []
    for number, count in enumerate((3, 1, 5)):
        prefix = folder / f"part{number}"
        ids = [list(range(number + 1, number + 2 + each)) for each in range(count)]
        straight_loop(prefix, ids)
        parts.append((str(prefix), count, sum(map(len, ids))))
    builder = IndexedDatasetBuilder(str(folder / "theirs.bin"), dtype=np.uint16)
    for prefix, _, _ in parts:
        builder.add_index(prefix)
    builder.finalize(str(folder / "theirs.idx"))
    concatenate(parts, str(folder / "ours"), np.uint16)
    assert contents(folder / "ours") == contents(folder / "theirs")


def test_megatron_reads_the_documents(folder):
    write_corpus(folder / "corpus", [("txt", ["first"]), ("jsonl", ["second", "", "third"])])
    record = build_corpus(request_of(folder)).record
    dataset = IndexedDataset(str(folder / "out"))
    assert [bytes(row[:-1].tolist()).decode() for row in dataset[:]] == ["first", "second", "third"]
    assert {int(row[-1]) for row in dataset[:]} == {256}
    assert (record.documents, record.tokens, record.empty_documents) == (3, 19, 1)
    assert (record.vocab_size, record.eod, record.append_eod, record.dtype) == (257, 256, True, "uint16")


def test_without_end_tokens(folder):
    write_corpus(folder / "corpus", [("jsonl", ["ab", "c"])])
    record = build_corpus(request_of(folder, append_eod=False)).record
    assert (folder / "out.bin").read_bytes() == np.frombuffer(b"abc", np.uint8).astype(np.uint16).tobytes()
    assert record.tokens == record.text_bytes == 3


def test_another_key_and_lines_of_every_ending(folder):
    (folder / "corpus").mkdir()
    raw = b'\xef\xbb\xbf{"body": "a"}\r\n\n  \n{"body": "b", "text": 3}'
    (folder / "corpus" / "a.ndjson").write_bytes(raw)
    build_corpus(request_of(folder, json_key="body"))
    assert without_record(contents(folder / "out")) == expected(folder, ["a", "b"])


def test_the_same_build_again_does_nothing(folder, monkeypatch):
    corpus_in(folder, DOCUMENTS)
    first = build_corpus(request_of(folder))
    monkeypatch.setattr(building, "work_on", None)
    again = build_corpus(request_of(folder))
    assert again.already
    assert again.record == first.record


def test_other_input_under_the_same_name_is_refused(folder):
    corpus_in(folder, DOCUMENTS)
    build_corpus(request_of(folder))
    before = contents(folder / "out")
    files = corpus_in(folder, ["other"])
    with pytest.raises(Refused, match="is there already"):
        build_corpus(request_of(folder))
    assert contents(folder / "out") == before
    build_corpus(request_of(folder, overwrite=True))
    assert without_record(contents(folder / "out")) == files


@pytest.mark.parametrize("ending", [".bin", ".json"])
def test_somebody_elses_file_is_not_replaced(folder, ending):
    corpus_in(folder, DOCUMENTS)
    other = Path(f"{folder / 'out'}{ending}")
    other.write_text("{}")
    with pytest.raises(Refused, match="is there already"):
        build_corpus(request_of(folder))
    assert other.read_text() == "{}"


def test_a_damaged_piece_is_done_again(folder, small_pieces):
    files = corpus_in(folder, DOCUMENTS)
    with pytest.raises(BuildStopped):
        build_corpus(request_of(folder), StopsAfter(6))
    pieces = sorted((folder / "out.building").glob("*.bin"))
    pieces[0].write_bytes(pieces[0].read_bytes()[:-1])
    pieces[1].unlink()
    sorted((folder / "out.building").glob("*.json"))[-1].write_text('{"parts": [[1')
    build_corpus(request_of(folder))
    assert without_record(contents(folder / "out")) == files


def test_one_build_at_a_time(folder):
    corpus_in(folder, DOCUMENTS)

    class Meanwhile(BuildWatch):
        def begin(self, stage, total, kept):
            with pytest.raises(Refused, match="being built by another process"):
                build_corpus(request_of(folder))

    build_corpus(request_of(folder), Meanwhile())


@settings(max_examples=60, deadline=None)
@given(st.lists(texts, max_size=12), st.integers(1, 400), st.booleans())
def test_a_large_file_is_cut_at_lines_only(documents, size, last_newline):
    """Whatever the size of pieces, every line is in exactly one of them."""
    with tempfile.TemporaryDirectory() as name:
        write_corpus(Path(name), [("jsonl", documents)])
        (path,) = Path(name).iterdir()
        if not last_newline:
            path.write_bytes(path.read_bytes().removesuffix(b"\n"))
        (found,), faults = find_inputs([str(path)])
        assert not faults
        spans = [span for piece in cut([found], smallest=size) for span in piece.spans]
        assert (spans[0].start, spans[-1].end) == (0, found.size)
        read = [document for span in spans for document in SpanReader(span, "text")]
        assert read == [text.encode() for text in documents]


def run(*arguments: str | Path):
    result = CliRunner().invoke(app, ["data", "build", *map(str, arguments)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def test_the_command(folder):
    files = corpus_in(folder, DOCUMENTS)
    command = ("--input", folder / "corpus/**/*.jsonl", "--tokenizer", "byte", "--output", folder / "x/out")
    result = run(*command, "--workers", 1)
    assert result.exit_code == 0, result.output
    assert "documents" in result.stdout
    assert "100 %" in result.stderr
    assert without_record(contents(folder / "x/out")) == files
    assert "there already" in run(*command).stdout


def test_a_stopped_command_says_so(folder, monkeypatch):
    corpus_in(folder, DOCUMENTS)
    handler = signal.getsignal(signal.SIGTERM)
    with monkeypatch.context() as patch:
        patch.setattr(signal, "signal", ring := partial(ringing, signal.signal))
        result = run("--input", folder / "corpus", "--tokenizer", "byte", "--output", folder / "out")
    assert ring
    assert result.exit_code == 3
    assert "stopped: by SIGTERM" in result.stderr
    assert not contents(folder / "out")
    assert signal.getsignal(signal.SIGTERM) is handler


def ringing(install, number, handler):
    """Install a handler, and send the signal at once."""
    before = install(number, handler)
    if number == signal.SIGTERM and getattr(handler, "__name__", "") == "_receive":
        os.kill(os.getpid(), number)
    return before


@pytest.mark.parametrize(
    ("options", "field"),
    [
        (["--tokenizer", "gpt2"], "--tokenizer=gpt2 is no tokenizer"),
        (["--tokenizer", "mixle:x"], "mixle, which has none"),
        (["--tokenizer", "byte", "--eod-token", "</s>"], "--eod-token=</s> names no token"),
        (["--tokenizer", "byte", "--max-bad", "-1"], "--max-bad=-1 must be at least 0"),
        (["--tokenizer", "byte", "--workers", "0"], "--workers=0 must be at least 1"),
    ],
)
def test_options_that_cannot_be(folder, options, field):
    corpus_in(folder, DOCUMENTS)
    result = run("--input", folder / "corpus", "--output", folder / "out", *options)
    assert result.exit_code == 2
    assert field in result.stderr
    assert sorted(path.name for path in folder.iterdir()) == ["corpus", "straight.bin", "straight.idx"]


def test_an_output_that_names_no_file(folder):
    corpus_in(folder, DOCUMENTS)
    result = run("--input", folder / "corpus", "--tokenizer", "byte", "--output", f"{folder}/")
    assert result.exit_code == 2
    assert "names no file" in result.stderr


def test_the_record_is_plain(folder):
    corpus_in(folder, DOCUMENTS)
    build_corpus(request_of(folder))
    stored = json.loads((folder / "out.json").read_text())
    assert stored["format"] == 1
    assert stored["documents"] == sum(map(bool, DOCUMENTS))
    assert stored["tokenizer"] == "byte"
