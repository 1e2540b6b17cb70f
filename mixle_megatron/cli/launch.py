"""``mixle-megatron launch``: job files for Slurm and Kubernetes, printed on standard output."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from mixle_megatron.cluster.job import Job
    from mixle_megatron.errors import Fault

app = typer.Typer(no_args_is_help=True, help="Print the job file that runs a config on a cluster.")

MOST_NODES, MOST_GPUS = 100_000, 1024

Config = Annotated[Path, typer.Argument(metavar="CONFIG", help="A YAML config file.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Values set over those of the file.")
]
Nodes = Annotated[int, typer.Option(min=1, max=MOST_NODES, help="Nodes of the job.")]
GpusPerNode = Annotated[
    int, typer.Option(min=1, max=MOST_GPUS, help="GPUs of each node, one rank each (host.device=cpu: ranks).")
]
NvlinkDomain = Annotated[
    int | None,
    typer.Option(min=1, help="GPUs that NVLink connects (GB200 NVL72: 72). Default: those of a node."),
]


class Kind(StrEnum):
    """What a job on Kubernetes can be."""

    trainjob = "trainjob"
    pytorchjob = "pytorchjob"
    jobset = "jobset"


@app.command()
def slurm(
    config: Config,
    nodes: Nodes,
    gpus_per_node: GpusPerNode,
    overrides: Overrides = None,
    partition: Annotated[str | None, typer.Option(help="Of the cluster, or several with commas.")] = None,
    account: Annotated[str | None, typer.Option(help="That the time is charged to.")] = None,
    time: Annotated[
        str | None, typer.Option(help="Limit, such as 8:00:00. Default: the partition's.")
    ] = None,
    job_name: Annotated[str | None, typer.Option(help="Default: run.name.")] = None,
    cpus_per_task: Annotated[int, typer.Option(min=1, help="Cores of each rank.")] = 4,
    signal: Annotated[
        int, typer.Option(min=1, max=65535, help="Seconds before the limit at which ranks are told to stop.")
    ] = 300,
    container_image: Annotated[
        str | None, typer.Option(help="For pyxis. Default: the environment that the job is submitted from.")
    ] = None,
    container_mounts: Annotated[
        str | None,
        typer.Option(help="SOURCE:TARGET[:FLAGS],... beside the working folder and an absolute run.dir."),
    ] = None,
    setup: Annotated[
        list[str] | None,
        typer.Option(help="A line of shell that runs before the ranks, such as 'module load cuda'."),
    ] = None,
    nvlink_domain: NvlinkDomain = None,
) -> None:
    """Print a batch script for sbatch: one task a GPU, queued again after a stop with a checkpoint."""
    from mixle_megatron.cluster.slurm import SlurmOptions, sbatch_script, slurm_warnings

    job, warnings = _job(config, overrides, nodes, gpus_per_node, nvlink_domain)
    options = SlurmOptions(
        name=job_name,
        partition=partition,
        account=account,
        time=time,
        cpus_per_task=cpus_per_task,
        signal=signal,
        container_image=container_image,
        container_mounts=container_mounts,
        setup=tuple(setup or ()),
    )
    script = sbatch_script(job, options)
    _print(script, [*warnings, *slurm_warnings(job, options)])


@app.command()
def kubernetes(
    config: Config,
    nodes: Nodes,
    gpus_per_node: GpusPerNode,
    image: Annotated[str, typer.Option(help="A container image with this package in it.")],
    volume_claim: Annotated[
        str, typer.Option(help="PersistentVolumeClaim for run.dir, which all nodes can write to.")
    ],
    overrides: Overrides = None,
    kind: Annotated[Kind, typer.Option(help="What runs the pods.")] = Kind.trainjob,
    namespace: Annotated[str | None, typer.Option(help="Default: that of kubectl's context.")] = None,
    job_name: Annotated[str | None, typer.Option(help="Default: run.name, in Kubernetes' letters.")] = None,
    mount: Annotated[
        list[str] | None, typer.Option(help="CLAIM:/PATH of a further volume claim, such as the data's.")
    ] = None,
    shared_memory: Annotated[str, typer.Option(help="Size of /dev/shm, which counts as memory.")] = "16Gi",
    cpu: Annotated[str | None, typer.Option(help="Cores that each pod requests.")] = None,
    memory: Annotated[str | None, typer.Option(help="Memory that each pod requests, and is held to.")] = None,
    max_restarts: Annotated[int, typer.Option(min=0, help="Starts after a failure; 0: none.")] = 3,
    grace_period: Annotated[
        int, typer.Option(min=1, help="Seconds that a pod has for a checkpoint when it is told to stop.")
    ] = 300,
    nvlink_domain: NvlinkDomain = None,
) -> None:
    """Print manifests for kubectl apply: a ConfigMap, and a TrainJob, PyTorchJob or JobSet."""
    from mixle_megatron.cluster.kubernetes import KubernetesOptions, kubernetes_warnings, manifests
    from mixle_megatron.cluster.pods import PodOptions

    job, warnings = _job(config, overrides, nodes, gpus_per_node, nvlink_domain)
    pods = PodOptions(
        image=image,
        volume_claim=volume_claim,
        mounts=tuple(mount or ()),
        shared_memory=shared_memory,
        cpu=cpu,
        memory=memory,
        grace_period=grace_period,
    )
    options = KubernetesOptions(kind.value, pods, name=job_name, namespace=namespace, restarts=max_restarts)
    text = manifests(job, options)
    _print(text, [*warnings, *kubernetes_warnings(job, options)])


def _job(
    path: Path, overrides: Any, nodes: int, gpus_per_node: int, domain: int | None
) -> tuple[Job, list[Fault]]:
    """The config on the nodes, and what is worth a look before it is submitted."""
    from mixle_megatron.cluster.job import job_warnings, make_job
    from mixle_megatron.config.load import load_config

    loaded = load_config(path, overrides or [])
    job = make_job(loaded, nodes=nodes, gpus_per_node=gpus_per_node)
    return job, job_warnings(loaded, domain or gpus_per_node)


def _print(text: str, warnings: Iterable[Fault]) -> None:
    for warning in warnings:
        typer.echo(f"warning: {warning}", err=True)
    typer.echo(text, nl=False)
