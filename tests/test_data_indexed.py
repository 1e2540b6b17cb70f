"""Indexed corpora as a run's data: Megatron's own samples, blended by its own rule, in one order for all."""

import functools
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from corpora import straight_loop
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import DType

from mixle_megatron.config.data import IndexedSection, TokensSection, ValidationSetSection
from mixle_megatron.data import DataRequest, GlobalBatchLoader, check_data, compiled_helpers, prepare_data
from mixle_megatron.data.corpus_record import CorpusRecord
from mixle_megatron.data.gpt_epochs import epoch_seed
from mixle_megatron.data.index_format import DTYPES
from mixle_megatron.errors import Refused

EOD = 256
LENGTH = 16
SEED = 11
SPLIT = [0.7, 0.2, 0.1]


def corpus(prefix, documents, seed):
    """Documents of random bytes, each with its end."""
    random = np.random.default_rng(seed)
    lengths = random.integers(3, 60, documents)
    straight_loop(prefix, [np.append(random.integers(0, EOD, length), EOD) for length in lengths])
    return str(prefix)


@pytest.fixture(scope="module")
def prefixes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpora")
    return [corpus(folder / "one", 60, 1), corpus(folder / "two", 90, 2)]


def section(prefixes, weights=None, **more):
    weights = weights or [1.0] * len(prefixes)
    blend = [{"path": path, "weight": weight} for path, weight in zip(prefixes, weights, strict=True)]
    return IndexedSection(source="indexed", blend=blend, **{"split": SPLIT, **more})


def request(data, *, sets=None, evaluates=True, length=LENGTH, vocab=257, seed=SEED):
    return DataRequest(data, sets or {}, evaluates, length, vocab, seed)


@functools.cache
def config(prefix, seed, **more):
    plain = {"reset_position_ids": False, "reset_attention_mask": False, "eod_mask_loss": False}
    return GPTDatasetConfig(
        random_seed=seed,
        sequence_length=LENGTH,
        blend=([prefix], None),
        split="70,20,10",
        path_to_cache="",
        tokenizer=SimpleNamespace(eod=EOD, vocab_size=None, unique_identifiers={}),
        **plain | more,
    )


def megatrons(prefix, part, epoch=0, **more):
    """Megatron's dataset of one epoch of a part, by its own builder."""
    settings = config(prefix, epoch_seed(SEED, epoch), **more)
    return BlendedMegatronDatasetBuilder(GPTDataset, [None] * 3, lambda: True, settings).build()[part]


def rows(dataset):
    items = [dataset[place] for place in range(len(dataset))]
    return [[*item["tokens"].tolist(), int(item["labels"][-1])] for item in items]


# Against Megatron


def test_samples_are_those_of_megatrons_builder(prefixes, tmp_path):
    data = prepare_data(request(section(prefixes[:1])), cache_dir=tmp_path)
    size = len(data.training)
    for epoch in range(3):
        ours = data.training.batch(range(epoch * size, (epoch + 1) * size)).tolist()
        assert ours == rows(megatrons(prefixes[0], 0, epoch))
    held_out = data.validation[0].source
    assert held_out.batch(range(len(held_out))).tolist()[:5] == rows(megatrons(prefixes[0], 1))[:5]
    assert len(held_out) == len(megatrons(prefixes[0], 1))


def test_a_blend_is_dealt_as_megatrons_blended_dataset_deals(prefixes, tmp_path):
    weights = [0.7, 0.3]
    data = prepare_data(request(section(prefixes, [7.0, 3.0])), cache_dir=tmp_path)
    parts = [megatrons(prefix, 0) for prefix in prefixes]
    size = int(min(len(part) / weight for part, weight in zip(parts, weights, strict=True))) - 1
    expected = BlendedDataset(parts, weights, size, config(prefixes[0], SEED))
    assert data.training.batch(range(size)).tolist() == rows(expected)
    assert [data.training.place(i)[0] for i in range(size)] == [
        int(expected[i]["dataset_id"]) for i in range(size)
    ]


