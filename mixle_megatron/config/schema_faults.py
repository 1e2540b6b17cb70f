"""What pydantic finds wrong with a config, said as faults with the nearest thing that works."""

from __future__ import annotations

import re
from collections.abc import Iterator
from difflib import get_close_matches
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from mixle_megatron.config.data import (
    DATA_SECTIONS,
    SOURCES,
    BlendEntry,
    TextSection,
    ValidationSetSection,
    data_section,
)
from mixle_megatron.config.schema import Config
from mixle_megatron.config.sections import ResumeSection
from mixle_megatron.errors import Fault
from mixle_megatron.rules.nearest import listed

SECTIONS: dict[str, type[BaseModel]] = {
    name: TextSection if name == "data" else field.annotation
    for name, field in Config.model_fields.items()
    if name == "data" or (isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel))
}
"""The sections of a config by name; of ``data``, which has one for each source, that of text."""

_MAPPINGS: dict[str, type[BaseModel]] = SECTIONS | {
    "run.resume": ResumeSection,
    "data.blend": BlendEntry,
    "evaluation.sets": ValidationSetSection,
    "evaluation.sets.blend": BlendEntry,
}
"""Everything in a config that has keys, by its dotted key without numbers and names of sets."""

_NAMELESS = re.compile(r"\.\d+(?=\.|$)|(?<=^evaluation\.sets)\.[^.]*")

_RULES = {
    "missing": "is required",
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
    "bool_type": "must be true or false",
    "string_type": "must be text",
    "list_type": "must be a list",
    "model_type": "must be a mapping of keys to values",
    "dict_type": "must be a mapping of keys to values",
    "too_short": "must not be empty",
    "string_too_short": "must not be empty",
    "string_too_long": "must be at most {max_length} characters",
    "string_pattern_mismatch": "must be letters, digits, '.', '_' and '-', and begin with a letter or digit",
    "greater_than": "must be above {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be below {lt}",
    "less_than_equal": "must be at most {le}",
}
_REMEDIES = {
    "greater_than_equal": "use {ge} or more",
    "less_than_equal": "use {le} or less",
    "auto_or_count": "use auto, 1 or more",
}


def schema_faults(error: ValidationError) -> list[Fault]:
    """Each of pydantic's errors as a fault, named by its dotted key."""
    return [_fault(details) for details in error.errors(include_url=False)]


def doubted_keys(error: ValidationError) -> set[str]:
    """Dotted keys and sections whose value is not known because of an error.

    An unknown key that resembles a known one leaves that one in doubt; any other does no harm.
    """
    keys = set()
    for details in error.errors(include_url=False):
        key = _dotted(details)
        keys.update(_resembling(key) if details["type"] == "extra_forbidden" else [key])
    return keys


def _dotted(details: Any) -> str:
    return ".".join(str(part) for part in details["loc"])


def _fault(details: Any) -> Fault:
    key, kind = _dotted(details), details["type"]
    given = None if kind == "missing" else shown(details["input"])
    if kind == "extra_forbidden":
        return _unknown_key(key, given)
    if kind == "literal_error":
        return _not_one_of(key, given, details["ctx"]["expected"])
    if kind == "missing":
        return Fault(key, None, _RULES[kind], _meaning(key))
    context = details.get("ctx", {})
    rule = _RULES.get(kind, "").format(**context) or details["msg"]
    return Fault(
        key, given, rule, _REMEDIES.get(kind, "").format(**context) or _typed_remedy(key, kind, given)
    )


def _typed_remedy(key: str, kind: str, given: Any) -> str:
    """What to write where a value has the wrong type."""
    if kind == "string_type" and isinstance(given, int | float):
        return f'quote it: "{given}"'
    if kind in {"model_type", "dict_type"}:
        fields = _fields(key)
        return f"its keys are {', '.join(fields)}" if fields else ""
    if kind == "list_type" and isinstance(given, str):
        return f"use [{given}]"
    if kind in {"int_type", "float_type"} and isinstance(given, str) and given.strip().isdigit():
        return f"use {given.strip()} without quotes"
    return ""


