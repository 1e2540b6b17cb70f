"""What is decided about hosts that are not here, against what NVIDIA publishes; and what may be claimed."""

from __future__ import annotations

import importlib.metadata
import json
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_up_hosts import A100, B200, H100, HOSTS, LAPTOP, WORKSTATION, host, with_package
from mixle.utils.parallel.training_contracts import BackendCapabilities, ParallelAxis, ParallelPlan

from mixle_megatron.backend import MegatronBackend
from mixle_megatron.capabilities import CAPABILITIES, WEAKEST_HOST, capabilities
from mixle_megatron.capability.decide import EXECUTED, NOT_RUN, STATUSES, UNSUPPORTED, WITHHELD, decide
from mixle_megatron.capability.diagnosis import diagnose
from mixle_megatron.capability.facts import Cuda, CudaDevice, HostFacts, Package, TransformerEngine
from mixle_megatron.capability.hazards import hazards
from mixle_megatron.capability.requirements import REQUIREMENTS, Requirement
from mixle_megatron.precision import NAMES, recipe

TENSOR = {"fp8", "fp8-delayed", "fp8-tensorwise"}
BLOCK = TENSOR | {"fp8-blockwise"}
BLACKWELL = BLOCK | {"mxfp8", "fp4", "nvfp4"}
EVERYWHERE = {"fp32", "fp16"}

# Which precisions training can have on a device. From the "Datatype and hardware support matrix" of
# NVIDIA's Transformer Engine and the "Supported devices" of its recipes: bf16 from 8.0; FP8 with a scale a
# tensor from 8.9; block scaling from 9.0 with CUDA 12.9; MXFP8 and NVFP4 on 10.0 and 10.3. CUDA 13 has left
# Volta out, and CUDA 12.8 was the first that had Blackwell. 2.1 has no recipe for one scale of the tensor
# itself (2.2), for blocks (2.3) or for NVFP4 (2.8).
PUBLISHED = {
    "laptop": set(),
    "V100": EVERYWHERE,
    "V100 with CUDA 13": set(),
    "A100": EVERYWHERE | {"bf16"},
    "L40S": EVERYWHERE | {"bf16"} | TENSOR,
    "H100": EVERYWHERE | {"bf16"} | BLOCK,
    "H100 with CUDA 12.4": EVERYWHERE | {"bf16"} | TENSOR,
    "H200": EVERYWHERE | {"bf16"} | BLOCK,
    "B200": EVERYWHERE | {"bf16"} | BLACKWELL,
    "B200 with CUDA 12.4": set(),
    "B300": EVERYWHERE | {"bf16"} | BLACKWELL,
    "workstation": EVERYWHERE | {"bf16"} | BLOCK,
    "two kinds": EVERYWHERE | {"bf16"} | BLOCK,
    "two kinds of Blackwell": EVERYWHERE | {"bf16"} | BLOCK,
    "Megatron too old": set(),
    "Megatron missing": set(),
    "no Transformer Engine": EVERYWHERE | {"bf16"},
    "Transformer Engine too old": EVERYWHERE | {"bf16", "fp8", "fp8-delayed", "mxfp8"},
    "Transformer Engine broken": EVERYWHERE | {"bf16"},
    "Transformer Engine breaks Megatron": set(),
    "Transformer Engine for another CUDA": EVERYWHERE | {"bf16"},
    "wrong apex": set(),
    "torch without CUDA": set(),
    "old driver": set(),
}
TRAINS_NOTHING = {"Megatron too old", "Megatron missing", "Transformer Engine breaks Megatron"}


def cuda_statuses(facts: HostFacts) -> dict[str, str]:
    """How each precision stands on CUDA."""
    table = decide(facts)
    return {name: table[name].standings["cuda"].status for name in NAMES}


@pytest.mark.parametrize("name", HOSTS)
def test_precisions_on_cuda_are_those_that_nvidia_publishes(name: str) -> None:
    supported = {
        precision for precision, status in cuda_statuses(HOSTS[name]).items() if status != UNSUPPORTED
    }
    assert supported == PUBLISHED[name]


@pytest.mark.parametrize("name", HOSTS)
def test_nothing_is_claimed_on_cuda_that_was_never_run_there(name: str) -> None:
    """This version has run nothing on CUDA: what is built there is said to be so, the rest is withheld."""
    built = {"fp32", "bf16", "fp16"}
    for precision, status in cuda_statuses(HOSTS[name]).items():
        expected = NOT_RUN if precision in built else WITHHELD
        assert status == (expected if precision in PUBLISHED[name] else UNSUPPORTED), precision


