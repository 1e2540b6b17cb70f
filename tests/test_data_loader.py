"""Dealing: an update is the same samples in the same order under every plan, and resumes exactly."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mixle_megatron.data import GlobalBatchLoader, SampleSource, ValidationBatches
from mixle_megatron.errors import Refused


class NumberedSource:
    """A source whose sample i is ``[10 i, 10 i + 1, ...]``, and which counts what is read."""

    def __init__(self, length=50, sequence_length=3, seed=1, fingerprint="numbers"):
        self.length = length
        self.sequence_length = sequence_length
        self.seed = seed
        self.fingerprint = fingerprint
        self.field = "data.paths"
        self.unsupervised_after = None
        self.read = []

    def __len__(self):
        return self.length

    def sample(self, global_index):
        self.read.append(global_index)
        return 10 * global_index + np.arange(self.sequence_length + 1)

    def drawn(self, samples):
        return [samples]

    def batch(self, global_indices):
        return np.stack([self.sample(index) for index in global_indices])


def loader(source=None, *, rank=0, dp=1, accumulation=1, microbatches=1, micro=1, size=None):
    return GlobalBatchLoader(
        NumberedSource() if source is None else source,
        global_batch_size=micro * dp * accumulation * microbatches if size is None else size,
        micro_batch_size=micro,
        data_parallel_rank=rank,
        data_parallel_size=dp,
        gradient_accumulation_steps=accumulation,
        microbatches=microbatches,
    )


@st.composite
def layouts(draw):
    """Two plans of one global batch: micro-batch size, and D, A, M twice with the same product."""
    micro, count = draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 4, 6, 8, 12]))

    def plan():
        dp = draw(st.sampled_from([d for d in range(1, count + 1) if count % d == 0]))
        rest = count // dp
        accumulation = draw(st.sampled_from([a for a in range(1, rest + 1) if rest % a == 0]))
        return {"dp": dp, "accumulation": accumulation, "microbatches": rest // accumulation}

    return micro, plan(), plan()


def global_order(source, step, *, micro, dp, accumulation, microbatches):
    """The sample numbers of an update, put together from all ranks by the documented dealing."""
    places = {}
    for rank in range(dp):
        mine = loader(
            source, rank=rank, dp=dp, accumulation=accumulation, microbatches=microbatches, micro=micro
        )
        for a, (inputs, targets) in enumerate(mine.update(step)):
            assert inputs.shape == targets.shape == (microbatches * micro, source.sequence_length)
            assert inputs.dtype == targets.dtype == np.int64
            assert inputs.flags.c_contiguous
            assert targets.flags.c_contiguous
            assert np.array_equal(targets, inputs + 1)
            for m, part in enumerate(np.split(inputs, microbatches)):
                places[(a * dp + rank) * microbatches + m] = (part[:, 0] // 10).tolist()
    return [number for place in sorted(places) for number in places[place]]


@given(layouts(), st.integers(0, 20))
@settings(deadline=None)
def test_an_update_is_the_same_samples_in_the_same_order_under_every_plan(layout, step):
    micro, one, other = layout
    source = NumberedSource()
    size = micro * one["dp"] * one["accumulation"] * one["microbatches"]
    first = global_order(source, step, micro=micro, **one)
    assert first == list(range(step * size, (step + 1) * size))
    assert global_order(source, step, micro=micro, **other) == first


def test_a_rank_reads_its_own_rows_alone():
    source = NumberedSource()
    loader(source, rank=1, dp=2, microbatches=2, micro=2).update(3)
    assert source.read == [28, 29, 30, 31]


def test_iterating_is_update_after_update():
    mine = loader(dp=2, rank=1, accumulation=2)
    for step, batches in zip(range(4), mine, strict=False):
        for (inputs, targets), (same_inputs, same_targets) in zip(batches, mine.update(step), strict=True):
            assert np.array_equal(inputs, same_inputs)
            assert np.array_equal(targets, same_targets)


@given(layouts(), st.integers(0, 30))
@settings(deadline=None)
def test_a_state_brings_back_the_very_next_update_under_another_plan(layout, steps):
    micro, one, other = layout
    before = loader(micro=micro, **one)
    for _ in range(steps):
        next(before)
    state = json.loads(json.dumps(before.state_dict()))
    assert state["consumed_samples"] == steps * before.global_batch_size
    assert state["epoch"] == state["consumed_samples"] // 50
    after = [loader(micro=micro, rank=rank, **other) for rank in range(other["dp"])]
    for each in after:
        each.load_state_dict(state)
    resumed = sorted(int(row[0]) for each in after for inputs, _ in next(each) for row in inputs)
    expected = range(state["consumed_samples"], state["consumed_samples"] + before.global_batch_size)
    assert [number // 10 for number in resumed] == list(expected)


def test_a_state_of_other_data_is_refused_with_all_differences():
    state = loader().state_dict()
    other = loader(NumberedSource(sequence_length=4, seed=2, fingerprint="others"))
    next(other)
    with pytest.raises(Refused) as caught:
        other.load_state_dict(state)
    assert [fault.field for fault in caught.value.faults] == ["run.seed", "model.seq_length", "data.paths"]
    assert other.consumed_samples == 1


@pytest.mark.parametrize("consumed", [None, -1, "3"])
def test_a_state_that_is_not_whole_is_refused(consumed):
    with pytest.raises(Refused, match="consumed_samples"):
        loader().load_state_dict({**loader().state_dict(), "consumed_samples": consumed})


def test_all_faults_of_a_layout_at_once():
    with pytest.raises(Refused) as caught:
        loader(NumberedSource(length=0), rank=2, dp=2, micro=2, microbatches=2, size=7)
    assert [fault.field for fault in caught.value.faults] == [
        "data_parallel_rank",
        "data.paths",
        "batch.global_batch_size",
    ]
    assert "= 8; use 8" in str(caught.value)
    with pytest.raises(Refused, match=r"plan\.microbatches=0 must be at least 1"):
        loader(microbatches=0)


def test_the_source_here_is_one():
    assert isinstance(NumberedSource(), SampleSource)


def validation(source, *, batches, micro=2, dp=1, microbatches=1):
    """The batches of every rank."""
    return [
        ValidationBatches(
            source,
            batches=batches,
            micro_batch_size=micro,
            data_parallel_rank=rank,
            data_parallel_size=dp,
            microbatches=microbatches,
        )
        for rank in range(dp)
    ]


@given(
    length=st.integers(0, 40),
    batches=st.integers(0, 9),
    micro=st.integers(1, 3),
    dp=st.integers(1, 5),
    microbatches=st.integers(1, 3),
)
@settings(deadline=None)
def test_validation_is_the_same_samples_under_every_plan(length, batches, micro, dp, microbatches):
    source = NumberedSource(length=length)
    ranks = validation(source, batches=batches, micro=micro, dp=dp, microbatches=microbatches)
    assert len({len(each) for each in ranks}) == 1
    seen, order = 0, {}
    for rank, each in enumerate(ranks):
        for call, (inputs, targets) in enumerate(each):
            assert inputs.shape == targets.shape == (microbatches * micro, 3)
            supervised = targets != -100
            assert (supervised.all(axis=1) | ~supervised.any(axis=1)).all()
            seen += int(supervised.sum())
            numbers = (inputs[supervised.all(axis=1), 0] // 10).tolist()
            order[call * dp + rank] = numbers
    flat = [number for place in sorted(order) for number in order[place]]
    count = min(length, batches * micro)
    assert flat == [place * length // count for place in range(count)]
    assert len(set(flat)) == count
    assert seen == ranks[0].num_tokens == 3 * count


def test_validation_is_spread_over_the_split_and_repeats():
    (each,) = validation(NumberedSource(length=100), batches=2)
    first, second = ([inputs[:, 0].tolist() for inputs, _ in each] for _ in range(2))
    assert first == second == [[0, 250], [500, 750]]


def test_bad_validation_numbers():
    with pytest.raises(Refused) as caught:
        ValidationBatches(
            NumberedSource(), batches=-1, micro_batch_size=0, data_parallel_rank=2, data_parallel_size=2
        )
    assert [fault.field for fault in caught.value.faults] == [
        "evaluation.batches",
        "batch.micro_batch_size",
        "data_parallel_rank",
    ]
