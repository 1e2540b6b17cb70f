"""Megatron's optimizers for one stage: adam and sgd, both sharded by its DistributedOptimizer."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

from mixle_megatron.optimizer_shards import TORCH_ADAMS
from mixle_megatron.process_groups import MegatronGroups

_ADAM_ONLY = set(torch.optim.AdamW([torch.zeros(1)]).defaults) - set(
    torch.optim.SGD([torch.zeros(1)]).defaults
)


def build_optimizer(
    config: OptimizerConfig,
    chunks: list[torch.nn.Module],
    groups: MegatronGroups,
    *,
    decays_vectors: bool = False,
) -> Any:
    """Megatron's optimizer for a stage's chunks in their DistributedDataParallel wrappers.

    Megatron decays no biases and norms, unless ``decays_vectors`` takes that exemption away.

    Megatron's DistributedOptimizer is built around adam alone (it asserts so), although all that it
    does to a base optimizer is to hand it shards of the parameters. For sgd it is therefore built
    around adam, and the base optimizer is exchanged before it has any state.
    """
    if config.optimizer != "sgd":
        optimizer = _distributed(config, chunks, groups, decays_vectors)
        for part in optimizer.chained_optimizers:
            _update_in_one_call(part.optimizer)
        return optimizer
    optimizer = _distributed(dataclasses.replace(config, optimizer="adam"), chunks, groups, decays_vectors)
    for part in optimizer.chained_optimizers:
        part.config = config
        if part.optimizer is not None:
            part.optimizer = _sgd_over(part.optimizer.param_groups, config)
    optimizer.config = config
    return optimizer


def _distributed(
    config: OptimizerConfig, chunks: list[torch.nn.Module], groups: MegatronGroups, decays_vectors: bool
) -> Any:
    return get_megatron_optimizer(
        config,
        chunks,
        # None is Megatron's standard exemption; no override at all is none.
        config_overrides={} if decays_vectors else None,
        use_gloo_process_groups=False,
        pg_collection=groups.collection,
    )


def _update_in_one_call(optimizer: Any) -> None:
    """Have torch's adam update each parameter in one kernel, where Megatron found no fused adam itself.

    Megatron passes torch no such choice, and torch's default on a CPU is a dozen calls a parameter.
    """
    if isinstance(optimizer, TORCH_ADAMS):
        for group in optimizer.param_groups:
            group["foreach"], group["fused"] = False, True


def _sgd_over(param_groups: list[dict[str, Any]], config: OptimizerConfig) -> torch.optim.SGD:
    sgd = torch.optim.SGD(
        [torch.zeros(1)], lr=config.lr, momentum=config.sgd_momentum, weight_decay=config.weight_decay
    )
    # The very same dictionaries, as the DistributedOptimizer keeps references to them; and set, not
    # passed, as torch takes no views of parameters for an optimizer, which its shards are.
    for group in param_groups:
        for key in _ADAM_ONLY & set(group):
            del group[key]
        for key, value in sgd.defaults.items():
            group.setdefault(key, value)
    sgd.param_groups = param_groups
    return sgd