@pytest.mark.parametrize("name", HOSTS)
def test_the_whole_table_of_a_host(name: str) -> None:
    """The CPU executes the same on every host that can train, whatever stands beside it."""
    table = decide(HOSTS[name])
    assert table.trains == (name not in TRAINS_NOTHING)
    everything = {
        "axis": ("dp_replicate", "dp_shard", "tp", "pp", "cp", "ep", "etp"),
        "precision": ("fp32", "bf16", "fp16"),
        "feature": ("distributed_optimizer", "reshardable_checkpoint", "elastic_restart"),
    }
    for kind, names in everything.items():
        assert table.executed(kind) == (names if table.trains else ())
    cuda = PUBLISHED[name] != set()
    for capability in table.capabilities:
        assert set(capability.standings) == {"cpu", "cuda"}
        if capability.kind == "axis" and table.trains:
            assert capability.standings["cuda"].status == (NOT_RUN if cuda else UNSUPPORTED)


@pytest.mark.parametrize("name", HOSTS)
def test_mixle_reads_what_the_table_says(name: str) -> None:
    table, claimed = decide(HOSTS[name]), capabilities(HOSTS[name])
    assert claimed.precisions == set(table.executed("precision"))
    assert {axis.value for axis in claimed.axes} == set(table.executed("axis"))
    assert claimed.distributed_optimizer == claimed.reshardable_checkpoint == table.trains
    assert claimed.elastic_restart == table.trains
    assert len(claimed.requirements) == len(REQUIREMENTS)
    if table.trains:
        claimed.validate(ParallelPlan(tp=2, cp=2), precision="bf16")
    with pytest.raises(ValueError, match="does not support precision='fp8'"):
        claimed.validate(ParallelPlan(), precision="fp8")


REASONS = {
    ("laptop", "fp8"): "there is no CUDA device, and it needs one of compute capability 8.9 or above; "
    "Transformer Engine is not installed",
    ("A100", "fp8"): "compute capability 8.0 (NVIDIA A100-SXM4-80GB) is below 8.9",
    ("V100", "bf16"): "compute capability 7.0 (Tesla V100-SXM2-32GB) is below 8.0",
    ("V100 with CUDA 13", "fp32"): "torch is built for CUDA 13.0, which has left compute capability 7.0 "
    "(Tesla V100-SXM2-32GB) out",
    ("H100", "mxfp8"): "compute capability 9.0 (NVIDIA H100 80GB HBM3) is below 10.0",
    ("H100 with CUDA 12.4", "fp8-blockwise"): "torch is built for CUDA 12.4, and it needs 12.9",
    ("H100", "fp8"): "fp8 is fp8-delayed here; this hardware and Transformer Engine have it",
    ("B200", "fp8"): "fp8 is mxfp8 here",
    ("B200", "fp4"): "fp4 is nvfp4 here",
    ("workstation", "fp8"): "fp8 is fp8-tensorwise here",
    ("workstation", "mxfp8"): "compute capability 12.0 (NVIDIA RTX PRO 6000 Blackwell) is not 10.x",
    ("two kinds", "nvfp4"): "compute capability 9.0 (NVIDIA H100 80GB HBM3) is below 10.0",
    ("no Transformer Engine", "fp8"): "Transformer Engine is not installed",
    ("Transformer Engine too old", "fp8-blockwise"): "Transformer Engine 2.1.0 is older than 2.3",
    ("Transformer Engine broken", "fp8"): "importing Transformer Engine 2.18.0 fails: ModuleNotFoundError: "
    "No module named 'onnxscript'",
    ("Megatron too old", "fp32"): "megatron-core 0.15.3 is not within >=0.16,<0.20",
    ("Megatron missing", "tp"): "megatron-core is not installed",
    (
        "Transformer Engine breaks Megatron",
        "bf16",
    ): "importing megatron-core 0.19.2 fails: ImportError: transformer_engine_torch.so: undefined symbol",
    ("torch without CUDA", "bf16"): "torch 2.14.1 is built without CUDA",
    ("old driver", "bf16"): "torch is built for CUDA 13.0, and the driver runs 12.4 at most",
}
REMEDIES = {
    ("A100", "fp8"): "a CUDA device of compute capability 8.9 or above",
    ("no Transformer Engine", "fp8"): "pip install --no-build-isolation 'mixle-megatron[te]'",
    ("V100 with CUDA 13", "fp32"): "a build of torch for CUDA 12",
    ("Megatron too old", "fp32"): "pip install 'megatron-core>=0.16,<0.20'",
    ("Transformer Engine breaks Megatron", "fp32"): "pip uninstall transformer-engine, or rebuild it",
    ("torch without CUDA", "bf16"): "a build of torch for CUDA 12.4",
    ("old driver", "bf16"): "a newer driver, or a build of torch for CUDA 12",
    ("H100", "fp8"): "a version of this package that has run it",
}


