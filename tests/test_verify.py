"""``mixle-megatron verify`` and its evidence: planted faults, what is claimed with it, what is not used."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import torch.distributed as dist
from made_up_hosts import H100 as H100_DEVICE
from made_up_hosts import LAPTOP, HostFacts, Package, host, with_package
from typer.testing import CliRunner

from mixle_megatron.capabilities import capabilities
from mixle_megatron.capability.decide import decide
from mixle_megatron.capability.diagnosis import diagnose
from mixle_megatron.checkpoint.stored_state import OptimizerFormat
from mixle_megatron.cli.main import app
from mixle_megatron.evidence import store, verification
from mixle_megatron.evidence.claims import CLAIMS, DP_RESHARDABLE, FEATURES, FULLY_RESHARDABLE, Claim
from mixle_megatron.evidence.coverage import uncovered
from mixle_megatron.evidence.local_ranks import LocalRanks, RanksFailed
from mixle_megatron.evidence.numerics import with_evidence
from mixle_megatron.evidence.origin import Origin, origin_of
from mixle_megatron.evidence.record import ClaimEvidence, Error, Evidence, Measurement
from mixle_megatron.evidence.selection import selected
from mixle_megatron.evidence.store import kept_evidence
from mixle_megatron.evidence.verification import Terms, verify
from mixle_megatron.plan_record import PlanRecord
from mixle_megatron.updates import Communicating, declared_updates

PAGE = (Path(__file__).parent.parent / "docs" / "verify.md").read_text(encoding="utf-8")
HERE = Origin({"torch": "2.14.1"}, {"processor": "x86_64"})


def claim(name: str) -> Claim:
    """A claim with the first of its trials alone."""
    found = next(each for each in CLAIMS if each.name == name)
    return dataclasses.replace(found, trials=found.trials[:1])


# Planted faults


@contextmanager
def divided_by_its_own_tokens() -> Iterator[None]:
    """Each replica divides the summed gradient by its own tokens, and not by those of all."""
    from mixle_megatron.stage import Stage

    accumulate, reduce_gradients, seen = Stage.accumulate, Stage.reduce_gradients, [0]

    def remember(stage: Stage, batch: Any, *, completes_update: bool) -> float:
        seen[0] = batch.tokens
        return accumulate(stage, batch, completes_update=completes_update)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Stage, "accumulate", remember)
        patch.setattr(Stage, "reduce_gradients", lambda stage, _tokens: reduce_gradients(stage, seen[0]))
        yield


@contextmanager
def divided_by_twice_the_tokens() -> Iterator[None]:
    """Every plan, that of one rank too, has a divisor that is wrong by the same factor."""
    from mixle_megatron.stage import Stage

    reduce_gradients = Stage.reduce_gradients
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Stage, "reduce_gradients", lambda stage, tokens: reduce_gradients(stage, 2 * tokens))
        yield


@contextmanager
def without_the_tied_reduction() -> Iterator[None]:
    """First and last stage keep their own gradients of the embedding that they share."""
    from megatron.core.distributed import finalize_model_grads  # the function, of the module of that name

    module = sys.modules[finalize_model_grads.__module__]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_allreduce_word_embedding_grads", lambda *_args, **_kwargs: None)
        yield


@contextmanager
def rank_1_skips_its_all_reduce() -> Iterator[None]:
    """Of the gradients that tp ranks add up, rank 1 gives its part and takes no sum."""
    from megatron.core.distributed import finalize_model_grads

    module = sys.modules[finalize_model_grads.__module__]
    original = module._allreduce_non_tensor_model_parallel_grads
    all_reduce = dist.all_reduce

    def skipping(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return all_reduce(tensor.clone() if dist.get_rank() == 1 else tensor, *args, **kwargs)

    def faulty(*args: Any, **kwargs: Any) -> None:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(dist, "all_reduce", skipping)
            original(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_allreduce_non_tensor_model_parallel_grads", faulty)
        yield


FAULTS: dict[str, Callable[[], Any]] = {
    fault.__name__: fault
    for fault in (
        divided_by_its_own_tokens,
        divided_by_twice_the_tokens,
        without_the_tied_reduction,
        rank_1_skips_its_all_reduce,
    )
}


def with_fault(fault: str, function: Callable[..., Any], *args: Any) -> Any:
    """On a rank: call the function while the fault is planted."""
    with FAULTS[fault]():
        return function(*args)


@pytest.mark.parametrize(
    ("fault", "tried", "withdrawn", "where"),
    [
        ("divided_by_its_own_tokens", ("dp_shard", "tp"), "dp_shard", ""),
        ("without_the_tied_reduction", ("pp", "dp_shard"), "pp", "embedding.word_embeddings.weight"),
        ("rank_1_skips_its_all_reduce", ("tp", "pp"), "tp", "layernorm"),
        ("divided_by_twice_the_tokens", ("fp32", "tp"), "fp32", ""),
    ],
)
def test_a_planted_fault_withdraws_its_claim_and_no_other(
    run_on: Any, fault: str, tried: tuple[str, ...], withdrawn: str, where: str
) -> None:
    planted = lambda ranks, function, *args: run_on(ranks, with_fault, fault, function, *args)  # noqa: E731
    evidence = verify([claim(each) for each in tried], Terms(planted, "cpu", 4, HERE), lambda _trial: None)
    assert [each.name for each in evidence.claims if each.withdrawn] == [withdrawn]
    (measured,) = evidence[withdrawn].measurements
    assert "gradient off by " in measured.problem
    assert measured.gradient.relative > 1e-2
    assert where in measured.gradient.where
    assert measured.bit_identical, "a fault is repeated exactly"


def test_what_fails_on_a_rank_withdraws_the_claim_with_its_reason() -> None:
    def failing(ranks: int, _function: Any, *_args: Any) -> Any:
        if ranks == 1:
            return [None]
        raise RanksFailed("rank 1: RuntimeError: no route to host\nand a traceback")

    evidence = verify([claim("tp")], Terms(failing, "cpu", 4, HERE), lambda _trial: None)
    assert evidence["tp"].withdrawn
    assert evidence["tp"].problem == "tp=2, fp32: rank 1: RuntimeError: no route to host"


def test_what_this_host_has_too_few_ranks_for_is_neither_shown_nor_withdrawn() -> None:
    terms = Terms(lambda *_: pytest.fail("nothing is to be run"), "cuda", 1, HERE)
    shown = verify([claim("tp")], terms, lambda _trial: None)["tp"]
    assert not shown.holds
    assert not shown.withdrawn
    assert shown.problem == "not run: tp=2, fp32 needs 2 ranks, and this host has 1"


def die_on_rank_1() -> int:
    if dist.get_rank() == 1:
        os._exit(3)
    dist.barrier()
    return dist.get_rank()


def own_rank() -> int:
    return dist.get_rank()


def test_ranks_that_died_are_said_and_replaced() -> None:
    with LocalRanks("gloo") as ranks:
        with pytest.raises(RanksFailed, match=r"^rank [01]: "):
            ranks.run_on(2, die_on_rank_1)
        assert ranks.run_on(2, own_rank) == [0, 1]


# What evidence is used for


def measurement(each: Claim, problem: str = "") -> tuple[Measurement, ...]:
    """A made-up measurement of each trial of a claim."""
    return tuple(
        Measurement(
            evidence_id=f"{trial.name}-id",
            trial=trial.name,
            plan=dict(trial.plan),
            precision=trial.precision,
            device="cpu",
            ranks=trial.ranks,
            samples=6,
            bit_identical=trial.plan != {"cp": 2},
            loss=Error(1e-7, 1e-8, "update 1"),
            gradient=Error(2e-7, 3e-6, "weight"),
            parameters=Error(1e-8, 1e-8, "weight"),
            problem=problem,
        )
        for trial in each.trials
    )


def made_up(facts: HostFacts = LAPTOP, **problems: str) -> Evidence:
    """Evidence of a host for every claim; those named have a problem, or are left out for ``none``."""
    named = {name.replace("_IN_", " in "): problem for name, problem in problems.items()}
    found = tuple(
        ClaimEvidence(each.name, each.kind, measurement(each, named.get(each.name, "")))
        for each in CLAIMS
        if named.get(each.name) != "none"
    )
    return Evidence(origin_of(facts), found, "2026-01-01T00:00:00+00:00")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that evidence is kept in, in a cache folder of this test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return store.default_path()


def write(evidence: Evidence, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(evidence.as_dict()), encoding="utf-8")


def test_every_claim_has_something_to_be_run_for_it() -> None:
    names = {each.name for each in CLAIMS} | set(FEATURES)
    assert {one.name for one in decide(LAPTOP).capabilities if one.executes} <= names
    assert {FULLY_RESHARDABLE, DP_RESHARDABLE} == set(get_args(OptimizerFormat)) <= names


def test_with_evidence_of_everything_the_claims_are_those_without(cache: Path) -> None:
    write(made_up(), cache)
    assert capabilities(LAPTOP, evidence=True) == capabilities(LAPTOP)


@pytest.mark.parametrize(
    ("problems", "missing"),
    [
        ({"tp": "gradient off"}, {"tp"}),
        ({"tp": "gradient off", "tp_IN_bf16": "gradient off"}, {"tp"}),
        ({"tp_IN_bf16": "gradient off"}, {"bf16"}),
        ({"bf16": "none"}, {"bf16"}),
        ({"dp_shard": "none"}, {"dp_shard", "distributed_optimizer"}),
        ({"fully_reshardable": "loss off"}, {"reshardable_checkpoint", "elastic_restart"}),
        ({"dp_reshardable": "loss off"}, set()),
    ],
    ids=str,
)
def test_only_what_evidence_covers_is_claimed(
    cache: Path, problems: dict[str, str], missing: set[str]
) -> None:
    evidence = made_up(**problems)
    missing = missing & {one.name for one in decide(LAPTOP).capabilities if one.executes}
    assert set(uncovered(decide(LAPTOP), evidence)) == missing
    write(evidence, cache)
    everything, shown = capabilities(LAPTOP).as_dict(), capabilities(LAPTOP, evidence=True).as_dict()
    assert set(everything["axes"]) - set(shown["axes"]) == missing & set(everything["axes"])
    assert set(everything["precisions"]) - set(shown["precisions"]) == missing & set(everything["precisions"])
    for feature in FEATURES:
        assert shown[feature] == (feature not in missing)
    said = shown["requirements"][len(everything["requirements"]) :]
    assert {re.match(r"evidence for (\w+): ", each)[1] for each in said} == missing


@pytest.mark.parametrize(
    ("facts", "differs"),
    [
        (with_package(LAPTOP, "torch", Package("2.13.0")), "torch 2.13.0, not 2.14.1"),
        (dataclasses.replace(LAPTOP, python="3.11.9"), "python 3.11.9, not 3.12.1"),
        (host(H100_DEVICE), "CUDA devices NVIDIA H100 80GB HBM3 (9.0), not none"),
    ],
    ids=["torch", "python", "devices"],
)
def test_evidence_of_another_version_or_machine_is_not_used_and_doctor_says_so(
    cache: Path, facts: HostFacts, differs: str
) -> None:
    write(made_up(), cache)
    kept = kept_evidence(facts)
    assert (kept.status, kept.evidence) == ("other", None)
    assert differs in kept.message
    shown = capabilities(facts, evidence=True)
    assert not shown.axes | shown.precisions
    assert any(differs in each for each in shown.requirements)
    assert diagnose(facts, kept).as_dict()["evidence"]["message"] == kept.message


def test_other_sources_under_the_same_version_are_another_version(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(made_up(), cache)
    monkeypatch.setattr("mixle_megatron.evidence.origin.sources_digest", lambda: "0" * 16)
    assert "mixle-megatron sources" in kept_evidence(LAPTOP).message


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema_version": 1, "claims": 3}', "\x00"])
def test_damaged_evidence_is_said_to_be_so(cache: Path, text: str) -> None:
    cache.parent.mkdir(parents=True)
    cache.write_text(text, encoding="utf-8")
    assert kept_evidence(LAPTOP).status == "damaged"
    assert not capabilities(LAPTOP, evidence=True).axes


def test_doctor_prints_how_evidence_stands(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mixle_megatron.capability.imports.facts_after_importing", lambda: LAPTOP)
    doctor = partial(CliRunner().invoke, app)
    assert "Evidence: there is none; mixle-megatron verify makes it" in doctor(["doctor"]).stdout
    write(made_up(tp="gradient off"), cache)
    assert "it does not show tp" in " ".join(doctor(["doctor"]).stdout.split())
    said = json.loads(doctor(["doctor", "--json"]).stdout)["evidence"]
    assert said["status"] == "used"
    assert [each["name"] for each in said["does_not_hold"]] == ["tp"]


def test_updates_carry_the_worst_of_what_was_observed_of_their_axes() -> None:
    updates = declared_updates(PlanRecord(tp=2, cp=2, dp_shard=2), Communicating(tied_embedding=True))
    observed = with_evidence(updates, made_up(tp_IN_bf16="gradient off"), "fp32", "cpu")
    for before, after in zip(updates, observed, strict=True):
        trials = [f"{axis.value}=2, fp32" for axis in before.mesh_axes]
        assert after.numerics_evidence_id == "+".join(f"{each}-id" for each in trials)
        assert after.numerics_sample_count == 6 * len(trials)
        assert (after.maximum_absolute_error, after.maximum_relative_error) == (2e-7, 3e-6)
        assert after.determinism_observed == ("cp=2, fp32" not in trials)
        assert not after.exact
    for precision, device, evidence in (
        ("bf16", "cpu", made_up(tp_IN_bf16="off")),
        ("fp32", "cuda", made_up()),
    ):
        others = with_evidence(updates, evidence, precision, device)
        assert all(each.numerics_evidence_id is None for each in others if "tp" in each.mesh_axes)


# The command


def updates_of_a_session(folder: str) -> list[tuple[str, str | None, int]]:
    """What a session of two optimizer shards declares, where evidence is kept in this cache folder."""
    from small_gpts import session

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", folder)
        with session(dp_shard=2) as opened:
            return [
                (each.node_id, each.numerics_evidence_id, each.numerics_sample_count)
                for each in opened.updates
            ]


def test_the_command_keeps_evidence_that_sessions_and_claims_then_use(
    run_on: Any, cache: Path, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "mixle_megatron", "verify", "--axes", "dp_shard", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said.pop("path") == str(cache)
    assert json.loads(cache.read_text(encoding="utf-8")) == said
    assert keys_of(said) - set(Origin.as_dict(kept_evidence().evidence.origin)["versions"]) <= documented()
    [shown] = said["claims"]
    [measured] = shown["measurements"]
    assert (shown["name"], shown["holds"], measured["samples"]) == ("dp_shard", True, 6)
    assert 0 < measured["gradient"]["relative"] < 1e-4
    claimed = capabilities(evidence=True)
    assert ({axis.value for axis in claimed.axes}, claimed.precisions) == ({"dp_shard"}, frozenset())
    for updates in run_on(2, updates_of_a_session, str(tmp_path)):
        assert updates
        assert {each[1:] for each in updates} == {(measured["evidence_id"], 6)}


def keys_of(value: Any) -> set[str]:
    """Every key of every object in plain data, but for the names of axes, packages and hardware."""
    if isinstance(value, list):
        return set().union(*map(keys_of, value)) if value else set()
    if not isinstance(value, dict):
        return set()
    named = {"plan", "versions", "hardware"}
    return set(value).union(*(keys_of(each) for key, each in value.items() if key not in named))


def documented() -> set[str]:
    return set(re.findall(r"`(\w+)`", PAGE))


def test_statuses_and_bounds_are_documented() -> None:
    from mixle_megatron.evidence.claims import BOUNDS

    assert set(store.STATUSES) <= documented()
    for (model, precision), bounds in BOUNDS.items():
        row = (
            f"| {model} | {precision} | {bounds.loss:.0e} | {bounds.gradient:.0e} | {bounds.parameters:.0e} |"
        )
        assert row in PAGE


def test_newer_evidence_replaces_only_what_it_is_of(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "facts_of_this_host", lambda: LAPTOP)
    store.keep(made_up(tp="gradient off", cp="gradient off"), store.writable(None))
    again = made_up()
    store.keep(
        dataclasses.replace(again, claims=tuple(each for each in again.claims if each.name == "tp")), cache
    )
    kept = kept_evidence(LAPTOP).evidence
    assert {each.name for each in kept.claims} == {each.name for each in CLAIMS}
    assert [each.name for each in kept.claims if not each.holds] == ["cp"]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (
            ["--axes", "tpx"],
            ["--axes=tpx is no axis of this host", "dp_replicate, dp_shard, tp, pp, cp, ep, etp"],
        ),
        (["--precisions", "fp32,fp7"], ["--precisions=fp7 is no precision of this host", "fp32, bf16, fp16"]),
        (["--checkpoints", "flat"], ["--checkpoints=flat", "fully_reshardable, dp_reshardable"]),
        (["--axes", "tp", "--out", "/proc"], ["--out=/proc is a folder"]),
        (["--device", "tpu"], ["--device=tpu is not known", "auto, cpu or cuda"]),
    ],
    ids=lambda value: value[0],
)
def test_a_bad_argument_is_refused_with_the_valid_ones(arguments: list[str], named: list[str]) -> None:
    done = CliRunner().invoke(app, ["verify", *arguments])
    assert done.exit_code == 2
    for words in named:
        assert words in done.stderr


def test_axes_and_precisions_that_are_named_bring_their_combinations() -> None:
    names = lambda **asked: [each.name for each in selected(LAPTOP, "cpu", **asked)]  # noqa: E731
    assert names(axes=["tp", "ep"], precisions=["fp32", "bf16", "fp16"]) == [
        *("tp", "ep", "fp32", "bf16", "fp16", "tp in bf16", "tp in fp16", "ep in bf16"),
    ]
    assert names(checkpoints=[DP_RESHARDABLE]) == [DP_RESHARDABLE]
    assert names() == [each.name for each in CLAIMS]


def test_a_withdrawn_claim_is_exit_code_1_and_the_report_says_which(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = "gradient off by 5.0e-01 at embedding.word_embeddings.weight, where 1e-04 is allowed"
    monkeypatch.setattr(verification, "verify_here", lambda *_: made_up(pp=problem))
    done = CliRunner().invoke(app, ["verify", "--axes", "pp"])
    assert done.exit_code == 1
    assert done.stdout.startswith("Withdrawn on this host: pp.\n")
    assert problem in " ".join(done.stdout.split())
