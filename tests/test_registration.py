"""``import mixle_megatron`` registers the backend, in whatever order, and loads nothing heavy."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys

import pytest

ORDERS = {
    "before": "import mixle_megatron; import mixle.utils.parallel",
    "after": "import mixle.utils.parallel; import mixle_megatron",
    "twice": "import mixle_megatron, importlib; importlib.reload(mixle_megatron)",
    "explicitly": "import mixle_megatron; mixle_megatron.register()",
}


def run(source: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, check=True
    ).stdout.strip()


@pytest.mark.parametrize("order", ORDERS)
def test_the_backend_is_ours_in_whatever_order_it_is_imported(order: str) -> None:
    asked = "print(type(mixle.utils.parallel.get_training_backend('megatron')).__module__)"
    assert run(f"{ORDERS[order]}; import mixle.utils.parallel; {asked}") == "mixle_megatron.backend"


def test_importing_loads_neither_torch_nor_megatron() -> None:
    heavy = "{'torch', 'megatron', 'mixle', 'numpy', 'pydantic', 'omegaconf'} & set(sys.modules)"
    assert run(f"import sys, mixle_megatron; print({heavy})") == "set()"


def test_every_public_name_can_be_had() -> None:
    import mixle_megatron

    for name in mixle_megatron.__all__:
        assert getattr(mixle_megatron, name) is not None
    with pytest.raises(AttributeError, match="Megatrn"):
        mixle_megatron.Megatrn  # noqa: B018


def test_a_mixle_that_looks_for_plugins_finds_the_backend() -> None:
    from mixle_megatron.backend import MegatronBackend

    entries = importlib.metadata.entry_points(group="mixle.training_backends", name="megatron")
    assert {type(entry.load()()) for entry in entries} == {MegatronBackend}
