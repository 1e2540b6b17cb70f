"""What the stand-ins of a CPU leave of torch for everybody else."""

from __future__ import annotations

import subprocess
import sys

SOURCE = """
import torch
from mixle_megatron.host import cpu_runtime

with cpu_runtime(), torch.device("meta"):
    within = [torch.empty(1), torch.zeros(1), torch.arange(3)]
with torch.device("meta"):
    afterwards = [torch.empty(1), torch.zeros(1), torch.arange(3)]
print(*(tensor.device for tensor in (*within, *afterwards)))
"""


def test_a_default_device_is_heeded_within_and_afterwards() -> None:
    """In a process of its own, as torch looks its factory functions up once."""
    done = subprocess.run([sys.executable, "-c", SOURCE], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["meta"] * 6
