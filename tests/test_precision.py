"""The table of precisions against what Megatron takes, and against what a config may say."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from typing import get_args

import pytest
import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.enums import Fp8Recipe
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.transformer_config import TransformerConfig

from mixle_megatron.config.schema import Precision as InConfig
from mixle_megatron.memory import PARAMETER_BYTES
from mixle_megatron.precision import ALIASES, EXECUTED, NAMES, RECIPES, recipe, withheld_reason
from mixle_megatron.translate import PARAMETER_DTYPES

SIZES = {"num_layers": 2, "hidden_size": 128, "num_attention_heads": 4}
GIVEN = {
    "TransformerConfig": TransformerConfig,
    "DistributedDataParallelConfig": DistributedDataParallelConfig,
}


def test_names_are_those_that_a_config_may_hold() -> None:
    assert get_args(InConfig) == NAMES
    assert set(NAMES) == set(RECIPES) | set(ALIASES)
    assert {choice for choices in ALIASES.values() for choice in choices} <= set(RECIPES)


@pytest.mark.parametrize("name", RECIPES)
def test_megatron_takes_the_fields_and_keeps_them(name: str) -> None:
    precision = RECIPES[name]
    config = TransformerConfig(**SIZES, **precision.transformer)
    for field, value in precision.transformer.items():
        assert getattr(config, field) == value
    optimizer = OptimizerConfig(
        optimizer="adam", lr=1e-3, use_distributed_optimizer=True, **precision.optimizer
    )
    for field, value in precision.optimizer.items():
        assert getattr(optimizer, field) == value


@pytest.mark.parametrize("name", RECIPES)
def test_fields_that_would_gather_quantised_parameters_exist(name: str) -> None:
    for owner, fields in RECIPES[name].parameter_gather.items():
        assert set(fields) <= {field.name for field in dataclasses.fields(GIVEN[owner])}


@pytest.mark.parametrize("name", RECIPES)
def test_first_and_last_layers_may_stay_where_megatron_lets_them(name: str) -> None:
    precision = RECIPES[name]
    if "fp8" not in precision.transformer:
        return
    given = SIZES | dict(precision.transformer) | {"first_last_layers_bf16": True}
    if precision.first_and_last_layers:
        assert TransformerConfig(**given).first_last_layers_bf16
    else:
        with pytest.raises(ValueError, match="does not support first / last layer"):
            TransformerConfig(**given)


def test_every_fp8_recipe_of_megatron_has_a_name_here() -> None:
    """All but the one that takes a function of the user's."""
    named = {each.transformer["fp8_recipe"] for each in RECIPES.values() if "fp8_recipe" in each.transformer}
    assert named == {each.value for each in Fp8Recipe} - {"custom"}


@pytest.mark.parametrize("name", RECIPES)
def test_sizes_are_multiples_of_what_megatron_pads_to(name: str) -> None:
    precision = RECIPES[name]
    if "fp8" in precision.transformer:
        from megatron.core.fp8_utils import get_fp8_align_size

        assert precision.multiple_of % get_fp8_align_size(Fp8Recipe(precision.transformer["fp8_recipe"])) == 0
    if "fp4" in precision.transformer:
        from megatron.core.fp4_utils import get_fp4_align_size

        assert precision.multiple_of % get_fp4_align_size(precision.transformer["fp4_recipe"]) == 0


def test_dtypes_and_bytes_are_torchs() -> None:
    for precision in RECIPES.values():
        assert getattr(torch, precision.dtype).itemsize == precision.parameter_bytes
    assert {name: getattr(torch, RECIPES[name].dtype) for name in EXECUTED} == PARAMETER_DTYPES
    assert {name: RECIPES[name].parameter_bytes for name in EXECUTED} == PARAMETER_BYTES


def test_what_is_executed_nowhere_has_a_reason() -> None:
    for name in NAMES:
        assert bool(withheld_reason(name)) == (name not in EXECUTED)
        assert bool(recipe(name).executed_on) == (name in EXECUTED)


def test_the_table_loads_no_torch() -> None:
    code = "import sys, mixle_megatron.precision; print({'torch', 'megatron'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
