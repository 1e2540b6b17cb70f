"""Runs on indexed corpora and arrays: one curve however it is cut, and every validation set by its name."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import yaml
from test_data_indexed import EOD, corpus, record
from tiny_run import CONFIG, train_here

from mixle_megatron.checkpoint.opening import read_session
from mixle_megatron.config.load import load_config
from mixle_megatron.config.schema import effective_config
from mixle_megatron.errors import Refused
from mixle_megatron.training.run_directory import resume_faults

STEPS = 6


@pytest.fixture(scope="module")
def run_file(tmp_path_factory):
    """A small run on a blend of two corpora, with three further sets."""
    folder = tmp_path_factory.mktemp("data")
    one, two = corpus(folder / "one", 60, 1), corpus(folder / "two", 90, 2)
    record(one)
    np.save(folder / "ids.npy", np.random.default_rng(1).integers(0, EOD, 500))
    (folder / "text.txt").write_text("what is evaluated on " * 20)
    values = yaml.safe_load(CONFIG.read_text())
    values["model"] |= {"num_layers": 2, "hidden_size": 32, "seq_length": 32}
    values["batch"] = {"global_batch_size": 8, "micro_batch_size": 2}
    values["precision"] = "fp32"
    values["plan"]["dp_shard"] = 1
    values["data"] = {
        "source": "indexed",
        "blend": [{"path": one, "weight": 2}, {"path": two, "weight": 1}],
        "split": [0.8, 0.2],
    }
    values["evaluation"] = {
        "every": 3,
        "batches": 2,
        "sets": {
            "corpus": {"blend": [{"path": one}]},
            "ids": {"path": str(folder / "ids.npy")},
            "text": {"paths": [str(folder / "text.txt")]},
        },
    }
    values["logging"] = {"progress": "plain", "tensorboard": False}
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(values))
    return str(path)


def lines(folder, name):
    return [json.loads(line) for line in (Path(folder) / name).read_text().splitlines()]


def losses(folder):
    return [line["loss"] for line in lines(folder, "receipts.jsonl")]


def train(run_on, ranks, folder, run_file, *more, steps=STEPS):
    results = run_on(ranks, train_from, str(folder), run_file, f"run.steps={steps}", *more)
    return results[0]["folder"]


def train_from(folder, run_file, *more):
    return train_here(folder, *more, config=run_file)


@pytest.fixture(scope="module")
def uninterrupted(run_on, run_file, tmp_path_factory):
    return train(run_on, 1, tmp_path_factory.mktemp("whole"), run_file)


def test_every_set_is_evaluated_by_its_name(uninterrupted):
    evaluations = lines(uninterrupted, "evaluations.jsonl")
    assert [(line["step"], line["set"]) for line in evaluations] == [
        (step, name) for step in (3, 6) for name in ("validation", "corpus", "ids", "text")
    ]
    for line in evaluations:
        assert line["perplexity"] == pytest.approx(math.exp(line["loss"]))
        assert line["tokens"] % 32 == 0
    bits = {line["set"]: line["bits_per_byte"] for line in evaluations[-4:]}
    loss = {line["set"]: line["loss"] for line in evaluations[-4:]}
    assert bits["validation"] is None, "one of its corpora does not say how long its text is"
    assert bits["ids"] is None
    assert bits["corpus"] == pytest.approx(loss["corpus"] * 1900 / 1840 / math.log(2))
    assert bits["text"] == pytest.approx(loss["text"] * 421 / 420 / math.log(2))


def test_a_receipt_says_how_long_data_was_waited_for(uninterrupted):
    for line in lines(uninterrupted, "receipts.jsonl"):
        assert 0 <= line["extra"]["data_seconds"] < 60


def test_neither_plans_nor_resumes_nor_the_number_of_steps_change_the_data(
    run_on, run_file, uninterrupted, tmp_path
):
    train(run_on, 2, tmp_path, run_file, "plan.dp_shard=2", steps=2)
    train(run_on, 1, tmp_path, run_file, "batch.micro_batch_size=4", "evaluation.every=0", steps=4)
    folder = train(run_on, 2, tmp_path, run_file, "plan.dp_replicate=2", "batch.micro_batch_size=1")
    assert losses(folder) == pytest.approx(losses(uninterrupted), rel=1e-5)


def test_other_data_is_refused_at_resume_and_begun_anew_where_that_is_asked_for(
    run_on, run_file, uninterrupted, tmp_path
):
    other = load_config(run_file).config.data.model_dump(mode="json")
    other["blend"][0]["weight"] = 5
    given = f"data={json.dumps(other)}"
    with pytest.raises(AssertionError, match=r"data\.blend\.0\.weight=5\.0 was 2\.0 when the run began"):
        train(run_on, 1, Path(uninterrupted).parent, run_file, given, steps=STEPS + 1)
    resumed = f"run.resume={{from: {uninterrupted}}}"
    folder = train(run_on, 1, tmp_path, run_file, given, resumed, "evaluation.every=0", steps=STEPS + 1)
    assert [line["step"] for line in lines(folder, "receipts.jsonl")] == [STEPS + 1]
    payload, _ = read_session(Path(folder) / "checkpoints" / f"iter_{STEPS + 1:07d}")
    assert payload["loader_state"]["consumed_samples"] == 8, "the clock of the data began anew"


def test_data_that_has_moved_is_gone_on_with(run_file):
    config = load_config(run_file).config
    stored = effective_config(config).model_dump(mode="json")
    moved = config.data.model_dump(mode="json") | {"cache": "elsewhere"}
    moved["blend"][1]["path"] = "elsewhere/two"
    other = load_config(run_file, [f"data={json.dumps(moved)}"]).config
    assert resume_faults(other, stored) == []


def test_faults_of_sections_are_named_by_their_keys(run_file):
    def refused(*overrides):
        with pytest.raises(Refused) as caught:
            load_config(run_file, overrides)
        return [(fault.field, fault.remedy) for fault in caught.value.faults]

    assert refused("data.source=indxed") == [("data.source", "did you mean indexed?")]
    assert refused("data.source=csv") == [("data.source", "use text, indexed or tokens")]
    assert refused("data.paths=[x]") == [("data.paths", "leave it out")]
    assert refused("data.blnd=1") == [("data.blnd", "did you mean data.blend?")]
    (path, unknown) = refused("data.blend=[{pth: x}]")
    assert path[0] == "data.blend.0.path"
    assert unknown == ("data.blend.0.pth", "did you mean data.blend.0.path?")
    assert refused("evaluation.sets.ids.pth=1")[0][0] == "evaluation.sets.ids.pth"
