"""What the server that ranks fork from imports: Megatron, and without what it says while it is imported."""

from mixle_megatron.training.quiet import quieten

quieten()

from mixle_megatron.evidence import plain, trial  # noqa: E402

__all__ = ["plain", "trial"]