@pytest.mark.parametrize("evaluates", [False, True])
def test_what_follows_the_end_of_a_document_is_unsupervised_as_megatron_masks_it(
    prefixes, tmp_path, evaluates
):
    asked = request(section(prefixes[:1], eod=EOD, eod_mask_loss=True), evaluates=evaluates)
    batches = loader(prepare_data(asked, cache_dir=tmp_path).training, micro=3).update(0)
    ((inputs, targets),) = batches
    dataset = megatrons(prefixes[0], 0, eod_mask_loss=True)
    for place in range(3):
        item = dataset[place]
        assert inputs[place].tolist() == item["tokens"].tolist()
        supervised = torch.as_tensor(targets[place] != -100)
        assert torch.equal(supervised, item["loss_mask"] > 0)
        assert torch.equal(torch.as_tensor(targets[place])[supervised], item["labels"][supervised])


def test_the_types_of_tokens_are_megatrons():
    assert {each.value: each.name for each in DType} == DTYPES


# One order


def loader(source, *, rank=0, dp=1, accumulation=1, microbatches=1, micro=1):
    return GlobalBatchLoader(
        source,
        global_batch_size=micro * dp * accumulation * microbatches,
        micro_batch_size=micro,
        data_parallel_rank=rank,
        data_parallel_size=dp,
        gradient_accumulation_steps=accumulation,
        microbatches=microbatches,
    )


GLOBAL = 12
PLANS = [
    {
        "dp": dp,
        "accumulation": accumulation,
        "micro": micro,
        "microbatches": GLOBAL // (dp * accumulation * micro),
    }
    for dp in (1, 2, 3, 4)
    for accumulation in (1, 2)
    for micro in (1, 2, 3)
    if GLOBAL % (dp * accumulation * micro) == 0
]


def update(ranks, plan):
    """The rows of one update of all ranks, in the global order that the loader documents."""
    read = [next(rank) for rank in ranks]
    return [row for step in range(plan["accumulation"]) for each in read for row in each[step][0].tolist()]


@pytest.fixture(scope="module")
def three_epochs(prefixes, tmp_path_factory):
    """A cache, and for one corpus and for two the inputs of three epochs, read one by one."""
    cache, expected = tmp_path_factory.mktemp("cache"), {}
    for number in (1, 2):
        source = prepare_data(request(section(prefixes[:number])), cache_dir=cache).training
        steps = 3 * len(source) // GLOBAL if number == 1 else 30
        expected[number] = [source.sample(index)[:-1].tolist() for index in range(steps * GLOBAL)]
    return cache, expected


@given(st.data())
@settings(deadline=None, max_examples=15)
def test_three_epochs_are_the_same_however_they_are_read(prefixes, three_epochs, data):
    """Neither plans, micro-batch sizes nor resumes between them change which sample comes when."""
    cache, expected = three_epochs
    number = data.draw(st.sampled_from([1, 2]))
    steps = len(expected[number]) // GLOBAL
    stops = data.draw(st.lists(st.integers(1, steps), max_size=4, unique=True).map(sorted))
    state, seen = None, []
    for first, last in zip([0, *stops], [*stops, steps], strict=True):
        plan = data.draw(st.sampled_from(PLANS))
        source = prepare_data(request(section(prefixes[:number])), cache_dir=cache).training
        ranks = [loader(source, rank=rank, **plan) for rank in range(plan["dp"])]
        for rank in ranks:
            if state is not None:
                rank.load_state_dict(state)
        for _ in range(first, last):
            seen += update(ranks, plan)
        state = ranks[0].state_dict()
        assert state["consumed_samples"] == sum(state["drawn"]) == last * GLOBAL
    assert seen == expected[number]


def test_every_sample_comes_once_an_epoch(prefixes, tmp_path):
    data = prepare_data(request(section(prefixes[:1])), cache_dir=tmp_path).training
    epochs = [data.batch(range(e * len(data), (e + 1) * len(data))) for e in range(2)]
    tokens = [np.sort(each[:, :-1], axis=None)[: len(data)] for each in epochs]
    assert not np.array_equal(*epochs)
    assert [len(each) for each in tokens] == [len(data)] * 2


