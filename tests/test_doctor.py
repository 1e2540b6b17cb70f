"""``mixle-megatron doctor``: what it prints of this host and of others, its JSON, its exit code."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from made_up_hosts import HOSTS, LAPTOP
from typer.testing import CliRunner, Result

from mixle_megatron.capability import imports
from mixle_megatron.capability.decide import STATUSES
from mixle_megatron.capability.diagnosis import SCHEMA_VERSION
from mixle_megatron.capability.facts import HostFacts
from mixle_megatron.cli.main import app
from mixle_megatron.precision import RECIPES

PAGE = (Path(__file__).parent.parent / "docs" / "doctor.md").read_text(encoding="utf-8")


@pytest.fixture
def doctor(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The command on a host with those facts."""

    def run(facts: HostFacts, *arguments: str) -> Result:
        monkeypatch.setattr(imports, "facts_after_importing", lambda: facts)
        return CliRunner().invoke(app, ["doctor", *arguments])

    return run


def test_of_this_host_it_says_that_it_trains_and_why() -> None:
    command = [sys.executable, "-m", "mixle_megatron", "doctor"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("This host trains on ")
    assert done.stderr == ""
    for words in (
        "megatron-core",
        "Axes of a plan",
        "dp_replicate",
        "Precisions",
        "nvfp4",
        "elastic_restart",
    ):
        assert words in done.stdout


def test_a_torch_that_cannot_be_loaded_is_said_and_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(
        "raise OSError('libtorch.so: no such file')", encoding="utf-8"
    )
    command = [sys.executable, "-m", "mixle_megatron", "doctor"]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 1
    assert "importing torch" in done.stdout.splitlines()[0]
    assert "fails: OSError: libtorch.so: no such file" in done.stdout.splitlines()[0]
    assert done.stderr == ""


@pytest.mark.parametrize("name", HOSTS)
def test_the_exit_code_is_0_where_something_can_be_trained(doctor: Any, name: str) -> None:
    nothing = {"Megatron too old", "Megatron missing", "Transformer Engine breaks Megatron"}
    for arguments in ((), ("--json",)):
        assert doctor(HOSTS[name], *arguments).exit_code == (1 if name in nothing else 0)


@pytest.mark.parametrize("name", HOSTS)
def test_it_prints_every_capability_with_its_reason(doctor: Any, name: str) -> None:
    printed = " ".join(doctor(HOSTS[name]).stdout.split())
    said = json.loads(doctor(HOSTS[name], "--json").stdout)
    for capability in said["capabilities"]:
        assert capability["name"] in printed
    for warning in said["warnings"]:
        assert warning["about"] in printed


def test_the_verdict_comes_first(doctor: Any) -> None:
    first = {
        name: doctor(HOSTS[name]).stdout.splitlines()[0] for name in ("laptop", "A100", "Megatron missing")
    }
    assert first == {
        "laptop": "This host trains on the CPU, over gloo.",
        "A100": "This host trains on 8 x NVIDIA A100-SXM4-80GB (8.0, 80.00 GiB), over NCCL, which no test of "
        "this version has run, and on the CPU, over gloo.",
        "Megatron missing": "This host trains nothing: megatron-core is not installed",
    }


def test_with_devices_each_capability_is_told_for_both(doctor: Any) -> None:
    lines = doctor(HOSTS["H100"]).stdout.splitlines()
    number = next(number for number, line in enumerate(lines) if line.startswith("bf16"))
    assert re.match(r"bf16 +cpu +yes ", lines[number])
    assert re.match(r" +cuda +not run yet ", lines[number + 1])
    assert any(re.match(r" +cuda +no +compute capability 9.0 .* is below 10.0", line) for line in lines)


def test_a_host_cannot_steer_the_terminal(doctor: Any) -> None:
    hostile = HostFacts(python="3.12.1", environment={"NCCL_DEBUG": "\x1b[2Jgone"})
    assert "\x1b" not in doctor(hostile).stdout


def keys_of(value: Any) -> set[str]:
    """Every key of every object in plain data, but for those that are names of things."""
    if isinstance(value, list):
        return set().union(*map(keys_of, value)) if value else set()
    if not isinstance(value, dict):
        return set()
    named = {"devices", "packages", "support", "environment"}
    found = set(value)
    for key, item in value.items():
        inner = list(item.values()) if key in named and isinstance(item, dict) else item
        found |= keys_of(inner)
    return found


def test_every_key_of_the_json_is_documented() -> None:
    said = json.loads(json.dumps(_said(HOSTS["two kinds"])))
    documented = set(re.findall(r"`(\w+)`", PAGE))
    assert keys_of(said) <= documented
    assert said["schema_version"] == SCHEMA_VERSION
    assert f"`schema_version` is {SCHEMA_VERSION}" in PAGE
    assert set(STATUSES) <= documented


def test_the_json_has_the_keys_of_its_version() -> None:
    """What a program may rely on under schema version 1: keys are added, and none goes."""
    said = _said(LAPTOP)
    assert set(said) == {
        *("schema_version", "trains", "requirements", "capabilities", "warnings", "evidence", "facts"),
    }
    assert set(said["requirements"][0]) == {"name", "needs", "found", "problem", "remedy", "met"}
    assert set(said["capabilities"][0]) == {"name", "kind", "executes", "reason", "remedy", "devices"}
    assert set(said["capabilities"][0]["devices"]) == {"cpu", "cuda"}
    assert set(said["capabilities"][0]["devices"]["cpu"]) == {"status", "reason", "remedy"}
    assert set(_said(HOSTS["two kinds"])["warnings"][0]) == {"about", "message", "remedy"}
    assert set(said["facts"]) == {
        *("python", "packages", "cuda", "transformer_engine", "apex", "shared_memory_bytes"),
        *("open_files", "environment", "imported"),
    }


def test_the_precisions_of_the_page_are_those_of_the_table() -> None:
    rows = dict(re.findall(r"^\| `([\w-]+)` \| ([^|]*\|[^|]*\|[^|]*) \|$", PAGE, flags=re.MULTILINE))
    assert set(rows) >= set(RECIPES)
    for name, precision in RECIPES.items():
        devices, engine, cuda = (cell.strip() for cell in rows[name].split("|"))
        assert ("CPU" in devices) == (not precision.quantised)
        least = ".".join(map(str, precision.compute_capability))
        stated = {"fp32": "CUDA"}.get(name, f"{least} and above" if precision.below is None else "10.x")
        assert stated in devices
        assert engine == (precision.transformer_engine or "")
        assert cuda == (".".join(map(str, precision.cuda)) if precision.cuda else "")


def _said(facts: HostFacts) -> dict[str, Any]:
    from mixle_megatron.capability.diagnosis import diagnose

    return diagnose(facts).as_dict()
