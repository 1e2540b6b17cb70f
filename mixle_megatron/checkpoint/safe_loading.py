"""Loading a checkpoint of unknown origin through Megatron without running what is in it.

``dist_checkpointing.load`` reads tensors and ``common.pt`` with torch's weights-only unpickler. It
does not so read the rest, and three things in a checkpoint can therefore call whatever their author
wants: the ``.metadata`` file (``pickle.load`` in torch's ``FileSystemReader``); every sharded object in
the ``.distcp`` files, and Megatron-Core 0.19's common state among them (``weights_only=False`` in
torch's ``DefaultLoadPlanner``); and all of it where ``TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD`` is set.
:func:`safe_loading` replaces these readers while it lasts. They are the same in torch 2.13 and 2.14,
and under Megatron-Core 0.16 and 0.19.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint._traverse import set_element

from mixle_megatron.checkpoint.common_state import load_plain
from mixle_megatron.checkpoint.safe_metadata import METADATA, read_metadata
from mixle_megatron.errors import CheckpointError

_UNSAFE = "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"


@contextmanager
def safe_loading() -> Iterator[None]:
    """Let every reader of torch's dist-checkpoints in this process build plain values only.

    For use around each ``dist_checkpointing.load`` and ``load_common_state_dict``. An object may be
    read by one rank only, and then it is refused on that rank only: let the ranks agree afterwards.

    It does not reach what a layer does with its state once that is loaded: Transformer Engine unpickles
    the ``_extra_state`` of its layers, unless that is empty.

    Raises:
        CheckpointError: what :func:`read_metadata` and :func:`load_plain` refuse, in place of the
            ``CheckpointException`` that torch makes of it, which is no ``Exception``.
    """
    refused: list[CheckpointError] = []
    with (
        _replaced(FileSystemReader, "read_metadata", _noting(refused, _metadata_reader())),
        _replaced(DefaultLoadPlanner, "load_bytes", _noting(refused, _load_bytes)),
        _unset(_UNSAFE),
    ):
        try:
            yield
        except BaseException:
            if refused:
                raise refused[0] from None
            raise


def _noting(refused: list[CheckpointError], reader: Callable[..., Any]) -> Callable[..., Any]:
    """``reader``, with what it refuses kept in ``refused``."""

    def noting(*arguments: Any, **options: Any) -> Any:
        try:
            return reader(*arguments, **options)
        except CheckpointError as error:
            refused.append(error)
            raise

    return noting


def _metadata_reader() -> Callable[..., Any]:
    """What reads each file once: Megatron asks for it several times in one load."""
    read = cache(read_metadata)

    def of_reader(reader: FileSystemReader, *_arguments: Any, rank: int | None = None) -> Any:
        metadata = read(Path(reader.path, METADATA if rank is None else f"__{rank}{METADATA}"))
        metadata.storage_meta.load_id = reader.load_id
        return metadata

    return of_reader


def _load_bytes(planner: DefaultLoadPlanner, read_item: Any, value: Any) -> None:
    name = read_item.dest_index.fqn
    loaded = load_plain(value, f"the object {name}")
    if planner.flatten_state_dict:
        set_element(planner.original_state_dict, planner.mappings[name], loaded)
    else:
        planner.state_dict[name] = loaded


@contextmanager
def _replaced(owner: type, name: str, function: Any) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, function)
    try:
        yield
    finally:
        setattr(owner, name, original)


@contextmanager
def _unset(variable: str) -> Iterator[None]:
    value = os.environ.pop(variable, None)
    try:
        yield
    finally:
        if value is not None:
            os.environ[variable] = value