@pytest.mark.parametrize(("name", "capability"), REASONS)
def test_the_reason_says_what_is_missing_with_its_numbers(name: str, capability: str) -> None:
    assert REASONS[name, capability] in decide(HOSTS[name])[capability].standings["cuda"].reason


@pytest.mark.parametrize(("name", "capability"), REMEDIES)
def test_the_remedy_says_what_would_make_it_so(name: str, capability: str) -> None:
    assert REMEDIES[name, capability] in decide(HOSTS[name])[capability].standings["cuda"].remedy


def test_the_engine_is_asked_where_the_hardware_would_do() -> None:
    """Its own check is the last word: a device that the table admits and the engine refuses is refused."""
    refusing = replace(HOSTS["B200"], transformer_engine=HOSTS["H100"].transformer_engine)
    standing = decide(refusing)["mxfp8"].standings["cuda"]
    assert (standing.status, standing.reason.partition(";")[0]) == (
        UNSUPPORTED,
        "Transformer Engine says: mxfp8 is not for this device",
    )


def test_fp8_is_the_recipe_that_transformer_engine_would_choose() -> None:
    """get_default_fp8_recipe: MXFP8 where there is some, from 12.0 the tensor's own scale, else delayed."""
    chosen = {
        "B200": "mxfp8",
        "B300": "mxfp8",
        "workstation": "fp8-tensorwise",
        "H100": "fp8-delayed",
        "L40S": "fp8-delayed",
        "two kinds": "fp8-delayed",
        "two kinds of Blackwell": "fp8-tensorwise",
        "laptop": "fp8-delayed",
    }
    for name, expected in chosen.items():
        devices = [device.compute_capability for device in HOSTS[name].cuda.devices]
        assert recipe("fp8", devices).name == expected, name


HAZARDS = {
    "laptop": set(),
    "V100": set(),
    "A100": set(),
    "H100": set(),
    "B200": set(),
    "workstation": set(),
    "two kinds": {"devices"},
    "no Transformer Engine": {"Transformer Engine"},
    "Transformer Engine broken": {"Transformer Engine"},
    "Transformer Engine for another CUDA": {"Transformer Engine"},
    "wrong apex": {"apex"},
    "torch without CUDA": {"gloo"},
    "old driver": {"gloo"},
    "V100 with CUDA 13": {"gloo"},
}


@pytest.mark.parametrize("name", HAZARDS)
def test_warnings_of_a_host(name: str) -> None:
    assert {hazard.about for hazard in hazards(HOSTS[name])} == HAZARDS[name]


@pytest.mark.parametrize(
    ("changes", "about"),
    [
        ({"environment": {}}, "CUDA_DEVICE_MAX_CONNECTIONS"),
        ({"environment": {"CUDA_DEVICE_MAX_CONNECTIONS": "8"}}, "CUDA_DEVICE_MAX_CONNECTIONS"),
        ({"shared_memory_bytes": 64 << 20}, "/dev/shm"),
        ({"open_files": 1024}, "open files"),
        ({"environment": {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "NCCL_P2P_DISABLE": "1"}}, "NCCL_P2P_DISABLE"),
        ({"environment": {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "NCCL_DEBUG": "INFO"}}, "NCCL_DEBUG"),
        ({"cuda": replace(HOSTS["H100"].cuda, nccl=None)}, "NCCL"),
    ],
)
def test_warnings_of_what_surrounds_the_devices(changes: dict, about: str) -> None:
    assert [
        hazard.about for hazard in hazards(host(H100, A100, A100, **changes)) if hazard.about != "devices"
    ] == ([about])


def test_blackwell_overlaps_without_a_limit_on_connections() -> None:
    assert hazards(host(B200, environment={})) == ()
    assert hazards(host(WORKSTATION, environment={})) == ()


