"""Comparing a session with itself, to the last bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def snapshot(opened: Any) -> dict[str, torch.Tensor]:
    """Everything that an update changes, copied: parameters, optimizer, schedule, generator."""
    tensors = {name: parameter for name, parameter in opened.module.named_parameters()}
    for number, part in enumerate(opened.optimizer.chained_optimizers):
        for group in part.optimizer.param_groups:
            for index, shard in enumerate(group["params"]):
                tensors[f"{number}.{index}.{group['wd_mult']}"] = shard
                for key, value in part.optimizer.state[shard].items():
                    tensors[f"{number}.{index}.{group['wd_mult']}.{key}"] = torch.as_tensor(value)
    clocks = torch.tensor([opened.step, opened.scheduler.num_steps])
    return {
        name: tensor.detach().clone()
        for name, tensor in (tensors | {"clocks": clocks, "generator": torch.get_rng_state()}).items()
    }


def differences(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> list[str]:
    """Names of the tensors that are not equal to the last bit."""
    names = before.keys() | after.keys()
    return sorted(
        name
        for name in names
        if name not in before or name not in after or not torch.equal(before[name], after[name])
    )


def message_of(call: Callable[[], Any], kind: type[BaseException]) -> str:
    """What ``call`` says when it raises ``kind``; fails if it does not."""
    try:
        call()
    except kind as error:
        return str(error)
    raise AssertionError(f"nothing raised {kind.__name__}")
