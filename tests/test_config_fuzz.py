"""500 mutated configs: each is sound or refused, and none ends in a traceback."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from mixle_megatron.cli.main import app
from mixle_megatron.config.schema_faults import dotted_keys

TINY = Path(__file__).parent.parent / "configs" / "tiny_gpt_cpu.yaml"
MUTATIONS = 500
BATCHES = 10
WEIRD: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 3, 7, 2**31 - 1, 2**31, 2**63, 10**30, -(10**30)),
    *(0.0, -0.0, 0.5, 1e-300, 1e300, 1.5, float("nan"), float("inf"), float("-inf")),
    *(
        "",
        " ",
        "0",
        "auto",
        "none",
        "off",
        "nan",
        "1e-3",
        "1e999",
        "stdlib",
        "../..",
        "a/b",
        "${",
        "${plan.tp}",
    ),
    *(
        "${oc.env:NOT_SET}",
        "???",
        "\x7f",
        "\u2028",
        "\ud800",
        "\U0001f9ee",
        "x" * 5000,
        "%s",
        "{x}",
        "[bold]",
    ),
    *([], [[]], [None], ["a", 1], {}, {"a": 1}, {"": 0}, {1: 2}, {None: 3}, {"a": {"b": {"c": {}}}}),
)
WEIRD_TEXTS = (
    "0x" + "f" * 5000,
    "1" * 5000,
    "!!set {a}",
    "!!binary aGk=",
    "&a [*a]",
    "*nope",
    "2001-01-01",
    "%",
    "@x",
)


def nested(depth: int) -> Any:
    """A mapping in a mapping, and so on."""
    value: Any = 1
    for _ in range(depth):
        value = {"run": value}
    return value


def pick_key(values: dict, chance: random.Random) -> tuple[dict, Any]:
    """A random mapping of the config and one of its keys."""
    mappings = [values, *(section for section in values.values() if isinstance(section, dict))]
    chosen = chance.choice([mapping for mapping in mappings if mapping] or [{"x": 1}])
    return chosen, chance.choice(list(chosen))


def delete_key(values: dict, chance: random.Random) -> None:
    mapping, key = pick_key(values, chance)
    del mapping[key]


def rename_key(values: dict, chance: random.Random) -> None:
    mapping, key = pick_key(values, chance)
    text = str(key)
    position = chance.randrange(len(text) + 1)
    mapping[text[:position] + chance.choice(["", "x", "_", ".", " "]) + text[position + 1 :]] = mapping.pop(
        key
    )


def change_value(values: dict, chance: random.Random) -> None:
    mapping, key = pick_key(values, chance)
    mapping[key] = chance.choice(WEIRD)


def set_known_key(values: dict, chance: random.Random) -> None:
    section, _, key = chance.choice(list(dotted_keys())).partition(".")
    if isinstance(values.get(section), dict):
        values[section][key] = chance.choice(WEIRD)


def change_number(values: dict, chance: random.Random) -> None:
    mapping, key = pick_key(values, chance)
    if isinstance(mapping[key], int):
        mapping[key] = chance.choice([mapping[key] + 1, mapping[key] * 2, mapping[key] * 3, 2, 5])


def move_section(values: dict, chance: random.Random) -> None:
    mapping, key = pick_key(values, chance)
    values[chance.choice(list(values) or ["x"])] = mapping[key]


def nest(values: dict, chance: random.Random) -> None:
    mapping, key = pick_key(values, chance)
    mapping[key] = nested(chance.choice([2, 10, 50]))


CHANGES: tuple[Callable[[dict, random.Random], None], ...] = (
    *(delete_key, rename_key, change_value, change_value, set_known_key, set_known_key),
    *(change_number, change_number, move_section, nest),
)


def mutated_values(chance: random.Random) -> bytes:
    """The example with one to four structural changes."""
    values = yaml.safe_load(TINY.read_text())
    for _ in range(chance.randint(1, 4)):
        chance.choice(CHANGES)(values, chance)
    return yaml.safe_dump(values, allow_unicode=False).encode()


def mutated_text(chance: random.Random) -> bytes:
    """The example with changed lines and values that YAML itself stumbles over."""
    lines = TINY.read_text().splitlines()
    for _ in range(chance.randint(1, 4)):
        index = chance.randrange(len(lines))
        action = chance.randrange(5)
        if action == 0:
            lines[index] = lines[index].partition(":")[0] + ": " + chance.choice(WEIRD_TEXTS)
        elif action == 1:
            lines.insert(index, chance.choice(lines))
        elif action == 2:
            lines[index] = " " * chance.randrange(6) + lines[index].lstrip()
        elif action == 3 and len(lines) > 1:
            del lines[index]
        else:
            lines[index] += chance.choice([":", "[", "}", '"', "\t", "#", " &a", " *a", "\\", "|"])
    return "\n".join(lines).encode()


def mutated_bytes(chance: random.Random) -> bytes:
    """The example with random bytes in it, or cut short, or nothing but random bytes."""
    content = bytearray(TINY.read_bytes())
    action = chance.randrange(4)
    if action == 0:
        return chance.randbytes(chance.randrange(400))
    if action == 1:
        return bytes(content[: chance.randrange(len(content))])
    for _ in range(chance.randint(1, 8)):
        content[chance.randrange(len(content))] = chance.randrange(256 if action == 2 else 128)
    return bytes(content)


def mutated_overrides(chance: random.Random) -> list[str]:
    """Overrides of known and unknown keys, sound and not."""
    keys = [
        *dotted_keys(),
        "precision",
        "plan",
        "x",
        "",
        "a..b",
        "plan.",
        "data.paths.0",
        "data.paths[0]",
        "run.name.x",
    ]
    values = [str(value) for value in WEIRD] + [
        "[",
        "{",
        "{a: 1}",
        "2",
        "${run.seed}",
        "a=b",
        "&a [*a]",
        "[" * 2000,
    ]
    return [
        f"{chance.choice(keys)}{chance.choice(['=', '=', '=', '', ' ='])}{chance.choice(values)}"
        for _ in range(chance.randint(1, 3))
    ]


@pytest.mark.parametrize("batch", range(BATCHES))
def test_mutated_configs_are_sound_or_refused(batch: int, tmp_path: Path) -> None:
    runner, path = CliRunner(), tmp_path / "config.yaml"
    codes = []
    for number in range(batch, MUTATIONS, BATCHES):
        chance = random.Random(number)
        content = chance.choice([mutated_values, mutated_values, mutated_text, mutated_bytes])(chance)
        path.write_bytes(content)
        overrides = mutated_overrides(chance) if chance.random() < 0.3 else []
        command = chance.choice([["plan"], ["plan", "--json"], ["config", "check"], ["config", "show"]])
        result = runner.invoke(app, [*command, "--", str(path), *overrides])
        about = f"mutation {number}: {command} {overrides}\n{content!r}\n{result.output}"
        assert isinstance(result.exception, SystemExit | None), about + repr(result.exception)
        assert result.exit_code in (0, 2), about
        assert "Traceback" not in result.output, about
        assert result.exit_code == 0 or result.stderr.strip(), about
        codes.append(result.exit_code)
    assert {0, 2} == set(codes), "the mutations no longer reach both outcomes"
