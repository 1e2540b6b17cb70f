"""``data inspect``: what it finds in a corpus, and that it finds what is wrong with one."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from corpora import EOD, as_bytes, straight_loop
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from typer.testing import CliRunner, Result

from mixle_megatron.cli.data_tables import BAR_WIDTH, bar
from mixle_megatron.cli.main import app
from mixle_megatron.data import index_checks, token_checks
from mixle_megatron.data.building import BuildRequest, build_corpus
from mixle_megatron.data.corpus_record import CorpusRecord
from mixle_megatron.data.indexed_inspection import CorpusInspection, LengthBin, Sample, inspect_corpus

PER_EXAMPLE = settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
DOCUMENTS = ["a", "bb", "ccc", "dddd", "é\x1b[31m", "x" * 100, "y" * 127]
LENGTHS = [2, 3, 4, 5, 8, 101, 128]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """The prefix of a corpus as ``data build`` leaves it."""
    lines = "".join(json.dumps({"text": text}) + "\n" for text in DOCUMENTS)
    (tmp_path / "text.jsonl").write_text(lines)
    build_corpus(BuildRequest([str(tmp_path / "text.jsonl")], "byte", str(tmp_path / "out"), workers=1))
    return tmp_path / "out"


def run(prefix: Path, *options: str | int) -> Result:
    result = CliRunner().invoke(app, ["data", "inspect", str(prefix), *map(str, options)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def damaged(prefix: Path, *options: str | int) -> str:
    """What is said of a corpus that is damaged; plain and JSON agree."""
    found = run(prefix, *options)
    assert found.exit_code == 1, found.output
    stored = json.loads(run(prefix, "--json", *options).stdout)
    assert stored["whole"] is False
    assert found.stderr.splitlines() == [f"damaged: {line}" for line in stored["damage"]]
    assert set(stored) == KEYS
    return found.stderr


KEYS = {"whole", *CorpusInspection.__dataclass_fields__}


def test_json_of_a_corpus(corpus):
    stored = json.loads(run(corpus, "--json").stdout)
    assert set(stored) == KEYS
    assert stored["whole"] is True
    assert (stored["documents"], stored["sequences"], stored["tokens"]) == (7, 7, sum(LENGTHS))
    assert (stored["shortest"], stored["longest"]) == (2, 128)
    assert stored["mean"] == pytest.approx(np.mean(LENGTHS))
    assert stored["dtype"] == "uint16"
    assert stored["bin_bytes"] == 2 * sum(LENGTHS)
    assert (stored["smallest_token"], stored["largest_token"], stored["vocab_size"]) == (27, 256, 257)
    assert stored["record"] == json.loads(corpus.with_suffix(".json").read_text())
    assert stored["notes"] == stored["damage"] == []
    samples = {each["document"]: each for each in stored["samples"]}
    assert list(samples) == [0, 2, 4]
    assert samples[4] == {
        "document": 4,
        "tokens": 8,
        "ids": [*"é\x1b[31m".encode(), EOD],
        "text": "é\x1b[31m",
    }


def test_the_picture(corpus):
    shown = run(corpus, "--samples", 7)
    assert shown.exit_code == 0
    assert "whole (every token read)" in shown.stdout
    assert "\x1b" not in shown.stdout  # which a document holds
    rows = [line.split() for line in shown.stdout.splitlines() if "█" in line]
    assert [(row[0], row[-3]) for row in rows] == [
        ("2", "2"),
        ("4", "2"),
        ("8", "1"),
        ("64", "1"),
        ("128", "1"),
    ]
    assert rows[0].count("█" * BAR_WIDTH) == 1


@given(st.floats(0, 1))
def test_a_bar_is_as_long_as_its_share(share):
    drawn = bar(share)
    assert len(drawn) <= BAR_WIDTH
    assert abs(drawn.count("█") - share * BAR_WIDTH) <= 1
    assert bool(drawn) == (share > 0)


@PER_EXAMPLE
@given(st.lists(st.lists(st.integers(0, 65_000), max_size=20), min_size=1, max_size=20), st.integers(1, 7))
def test_a_corpus_of_megatrons_own_tool(tmp_path, documents, chunk):
    """Which has no record; read in chunks of any size."""
    straight_loop(tmp_path / "theirs", documents)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(index_checks, "_CHUNK", chunk)
        patch.setattr(token_checks, "_CHUNK", chunk)
        found = inspect_corpus(str(tmp_path / "theirs"), samples=2)
        lengths = [len(each) for each in documents]
        if not sum(lengths):
            return
        every = [token for each in documents for token in each]
        assert found.damage == []
        assert (found.documents, found.tokens) == (len(documents), sum(lengths))
        assert (found.smallest_token, found.largest_token) == (min(every), max(every))
        assert (found.shortest, found.longest) == (min(lengths), max(lengths))
        counted = {n: sum(e.documents for e in found.histogram if e.least <= n <= e.most) for n in lengths}
        assert sum(each.documents for each in found.histogram) == len(documents)
        assert all(counted.values())
        assert found.samples[0].ids == tuple(documents[0])
        assert any("there is no" in note for note in found.notes)
        assert any("compared with no vocabulary" in note for note in found.notes)
        outside = inspect_corpus(str(tmp_path / "theirs"), vocab_size=max(max(every), 1))
        assert bool(outside.damage) == (max(every) > 0)


@PER_EXAMPLE
@given(st.data())
def test_any_cut_is_found(corpus, data):
    """Of the tokens or of the index, to any shorter size, and of anything appended."""
    path = corpus.with_suffix(data.draw(st.sampled_from([".bin", ".idx"])))
    whole = path.read_bytes()
    try:
        path.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])
        assert inspect_corpus(str(corpus)).damage
        assert inspect_corpus(str(corpus), quick=True).damage
        path.write_bytes(whole + b"\0" * data.draw(st.integers(8, 20)))
        assert inspect_corpus(str(corpus)).damage
    finally:
        path.write_bytes(whole)


@PER_EXAMPLE
@given(st.data())
def test_any_other_byte_in_the_index_is_found(corpus, data):
    path = corpus.with_suffix(".idx")
    whole = path.read_bytes()
    place = data.draw(st.integers(0, len(whole) - 1))
    other = data.draw(st.integers(0, 255).filter(lambda byte: byte != whole[place]))
    try:
        path.write_bytes(whole[:place] + bytes([other]) + whole[place + 1 :])
        assert inspect_corpus(str(corpus)).damage
    finally:
        path.write_bytes(whole)


@pytest.mark.parametrize("ending", [".bin", ".idx"])
def test_a_missing_half_is_damage(corpus, ending):
    corpus.with_suffix(ending).unlink()
    assert f"out{ending} is missing" in damaged(corpus)


def test_tokens_outside_the_vocabulary(corpus):
    tokens = np.fromfile(corpus.with_suffix(".bin"), dtype=np.uint16)
    tokens[[3, 20]] = 300
    tokens.tofile(corpus.with_suffix(".bin"))
    said = damaged(corpus)
    assert "2 tokens are not in the vocabulary of 257 (ids 27 to 300), the first of them token 3" in said
    assert run(corpus, "--quick").exit_code == 0
    assert run(corpus, "--vocab-size", 301).exit_code == 0


@pytest.mark.parametrize("chunk", [1, 3, 1000])
def test_documents_without_their_end(corpus, chunk, monkeypatch):
    monkeypatch.setattr(token_checks, "_CHUNK", chunk)
    ends = np.cumsum(LENGTHS) - 1
    tokens = np.fromfile(corpus.with_suffix(".bin"), dtype=np.uint16)
    tokens[ends[[2, 6]]] = 7
    tokens.tofile(corpus.with_suffix(".bin"))
    said = damaged(corpus)
    assert "2 documents do not end with token 256, the first of them document 2" in said


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda record: record | {"tokens": 3}, "says tokens 3, and the index 251"),
        (lambda record: record | {"documents": 3}, "says documents 3, and the index 7"),
        (lambda record: record | {"format": 9}, "is no record of format 1"),
        (lambda record: {"format": 1}, "lacks tokenizer"),
        (lambda record: [], "is no record"),
    ],
)
def test_a_record_of_something_else(corpus, change, said):
    path = corpus.with_suffix(".json")
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    assert said in damaged(corpus)


def test_a_record_that_is_cut(corpus):
    path = corpus.with_suffix(".json")
    path.write_text(path.read_text()[:40])
    assert "out.json" in damaged(corpus)


def test_documents_of_several_sequences_are_noted(tmp_path):
    builder = IndexedDatasetBuilder(str(tmp_path / "two.bin"), dtype=np.uint16)
    builder.add_document(np.arange(5), [2, 3])
    builder.add_document(np.arange(4), [4])
    builder.finalize(str(tmp_path / "two.idx"))
    found = inspect_corpus(str(tmp_path / "two"))
    assert (found.documents, found.sequences, found.damage) == (2, 3, [])
    assert any("not every one of its 2 documents is one of its 3 sequences" in note for note in found.notes)


def test_a_tokenizer_that_is_gone_leaves_ids(corpus):
    path = corpus.with_suffix(".json")
    path.write_text(path.read_text().replace('"byte"', '"hf:/nowhere/tokenizer.json"', 1))
    found = inspect_corpus(str(corpus))
    assert found.damage == []
    assert [each.text for each in found.samples] == [None] * 3
    assert "samples are shown as ids" in found.notes[0]
    assert "97 256" in run(corpus).stdout


def test_every_key_is_documented():
    page = (Path(__file__).parent.parent / "docs" / "data.md").read_text(encoding="utf-8")
    for key in {*KEYS, *CorpusRecord.__dataclass_fields__, *LengthBin.__dataclass_fields__, "format"}:
        assert f"`{key}`" in page
    for key in Sample.__dataclass_fields__:
        assert f"`{key}` (" in page


def test_what_is_not_there_is_refused(corpus):
    result = run(corpus.parent / "other")
    assert result.exit_code == 2
    assert "names no corpus" in result.stderr
    assert f"did you mean {corpus}?" in run(corpus.with_suffix(".idx")).stderr


def test_an_empty_index(tmp_path):
    straight_loop(tmp_path / "none", as_bytes([]))
    found = inspect_corpus(str(tmp_path / "none"))
    assert (found.documents, found.tokens, found.damage) == (0, 0, [])
    assert "the corpus holds no document" in found.notes
    assert run(tmp_path / "none").exit_code == 0
