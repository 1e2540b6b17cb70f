"""What a rank says when another one is gone: one cause, in place of a trace through torch's collectives."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from mixle_megatron.errors import MixleMegatronError, RanksLost

_OF_GLOO = re.compile(
    r"gloo|Connection (closed|reset) by peer|Connection refused|Broken pipe|Timed out waiting|Socket Timeout"
)
"""gloo raises plain RuntimeErrors; NCCL's and the store's have a type of their own."""


@contextmanager
def naming_lost_ranks() -> Iterator[None]:
    """Raise :class:`RanksLost`, with torch's error as its cause, where an exchange with other ranks fails."""
    try:
        yield
    except MixleMegatronError:
        raise
    except RuntimeError as error:
        if not _is_of_an_exchange(error):
            raise
        rank, ranks = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
        # gloo's first line begins with the place in its source.
        reason = re.sub(r"^\[[^\]]*\]\s*", "", str(error).strip().splitlines()[0])
        raise RanksLost(
            f"rank {rank} of {ranks} stops: another rank died, or did not answer within "
            f"host.timeout_minutes ({reason}). The run goes on from its newest checkpoint when it is started "
            "again; what the other rank said last is why"
        ) from error


def _is_of_an_exchange(error: RuntimeError) -> bool:
    return isinstance(error, dist.DistError) or _OF_GLOO.search(str(error)) is not None
