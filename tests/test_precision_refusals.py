"""A precision that cannot be had is refused by plan, config check, prepare and pretrain alike."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from made_up_hosts import HOSTS
from small_gpts import SIZES, parallel_plan
from tiny_run import CONFIG, overrides
from typer.testing import CliRunner

from mixle_megatron.capability.facts import HostFacts
from mixle_megatron.cli.main import app
from mixle_megatron.errors import Fault, Refused, Unsupported
from mixle_megatron.host import installed
from mixle_megatron.precision import EXECUTED, NAMES
from mixle_megatron.rules import NOT_EXECUTED
from mixle_megatron.rules.verdict import NOT_HERE

WITHHELD = [name for name in NAMES if name not in EXECUTED]
HARDWARE = ("laptop", "A100", "H100", "B200", "no Transformer Engine")


@pytest.fixture(autouse=True)
def nothing_is_started(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No launcher's environment; and no group and no redirection after the refusal."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    yield
    assert not dist.is_initialized()
    assert not installed()


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Makes this host, to everything that asks, one of those that are made up."""

    def become(name: str) -> None:
        facts: HostFacts = HOSTS[name]
        usable = bool(facts.cuda.devices) and facts.cuda.usable
        device = torch.device("cuda", 0) if usable else torch.device("cpu")
        monkeypatch.setattr("mixle_megatron.config.here.facts_of_this_host", lambda: facts)
        monkeypatch.setattr("mixle_megatron.backend.facts_beside_torch", lambda _device: facts)
        monkeypatch.setattr("mixle_megatron.backend.choose_device", lambda _requested: device)

    return become


Faults = dict[str, list[dict[str, Any]]]


def values(folder: Path, precision: str, *more: str) -> list[str]:
    """A small run of whose data nothing is wrong on any host."""
    return overrides(
        folder, f"precision={precision}", "data.validation_fraction=0", "evaluation.every=0", *more
    )


def judged(precision: str, folder: Path, *more: str, here: bool = False) -> Faults:
    """What ``config check`` finds: faults and warnings about the precision and the device."""
    arguments = [
        "config",
        "check",
        str(CONFIG),
        *values(folder, precision, *more),
        "--json",
    ]
    result = CliRunner().invoke(app, [*arguments, *(["--here"] if here else [])])
    [found] = json.loads(result.stdout)["files"].values()
    assert result.exit_code == (2 if found["faults"] else 0)
    return found


def prepared(precision: str) -> tuple[Fault, ...]:
    """What ``prepare`` refuses; it gets no further here."""
    from mixle_megatron.backend import MegatronBackend
    from mixle_megatron.models.gpt import GPT

    with pytest.raises(Refused) as caught:
        MegatronBackend().prepare(GPT.of(**SIZES), plan=parallel_plan(), precision=precision)
    assert isinstance(caught.value, Unsupported)
    return caught.value.faults


def pretrained(precision: str, folder: Path) -> str:
    """What ``pretrain`` says when it refuses."""
    result = CliRunner().invoke(app, ["pretrain", str(CONFIG), *values(folder, precision)])
    assert result.exit_code == 2, result.output
    assert not (folder / "tiny-gpt").exists()
    return result.stderr


def planned(precision: str, folder: Path) -> Any:
    """What ``plan`` does."""
    return CliRunner().invoke(app, ["plan", str(CONFIG), *values(folder, precision), "--json"])


def about(faults: Any, field: str = "precision") -> set[tuple[str, str]]:
    """Rules and remedies of the faults about a field."""
    plain = [fault if isinstance(fault, dict) else fault.as_dict() for fault in faults]
    return {(fault["rule"], fault["remedy"]) for fault in plain if fault["field"] == field}


@pytest.mark.parametrize("host", HARDWARE)
@pytest.mark.parametrize("precision", WITHHELD)
def test_what_this_version_executes_nowhere_is_refused_everywhere(
    on: Callable[[str], None], tmp_path: Path, host: str, precision: str
) -> None:
    """Host or no host: and where a host is judged, with what it lacks, the same in every place."""
    on(host)
    file_alone = judged(precision, tmp_path)
    here = judged(precision, tmp_path, here=True)
    by_version = about(file_alone["faults"])
    assert len(by_version) == 1
    assert all(rule.startswith(NOT_EXECUTED) for rule, _ in by_version)
    lacking = about(file_alone["warnings"])
    assert all(rule.startswith(NOT_HERE) for rule, _ in lacking)
    assert about(here["faults"]) == by_version | lacking == about(prepared(precision))

    refusal = pretrained(precision, tmp_path)
    for rule, remedy in by_version | lacking:
        assert f"precision={precision} {rule}; {remedy}" in refusal
    plan = planned(precision, tmp_path)
    assert plan.exit_code == 2
    [(rule, remedy)] = by_version
    assert f"precision={precision} {rule}; {remedy}" in plan.stderr


