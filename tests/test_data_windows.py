"""The order of windows: every one once an epoch, the same for all who ask."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mixle_megatron.data import SampleSource, TokenStream, WindowSequence
from mixle_megatron.data.source import epoch_order


def stream_of(folder, tokens):
    path = folder / "tokens.bin"
    np.asarray(tokens, dtype="<u2").tofile(path)
    return TokenStream(str(path), len(tokens), 1, "digest")


@pytest.fixture(scope="module")
def stream(tmp_path_factory):
    return stream_of(tmp_path_factory.mktemp("stream"), np.arange(250))


@given(st.integers(1, 300), st.integers(0, 2**40), st.integers(0, 3))
@settings(deadline=None)
def test_every_window_comes_once_an_epoch(stream, length, seed, epoch):
    windows = WindowSequence(stream, sequence_length=length, seed=seed)
    size = len(windows)
    assert size == 249 // length
    order = [windows.window_number(i) for i in range(epoch * size, (epoch + 1) * size)]
    assert sorted(order) == list(range(size))


@given(st.integers(1, 20), st.lists(st.integers(0, 600), max_size=12))
@settings(deadline=None)
def test_a_batch_is_its_samples(stream, length, indices):
    windows = WindowSequence(stream, sequence_length=length, seed=3)
    rows = windows.batch(indices)
    assert rows.dtype == np.int64
    assert rows.shape == (len(indices), length + 1)
    for row, index in zip(rows, indices, strict=True):
        assert np.array_equal(row, windows.sample(index))
        assert row[0] % length == 0
        assert np.array_equal(row, np.arange(row[0], row[0] + length + 1))


def test_seed_and_epoch_change_the_order_and_nothing_else_does():
    orders = [epoch_order(200, seed=seed, epoch=epoch).tolist() for seed in (0, 1) for epoch in (0, 1)]
    assert len({tuple(order) for order in orders}) == 4
    assert epoch_order(200, seed=1, epoch=1).tolist() == orders[3]
    assert epoch_order(5, seed=-3, epoch=0).dtype == np.int64


def test_the_order_stays_what_it_was():
    # A checkpoint counts samples alone: another order under the same count would repeat and skip text.
    assert epoch_order(10, seed=1234, epoch=0).tolist() == [8, 1, 5, 4, 2, 6, 9, 7, 0, 3]


def test_unshuffled_windows_are_in_the_order_of_the_text(stream):
    windows = WindowSequence(stream, sequence_length=10, seed=None)
    assert [windows.window_number(i) for i in range(50)] == [i % 24 for i in range(50)]


def test_only_the_newest_orders_are_kept(stream):
    windows = WindowSequence(stream, sequence_length=10, seed=1)
    first = windows.sample(0)
    for epoch in range(5):
        windows.sample(epoch * len(windows))
    assert len(windows._orders) == 2
    assert np.array_equal(windows.sample(0), first)


def test_it_is_a_sample_source(stream):
    windows = WindowSequence(stream, sequence_length=10, seed=1)
    assert isinstance(windows, SampleSource)
    assert windows.fingerprint == "digest"


def test_bad_numbers(stream):
    with pytest.raises(ValueError, match="sequence_length"):
        WindowSequence(stream, sequence_length=0, seed=1)
    with pytest.raises(IndexError):
        WindowSequence(stream, sequence_length=10, seed=1).sample(-1)
    assert len(WindowSequence(stream, sequence_length=250, seed=1)) == 0
