"""Megatron's C++ index helpers: wheels bring them compiled, and a copy of the sources compiles them once."""

from __future__ import annotations

import importlib
import os
import tempfile

from mixle_megatron.data.stream_cache import locked
from mixle_megatron.errors import Fault, Refused

_MODULE = "megatron.core.datasets.helpers_cpp"


def require_helpers() -> None:
    """Make Megatron's helpers importable; of the processes of a node one compiles them, if it must.

    Raises:
        Refused: they are not there, and cannot be compiled here.
    """
    if _importable():
        return
    with locked(os.path.join(tempfile.gettempdir(), f"megatron-helpers-{os.getuid()}.lock")):
        importlib.invalidate_caches()
        if not _importable():
            _compile()


def _importable() -> bool:
    try:
        importlib.import_module(_MODULE)
    except ImportError:
        return False
    return True


def _compile() -> None:
    from megatron.core.datasets.utils import compile_helpers

    try:
        compile_helpers()
    except (SystemExit, OSError) as error:  # Megatron exits where make fails
        rule = "needs Megatron's C++ helpers, which are not compiled, and make failed"
        remedy = "install megatron-core from a wheel, or make and a C++ compiler"
        raise Refused([Fault("data.source", "indexed", rule, remedy)]) from error
    importlib.invalidate_caches()
    importlib.import_module(_MODULE)
