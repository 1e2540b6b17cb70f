"""Cutting a batch into microbatches loses no row, adds no supervised one, and refuses what does not fit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mixle_megatron.errors import Refused
from mixle_megatron.microbatches import NOT_SUPERVISED, as_token_ids, cut, foreign_id_faults

VOCABULARY = 50


@st.composite
def batches(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets of 0 to 9 rows, some targets not supervised."""
    rows, sequence = draw(st.integers(0, 9)), draw(st.integers(1, 4))
    ids = st.integers(0, VOCABULARY - 1)
    count = rows * sequence
    inputs = draw(st.lists(ids, min_size=count, max_size=count))
    targets = draw(st.lists(ids | st.just(NOT_SUPERVISED), min_size=count, max_size=count))
    shape = (rows, sequence)
    return torch.tensor(inputs).long().reshape(shape), torch.tensor(targets).long().reshape(shape)


@settings(deadline=None)
@given(batches(), st.integers(1, 12), st.booleans())
def test_microbatches_hold_every_row_once_and_in_order(batch, count: int, equal: bool) -> None:
    inputs, targets = batch
    found = cut(inputs, targets, count, equal=equal)
    assert 1 <= len(found.microbatches) <= count
    assert (found.examples, found.tokens) == (len(inputs), int((targets != NOT_SUPERVISED).sum()))
    rows = torch.cat([microbatch.inputs for microbatch in found])
    labels = torch.cat([microbatch.targets for microbatch in found])
    assert torch.equal(rows[: len(inputs)], inputs)
    assert torch.equal(labels[: len(inputs)], targets)
    assert (labels[len(inputs) :] == NOT_SUPERVISED).all()
    assert found.rows == max(len(microbatch.inputs) for microbatch in found)
    assert all(len(microbatch.inputs) > 0 for microbatch in found)


@settings(deadline=None)
@given(batches(), st.integers(1, 12))
def test_equal_microbatches_have_one_shape_and_less_than_one_of_them_is_padding(batch, count: int) -> None:
    inputs, targets = batch
    found = cut(inputs, targets, count, equal=True)
    assert {microbatch.inputs.shape for microbatch in found} == {(found.rows, inputs.shape[1])}
    assert found.rows * len(found.microbatches) - max(len(inputs), 1) < found.rows


@settings(deadline=None)
@given(batches(), st.integers(-3, VOCABULARY + 3), st.sampled_from(["inputs", "targets"]))
def test_exactly_the_ids_outside_of_the_vocabulary_are_named(batch, token: int, where: str) -> None:
    inputs, targets = batch
    assert foreign_id_faults(inputs, targets, VOCABULARY) == []
    if len(inputs) == 0:
        return
    {"inputs": inputs, "targets": targets}[where][-1, 0] = token
    faults = foreign_id_faults(inputs, targets, VOCABULARY)
    named = [(fault.field, fault.value) for fault in faults]
    assert named == ([] if 0 <= token < VOCABULARY else [(where, token)])


@pytest.mark.parametrize(
    ("inputs", "targets"),
    [([1, 2], [1, 2]), ([[1, 2]], [[1], [2]]), ([[]], [[]]), ([[[1]]], [[[1]]])],
    ids=["one dimension", "two shapes", "no sequence", "three dimensions"],
)
def test_shapes_other_than_batch_and_sequence_are_refused(inputs, targets) -> None:
    with pytest.raises(Refused, match="must have one shape"):
        as_token_ids(inputs, targets)