def test_a_round_keeps_the_weights_and_the_next_goes_on_in_each_corpus(prefixes, tmp_path):
    data = prepare_data(request(section(prefixes, [0.9, 0.1])), cache_dir=tmp_path).training
    size = len(data)
    places = [data.place(index) for index in range(3 * size)]
    for number in range(2):
        own = [sample for which, sample in places if which == number]
        assert own == list(range(len(own)))
        assert abs(len(own) - 3 * size * [0.9, 0.1][number]) <= 3
        assert data.drawn(2 * size + 7)[number] == sum(which == number for which, _ in places[: 2 * size + 7])


def indices_of_two_ranks(folder, prefix):
    """A rank that is not the first builds an epoch that nobody has built, in the midst of a run."""
    import torch.distributed as dist

    data = prepare_data(request(section([prefix])), cache_dir=folder).training
    if dist.get_rank() == 1:
        data.sample(len(data))
    dist.barrier()
    return data.batch(range(2 * len(data))).tolist()


def test_any_rank_may_be_the_first_to_need_an_epoch(run_on, prefixes, tmp_path):
    one, other = run_on(2, indices_of_two_ranks, str(tmp_path / "cache"), prefixes[0])
    assert one == other
    assert len({tuple(row) for row in one}) > len(one) // 2
    assert sorted(path.name for path in (tmp_path / "cache").glob("*/*.aside")) == []


# What may differ at resume


def test_other_data_is_told_by_what_it_holds_and_not_by_where_it_lies(prefixes, tmp_path):
    def state_of(*arguments, **more):
        source = prepare_data(request(section(*arguments, **more)), cache_dir=tmp_path).training
        return loader(source), loader(source).state_dict()

    moved = corpus(tmp_path / "moved", 60, 1)
    here, state = state_of([prefixes[0], prefixes[1]], [0.5, 0.5])
    assert here.differences(state_of([moved, prefixes[1]], [2.0, 2.0])[1]) == []
    others = [
        state_of([prefixes[0], prefixes[1]], [0.5, 0.6]),
        state_of([prefixes[1], prefixes[0]]),
        state_of([prefixes[0], prefixes[1]], split=[0.8, 0.1, 0.1]),
    ]
    for other, _ in others:
        assert [fault.field for fault in other.differences(state)] == ["data.blend"]


# Refusals


def faults_of(*arguments, **more):
    return [(fault.field, fault.value) for fault in check_data(request(*arguments, **more))]


def test_what_is_missing_or_damaged_is_named(prefixes, tmp_path):
    half = corpus(tmp_path / "half", 3, 3)
    (tmp_path / "half.bin").write_bytes(b"\0" * 7)
    short = corpus(tmp_path / "short", 1, 4)
    (tmp_path / "short.idx").write_bytes(b"no index")
    (tmp_path / "lone.bin").write_bytes(b"")
    lone = str(tmp_path / "lone")
    found = faults_of(section([half, prefixes[0], short, lone, f"{prefixes[0]}.bin"]))
    assert found == [
        ("data.blend.0.path", half),
        ("data.blend.2.path", short),
        ("data.blend.3.path", lone),
        ("data.blend.4.path", f"{prefixes[0]}.bin"),
    ]
    with pytest.raises(Refused, match=r"leave \.bin out"):
        prepare_data(request(section([f"{prefixes[0]}.bin"])), cache_dir=tmp_path)


def test_parts_too_small_for_a_sample_are_named(prefixes, tmp_path):
    assert faults_of(section(prefixes), length=10**6) == [
        ("data.blend.0.path", prefixes[0]),
        ("data.blend.1.path", prefixes[1]),
    ]
    assert faults_of(section(prefixes[:1], split=[1.0])) == [("data.split", [1.0])]
    assert faults_of(section(prefixes[:1], split=[1.0]), evaluates=False) == []
    assert faults_of(section(prefixes[:1], split=[0.999, 0.001])) == [("data.split", [0.999, 0.001])]
    with pytest.raises(Refused, match="less than one sample"):
        prepare_data(request(section(prefixes, [1.0, 1e-6])), cache_dir=tmp_path)


