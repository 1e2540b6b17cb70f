"""How building a corpus can end without one, other than by a refusal of its input."""

from __future__ import annotations

from mixle_megatron.errors import MixleMegatronError


class BuildStopped(MixleMegatronError):
    """The build was asked to stop. What is done stays done: started again it goes on."""


class BuildFailed(MixleMegatronError, RuntimeError):
    """The corpus could not be written, or a process was lost. Nothing stands under its name but what did."""
