"""Reading ahead: the same batches, and a state of what was handed out and not of what was read."""

import threading

import numpy as np
import pytest
from test_data_loader import NumberedSource, loader

from mixle_megatron.data import PrefetchingLoader


@pytest.fixture
def ahead():
    """A loader that reads ahead, and its source."""
    source = NumberedSource()
    made = PrefetchingLoader(loader(source, dp=2, rank=1, micro=3))
    yield made, source
    made.close()


def numbers(batches):
    return [int(row[0]) // 10 for inputs, _ in batches for row in inputs]


def test_it_gives_what_the_loader_gives(ahead):
    made, _ = ahead
    plain = loader(dp=2, rank=1, micro=3)
    for _ in range(20):
        for (inputs, targets), (same_inputs, same_targets) in zip(next(made), next(plain), strict=True):
            assert np.array_equal(inputs, same_inputs)
            assert np.array_equal(targets, same_targets)
        assert made.state_dict() == plain.state_dict()


def test_going_on_forgets_what_was_read_ahead(ahead):
    made, source = ahead
    states = [made.state_dict() for _ in range(4) if next(made)]
    made.load_state_dict(states[1])
    assert numbers(next(made)) == [15, 16, 17]
    assert len(source.read) > 3 * 3, "more was read than handed out"
    assert made.state_dict() == states[2]


def test_a_failure_in_the_thread_is_raised_where_its_batch_is_due(ahead):
    made, source = ahead
    source.sample = lambda index: 1 // 0 if index == 9 else np.full(4, 10 * index)
    assert numbers(next(made)) == [3, 4, 5]
    with pytest.raises(ZeroDivisionError):
        next(made)
    assert made.state_dict()["consumed_samples"] == 6


def test_its_thread_reads_while_the_caller_computes_and_ends_with_it():
    begun, waits = threading.Event(), threading.Event()
    source = NumberedSource()
    plain = source.batch

    def batch(indices):
        if indices[0] == 1:
            begun.set()
            assert waits.wait(60)
        return plain(indices)

    source.batch = batch
    made = PrefetchingLoader(loader(source))
    assert numbers(next(made)) == [0]
    assert begun.wait(60), "the second update is read before anybody asks for it"
    waits.set()
    assert numbers(next(made)) == [1]
    assert made.seconds >= 0
    made.close()
    assert not any(thread.name.startswith("data") for thread in threading.enumerate())


def test_what_the_run_never_reaches_is_read_only_when_asked_for():
    source = NumberedSource()
    made = PrefetchingLoader(loader(source), until=2)
    assert [numbers(next(made)) for _ in range(4)] == [[0], [1], [2], [3]]
    made.load_state_dict(made.state_dict() | {"consumed_samples": 0, "drawn": [0]})
    source.read.clear()
    assert [numbers(next(made)) for _ in range(2)] == [[0], [1]]
    made.close()
    assert source.read == [0, 1]
