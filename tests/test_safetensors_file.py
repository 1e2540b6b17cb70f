"""A safetensors file that is written tensor by tensor is what the library itself reads."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load

from mixle_megatron.checkpoint.safetensors_file import TensorOutline, in_file_order, write_safetensors

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]

outlines = st.lists(
    st.builds(
        TensorOutline,
        name=st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20),
        shape=st.lists(st.integers(0, 5), max_size=3).map(tuple),
        dtype=st.sampled_from(DTYPES),
    ),
    max_size=8,
    unique_by=lambda outline: outline.name,
).filter(lambda made: all(outline.name != "__metadata__" for outline in made))


def values(outline: TensorOutline) -> torch.Tensor:
    generator = torch.Generator().manual_seed(len(outline.name))
    return torch.randn(outline.shape, generator=generator).to(outline.dtype)


@given(
    outlines, st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), st.just("é\n"), max_size=3)
)
def test_the_library_reads_what_was_written(made: list[TensorOutline], metadata: dict[str, str]) -> None:
    ordered = in_file_order(made)
    file = io.BytesIO()
    write_safetensors(file, ordered, map(values, ordered), metadata)
    read = load(file.getvalue())
    assert read.keys() == {outline.name for outline in made}
    for outline in made:
        assert read[outline.name].dtype == outline.dtype
        torch.testing.assert_close(read[outline.name], values(outline), rtol=0, atol=0)


def test_the_header_keeps_text(tmp_path: Path) -> None:
    path = tmp_path / "one.safetensors"
    outline = TensorOutline("a", (2,), torch.float32)
    with path.open("wb") as file:
        write_safetensors(file, [outline], [torch.zeros(2)], {"model": '{"x": 1}'})
    with safe_open(path, "pt") as opened:
        assert opened.metadata() == {"model": '{"x": 1}'}


@pytest.mark.parametrize("tensor", [torch.zeros(3), torch.zeros(2, dtype=torch.bfloat16)])
def test_a_tensor_that_is_not_its_outline_is_refused(tensor: torch.Tensor) -> None:
    outline = TensorOutline("a", (2,), torch.float32)
    with pytest.raises(ValueError, match="outline"):
        write_safetensors(io.BytesIO(), [outline], [tensor], {})
