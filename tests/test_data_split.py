"""Training and validation are split by document, by nothing but the seed and the document's name."""

import re

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from mixle_megatron.data.folder_walk import Document
from mixle_megatron.data.split import byte_tokens, sample_documents, split_documents, split_faults


def document(name, size=9):
    return Document(name, f"/corpus/{name}", size, 0, (0, hash(name)))


names = st.lists(st.text("abcde/", min_size=1, max_size=6), min_size=1, max_size=30, unique=True)
fractions = st.floats(0, 0.99)


@given(names, fractions, st.integers(), st.randoms())
def test_a_documents_side_depends_on_no_other_document(chosen, fraction, seed, random):
    documents = [document(name) for name in chosen]
    train, validation = split_documents(documents, fraction=fraction, seed=seed)
    assert sorted(each.name for each in train + validation) == sorted(chosen)
    part = random.sample(documents, random.randint(1, len(documents)))
    train_part, validation_part = split_documents(part, fraction=fraction, seed=seed)
    assert train_part == [each for each in part if each in train]
    assert validation_part == [each for each in part if each in validation]


@given(names, fractions, fractions, st.integers())
def test_a_larger_fraction_keeps_what_a_smaller_one_held_out(chosen, one, other, seed):
    documents = [document(name) for name in chosen]
    small = split_documents(documents, fraction=min(one, other), seed=seed)[1]
    large = split_documents(documents, fraction=max(one, other), seed=seed)[1]
    assert set(small) <= set(large)


def test_the_fraction_is_met_and_the_seed_matters():
    documents = [document(f"{i}.txt") for i in range(4000)]
    first, second = (set(split_documents(documents, fraction=0.1, seed=seed)[1]) for seed in (1, 2))
    assert 320 < len(first) < 480
    assert first != second


@given(names, st.lists(st.integers(1, 50), min_size=30, max_size=30), fractions, st.integers(1, 60))
def test_the_fractions_that_a_refusal_names_work(chosen, sizes, fraction, length):
    documents = [document(name, size) for name, size in zip(chosen, sizes, strict=False)]
    found = split_faults(documents, fraction=fraction, seed=5, sequence_length=length)
    parts = split_documents(documents, fraction=fraction, seed=5)
    needed = parts if fraction else parts[:1]
    assert bool(found) == any(byte_tokens(part) < length + 1 for part in needed)
    assume(found and found[0].field == "data.validation_fraction")
    for number in re.findall(r"0\.\d+", found[0].remedy):
        assert split_faults(documents, fraction=float(number), seed=5, sequence_length=length) == []


def test_one_document_cannot_be_in_both_parts():
    (fault,) = split_faults([document("a.txt", 900)], fraction=0.05, seed=1, sequence_length=8)
    assert fault.field == "data.validation_fraction"
    assert "validation part 0 of 1 documents" in fault.rule
    assert fault.remedy == "give more documents (a document is one file), or 0 for no validation"
    assert split_faults([document("a.txt", 900)], fraction=0.0, seed=1, sequence_length=8) == []


def test_too_little_text_names_the_sequence_that_fits():
    (fault,) = split_faults([document("a.txt", 9)], fraction=0.0, seed=1, sequence_length=10)
    assert fault.field == "data.paths"
    assert fault.remedy == "give more text, or a model.seq_length of at most 9"
    assert split_faults([document("a.txt", 9)], fraction=0.0, seed=1, sequence_length=9) == []


@given(names, st.lists(st.integers(1, 50), min_size=30, max_size=30), st.integers(1, 400))
def test_a_cap_takes_whole_documents_and_leaves_none_that_fits(chosen, sizes, cap):
    documents = [document(name, size) for name, size in zip(chosen, sizes, strict=False)]
    taken = sample_documents(documents, cap)
    room = cap - sum(each.size for each in taken)
    assert room >= 0
    assert taken == [each for each in documents if each in taken]
    assert all(each.size > room for each in documents if each not in taken)


def test_undecodable_file_names_have_a_side():
    assert sum(map(len, split_documents([document("\udcff.txt")], fraction=0.5, seed=0))) == 1


@pytest.mark.parametrize("seed", [-1, 0, 2**70])
def test_any_integer_is_a_seed(seed):
    assert split_documents([document("a")], fraction=0.0, seed=seed) == ([document("a")], [])
