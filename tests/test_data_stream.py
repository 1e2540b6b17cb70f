"""The packed token streams: what is in them, and that their cache is built once and never half."""

import json
import multiprocessing
import os
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mixle_megatron.config.data import TextSection
from mixle_megatron.data import check_source, prepare_text_data, stream_cache
from mixle_megatron.errors import Refused

EOD = 256


def write(folder, texts):
    """Write documents ``0000.txt`` and so on."""
    for i, text in enumerate(texts):
        (folder / f"{i:04}.txt").write_bytes(text)
    return TextSection(paths=[str(folder)], validation_fraction=0.4)


def packed_by_hand(texts):
    return [token for text in texts for token in [*text, EOD]]


@pytest.fixture
def section(tmp_path):
    """Twenty documents, each of a byte of its own."""
    (tmp_path / "corpus").mkdir()
    return write(tmp_path / "corpus", [bytes([i]) * (3 + i) for i in range(20)])


def prepare(section, cache, seed=7, **options):
    return prepare_text_data(section, seq_length=4, seed=seed, cache_dir=cache, **options)


@settings(max_examples=25, deadline=None)
@given(
    texts=st.lists(st.binary(min_size=1, max_size=20), min_size=2, max_size=12),
    seed=st.integers(0, 99),
    length=st.integers(1, 9),
)
def test_windows_are_those_of_a_naive_packer(tmp_path_factory, texts, seed, length):
    folder = tmp_path_factory.mktemp("corpus")
    section = write(folder, texts)
    if check_source(section, seed=seed, seq_length=length):
        with pytest.raises(Refused):
            prepare_text_data(section, seq_length=length, seed=seed, cache_dir=folder / "cache")
        return
    streams = prepare_text_data(section, seq_length=length, seed=seed, cache_dir=folder / "cache")
    both = []
    for windows, stream in (
        (streams.training_windows(), streams.train),
        (streams.validation_windows(), streams.validation),
    ):
        tokens = stream.tokens.tolist()
        both += tokens
        expected = [tokens[i : i + length + 1] for i in range(0, len(tokens), length)]
        expected = [window for window in expected if len(window) == length + 1]
        assert [windows.window(i).tolist() for i in range(len(windows))] == expected
        assert windows.dropped_tokens == len(tokens) - (len(expected) * length + 1)
    assert sorted(both) == sorted(packed_by_hand(texts))


def test_documents_lie_whole_in_one_split_each(section, tmp_path):
    streams = prepare(section, tmp_path / "cache")
    train, validation = (
        set(bytes(tokens[tokens != EOD].astype(np.uint8)))
        for tokens in (streams.train.tokens, streams.validation.tokens)
    )
    assert train
    assert validation
    assert train | validation == set(range(20))
    assert not train & validation
    expected = packed_by_hand(bytes([i]) * (3 + i) for i in sorted(train))
    assert streams.train.tokens.tolist() == expected
    assert streams.train.num_documents == len(train)


def test_long_documents_are_read_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(stream_cache, "_CHUNK", 8)
    texts = [bytes(range(size)) for size in (7, 8, 9, 24, 25)]
    section = write(tmp_path, texts).model_copy(update={"validation_fraction": 0.0})
    seen = []
    streams = prepare(section, tmp_path / "cache", progress=lambda done, total: seen.append((done, total)))
    assert streams.train.tokens.tolist() == packed_by_hand(texts)
    assert seen == sorted(seen)
    assert seen[-1] == (73, 73)


def test_no_validation_split_is_an_empty_stream(section, tmp_path):
    streams = prepare(section.model_copy(update={"validation_fraction": 0.0}), tmp_path / "cache")
    assert streams.validation.tokens.shape == (0,)
    assert len(streams.validation_windows()) == 0
    assert streams.validation_windows().dropped_tokens == 0
    with pytest.raises(IndexError):
        streams.validation_windows().sample(0)


def test_a_warm_cache_is_not_built_again(section, tmp_path):
    built = []
    first = prepare(section, tmp_path / "cache", progress=lambda *_: built.append(1))
    assert built
    built.clear()
    assert prepare(section, tmp_path / "cache", progress=lambda *_: built.append(1)) == first
    assert not built


def test_tokens_are_mapped_and_not_copied(section, tmp_path):
    stream = prepare(section, tmp_path / "cache").train
    assert isinstance(stream.tokens, np.memmap)
    assert not stream.tokens.flags.writeable
    again = pickle.loads(pickle.dumps(stream))
    assert "tokens" not in vars(again)
    assert np.array_equal(again.tokens, stream.tokens)


