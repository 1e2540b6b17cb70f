"""What the kinds of objects that a job is made of have to state, and which of it is missing in one.

Each table maps a place to the fields that are required there, if the place itself is there; ``[]`` is every
item of a list and ``{}`` every value of a mapping. They are the ``required`` lists of the published schemas:

* JobSet: kubernetes-sigs/jobset 0.6 to 0.12, config/components/crd/bases/jobset.x-k8s.io_jobsets.yaml
* TrainJob, TrainingRuntime: kubeflow/trainer 2.0 to 2.3, manifests/base/crds/trainer.kubeflow.org_*.yaml
* PyTorchJob: kubeflow/training-operator 1.7 to 1.9, manifests/base/crds/kubeflow.org_pytorchjobs.yaml
* ConfigMap, pods and Jobs: Kubernetes' OpenAPI specification, api/openapi-spec/swagger.json

and, marked so, what the operators' own webhooks require.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

OBJECT = {"": ("apiVersion", "kind", "metadata"), "metadata": ("name",)}

POD = {
    "": ("containers",),
    "containers[]": ("name", "image"),  # webhook of the PyTorchJob: image
    "containers[].env[]": ("name",),
    "containers[].env[].valueFrom.fieldRef": ("fieldPath",),
    "containers[].volumeMounts[]": ("mountPath", "name"),
    "volumes[]": ("name",),
    "volumes[].persistentVolumeClaim": ("claimName",),
}

JOB = {
    "": ("template",),
    "template": ("spec",),
    "podFailurePolicy": ("rules",),
    "podFailurePolicy.rules[]": ("action",),
    "podFailurePolicy.rules[].onExitCodes": ("operator", "values"),
    "podFailurePolicy.rules[].onPodConditions[]": ("type",),
}


def below(place: str, table: dict[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """A table whose places lie below another one."""
    return {f"{place}.{inner}".rstrip("."): fields for inner, fields in table.items()}


JOBSET_SPEC = {
    "failurePolicy.rules[]": ("action", "name"),
    "replicatedJobs[]": ("name", "template"),
    "replicatedJobs[].template": ("spec",),
    **below("replicatedJobs[].template.spec", JOB),
    **below("replicatedJobs[].template.spec.template.spec", POD),
}

REQUIRED = {
    "ConfigMap": OBJECT | {"": (*OBJECT[""], "data")},
    "JobSet": OBJECT | {"": (*OBJECT[""], "spec")} | below("spec", JOBSET_SPEC),
    "TrainingRuntime": OBJECT
    | {"": (*OBJECT[""], "spec"), "spec": ("template",), "spec.template": ("spec",)}
    | below("spec.template.spec", JOBSET_SPEC),
    "TrainJob": OBJECT
    | {"": (*OBJECT[""], "spec"), "spec": ("runtimeRef",), "spec.runtimeRef": ("name",)}
    | {"spec.trainer.env[]": ("name",)},
    "PyTorchJob": OBJECT
    | {"": (*OBJECT[""], "spec"), "spec": ("pytorchReplicaSpecs",)}
    | {"spec.pytorchReplicaSpecs": ("Master",)}
    | {"spec.pytorchReplicaSpecs{}": ("replicas", "template")}
    | below("spec.pytorchReplicaSpecs{}.template.spec", POD),
}

VERSIONS = {
    "ConfigMap": "v1",
    "JobSet": "jobset.x-k8s.io/v1alpha2",
    "TrainingRuntime": "trainer.kubeflow.org/v1alpha1",
    "TrainJob": "trainer.kubeflow.org/v1alpha1",
    "PyTorchJob": "kubeflow.org/v1",
}


def missing(manifest: dict[str, Any]) -> list[str]:
    """Required fields that an object does not state."""
    kind = manifest["kind"]
    found = [] if manifest["apiVersion"] == VERSIONS[kind] else [f"apiVersion of {kind}"]
    for place, fields in REQUIRED[kind].items():
        steps = re.findall(r"[^.\[\]{}]+|\[\]|\{\}", place)
        for value in _places(manifest, steps):
            found += [f"{kind}.{place}.{field}" for field in fields if field not in value]
    return found


def _places(value: Any, steps: list[str]) -> Iterator[Any]:
    if not steps:
        yield value
        return
    first, rest = steps[0], steps[1:]
    if first == "[]":
        inner = list(value)
    elif first == "{}":
        inner = list(value.values())
    else:
        inner = [value[first]] if first in value else []
    for each in inner:
        yield from _places(each, rest)
