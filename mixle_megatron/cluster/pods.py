"""The pod of one node: its container, what is mounted into it, and what it asks for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from mixle_megatron.cluster.job import Job

CONFIG_FOLDER = "/etc/mixle-megatron"
CONFIG_FILE = "config.yaml"
SHARED_MEMORY = "/dev/shm"
TAKEN = frozenset({"/", "/etc", CONFIG_FOLDER, SHARED_MEMORY})
"""Where nothing else can be mounted."""

GPU = "nvidia.com/gpu"


@dataclass(frozen=True)
class PodOptions:
    """What of a node's pod is not the run's.

    Attributes:
        image: with this package in it.
        volume_claim: that run.dir lies on; all nodes have to be able to write to it.
        mounts: ``CLAIM:/PATH`` of further claims, such as that of the data.
        shared_memory: size of /dev/shm, which counts as memory of the pod.
        cpu: cores that a pod asks for; None: none.
        memory: that a pod asks for and is held to; None: none.
        grace_period: seconds from SIGTERM to SIGKILL, for a checkpoint to be written.
    """

    image: str
    volume_claim: str
    mounts: tuple[str, ...] = ()
    shared_memory: str = "16Gi"
    cpu: str | None = None
    memory: str | None = None
    grace_period: int = 300

    @property
    def claims(self) -> list[tuple[str, str]]:
        """The further claims, each with where it is mounted."""
        return [(claim, path) for claim, _, path in (mount.partition(":") for mount in self.mounts)]


def run_dir(job: Job) -> str:
    """Where run.dir lies in the pod: a relative one below the root, for its working folder is the image's."""
    return str(PurePosixPath("/", job.config.run.dir))


def pod_spec(
    job: Job, options: PodOptions, *, config_map: str, container: str, environment: list[dict[str, Any]]
) -> dict[str, Any]:
    """The specification of a node's pod, without its restart policy.

    Args:
        job: what it runs.
        options: what else it is made of.
        config_map: holds the config.
        container: its name, which some kinds prescribe.
        environment: of the container, beside what the kind sets itself.
    """
    volumes = _volumes(job, options, config_map)
    return {
        "terminationGracePeriodSeconds": options.grace_period,
        "containers": [
            {
                "name": container,
                "image": options.image,
                "command": ["mixle-megatron", "pretrain", f"{CONFIG_FOLDER}/{CONFIG_FILE}"],
                "env": [*_environment(job), *environment],
                "resources": _resources(job, options),
                "volumeMounts": [mount for _, mount in volumes],
            }
        ],
        "volumes": [volume for volume, _ in volumes],
    }


def _environment(job: Job) -> list[dict[str, Any]]:
    """Lines of the log appear when they are written; communication is in time to overlap computation."""
    values = {"PYTHONUNBUFFERED": "1"}
    if job.wants_one_connection:
        values["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    return [{"name": name, "value": value} for name, value in values.items()]


def _resources(job: Job, options: PodOptions) -> dict[str, dict[str, str]]:
    """GPUs, whose limit is their request too; without GPUs a core for each rank, unless told otherwise."""
    cpu = options.cpu or (None if job.uses_gpus else str(job.ranks_per_node))
    gpus = {GPU: str(job.ranks_per_node)} if job.uses_gpus else {}
    memory = {"memory": options.memory} if options.memory else {}
    requests = ({"cpu": cpu} if cpu else {}) | memory
    stated = {"limits": gpus | memory, "requests": requests}
    return {name: values for name, values in stated.items() if values}


def _volumes(job: Job, options: PodOptions, config_map: str) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Each volume, and where it is mounted."""
    volumes = [
        (
            {"name": "config", "configMap": {"name": config_map}},
            {"name": "config", "mountPath": CONFIG_FOLDER, "readOnly": True},
        ),
        (
            # NCCL and torch exchange through it within a node, and a container's own has 64 MiB.
            {
                "name": "shared-memory",
                "emptyDir": {"medium": "Memory", "sizeLimit": options.shared_memory},
            },
            {"name": "shared-memory", "mountPath": SHARED_MEMORY},
        ),
        _claim("runs", options.volume_claim, run_dir(job)),
    ]
    volumes += [_claim(f"mount-{n}", claim, path) for n, (claim, path) in enumerate(options.claims, 1)]
    return volumes


def _claim(name: str, claim: str, path: str) -> tuple[dict[str, Any], dict[str, Any]]:
    source = {"name": name, "persistentVolumeClaim": {"claimName": claim}}
    return source, {"name": name, "mountPath": path}
