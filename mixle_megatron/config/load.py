"""A config file and overrides, loaded, merged and validated: all faults of an input at once."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError

from mixle_megatron.config.check import located, rule_faults
from mixle_megatron.config.here import here_faults
from mixle_megatron.config.schema import Config, effective_config
from mixle_megatron.config.schema_faults import SECTIONS, doubted_keys, schema_faults, section_type, shown
from mixle_megatron.config.unread import unread_values
from mixle_megatron.config.yaml_source import check_yaml, read_yaml, yaml_fault
from mixle_megatron.errors import Fault, Refused, refuse_if_any

COMMAND_LINE = "command line"
MOST_UNRESOLVED = 100
_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*(\.[A-Za-z_][A-Za-z0-9_-]*)*")
_UNREADABLE = (yaml.YAMLError, OmegaConfBaseException, ValueError, TypeError, AttributeError, RecursionError)
"""What OmegaConf and PyYAML raise on values that they cannot hold."""


@dataclass(frozen=True)
class LoadedConfig:
    """A config and where its values came from.

    Attributes:
        config: the validated config.
        sources: dotted key -> ``file:line``, or ``command line`` for an override.
        path: the file, or None where the config came from a mapping.
    """

    config: Config
    sources: Mapping[str, str] = field(default_factory=dict)
    path: Path | None = None


def load_config(path: str | Path, overrides: Iterable[str] = ()) -> LoadedConfig:
    """Load a YAML file with ``key=value`` overrides on top.

    Raises:
        Refused: with every fault of the file, the overrides, the schema, and of those rules whose
            sections are sound. A config that is returned has passed the schema alone:
            :func:`check_config` asks the rules.
    """
    path = Path(path)
    text, lines = read_yaml(path)
    sources = {key: f"{path}:{line}" for key, line in lines.items()}
    merged, faults = _merge(_file_config(text, str(path)), overrides, sources)
    values, unresolved = _resolved(merged)
    return LoadedConfig(_validated(values, sources, faults + unresolved), sources, path)


def config_from_mapping(mapping: Mapping[str, Any]) -> Config:
    """A config from plain data, as the API gives it; refused as a file would be, without lines."""
    if not isinstance(mapping, Mapping):
        raise Refused([Fault("config", shown(mapping), "is not a mapping of sections")])
    try:
        return _validated(mapping, {}, [])
    except RecursionError:
        raise Refused([Fault("config", shown(mapping), "is nested without end")]) from None


def check_config(loaded: LoadedConfig, world_size: int | None = None, here: bool = False) -> list[Fault]:
    """Ask every rule.

    Args:
        loaded: a config that passed the schema.
        world_size: ranks that are there, where the caller knows.
        here: also judge what only this host can tell: whether the data is there.

    Returns:
        All faults with their sources; :func:`mixle_megatron.rules.verdict` raises them.
    """
    config = loaded.config
    sections = {name: getattr(config, name) for name in Config.model_fields}
    faults = rule_faults(sections, world_size) + (here_faults(config) if here else [])
    return located(faults, loaded.sources)


def warnings_of(loaded: LoadedConfig) -> list[Fault]:
    """What a config states to no effect, with where it was stated."""
    return located(unread_values(loaded.config), loaded.sources)


def resolved_yaml(config: Config) -> str:
    """The effective config as YAML: every default written out. It can be loaded again."""
    values = effective_config(config).model_dump(mode="json")
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True)


def _file_config(text: str, path: str) -> DictConfig:
    try:
        loaded = OmegaConf.create(text)
    except _UNREADABLE as error:
        raise Refused([_unreadable(error, "config", path)]) from None
    return loaded if isinstance(loaded, DictConfig) else OmegaConf.create({})


def _unreadable(error: Exception, key: str, value: str) -> Fault:
    """A value that PyYAML or OmegaConf could not hold, as a fault."""
    if isinstance(error, yaml.YAMLError):
        return yaml_fault(error, key, value)
    inner = getattr(error, "full_key", None)
    reason = (str(error).splitlines() or [type(error).__name__])[0]
    return Fault(
        str(inner) if inner else key, None if inner else shown(value), f"cannot be read: {shown(reason)}"
    )


def _merge(
    base: DictConfig, overrides: Iterable[str], sources: dict[str, str]
) -> tuple[DictConfig, list[Fault]]:
    """Lay each override over the file, and note in ``sources`` what it set; with those that failed."""
    faults: list[Fault] = []
    for override in overrides:
        key = override.partition("=")[0]
        try:
            base = OmegaConf.merge(base, _parsed(override))
        except Refused as refused:
            faults += refused.faults
        except _UNREADABLE as error:
            faults.append(_unreadable(error, key, override.partition("=")[2]))
        for known in [known for known in sources if known.startswith(f"{key}.")]:
            del sources[known]
        sources[key] = COMMAND_LINE
    return base, [replace(fault, source=COMMAND_LINE) for fault in faults]


def _parsed(override: str) -> DictConfig:
    """One ``key=value`` as a config of its own."""
    key, equals, value = override.partition("=")
    if not equals or not _KEY.fullmatch(key):
        rule = "is not of the form section.key=value"
        raise Refused([Fault("override", shown(override), rule, "write it like plan.tp=2")])
    check_yaml(value, key, shown(value))
    return OmegaConf.from_dotlist([override])


def _resolved(merged: DictConfig) -> tuple[dict[Any, Any], list[Fault]]:
    """The merged config as plain data, with interpolations replaced by what they stand for.

    A value that cannot be resolved becomes null, and a fault, and the others go on.
    """
    faults: list[Fault] = []
    while True:
        try:
            return OmegaConf.to_container(merged, resolve=True, throw_on_missing=True), faults
        except _UNREADABLE as error:
            fault = _unreadable(error, "config", "")
            faults.append(fault)
            if len(faults) > MOST_UNRESOLVED or not _set_null(merged, fault.field):
                raise Refused(faults) from None


def _set_null(merged: DictConfig, key: str) -> bool:
    """Replace a value that cannot be resolved; False where its key leads nowhere."""
    try:
        OmegaConf.update(merged, key, None, merge=False)
    except _UNREADABLE:
        return False
    return True


def _validated(values: Mapping[Any, Any], sources: Mapping[str, str], known: list[Fault]) -> Config:
    """The config that the schema makes of plain values.

    Args:
        values: the merged and resolved values.
        sources: where they came from.
        known: faults that were found on the way here, whose keys are in doubt.
    """
    plain = _plain(values)
    plain |= {name: {} for name in SECTIONS if name in plain and plain[name] is None}
    doubted = {fault.field for fault in known}
    found: list[Fault] = []
    try:
        config = Config.model_validate(plain)
        sections = {name: getattr(config, name) for name in Config.model_fields}
    except ValidationError as error:
        found = [fault for fault in schema_faults(error) if fault.field not in doubted]
        doubted |= doubted_keys(error)
        sections = _sound_sections(plain, error)
    if known or found:
        found += [fault for fault in rule_faults(sections) if not _mentions(fault, doubted)]
    refuse_if_any(located(known + found, sources))
    return config


def _mentions(fault: Fault, doubted: Iterable[str]) -> bool:
    """Whether a rule's fault is about, or speaks of, a key whose value is not known."""
    text = f"{fault.field} {fault.rule} {fault.remedy} "
    return any(re.search(rf"(?<![\w.]){re.escape(key)}(?!\w)", text) for key in doubted)


def _plain(value: Any) -> Any:
    """Mappings with text for keys, and tuples as lists: what the strict schema takes."""
    if isinstance(value, Mapping):
        return {key if isinstance(key, str) else str(shown(key)): _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def _sound_sections(values: Mapping[str, Any], error: ValidationError) -> dict[str, Any]:
    """The sections that are whole once the values at fault give way to their defaults."""
    faulty = {tuple(details["loc"][:2]) for details in error.errors(include_url=False)}
    sound: dict[str, Any] = {}
    if ("precision",) not in faulty:
        sound["precision"] = values.get("precision", Config.model_fields["precision"].default)
    for name in SECTIONS:
        given = values.get(name, {})
        if not isinstance(given, Mapping):
            continue
        kept = {key: value for key, value in given.items() if (name, key) not in faulty}
        with suppress(ValidationError):
            sound[name] = section_type(name, kept).model_validate(kept)
    return sound
