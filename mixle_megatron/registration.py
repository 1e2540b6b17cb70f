"""Registering the backend with mixle, now or as soon as mixle's parallel package is imported.

Importing ``mixle.utils.parallel`` loads torch, which takes seconds, and registers mixle's built-in
backend of the same name. So where it is not imported yet, a hook waits for it and registers after it.
"""

from __future__ import annotations

import importlib.util
import sys
from importlib.abc import Loader, MetaPathFinder
from types import ModuleType
from typing import Any

_MIXLE = "mixle.utils.parallel"


def backend() -> Any:
    """A new ``MegatronBackend``; mixle calls this when the backend is first asked for."""
    from mixle_megatron.backend import MegatronBackend

    return MegatronBackend()


def register() -> None:
    """Register the backend as ``"megatron"`` in place of mixle's built-in one. This imports mixle."""
    from mixle.utils.parallel import register_training_backend

    register_training_backend("megatron", backend, override=True)


def register_when_mixle_is_there() -> None:
    """Register at once if mixle's parallel package is imported, else right after its import."""
    if _MIXLE in sys.modules:
        register()
    elif not any(isinstance(finder, _AfterImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport())


class _AfterImport(MetaPathFinder):
    """Finds mixle's parallel package as the other finders do, and registers once it has run."""

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> Any:
        if name != _MIXLE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _ThenRegister(spec.loader)
        return spec


class _ThenRegister(Loader):
    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: Any) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        register()
