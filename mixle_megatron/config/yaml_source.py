"""Reading a YAML file: its text, the line of each key, and what of it is refused as a file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import yaml

from mixle_megatron.errors import Fault, Refused, refuse_if_any

MOST_BYTES = 256 * 1024
MOST_NODES = 10_000
"""Values of a file with its aliases expanded: a few lines of them can stand for billions."""
MOST_DEPTH = 16


def read_yaml(path: Path) -> tuple[str, dict[str, int]]:
    """The text of a config file and the line that each dotted key is on.

    Raises:
        Refused: the file cannot be read, is no YAML, is no mapping, or repeats a key.
    """
    text = _read_text(path)
    check_yaml(text, "config", str(path))
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        raise Refused([yaml_fault(error, "config", str(path))]) from None
    if root is None:
        return text, {}
    if not isinstance(root, yaml.MappingNode):
        rule, remedy = "is not a mapping of sections", "begin with a section such as run:"
        raise Refused([Fault("config", str(path), rule, remedy, f"{path}:{root.start_mark.line + 1}")])
    lines: dict[str, int] = {}
    repeated = []
    for key, line in _keys(root, ""):
        if key in lines:
            rule = f"is given twice, in lines {lines[key]} and {line}"
            repeated.append(Fault(key, None, rule, "keep one of them", f"{path}:{line}"))
        lines[key] = line
    refuse_if_any(repeated)
    return text, lines


def _read_text(path: Path) -> str:
    """The file as text; everything that can be wrong with a path is one refusal."""
    rule = remedy = text = ""
    try:
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
        if len(content) > MOST_BYTES:
            rule = f"is larger than the {MOST_BYTES} bytes that a config may have"
        else:
            text = content.decode("utf-8-sig")
    except IsADirectoryError:
        rule, remedy = "is a folder", "name a YAML file"
    except FileNotFoundError:
        rule, remedy = "is not there", _files_beside(path)
    except UnicodeDecodeError as error:
        rule, remedy = f"is not UTF-8 text (byte {error.start})", "save it as UTF-8"
    except (OSError, ValueError) as error:
        rule = f"cannot be read: {getattr(error, 'strerror', None) or error}"
    if rule:
        raise Refused([Fault("config", str(path), rule, remedy)])
    return text


def _files_beside(path: Path) -> str:
    """Names the YAML files in the folder where one was looked for, a few of them."""
    try:
        names = sorted(file.name for file in path.parent.iterdir() if file.suffix in {".yaml", ".yml"})
    except (OSError, ValueError):
        return ""
    return f"beside it are {', '.join(names[:5])}" if names else ""


def check_yaml(text: str, field: str, value: str) -> None:
    """Refuse text that is no YAML, or is nested or aliased without measure.

    This looks at parser events only: building nodes recurses, and would not survive the nesting.

    Raises:
        Refused: with one fault, named ``field``.
    """
    try:
        problem = _excess(text)
    except yaml.YAMLError as error:
        raise Refused([yaml_fault(error, field, value)]) from None
    if problem:
        raise Refused([Fault(field, value, problem, "write it out flat")])


def _excess(text: str) -> str:
    """What is beyond measure in a YAML text, or nothing."""
    sizes: dict[str, int] = {}
    open_nodes: list[tuple[str | None, int]] = [(None, 0)]
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        added = 1
        if isinstance(event, yaml.CollectionStartEvent):
            open_nodes.append((event.anchor, 1))
            added = 0
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, added = open_nodes.pop()
            if anchor:
                sizes[anchor] = added
        elif isinstance(event, yaml.AliasEvent):
            added = sizes.get(event.anchor, 1)
        anchor, size = open_nodes[-1]
        open_nodes[-1] = (anchor, size + added)
        if len(open_nodes) > MOST_DEPTH:
            return f"is nested more than {MOST_DEPTH} deep (line {event.start_mark.line + 1})"
        if size + added > MOST_NODES:
            return f"stands for more than {MOST_NODES} values (line {event.start_mark.line + 1})"
    return ""


def yaml_fault(error: Exception, field: str, value: str) -> Fault:
    """A YAML error as a fault, with its line where it has one."""
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or getattr(error, "reason", None) or str(error)
    source = f"{value}:{mark.line + 1}" if mark is not None and field == "config" else None
    return Fault(field, value, f"is not valid YAML: {problem.splitlines()[0]}", "", source)


def _keys(node: yaml.MappingNode, prefix: str) -> Iterator[tuple[str, int]]:
    """Each dotted key under a mapping node with its line, counted from 1."""
    for key_node, value_node in node.value:
        if not isinstance(key_node, yaml.ScalarNode):
            continue
        key = f"{prefix}{key_node.value}"
        yield key, key_node.start_mark.line + 1
        if isinstance(value_node, yaml.MappingNode):
            yield from _keys(value_node, f"{key}.")
        if isinstance(value_node, yaml.SequenceNode):
            for index, item in enumerate(value_node.value):
                yield f"{key}.{index}", item.start_mark.line + 1
