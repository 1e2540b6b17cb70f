"""Installing the redirections for as long as something needs them, and undoing every one."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from mixle_megatron.host.redirections import REDIRECTIONS

# What each redirection replaced, newest last, and how many sessions rely on it. The redirections
# are attributes of modules that the whole process shares, so their count has to be shared too.
_replaced: list[tuple[Any, str, Any]] = []
_users = 0
_INHERITED = object()


def _resolve(dotted: str) -> Any:
    """The module or class with this dotted name."""
    try:
        return importlib.import_module(dotted)
    except ModuleNotFoundError:
        owner, _, name = dotted.rpartition(".")
        if not owner:
            raise
        return getattr(_resolve(owner), name)


def _install() -> None:
    # torch looks its factory functions up once, when it first makes a tensor within torch.device(...):
    # that has to be here, so that it finds its own and not the stand-ins.
    with torch.device("cpu"):
        torch.empty(0)
    # All owners first: importing one may compile functions, which torch cannot do among stand-ins.
    owners = [_resolve(redirection.owner) for redirection in REDIRECTIONS]
    for owner, redirection in zip(owners, REDIRECTIONS, strict=True):
        # vars() and not getattr(): a class's inherited attribute must be deleted again, not set.
        own = vars(owner).get(redirection.name, _INHERITED)
        stand_in = redirection.make(getattr(owner, redirection.name, None))
        setattr(owner, redirection.name, stand_in)
        _replaced.append((owner, redirection.name, own))


def _uninstall() -> None:
    while _replaced:
        owner, name, original = _replaced.pop()
        if original is _INHERITED:
            delattr(owner, name)
        else:
            setattr(owner, name, original)


def require() -> None:
    """Install the redirections, or count one more user of those that are installed."""
    global _users
    if _users == 0:
        _install()
    _users += 1


def release() -> None:
    """Give back one :func:`require`; the last one undoes every redirection."""
    global _users
    if _users == 0:
        raise RuntimeError("release() without require(): the redirections are not installed")
    _users -= 1
    if _users == 0:
        _uninstall()


def installed() -> bool:
    """Whether the redirections are in force now."""
    return _users > 0


@contextmanager
def cpu_runtime() -> Iterator[None]:
    """Run Megatron-Core on the CPU inside the block, for callers that build its modules themselves."""
    require()
    try:
        yield
    finally:
        release()
