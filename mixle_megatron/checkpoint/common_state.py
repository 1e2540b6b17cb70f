"""The state that is not sharded, and other objects of a checkpoint, read without running anything.

Megatron-Core 0.16 writes it as ``common.pt``, 0.19 as the object ``common_state`` in a
``.distcp`` file. Megatron's own readers take some of it with ``torch.load(weights_only=False)``; these
do not, and need no process group.
"""

from __future__ import annotations

import io
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from mixle_megatron.errors import CheckpointError

COMMON = "common.pt"
SESSION = "session"
"""The key under which a session keeps what it resumes from beside tensors."""

COMMON_STATE = MetadataIndex("common_state/shard_0_1")


class NotImported:
    """Stands for an object of one of Megatron's classes, as the arguments of Megatron-LM have them.

    Attributes:
        arguments: what the object would have been made from.
    """

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        self.arguments = (state,)

    def __repr__(self) -> str:
        return ", ".join(map(repr, self.arguments))


def read_common(folder: Path, metadata: Metadata) -> dict[str, Any]:
    """The common state of a checkpoint.

    What Megatron-LM keeps there is readable too: its arguments come as an ``argparse.Namespace``, and
    values of Megatron's own classes in it as :class:`NotImported`.

    Args:
        folder: the checkpoint.
        metadata: what its ``.metadata`` says.

    Raises:
        CheckpointError: there is none, it cannot be read, or it holds more than plain values; the
            message names what.
    """
    file = common_file(folder, metadata)
    if file is None:
        raise CheckpointError(f"{folder} has no common state: neither {COMMON} nor an object of that name")
    if file == COMMON:
        content = _read(folder / file, None)
        state = load_plain(io.BytesIO(content), f"the common state in {file}", stand_ins=_megatrons(content))
    else:
        state = read_object(folder, COMMON_STATE.fqn, metadata.storage_data[COMMON_STATE])
    if not isinstance(state, dict):
        raise CheckpointError(
            f"the common state in {file} is a {type(state).__name__} and no table of values"
        )
    return state


def read_object(folder: Path, name: str, place: Any) -> Any:
    """The object ``name`` of a checkpoint, which the metadata says to lie at ``place``.

    Raises:
        CheckpointError: as :func:`read_common`.
    """
    content = _read(folder / place.relative_path, place)
    said = f"the object {name} in {place.relative_path}"
    value = load_plain(io.BytesIO(content), said, stand_ins=_megatrons(content))
    # Megatron saves each sharded object as a list of one
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def common_file(folder: Path, metadata: Metadata) -> str | None:
    """The file of a checkpoint that holds its common state, as Megatron looks for it; None if none does."""
    if (folder / COMMON).is_file():
        return COMMON
    place = metadata.storage_data.get(COMMON_STATE)
    return None if place is None else place.relative_path


def load_plain(file: IO[bytes], name: str, stand_ins: tuple[str, ...] = ()) -> Any:
    """What ``torch.save`` wrote, by torch's weights-only unpickler.

    Args:
        file: opened for reading, seekable.
        name: what to call it in a message.
        stand_ins: classes, by their full names, whose objects come as :class:`NotImported`.

    Raises:
        CheckpointError: it cannot be read, or holds what only running code could rebuild.
    """
    try:
        with _admitting(Namespace, *((NotImported, path) for path in stand_ins)):
            unsafe = _unsafe(file)
            if not unsafe:
                return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file can make zip and pickle readers raise anything
        raise CheckpointError(f"{name} cannot be read: {_first_line(error)}") from None
    raise CheckpointError(f"{name} holds {', '.join(unsafe)}, which is no plain value; it was not loaded")


@contextmanager
def _admitting(*classes: Any) -> Iterator[None]:
    """Let the weights-only unpickler make these; torch forgets at the end what Megatron admitted too."""
    admitted = torch.serialization.get_safe_globals()
    with torch.serialization.safe_globals([one for one in classes if one not in admitted]):
        yield


def _unsafe(file: IO[bytes]) -> list[str]:
    """Full names of what the file holds and the weights-only unpickler does not make."""
    file.seek(0)
    unsafe = torch.serialization.get_unsafe_globals_in_checkpoint(file)
    file.seek(0)
    return sorted(unsafe)


def _megatrons(content: bytes) -> tuple[str, ...]:
    """Megatron's own classes that the file names; none where it cannot even be listed."""
    try:
        return tuple(path for path in _unsafe(io.BytesIO(content)) if path.startswith("megatron."))
    except Exception:  # :func:`load_plain` says what is wrong with it
        return ()


def _read(path: Path, place: Any) -> bytes:
    """The bytes of a file, or of one object in it."""
    try:
        with path.open("rb") as file:
            if place is None:
                return file.read()
            file.seek(place.offset)
            content = file.read(place.length)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if len(content) < place.length:
        raise CheckpointError(f"{path} ends before byte {place.offset + place.length}")
    return content


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
