"""An export takes no more memory than a few of the largest tensor, however large the model is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from exported_models import opened
from plan_matrix import DENSE

WIDE = DENSE | {"num_layers": 12, "hidden_size": 256}
MODEL_BYTES, LARGEST_BYTES, ALLOWED_BYTES = 38_000_000, 2**20, 8 * 2**20

_LIMITED = """
import re, resource, sys
from pathlib import Path
from mixle_megatron.checkpoint.export import export_checkpoint

small, large, out, to, allowed = sys.argv[1:]
export_checkpoint(Path(small), Path(out + ".small"), to=to, heads=4)  # imports what it needs
status = Path("/proc/self/status").read_text()
limit = int(re.search(r"VmData:\\s+(\\d+) kB", status)[1]) * 1024 + int(allowed)
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
export_checkpoint(Path(large), Path(out), to=to, heads=4)
"""


def save(model: dict[str, Any], path: str) -> tuple[int, int]:
    """Save a model that has not been trained; bytes of all its parameters, and of the largest."""
    with opened(model, {}, {}, "fp32") as session:
        session.save_checkpoint(path)
        sizes = [parameter.nbytes for parameter in session.module.parameters()]
        return sum(sizes), max(sizes)


@pytest.fixture(scope="module")
def folder(run_on: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of a large model and of a small one."""
    made = tmp_path_factory.mktemp("models")
    ((total, largest),) = run_on(1, save, WIDE, str(made / "large"))
    assert total > MODEL_BYTES
    assert largest == LARGEST_BYTES
    run_on(1, save, DENSE, str(made / "small"))
    return made


@pytest.mark.parametrize("to", ["safetensors", "mixle"])
def test_the_kernel_gives_no_more_than_a_few_tensors(folder: Path, tmp_path: Path, to: str) -> None:
    """RLIMIT_DATA counts memory of the process's own; what is mapped from files can be taken back."""
    arguments = [*(folder / "small", folder / "large", tmp_path / "out"), to, ALLOWED_BYTES]
    command = [sys.executable, "-c", _LIMITED, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out").stat().st_size > MODEL_BYTES
