"""The kinds of Kubernetes' objects that a job can be, each with how it names, joins and restarts its pods.

Every node is a pod, in which ``pretrain`` starts the node's ranks. It ends with 3 where it was stopped and
wrote a checkpoint, with 2 where it refused its input, which another start would not change, and with 0 or 1.
All three kinds make the headless service themselves through which pods find the first one.

Sources: the CRDs and controllers of kubernetes-sigs/jobset 0.6 to 0.12 (``jobset.x-k8s.io/v1alpha2``),
kubeflow/trainer 2.0 to 2.3 (``trainer.kubeflow.org/v1alpha1``) and kubeflow/training-operator 1.9
(``kubeflow.org/v1``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mixle_megatron.cluster.job import REFUSED, STOPPED_EARLY, Job
from mixle_megatron.cluster.pods import PodOptions, pod_spec
from mixle_megatron.training.node import DEFAULT_PORT

_NODE = "node"
"""Name of the replicated job and of its container; Kubeflow's trainer prescribes both."""

_PYTORCH = "pytorch"
"""Name of the container that a PyTorchJob prescribes."""

_INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"

Manifest = dict[str, Any]


@dataclass(frozen=True)
class Naming:
    """What the objects of one job are called, and where.

    Attributes:
        name: of the job.
        config_map: that holds the config.
        metadata: makes the metadata of an object from its name.
    """

    name: str
    config_map: str
    metadata: Callable[[str], Manifest]


def jobset(job: Job, pods: PodOptions, naming: Naming, restarts: int) -> list[Manifest]:
    """A JobSet of one Indexed Job, with a pod for each node."""
    first = f"{naming.name}-{_NODE}-0-0.{naming.name}"
    environment = [
        {"name": "PET_NNODES", "value": str(job.nodes)},
        {"name": "PET_NPROC_PER_NODE", "value": str(job.ranks_per_node)},
        {"name": "PET_NODE_RANK", "valueFrom": {"fieldRef": {"fieldPath": _INDEX}}},
        {"name": "PET_MASTER_ADDR", "value": first},
        {"name": "PET_MASTER_PORT", "value": str(DEFAULT_PORT)},
    ]
    template = _job(job, pods, naming, environment)
    template |= {"completionMode": "Indexed", "parallelism": job.nodes, "completions": job.nodes}
    return [
        {
            "apiVersion": "jobset.x-k8s.io/v1alpha2",
            "kind": "JobSet",
            "metadata": naming.metadata(naming.name),
            "spec": {
                "failurePolicy": _failure_policy(restarts),
                "replicatedJobs": [{"name": _NODE, "replicas": 1, "template": {"spec": template}}],
            },
        }
    ]


def trainjob(job: Job, pods: PodOptions, naming: Naming, restarts: int) -> list[Manifest]:
    """A TrainJob, and before it the TrainingRuntime of its own that holds the pod.

    How a TrainJob changes the pod of a shared runtime differs between versions of the trainer; a runtime
    of its own reads alike in all of them. The trainer sets the pods' environment and their number.
    """
    labels = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    template = {"metadata": {"labels": labels}, "spec": _job(job, pods, naming, [])}
    runtime = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainingRuntime",
        "metadata": naming.metadata(naming.name),
        "spec": {
            "mlPolicy": {"numNodes": job.nodes, "torch": {}},
            "template": {
                "spec": {
                    "failurePolicy": _failure_policy(restarts),
                    "replicatedJobs": [{"name": _NODE, "template": template}],
                }
            },
        },
    }
    train_job = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": naming.metadata(naming.name),
        "spec": {
            "runtimeRef": {
                "apiGroup": "trainer.kubeflow.org",
                "kind": "TrainingRuntime",
                "name": naming.name,
            },
            "trainer": {"numNodes": job.nodes, "numProcPerNode": job.ranks_per_node},
        },
    }
    return [runtime, train_job]


def pytorchjob(job: Job, pods: PodOptions, naming: Naming, restarts: int) -> list[Manifest]:
    """A PyTorchJob of one master and, for further nodes, workers.

    Its restart policy ExitCode takes every code below 128 for final, so it is OnFailure: whatever a
    container ends with but 0, it is started again in its pod. The limit counts the restarts of all pods.
    """
    template = {"spec": pod_spec(job, pods, config_map=naming.config_map, container=_PYTORCH, environment=[])}
    replicas = {"Master": 1} | ({"Worker": job.nodes - 1} if job.nodes > 1 else {})
    return [
        {
            "apiVersion": "kubeflow.org/v1",
            "kind": "PyTorchJob",
            "metadata": naming.metadata(naming.name),
            "spec": {
                "nprocPerNode": str(job.ranks_per_node),
                "runPolicy": {"cleanPodPolicy": "Running", "backoffLimit": restarts * job.nodes},
                "pytorchReplicaSpecs": {
                    role: {"replicas": number, "restartPolicy": "OnFailure", "template": template}
                    for role, number in replicas.items()
                },
            },
        }
    ]


KINDS = {"trainjob": trainjob, "pytorchjob": pytorchjob, "jobset": jobset}


def longest_name(kind: str, nodes: int, limit: int) -> int:
    """Characters that the job's name may have, so that the name of its last pod has ``limit`` at most."""
    if kind == "pytorchjob":
        return limit - len(f"-worker-{max(nodes - 2, 0)}")
    return limit - len(f"-{_NODE}-0-{nodes - 1}-abcde")


def _failure_policy(restarts: int) -> Manifest:
    """All pods start again when a rank has failed; none do when the input was refused."""
    refused = {"name": "refused", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    return {"maxRestarts": restarts, "rules": [refused]}


def _job(job: Job, pods: PodOptions, naming: Naming, environment: list[Manifest]) -> Manifest:
    """The Job of all nodes: a pod that ends with 3 is replaced and not counted, any other ends the Job."""
    spec = pod_spec(job, pods, config_map=naming.config_map, container=_NODE, environment=environment)
    return {
        "backoffLimit": 0,
        "podFailurePolicy": {
            "rules": [_on_exit_code(STOPPED_EARLY, "Ignore"), _on_exit_code(REFUSED, "FailJob")]
        },
        "template": {"spec": {"restartPolicy": "Never"} | spec},
    }


def _on_exit_code(code: int, action: str) -> Manifest:
    exit_codes = {"containerName": _NODE, "operator": "In", "values": [code]}
    return {"action": action, "onExitCodes": exit_codes}
