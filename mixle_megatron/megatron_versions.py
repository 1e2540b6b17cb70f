"""What differs between the Megatron-Core versions that this package runs on (0.16 to 0.19).

Everything that has to ask "which Megatron is this?" is here, so that a new version is met in one
module.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from megatron.core.package_info import __version__ as MEGATRON_VERSION

TESTED = ((0, 16), (0, 19))
"""The oldest and the newest minor version that the tests run on, both included."""


def version_tuple(version: str = MEGATRON_VERSION) -> tuple[int, int]:
    """``"0.19.2"`` as ``(0, 19)``."""
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def is_tested(version: str = MEGATRON_VERSION) -> bool:
    """Whether the version lies in the range that the tests run on."""
    return TESTED[0] <= version_tuple(version) <= TESTED[1]


def known_fields(config_class: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """``values`` without the fields that this version's dataclass does not have yet.

    Only for fields whose absence means the same as the value that is dropped; anything else would
    be silently ignored.
    """
    names = {field.name for field in dataclasses.fields(config_class)}
    return {name: value for name, value in values.items() if name in names}


def known_arguments(function: Callable[..., Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """``values`` without the keyword arguments that this version's function does not take yet."""
    names = inspect.signature(function).parameters
    return {name: value for name, value in values.items() if name in names}
