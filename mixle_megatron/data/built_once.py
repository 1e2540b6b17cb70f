"""Arrays on disk that one process builds and all others map, of whatever node they share a folder with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mixle_megatron.data.stream_cache import cache_errors, locked, sync_folder, written_aside

_WHOLE = "whole"

Build = Callable[[], Mapping[str, "NDArray | str"]]


def build_once(folder: Path, build: Build) -> None:
    """Fill ``folder`` with what ``build`` gives, unless it is filled already.

    Any number of processes may call this at once, with builds that give the same: one builds, the others
    wait. Where a file system has no locks several may build, and put the same bytes in the same places. No
    file is seen by half, and the folder counts as filled only when the last one is on the disk.

    Args:
        folder: made if it is missing.
        build: gives the content by file name: arrays for ``.npy`` files, and texts.

    Raises:
        Refused: the folder cannot be written.
    """
    whole = folder / _WHOLE
    if whole.exists():
        return
    with cache_errors(str(folder)):
        folder.mkdir(parents=True, exist_ok=True)
        with locked(str(folder / "lock")):
            if whole.exists():
                return
            for name, content in build().items():
                with written_aside(str(folder / name)) as out:
                    if isinstance(content, str):
                        out.write(content.encode())
                    else:
                        np.save(out, content)
            with written_aside(str(whole)):
                pass
            sync_folder(str(folder))