def _unknown_key(key: str, given: Any) -> Fault:
    parent = key.rpartition(".")[0]
    rule = f"is not a key of {parent}" if _fields(parent) else "is not a section of the config"
    others = _sources_with(key)
    if others:
        return Fault(key, given, f"is a key of data.source={listed(others)} alone", "leave it out")
    close = _resembling(key)
    if close:
        return Fault(key, given, rule, f"did you mean {close[0]}?")
    near = get_close_matches(key, [*dotted_keys(), *Config.model_fields], n=1, cutoff=0.0)
    return Fault(key, given, rule, f"the nearest key is {near[0]}" if near else "")


def _resembling(key: str) -> list[str]:
    """Known dotted keys that an unknown one may have meant, the likeliest first."""
    parent, _, leaf = key.rpartition(".")
    siblings = _fields(parent) or Config.model_fields
    beside = get_close_matches(leaf, siblings, n=1, cutoff=0.6)
    beside = beside or [name for name in siblings if len(leaf) > 3 and leaf in name][:1]
    start = f"{parent}." if _fields(parent) else ""
    elsewhere = [known for known in dotted_keys() if known.rpartition(".")[2] == leaf]
    return [start + name for name in beside] or elsewhere[:1]


def _fields(key: str) -> dict[str, FieldInfo]:
    """The keys of what has keys; of ``data`` those of every source; none of anything else."""
    kind = _NAMELESS.sub("", key)
    if kind == "data":
        return {
            name: field for section in DATA_SECTIONS.values() for name, field in section.model_fields.items()
        }
    return _MAPPINGS[kind].model_fields if kind in _MAPPINGS else {}


def _sources_with(key: str) -> list[str]:
    """The sources whose section has the key; none where it is no key of ``data``."""
    parent, _, leaf = key.rpartition(".")
    return [name for name in SOURCES if parent == "data" and leaf in DATA_SECTIONS[name].model_fields]


def section_type(name: str, values: Any) -> type[BaseModel]:
    """What validates the section ``name``, which for ``data`` depends on its source."""
    return data_section(values) if name == "data" else SECTIONS[name]


def dotted_keys() -> Iterator[str]:
    """Every key that a config of text may have, as ``section.key``."""
    for name, section in SECTIONS.items():
        yield from (f"{name}.{key}" for key in section.model_fields)


def _not_one_of(key: str, given: Any, expected: str) -> Fault:
    """``expected`` is pydantic's list of the words, each in quotes."""
    words = [word.strip().strip("'") for word in expected.replace(" or ", ", ").split(",")]
    close = get_close_matches(str(given).lower(), [word.lower() for word in words], n=1, cutoff=0.6)
    near = next((word for word in words if close and word.lower() == close[0]), "")
    rule = f"is not one of {', '.join(words)}"
    return Fault(key, given, rule, f"did you mean {near}?" if near else f"use {listed(words)}")


def _meaning(key: str) -> str:
    """The description of a missing key, so that its reader need not look it up."""
    if key in _MAPPINGS:
        required = [name for name, field in _MAPPINGS[key].model_fields.items() if field.is_required()]
        return f"state it, with {listed(required).replace(' or ', ' and ')}"
    section, _, leaf = key.rpartition(".")
    fields = _fields(section) or Config.model_fields
    description = fields[leaf].description if leaf in fields else None
    return f"state it ({description.rstrip('.')})" if description else ""


def shown(value: Any) -> Any:
    """A value as a fault carries it: short, printable and plain, whatever it was."""
    if isinstance(value, dict):
        return f"a mapping of {len(value)} keys"
    if isinstance(value, list | tuple):
        return f"a list of {len(value)} values"
    if isinstance(value, bool) or value is None:
        return str(value).lower() if isinstance(value, bool) else "null"
    if isinstance(value, int):
        return value if value.bit_length() <= 64 else f"a whole number of {value.bit_length()} bits"
    if isinstance(value, float):
        return value
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
