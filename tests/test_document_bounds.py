"""Documents apart within packed rows: as each alone in its own row, and as Megatron's datasets have it."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.datasets.gpt_dataset import _get_ltor_masks_and_position_ids
from mixle.utils.parallel.training_contracts import ParallelPlan
from small_gpts import LLAMA, OPTIMIZERS, SEQUENCE, SIZES
from test_data_indexed import EOD, corpus, megatrons, record
from tiny_run import CONFIG, train_here

from mixle_megatron import DocumentBounds, MegatronBackend, PipelineSplit
from mixle_megatron.config.data import IndexedSection, ValidationSetSection
from mixle_megatron.config.load import check_config, load_config, warnings_of
from mixle_megatron.config.model import ModelSection
from mixle_megatron.data import DataRequest, check_data
from mixle_megatron.documents import bounds_faults
from mixle_megatron.errors import Refused
from mixle_megatron.layers.attention import _added
from mixle_megatron.models.gpt import GPT
from mixle_megatron.models.provider import SessionTerms
from mixle_megatron.pipeline_split import EVEN
from mixle_megatron.plan_record import PlanRecord

BOTH = DocumentBounds(EOD, positions=True, attention=True)

# Against Megatron's datasets


def megatrons_way(ids):
    mask, _, positions = _get_ltor_masks_and_position_ids(ids, EOD, True, True, False, True)
    return mask, positions


def assert_equal_to(mask, positions, ids):
    """``mask`` is Megatron's: true where a token is hidden."""
    ours = BOTH.attention_mask(ids[None], torch.float32)
    assert torch.equal(ours[0], _added(mask, ours))
    assert torch.equal(BOTH.position_ids(ids[None])[0], positions)


@given(st.lists(st.sampled_from([1, 2, EOD]), min_size=1, max_size=12))
def test_masks_and_positions_are_those_of_megatrons_function(ids):
    ids = torch.tensor(ids)
    assert_equal_to(*megatrons_way(ids), ids)


def test_masks_and_positions_are_those_of_megatrons_dataset(tmp_path):
    options = {"reset_position_ids": True, "reset_attention_mask": True, "create_attention_mask": True}
    dataset = megatrons(corpus(tmp_path / "one", 30, 1), 0, **options)
    for item in (dataset[place] for place in range(len(dataset))):
        assert_equal_to(item["attention_mask"], item["position_ids"], item["tokens"])


# Against documents that stand alone

MODELS = {
    "gpt2": {},
    "recomputed": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
    "attention_recomputed": {"recompute_granularity": "selective"},
    "llama": LLAMA,
    "latent": {"multi_latent_attention": True, "position_embedding_type": "rope"},
}