def test_changed_inputs_give_another_cache(section, tmp_path):
    first = prepare(section, tmp_path / "cache")
    changed = tmp_path / "corpus" / "0003.txt"
    changed.write_bytes(b"other")
    os.utime(changed, ns=(1, 1))
    second = prepare(section, tmp_path / "cache")
    other_seed = prepare(section, tmp_path / "cache", seed=8)
    assert len({first.train.path, second.train.path, other_seed.train.path}) == 3
    assert len({(each.train.digest, each.validation.digest) for each in (first, second, other_seed)}) == 3


def test_the_same_text_elsewhere_has_the_same_digest(section, tmp_path):
    first = prepare(section, tmp_path / "cache")
    (tmp_path / "corpus").rename(tmp_path / "moved")
    moved = section.model_copy(update={"paths": [str(tmp_path / "moved")]})
    second = prepare(moved, tmp_path / "cache")
    assert first.train.digest == second.train.digest
    assert first.train.path != second.train.path


def damage_by_cutting(stream):
    with open(stream.path, "r+b") as handle:
        handle.truncate(4)


def damage_by_deleting(stream):
    os.unlink(stream.path)


def damage_the_record(stream):
    with open(stream.path.replace(".train.bin", ".json"), "w") as handle:
        handle.write('{"streams": {"train": 3')


@pytest.mark.parametrize("damage", [damage_by_cutting, damage_by_deleting, damage_the_record])
def test_a_damaged_cache_is_built_again(section, tmp_path, damage):
    first = prepare(section, tmp_path / "cache")
    tokens = first.train.tokens.tolist()
    damage(first.train)
    assert prepare(section, tmp_path / "cache").train.tokens.tolist() == tokens


def test_what_a_killed_builder_left_is_removed(section, tmp_path):
    first = prepare(section, tmp_path / "cache")
    left = f"{first.train.path}.{stream_cache._host()}.1.00000000.aside"
    with open(left, "wb") as handle:
        handle.write(b"half")
    os.unlink(first.train.path)
    prepare(section, tmp_path / "cache")
    assert not os.path.exists(left)
    assert not list((tmp_path / "cache").glob("*.aside"))


def test_a_file_system_without_locks_serves(section, tmp_path, monkeypatch):
    monkeypatch.setattr(stream_cache, "_lock", lambda handle: False)
    assert prepare(section, tmp_path / "cache").train.num_tokens > 0


def test_a_document_that_changes_while_it_is_read_is_refused(section, tmp_path, monkeypatch):
    pieces = stream_cache._token_pieces

    def appended(documents):
        for each in documents:
            with open(each.path, "ab") as handle:
                handle.write(b"more")
        return pieces(documents)

    monkeypatch.setattr(stream_cache, "_token_pieces", appended)
    with pytest.raises(Refused, match="changed while it was read"):
        prepare(section, tmp_path / "cache")
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]


def test_a_cache_that_cannot_be_written_is_refused(section, tmp_path):
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(Refused, match="cannot hold the token cache") as caught:
        prepare(section, tmp_path / "file")
    assert caught.value.faults[0].field == "cache_dir"


def test_a_full_disk_is_refused_and_leaves_nothing(section, tmp_path, monkeypatch):
    def full(number):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(Refused, match="No space left on device"):
        prepare(section, tmp_path / "cache")
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]


def prepare_at_once(folder, cache, barrier, built, digests):
    """In a process of its own: wait for the others, prepare, and say who built what."""
    section = TextSection(paths=[folder], validation_fraction=0.4)
    progress = set()
    barrier.wait()
    streams = prepare(section, cache, progress=lambda *_: progress.add(1))
    if progress:
        with built.get_lock():
            built.value += 1
    digests.put((streams.train.digest, int(streams.train.tokens.sum())))


def test_processes_that_prepare_at_once_share_one_build(section, tmp_path):
    context = multiprocessing.get_context("spawn")
    barrier, built, digests = context.Barrier(4), context.Value("i", 0), context.Queue()
    arguments = (section.paths[0], str(tmp_path / "cache"), barrier, built, digests)
    workers = [context.Process(target=prepare_at_once, args=arguments) for _ in range(4)]
    for worker in workers:
        worker.start()
    seen = {digests.get(timeout=60) for _ in workers}
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0] * 4
    assert built.value == 1
    here = prepare(section, tmp_path / "cache").train
    assert seen == {(here.digest, int(here.tokens.sum()))}
    names = sorted(path.name.split(".", 1)[1] for path in (tmp_path / "cache").iterdir())
    assert names == ["json", "lock", "train.bin", "validation.bin"]


def test_the_record_says_what_is_in_the_cache(section, tmp_path):
    streams = prepare(section, tmp_path / "cache")
    record = json.loads(next((tmp_path / "cache").glob("*.json")).read_text())
    assert record["dtype"] == "uint16"
    assert record["streams"]["train"]["num_tokens"] == streams.train.num_tokens