def record(prefix, **more):
    known = {
        "tokenizer": "byte",
        "tokenizer_digest": "byte",
        "vocab_size": 257,
        "eod": EOD,
        "append_eod": True,
    }
    known |= {"dtype": "uint16", "documents": 60, "tokens": 1900, "text_bytes": 1840, "empty_documents": 0}
    known |= {"bad_records": 0, "bad": (), "input_files": 1, "input_bytes": 1, "fingerprint": "x"}
    CorpusRecord(**known | more).write(prefix)


def test_records_tell_vocabularies_tokenizers_and_ends(prefixes, tmp_path):
    one, two = corpus(tmp_path / "one", 60, 1), corpus(tmp_path / "two", 60, 2)
    assert faults_of(section([one], eod_mask_loss=True)) == [("data.eod", None)]
    record(one)
    record(two, tokenizer="hf:/tokens/tokenizer.json", tokenizer_digest="other", vocab_size=500)
    assert faults_of(section([one], eod_mask_loss=True)) == []
    assert faults_of(section([one, two]), vocab=300) == [
        ("model.vocab_size", 300),
        ("data.blend.1.path", two),
    ]
    other = {"code": ValidationSetSection(blend=[{"path": two}])}
    assert faults_of(section([one]), sets=other, vocab=500) == [("evaluation.sets.code", None)]
    data = prepare_data(request(section([one])), cache_dir=tmp_path / "cache")
    assert data.validation[0].bytes_per_token == 1840 / 1900


# Arrays


def test_an_array_is_windows_from_its_beginning_and_validates_at_its_end(tmp_path):
    ids = np.random.default_rng(5).integers(0, 257, 1000).astype(np.int32)
    np.save(tmp_path / "ids.npy", ids)
    tokens = TokensSection(source="tokens", path=str(tmp_path / "ids.npy"), validation_fraction=0.1)
    data = prepare_data(request(tokens), cache_dir=tmp_path / "cache")
    assert isinstance(data.training.stream.tokens, np.memmap)
    starts = range(0, 900 - LENGTH, LENGTH)
    expected = sorted(ids[start : start + LENGTH + 1].tolist() for start in starts)
    assert sorted(data.training.batch(range(len(data.training))).tolist()) == expected
    held_out = data.validation[0].source
    assert held_out.sample(1).tolist() == ids[900 + LENGTH : 900 + 2 * LENGTH + 1].tolist()
    with pytest.raises(Refused, match=r"vocab_size=256; use 257 or more"):
        prepare_data(replace(request(tokens), vocab_size=256), cache_dir=tmp_path / "cache")


def test_what_is_no_array_of_tokens_is_named(tmp_path):
    np.save(tmp_path / "two.npy", np.zeros((5, 5), dtype=np.int64))
    np.save(tmp_path / "half.npy", np.zeros(50))
    np.save(tmp_path / "any.npy", np.array([{}], dtype=object), allow_pickle=True)
    (tmp_path / "text.npy").write_text("not an array")
    np.save(tmp_path / "few.npy", np.zeros(5, dtype=np.int64))
    for name in ("two", "half", "any", "text", "few", "none"):
        path = str(tmp_path / f"{name}.npy")
        assert faults_of(
            TokensSection(source="tokens", path=path, validation_fraction=0.0), evaluates=False
        ) == [("data.path", path)], name


# What the machine lacks


def test_helpers_that_cannot_be_compiled_are_a_refusal(monkeypatch):
    def fail():
        raise SystemExit(1)

    monkeypatch.setattr(compiled_helpers, "_importable", lambda: False)
    monkeypatch.setattr("megatron.core.datasets.utils.compile_helpers", fail)
    with pytest.raises(Refused, match=r"data\.source=indexed needs Megatron's C\+\+ helpers"):
        compiled_helpers.require_helpers()


def test_a_cache_that_cannot_be_written_is_a_refusal(prefixes, tmp_path):
    (tmp_path / "file").write_text("in the way of a folder")
    with pytest.raises(Refused, match="cache_dir"):
        prepare_data(request(section(prefixes[:1])), cache_dir=tmp_path / "file")