def rows_of_documents():
    """Four rows of several documents each; inputs and targets ``[4, SEQUENCE]``."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, EOD, (4, SEQUENCE + 1), generator=generator)
    for row, ends in enumerate(([4, 9], [0, 7, 8], [15], [])):
        tokens[row, ends] = EOD
    return tokens[:, :-1].clone(), tokens[:, 1:].clone()


def each_alone(inputs, targets):
    """Every document in a row of its own, filled up with what nothing supervises."""
    alone = []
    for ids, following in zip(inputs, targets, strict=True):
        lasts = [*(ids == EOD).nonzero().flatten().tolist(), SEQUENCE - 1]
        first = 0
        for last in lasts:
            length = last + 1 - first
            if length:
                row = torch.zeros(SEQUENCE, dtype=torch.long), torch.full((SEQUENCE,), -100)
                row[0][:length], row[1][:length] = ids[first : last + 1], following[first : last + 1]
                alone.append(row)
            first = last + 1
    return tuple(torch.stack(part) for part in zip(*alone, strict=True))


def losses(model, sizes, documents, chunks=None, precision="fp32", alone=False):
    """The losses of an evaluation, of two updates, and of an evaluation after them."""
    split = PipelineSplit(virtual_pipeline_model_parallel_size=chunks) if chunks else EVEN
    inputs, targets = rows_of_documents()
    if alone:
        inputs, targets = each_alone(inputs, targets)
    session = MegatronBackend().prepare(
        GPT(ModelSection(**SIZES | {"num_layers": 4} | MODELS[model])),
        plan=ParallelPlan(**sizes),
        precision=precision,
        optimizer=OPTIMIZERS["sgd"],
        device="cpu",
        pipeline=split,
        documents=documents,
    )
    with session:
        mine = slice(session.data_parallel_rank, None, session.data_parallel_size)
        part = inputs[mine], targets[mine]
        found = [session.evaluate(*part).loss]
        found += [session.train_batch(*part).loss for _ in range(2)]
        return [*found, session.evaluate(*part).loss]


@pytest.fixture(scope="module")
def reference(run_on):
    """Losses of a model whose documents stand alone, each computed once."""
    known = {}

    def of(model):
        if model not in known:
            known[model] = run_on(1, partial(losses, alone=True), model, {}, None)[0]
        return known[model]

    return of


@pytest.mark.parametrize(
    ("model", "ranks", "plan", "chunks"),
    [
        ("gpt2", 1, {}, None),
        ("recomputed", 2, {"tp": 2}, None),
        ("attention_recomputed", 2, {"pp": 2, "microbatches": 2}, None),
        ("llama", 2, {"pp": 2, "microbatches": 2}, 2),
        ("latent", 2, {"dp_shard": 2}, None),
        ("gpt2", 4, {"tp": 2, "pp": 2, "microbatches": 4}, None),
    ],
)
def test_packed_documents_lose_what_each_loses_alone(run_on, reference, model, ranks, plan, chunks):
    for found in run_on(ranks, losses, model, plan, BOTH, chunks):
        assert found == pytest.approx(reference(model), rel=1e-6)


def test_each_bound_alone_matters_and_none_is_as_before(run_on, reference):
    def together(documents):
        return run_on(1, losses, "gpt2", {}, documents)[0][0]

    apart, joined = reference("gpt2")[0], together(None)
    assert together(DocumentBounds(EOD)) == joined
    for one in ({"positions": True}, {"attention": True}):
        assert min(abs(together(DocumentBounds(EOD, **one)) - other) for other in (apart, joined)) > 1e-4
    low = run_on(1, partial(losses, precision="bf16"), "gpt2", {}, BOTH)[0]
    assert low == pytest.approx(reference("gpt2"), abs=0.02)


# Refusals


def test_what_cannot_be_honoured_is_refused_by_name(monkeypatch):
    provider = GPT(ModelSection(**SIZES))
    fields = partial(_fields, provider=provider)
    assert fields(BOTH) == []
    assert fields(DocumentBounds(257)) == ["documents.end"]
    assert fields(BOTH, cp=2) == ["documents.attention"]
    assert fields(DocumentBounds(EOD, positions=True), cp=2) == []
    assert _fields(BOTH, provider=object()) == ["documents.attention"]
    monkeypatch.setattr("mixle_megatron.documents._has_transformer_engine", lambda: True)
    assert fields(BOTH, device="cuda") == ["documents.attention"]
    assert fields(BOTH, device="cpu") == []
    with pytest.raises(Refused, match=r"documents\.end=300"):
        MegatronBackend().prepare(provider, plan=ParallelPlan(), device="cpu", documents=DocumentBounds(300))
    assert not torch.distributed.is_initialized()


def _fields(bounds, provider, device="cpu", **sizes):
    terms = SessionTerms(PlanRecord(**sizes), "fp32", torch.device(device), EVEN, bounds)
    return [fault.field for fault in bounds_faults(bounds, terms, provider, 257)]


# Runs


@pytest.fixture(scope="module")
def run_file(tmp_path_factory):
    """A small run on one corpus, whose documents are apart."""
    folder = tmp_path_factory.mktemp("documents")
    prefix = corpus(folder / "one", 60, 1)
    record(prefix)
    values = yaml.safe_load(CONFIG.read_text())
    values["model"] |= {"num_layers": 2, "hidden_size": 32, "seq_length": 32}
    values["batch"] = {"global_batch_size": 4, "micro_batch_size": 2}
    values["precision"] = "fp32"
    values["plan"]["dp_shard"] = 1
    values["data"] = {
        "source": "indexed",
        "blend": [{"path": prefix}],
        "split": [0.8, 0.2],
        "reset_position_ids": True,
        "reset_attention_mask": True,
    }
    values["evaluation"] = {"every": 3, "batches": 1}
    values["logging"] = {"progress": "plain", "tensorboard": False}
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(values))
    return str(path)


def trained(run_on, ranks, folder, run_file, *more):
    """The losses of three updates and of the evaluation after them."""
    found = run_on(ranks, partial(train_here, config=run_file), str(folder), "run.steps=3", *more)
    lines = [
        json.loads(line)
        for name in ("receipts.jsonl", "evaluations.jsonl")
        for line in (Path(found[0]["folder"]) / name).read_text().splitlines()
    ]
    return [line["loss"] for line in lines]


def test_a_run_keeps_documents_apart(run_on, run_file, tmp_path):
    apart = trained(run_on, 1, tmp_path / "apart", run_file)
    together = ("data.reset_position_ids=false", "data.reset_attention_mask=false")
    joined = trained(run_on, 1, tmp_path / "joined", run_file, *together)
    assert len(apart) == len(joined) == 4
    assert all(abs(one - other) > 1e-5 for one, other in zip(apart, joined, strict=True))


def test_configs_are_refused_or_warned_of_by_key(run_file):
    def faults_of(*more):
        return [fault.field for fault in check_config(load_config(run_file, more), here=True)]

    assert faults_of() == []
    assert faults_of("plan.cp=2") == ["data.reset_attention_mask"]
    assert faults_of("plan.cp=2", "data.reset_attention_mask=false") == []
    assert faults_of("data.eod=300") == ["data.eod"]
    rope = load_config(run_file, ["model.position_embedding_type=rope"])
    assert "data.reset_position_ids" in [warning.field for warning in warnings_of(rope)]
    assert warnings_of(load_config(run_file, [])) == []


def test_sets_whose_documents_end_otherwise_are_refused(tmp_path):
    prefixes = [corpus(tmp_path / name, 60, 1) for name in ("one", "two")]
    for prefix, end in zip(prefixes, (EOD, 0), strict=True):
        record(prefix, eod=end)
    blends = [[{"path": prefix}] for prefix in prefixes]
    data = IndexedSection(source="indexed", blend=blends[0], split=[0.8, 0.2], reset_attention_mask=True)
    sets = {"two": ValidationSetSection(blend=blends[1])}
    found = check_data(DataRequest(data, sets, True, SEQUENCE, 257, 1))
    assert [fault.field for fault in found] == ["evaluation.sets.two"]
