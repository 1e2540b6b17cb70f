"""Types of single config values: strict numbers, names, and the words that YAML itself would eat."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

LARGEST_SIZE = 2**31 - 1
"""Upper bound of every count: what a 32-bit index of a tensor dimension or a rank can hold."""

Count = Annotated[int, Field(ge=1, le=LARGEST_SIZE)]
CountOrZero = Annotated[int, Field(ge=0, le=LARGEST_SIZE)]


def _number(value: Any) -> Any:
    """Read ``1e-3``, which YAML 1.1 takes for a string, as the number it looks like."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value


def _auto_or_count(value: Any) -> Any:
    """Pass ``auto`` or a count; a plain union would report one fault for each of its members."""
    whole = isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= LARGEST_SIZE
    if whole or (isinstance(value, str) and value == "auto"):
        return value
    raise PydanticCustomError("auto_or_count", "must be auto or a whole number from 1")


def _auto_or_bool(value: Any) -> Any:
    if isinstance(value, bool) or (isinstance(value, str) and value == "auto"):
        return value
    raise PydanticCustomError("auto_or_bool", "must be auto, true or false")


def _word_off(value: Any) -> Any:
    """YAML 1.1 reads the bare word ``off`` as false."""
    return "off" if value is False else value


def _word_none(value: Any) -> Any:
    """A YAML null where the word ``none`` is meant."""
    return "none" if value is None else value


def _word_null(value: Any) -> Any:
    """The word ``none`` where Megatron's own value is null."""
    return None if value == "none" else value


def _layer_frequency(value: Any) -> Any:
    """Pass a count, or a list with a 0 or a 1 for each layer."""
    if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= LARGEST_SIZE:
        return value
    if isinstance(value, list) and value and all(type(each) is int and each in (0, 1) for each in value):
        return value
    raise PydanticCustomError("layer_frequency", "must be a whole number from 1, or a list of 0 and 1")


_AUTO_OR_COUNT_SCHEMA = {"anyOf": [{"const": "auto"}, {"type": "integer", "minimum": 1}]}

Number = Annotated[float, BeforeValidator(_number), Field(allow_inf_nan=False)]
NumberOrZero = Annotated[float, BeforeValidator(_number), Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, BeforeValidator(_number), Field(ge=0, lt=1, allow_inf_nan=False)]
Positive = Annotated[float, BeforeValidator(_number), Field(gt=0, allow_inf_nan=False)]
AutoOrCount = Annotated[
    Literal["auto"] | int, BeforeValidator(_auto_or_count), WithJsonSchema(_AUTO_OR_COUNT_SCHEMA)
]
AutoOrBool = Annotated[
    Literal["auto"] | bool,
    BeforeValidator(_auto_or_bool),
    WithJsonSchema({"anyOf": [{"const": "auto"}, {"type": "boolean"}]}),
]
LayerFrequency = Annotated[
    int | list[int],
    BeforeValidator(_layer_frequency),
    WithJsonSchema(
        {"anyOf": [{"type": "integer", "minimum": 1}, {"type": "array", "items": {"enum": [0, 1]}}]}
    ),
]
OffWord = BeforeValidator(_word_off)
NoneWord = BeforeValidator(_word_none)
NullWord = BeforeValidator(_word_null)

FolderName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=200)]
Text = Annotated[str, Field(min_length=1)]


class Section(BaseModel):
    """A section of the config: frozen, with strict types and no unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
