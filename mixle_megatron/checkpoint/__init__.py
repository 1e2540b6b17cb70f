"""Saving and loading a session through Megatron's dist_checkpointing."""

from mixle_megatron.checkpoint.manifest import Facts
from mixle_megatron.checkpoint.session_state import load_session, save_session

__all__ = ["Facts", "load_session", "save_session"]
