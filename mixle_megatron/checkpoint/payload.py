"""What a session saves beside its tensors, and gives back when they are loaded: mixle's terms.

mixle's sessions keep ``loader_state`` and ``typed_scheduler_state`` for each rank, which may differ, and all
else once. Here what is the same on every rank is kept once, and every plan gets it back.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from mixle_megatron.checkpoint.manifest import FORMAT
from mixle_megatron.checkpoint.plain_values import decoded, encoded

_OF_RANKS = ("loader_state", "typed_scheduler_state")
_RANKS = "rank_local_states"


def saved_payload(
    state: Mapping[str, Any], *, loader_state: Any, typed_scheduler_state: Any, extra: Mapping[str, Any]
) -> dict[str, Any]:
    """What to save beside the tensors, plain and equal on all ranks. Collective.

    Args:
        state: of the session, plain values equal on all ranks.
        loader_state: the caller's on this rank; something with mixle's ``to_dict``, or plain values.
        typed_scheduler_state: the caller's on this rank, plain values.
        extra: the caller's, equal on all ranks.

    Raises:
        TypeError: on every rank, where what the caller gave some rank is more than plain values.
    """
    if hasattr(loader_state, "to_dict"):
        loader_state = loader_state.to_dict()
    given = {
        "loader_state": loader_state,
        "typed_scheduler_state": typed_scheduler_state,
        "extra": dict(extra),
    }
    own: Any
    try:
        own = {name: encoded(value, name) for name, value in given.items()}
    except TypeError as error:
        own = error
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, own)
    for rank, each in enumerate(told):
        if isinstance(each, TypeError):
            raise TypeError(f"rank {rank}: {each}")
    of_ranks = [{name: each[name] for name in _OF_RANKS} for each in told]
    same = len(set(map(json.dumps, of_ranks))) == 1
    shared = of_ranks[0] if same else dict.fromkeys(_OF_RANKS)
    return {**state, **shared, "extra": told[0]["extra"], _RANKS: None if same else of_ranks}


def given_back(payload: Mapping[str, Any], restored: Mapping[str, Any]) -> dict[str, Any]:
    """What ``load_checkpoint`` returns on this rank: all that mixle's does, and what else was saved.

    Args:
        payload: what :func:`saved_payload` gave.
        restored: ``scheduler``, ``scaler`` and ``rng`` as they were put back; None where nothing was.

    Returns:
        The payload, with the caller's values of this rank. Where another number of ranks saved it, and
        they kept different values, ``requires_rank_local_transform`` is true, this rank has none, and
        ``rank_local_states`` has those of all saving ranks.
    """
    saved, ranks = payload["parallel_plan"]["world_size"], dist.get_world_size()
    of_ranks = payload.get(_RANKS)
    own = {name: payload[name] for name in _OF_RANKS}
    lacks = of_ranks is not None and saved != ranks
    if of_ranks is not None and not lacks:
        own = of_ranks[dist.get_rank()]
    return {
        **payload,
        **{name: decoded(value) for name, value in own.items()},
        "extra": decoded(payload["extra"]),
        _RANKS: decoded(of_ranks),
        **{name: restored.get(name) for name in ("scheduler", "scaler", "rng")},
        "format_version": FORMAT,
        "rank_local_state_status": "transform_required" if lacks else "native",
        "requires_rank_local_transform": lacks,
        "world_size_changed": saved != ranks,
        "saved_world_size": saved,
    }