LACKING = {
    ("laptop", "fp8"): [
        "there is no CUDA device, and it needs one of compute capability 8.9 or above",
        "Transformer Engine is not installed",
    ],
    ("V100", "fp8"): ["compute capability 7.0 (Tesla V100-SXM2-32GB) is below 8.9"],
    ("A100", "fp8"): ["compute capability 8.0 (NVIDIA A100-SXM4-80GB) is below 8.9"],
    ("H100", "fp8"): [],
    ("H100", "nvfp4"): ["compute capability 9.0 (NVIDIA H100 80GB HBM3) is below 10.0"],
    ("B200", "nvfp4"): [],
    ("no Transformer Engine", "fp8-delayed"): ["Transformer Engine is not installed"],
    ("old driver", "fp8"): ["torch is built for CUDA 13.0, and the driver runs 12.4 at most"],
}


@pytest.mark.parametrize(("host", "precision"), LACKING)
def test_the_refusal_says_what_the_host_lacks(
    on: Callable[[str], None], tmp_path: Path, host: str, precision: str
) -> None:
    on(host)
    found = about(judged(precision, tmp_path)["warnings"])
    assert {rule.removeprefix(NOT_HERE) for rule, _ in found} == set(LACKING[host, precision])


def test_the_refusal_says_how_to_get_transformer_engine(on: Callable[[str], None], tmp_path: Path) -> None:
    on("no Transformer Engine")
    [(_, remedy)] = about(judged("fp8", tmp_path)["warnings"])
    assert remedy == "use fp32, bf16 or fp16, or pip install --no-build-isolation 'mixle-megatron[te]'"


def test_what_is_executed_elsewhere_is_refused_where_the_hardware_lacks_it(
    on: Callable[[str], None], tmp_path: Path
) -> None:
    """A V100 has no bf16: the file is sound, and this host cannot run it, unless on its CPU."""
    on("V100")
    sound = judged("bf16", tmp_path)
    assert sound["faults"] == []
    expected = (NOT_HERE + "compute capability 7.0 (Tesla V100-SXM2-32GB) is below 8.0",)
    assert {rule for rule, _ in about(sound["warnings"])} == set(expected)
    assert about(sound["warnings"]) == about(judged("bf16", tmp_path, here=True)["faults"])
    assert about(sound["warnings"]) == about(prepared("bf16"))
    assert expected[0] in pretrained("bf16", tmp_path)
    plan = planned("bf16", tmp_path)
    assert plan.exit_code == 0
    assert about(json.loads(plan.stdout)["warnings"]) == about(sound["warnings"])
    assert judged("bf16", tmp_path, "host.device=cpu", here=True)["faults"] == []
    assert judged("fp32", tmp_path, here=True)["faults"] == []


@pytest.mark.parametrize("host", ["laptop", "old driver", "V100 with CUDA 13"])
def test_a_device_that_is_not_usable_is_refused_where_the_host_is_judged(
    on: Callable[[str], None], tmp_path: Path, host: str
) -> None:
    on(host)
    wanted = ("host.device=cuda",)
    assert judged("bf16", tmp_path, *wanted)["faults"] == []
    assert about(judged("bf16", tmp_path, *wanted)["warnings"], "host.device")
    assert about(judged("bf16", tmp_path, *wanted, here=True)["faults"], "host.device")
    assert judged("bf16", tmp_path, here=True)["faults"] == []


@pytest.mark.parametrize("host", ["Megatron too old", "Megatron missing"])
def test_a_host_that_trains_nothing_refuses_every_run(
    on: Callable[[str], None], tmp_path: Path, host: str
) -> None:
    on(host)
    assert judged("fp32", tmp_path)["faults"] == []
    [(rule, remedy)] = about(judged("fp32", tmp_path, here=True)["faults"], "megatron-core")
    assert rule.startswith(NOT_HERE)
    assert remedy == "pip install 'megatron-core>=0.16,<0.20'"
    assert about(prepared("fp32"), "megatron-core") == {(rule, remedy)}
    assert rule in pretrained("fp32", tmp_path)
