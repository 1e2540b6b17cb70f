"""Counting what a rank communicates, for ``StepReceipt.collective_bytes``."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import p2p_communication

# Bytes that a rank sends in a bandwidth-optimal algorithm, as a share of the argument named, for a
# group of n ranks; the convention of NCCL's own performance tests ("bus bandwidth").
_SENT: dict[str, tuple[str, Callable[[int], float]]] = {
    "all_reduce": ("tensor", lambda n: 2 * (n - 1) / n),
    "broadcast": ("tensor", lambda n: (n - 1) / n),
    "reduce_scatter_tensor": ("input", lambda n: (n - 1) / n),
    "all_gather_into_tensor": ("output_tensor", lambda n: (n - 1) / n),
    "all_to_all_single": ("input", lambda n: (n - 1) / n),
    "all_gather": ("tensor", lambda n: n - 1),
}
_SENT["_reduce_scatter_base"] = _SENT["reduce_scatter_tensor"]
_SENT["_all_gather_base"] = _SENT["all_gather_into_tensor"]


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


class TrafficMeter:
    """Counts the bytes that this rank sends through ``torch.distributed`` between two readings.

    The functions are wrapped and not changed: each call goes on to torch as it came. Megatron binds
    some of them under names of its own when it is imported, so those are found and wrapped too.
    """

    def __init__(self) -> None:
        self._sent = 0
        self._wrapped: list[tuple[Any, str, Any]] = []

    def start(self) -> None:
        """Wrap the functions and begin to count."""
        for name, (payload, share) in _SENT.items():
            original = getattr(dist, name)
            self._replace(original, self._counting(original, payload, share))
        self._replace(dist.batch_isend_irecv, self._counting_p2p(dist.batch_isend_irecv))
        # The interleaved schedule sends one by one, through this function of Megatron's.
        self._replace(p2p_communication._p2p_ops, self._counting_sends(p2p_communication._p2p_ops))

    def stop(self) -> None:
        """Put every function back."""
        while self._wrapped:
            owner, name, original = self._wrapped.pop()
            setattr(owner, name, original)

    def take(self) -> int:
        """Bytes since the last call."""
        sent, self._sent = self._sent, 0
        return sent

    def _replace(self, original: Any, wrapper: Any) -> None:
        for owner in _owners():
            for name, value in list(vars(owner).items()):
                if value is original:
                    setattr(owner, name, wrapper)
                    self._wrapped.append((owner, name, original))

    def _counting(self, original: Any, payload: str, share: Callable[[int], float]) -> Any:
        signature = inspect.signature(original)

        @functools.wraps(original)
        def counted(*args: Any, **kwargs: Any) -> Any:
            arguments = signature.bind(*args, **kwargs).arguments
            size = dist.get_world_size(arguments.get("group"))
            if size > 1:  # it is -1 on a rank that is not in the group
                self._sent += int(_bytes(arguments[payload]) * share(size))
            return original(*args, **kwargs)

        return counted

    def _counting_p2p(self, original: Any) -> Any:
        @functools.wraps(original)
        def counted(operations: Any) -> Any:
            self._sent += sum(_bytes(each.tensor) for each in operations if each.op is dist.isend)
            return original(operations)

        return counted

    def _counting_sends(self, original: Any) -> Any:
        @functools.wraps(original)
        def counted(**kwargs: Any) -> Any:
            sent = (kwargs["tensor_send_prev"], kwargs["tensor_send_next"])
            self._sent += sum(_bytes(tensor) for tensor in sent if tensor is not None)
            return original(**kwargs)

        return counted


def _owners() -> list[Any]:
    megatron = [
        module
        for name, module in sys.modules.items()
        if name.startswith("megatron.core") and module is not None
    ]
    return [dist, *megatron]