def test_open_files_matter_on_a_cpu_too() -> None:
    assert [hazard.about for hazard in hazards(replace(LAPTOP, open_files=256))] == ["open files"]


# What may be claimed


def test_the_class_claims_no_more_than_the_weakest_host() -> None:
    weakest = capabilities(WEAKEST_HOST)
    assert MegatronBackend.capabilities is CAPABILITIES
    for name, facts in HOSTS.items():
        if name in TRAINS_NOTHING:
            continue
        here = capabilities(facts)
        assert CAPABILITIES.axes <= here.axes
        assert CAPABILITIES.precisions <= here.precisions
        assert (CAPABILITIES.axes, CAPABILITIES.precisions) == (weakest.axes, weakest.precisions)
    assert CAPABILITIES.axes == frozenset(ParallelAxis)
    assert CAPABILITIES.requirements == tuple(map(str, REQUIREMENTS))


def test_requirements_are_those_that_the_package_declares() -> None:
    declared = {
        re.match(r"[\w-]+", line)[0]: frozenset(re.findall(r"[<>=]+[\d.]+", line))
        for line in importlib.metadata.requires("mixle-megatron") or []
        if "extra ==" not in line
    }
    declared["python"] = frozenset(
        importlib.metadata.metadata("mixle-megatron")["Requires-Python"].split(",")
    )
    for requirement in REQUIREMENTS:
        stated = frozenset(filter(None, requirement.specifier.split(",")))
        assert stated == declared[requirement.name], requirement.name


versions = st.lists(st.integers(0, 30), min_size=1, max_size=3).map(lambda parts: ".".join(map(str, parts)))


@given(versions, versions, versions)
def test_a_version_is_in_a_range_as_packaging_has_it(version: str, at_least: str, below: str) -> None:
    from packaging.specifiers import SpecifierSet

    requirement = Requirement("anything", at_least, below)
    padded = SpecifierSet(requirement.specifier)
    # 2.0 is 2 to packaging, and a tuple of numbers has to be told so.
    if any(text.endswith(".0") for text in (version, at_least, below)):
        return
    assert requirement.admits(version) == padded.contains(version)


devices = st.builds(
    CudaDevice,
    st.sampled_from(["A", "B"]),
    st.tuples(st.integers(5, 13), st.integers(0, 9)),
    st.integers(1, 1 << 40),
)
errors = st.sampled_from([None, "ImportError: no"])
packages = st.builds(Package, st.none() | versions, errors)
any_host = st.builds(
    HostFacts,
    python=versions,
    packages=st.dictionaries(
        st.sampled_from(["mixle", "megatron-core", "torch", "einops", "psutil"]), packages
    ),
    cuda=st.builds(
        Cuda,
        st.lists(devices, max_size=3).map(tuple),
        st.none() | versions,
        st.none() | versions,
        st.none() | versions,
        st.none() | st.booleans(),
        st.none() | versions,
        errors,
    ),
    transformer_engine=st.builds(TransformerEngine, st.none() | versions, errors, st.none() | versions),
    apex=st.sampled_from([None, "nvidia", "other"]),
    shared_memory_bytes=st.none() | st.integers(0, 1 << 40),
    open_files=st.none() | st.integers(0, 1 << 20),
    environment=st.dictionaries(st.sampled_from(["NCCL_DEBUG", "NCCL_P2P_DISABLE"]), st.text(max_size=4)),
    imported=st.booleans(),
)


@given(any_host)
def test_of_every_host_something_is_decided_and_every_refusal_has_its_reason(facts: HostFacts) -> None:
    diagnosis = diagnose(facts)
    json.dumps(diagnosis.as_dict())
    for capability in diagnosis.table.capabilities:
        for standing in capability.standings.values():
            assert standing.status in STATUSES
            assert standing.reason
            assert standing.remedy or standing.status == EXECUTED
        assert capability.executes <= diagnosis.table.trains
        assert capability.standings["cuda"].status != EXECUTED
    assert isinstance(capabilities(facts), BackendCapabilities)
    assert capabilities(facts).precisions <= CAPABILITIES.precisions


def test_a_missing_package_is_named_with_how_to_get_it() -> None:
    [missing] = [one for one in decide(with_package(LAPTOP, "einops", None)).requirements if not one.met]
    assert (missing.problem, missing.remedy) == ("einops is not installed", "pip install 'einops'")
