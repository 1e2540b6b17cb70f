"""Megatron-Core on a host without CUDA: what is redirected, why, and for how long.

Megatron-Core names ``torch.cuda`` throughout. Where the device of a session is the CPU, the
entries of :data:`~mixle_megatron.host.redirections.REDIRECTIONS` stand in for it while the session
is open, and every one of them is undone when the last session closes. On CUDA none is installed.
"""

from mixle_megatron.host.runtime import cpu_runtime, installed, release, require

__all__ = ["cpu_runtime", "installed", "release", "require"]
