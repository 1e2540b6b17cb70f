"""Manifests for Kubernetes: a ConfigMap with the config, and a job of one of three kinds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import yaml

from mixle_megatron.cluster.job import STOPPED_EARLY, Job, stated_yaml
from mixle_megatron.cluster.kinds import KINDS, Naming, longest_name
from mixle_megatron.cluster.names import (
    LONGEST_LABEL,
    claim_faults,
    label_faults,
    label_of,
    quantity_faults,
)
from mixle_megatron.cluster.pods import CONFIG_FILE, TAKEN, PodOptions, run_dir
from mixle_megatron.errors import Fault, refuse_if_any


@dataclass(frozen=True)
class KubernetesOptions:
    """What of the manifests is not the run's.

    Attributes:
        kind: ``trainjob``, ``pytorchjob`` or ``jobset``.
        pods: what the pods are made of.
        name: of the job; None: run.name as Kubernetes takes it.
        namespace: of all objects; None: that of whoever applies them.
        restarts: how often all pods are started again after a failure.
    """

    kind: str
    pods: PodOptions
    name: str | None = None
    namespace: str | None = None
    restarts: int = 3

    def job_name(self, job: Job) -> str:
        """The job's name."""
        return label_of(job.config.run.name) if self.name is None else self.name


def manifests(job: Job, options: KubernetesOptions) -> str:
    """The objects of the job as YAML documents, in the order in which they are to be made.

    Raises:
        Refused: an option that Kubernetes would not take, or that contradicts another one.
    """
    refuse_if_any(kubernetes_faults(job, options))
    naming = _naming(job, options)
    objects = [
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": naming.metadata(naming.config_map),
            "data": {CONFIG_FILE: _config_text(job)},
        },
        *KINDS[options.kind](job, options.pods, naming, options.restarts),
    ]
    return _header(job, options) + "".join(f"---\n{_dumped(each)}" for each in objects)


def kubernetes_faults(job: Job, options: KubernetesOptions) -> list[Fault]:
    """Everything that is wrong with the options."""
    pods, name = options.pods, options.job_name(job)
    longest = longest_name(options.kind, job.nodes, LONGEST_LABEL)
    faults = [
        *label_faults("--job-name", name, longest=longest),
        *([] if options.namespace is None else label_faults("--namespace", options.namespace)),
        *_image_faults(pods.image),
        *claim_faults("--volume-claim", pods.volume_claim),
        *quantity_faults("--shared-memory", pods.shared_memory),
        *quantity_faults("--cpu", pods.cpu),
        *quantity_faults("--memory", pods.memory),
        *_run_dir_faults(job),
    ]
    return faults + _mount_faults(job, pods)


def _image_faults(image: str) -> list[Fault]:
    if image and image.split() == [image]:
        return []
    return [
        Fault("--image", image, "is no name of an image", "write it like registry.example/team/image:tag")
    ]


def _run_dir_faults(job: Job) -> list[Fault]:
    path = PurePosixPath(job.config.run.dir)
    if not str(path).startswith("~") and ".." not in path.parts and run_dir(job) not in TAKEN:
        return []
    rule, remedy = "is no folder that a volume can be mounted at", "use one of its own, such as /runs"
    return [Fault("run.dir", str(path), rule, remedy)]


def _mount_faults(job: Job, pods: PodOptions) -> list[Fault]:
    faults, taken = [], {run_dir(job), *TAKEN}
    for mount, (claim, path) in zip(pods.mounts, pods.claims, strict=True):
        faults += claim_faults("--mount", claim)
        if not path.startswith("/") or ":" in path or str(PurePosixPath(path)) in taken:
            rule = "is not CLAIM:/PATH with a path of its own"
            faults.append(Fault("--mount", mount, rule, "write it like datasets:/data"))
        taken.add(str(PurePosixPath(path)))
    return faults


def kubernetes_warnings(job: Job, options: KubernetesOptions) -> list[Fault]:
    """Paths that the run states, and on which no claim is mounted."""
    mounted = [run_dir(job), *(path for _, path in options.pods.claims)]
    return [
        Fault("--mount", None, f"holds no {path}, which the config states: it is the image's own")
        for path in job.outside_paths
        if not any(PurePosixPath(path).is_relative_to(folder) for folder in mounted)
    ]


def _config_text(job: Job) -> str:
    """The config, with run.dir where the volume is mounted."""
    run = job.config.run.model_copy(update={"dir": run_dir(job)})
    return stated_yaml(job.config.model_copy(update={"run": run}))


def _naming(job: Job, options: KubernetesOptions) -> Naming:
    def metadata(name: str) -> dict[str, str]:
        return {"name": name} | ({} if options.namespace is None else {"namespace": options.namespace})

    name = options.job_name(job)
    return Naming(name, f"{name}-config", metadata)


def _header(job: Job, options: KubernetesOptions) -> str:
    claim = options.pods.volume_claim
    return f"""\
# {job.title}.
# Make it with kubectl apply -f. It needs the volume claim {claim}, which holds run.dir and which the
# pods of all nodes can write to (ReadWriteMany). A pod that ends with {STOPPED_EARLY} was stopped and has
# written a checkpoint; it starts again.
"""


class _Dumper(yaml.SafeDumper):
    """Plain YAML: texts of several lines as blocks, and no aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        """Write out what occurs twice."""
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


def _dumped(manifest: dict[str, Any]) -> str:
    return yaml.dump(manifest, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1_000_000)
