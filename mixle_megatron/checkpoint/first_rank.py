"""What one rank does on the file system for all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from mixle_megatron.errors import CheckpointError, MixleMegatronError


def on_first_rank(action: Callable[[], Any], *, doing: str) -> Any:
    """Run ``action`` on global rank 0; every rank goes on with what it returned. Collective.

    Args:
        action: what to do; it returns plain values.
        doing: the same in words, such as ``write the checkpoint``.

    Raises:
        MixleMegatronError: on every rank, where it was raised on the first.
        CheckpointError: on every rank, where the first could not read or write a file.
    """
    told: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            told = [action(), None]
        except MixleMegatronError as error:
            told = [None, error]
        except OSError as error:
            told = [None, CheckpointError(f"cannot {doing}: {error}")]
    dist.broadcast_object_list(told, src=0)
    result, failure = told
    if failure is not None:
        raise failure
    return result
