"""An explanation of a plan as tables on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from mixle_megatron.cli.terminal_text import byte_count

PIPED_WIDTH = 200
"""Columns where the output is no terminal, so that nothing is cut from what is read later."""


def print_plan(explanation: Mapping[str, Any]) -> None:
    """Print the tables of :func:`mixle_megatron.explain.explain`."""
    console = Console(width=None if sys.stdout.isatty() else PIPED_WIDTH, highlight=False)
    has_experts = explanation["memory"]["expert_parameters"] > 0
    console.print(*_grid_lines(explanation["grids"], has_experts), sep="\n")
    for table in (
        *_rank_tables(explanation["ranks"]),
        _megatron_table(explanation["megatron"]),
        _batch_table(explanation["batch"]),
        *_stage_tables(explanation["pipeline"]),
        _memory_table(explanation["memory"]),
        _value_table(explanation["values"]),
    ):
        console.print()
        console.print(table)
    for warning in explanation["warnings"]:
        console.print(f"warning: {warning['field']}={warning['value']} {warning['rule']}", markup=False)


def _grid_lines(grids: Mapping[str, Any], has_experts: bool) -> list[str]:
    """Both grids in numbers: Megatron multiplies experts into the ranks that are there, and adds none."""
    lines = [f"{grids['world_size']} ranks"]
    for name in ("dense", "expert"):
        axes, sizes = " · ".join(grids[name]), " · ".join(map(str, grids[name].values()))
        lines.append(f"{name} grid: {axes} = {sizes} = {grids[f'{name}_product']} ranks")
    instances = grids["num_distributed_optimizer_instances"]
    shards = grids["optimizer_shards"]
    copies = "copy" if instances == 1 else "copies"
    line = f"optimizer state: {instances} {copies}, each sharded over {shards} ranks (ZeRO-1)"
    lines.append(f"{line}; that of experts over {grids['expert_optimizer_shards']}" if has_experts else line)
    return lines


def _titled(title: str, table: Table, note: str = "") -> Group:
    """A table under its title, which may be wider than the table."""
    return Group(Text(title, style="bold"), table, *([Text(note, style="italic")] if note else []))


def _table(columns: Iterable[str], *, numbers: bool = False) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="right" if numbers else "left", overflow="fold")
    return table


def _rank_tables(ranks: Mapping[str, Any]) -> list[Group]:
    """Coordinates of the listed ranks, then their groups of more than one rank."""
    listed = ranks["listed"]
    title = f"Ranks: {ranks['world_size']} on {ranks['nodes']} node(s) of {ranks['ranks_per_node']}"
    if ranks["left_out"]:
        title += f" (the first and last of them; {ranks['left_out']} left out)"
    mixle = ("dp_replicate", "dp_shard", "tp", "pp", "cp")
    megatron = ("dp", "etp", "ep", "edp")
    coordinates = _table(("rank", "node", *mixle, *megatron), numbers=True)
    for rank in listed:
        places = [rank["mixle"][axis] for axis in mixle] + [rank["megatron"][axis] for axis in megatron]
        _add(coordinates, [rank["rank"], rank["node"], *places], listed)
    return [_titled(title, coordinates), _group_table(listed)]


def _group_table(listed: Sequence[Mapping[str, Any]]) -> Group:
    """Groups by Megatron's names: one column for those that are the same, none for those of one rank."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for name in listed[0]["groups"]:
        alike.setdefault(tuple(rank["groups"][name]["ranks"] for rank in listed), []).append(name)
    alone = [name for names in alike.values() for name in names if _is_alone(name, listed)]
    columns = {names[0]: cells for cells, names in alike.items() if names[0] not in alone}
    table = _table(("rank", *columns))
    for rank, *cells in zip(listed, *columns.values(), strict=True):
        _add(table, [rank["rank"], *cells], listed)
    notes = [" = ".join(names) for names in alike.values() if len(names) > 1 and names[0] in columns]
    notes += [f"of one rank each: {', '.join(alone)}"] if alone else []
    return _titled("Groups", table, "; ".join(notes))


def _is_alone(name: str, listed: Sequence[Mapping[str, Any]]) -> bool:
    return all(rank["groups"][name]["size"] <= 1 for rank in listed)


def _add(table: Table, cells: Sequence[Any], listed: Sequence[Mapping[str, Any]]) -> None:
    """Add a rank's row, with a rule below it where the next listed rank does not follow it."""
    number = cells[0]
    follows = number == listed[-1]["rank"] or any(rank["rank"] == number + 1 for rank in listed)
    table.add_row(*map(str, cells), end_section=not follows)


def _megatron_table(megatron: Mapping[str, Mapping[str, Any]]) -> Group:
    table = _table(("of", "argument", "value"))
    for owner, arguments in megatron.items():
        for index, (name, value) in enumerate(arguments.items()):
            last = index == len(arguments) - 1
            table.add_row("" if index else owner, name, _word(value), end_section=last)
    return _titled("Megatron's arguments", table)


def _batch_table(batch: Mapping[str, int]) -> Group:
    """Sequences and tokens of each span of an update."""
    title = (
        f"Batch: {batch['microbatches']} microbatches a schedule call, "
        f"{batch['gradient_accumulation_steps']} call(s) an update, "
        f"{batch['data_parallel_size']} data-parallel rank(s)"
    )
    table = _table(("of", "sequences", "tokens"), numbers=True)
    table.columns[0].justify = "left"
    spans = {
        "microbatch": "per_microbatch",
        "schedule call, a rank": "per_call_and_rank",
        "update, a rank": "per_update_and_rank",
        "update": "per_update",
    }
    for name, key in spans.items():
        table.add_row(name, f"{batch[f'sequences_{key}']:,}", f"{batch[f'tokens_{key}']:,}")
    table.add_row(f"run of {batch['updates']:,} updates", "", f"{batch['tokens_of_run']:,}")
    return _titled(title, table)


def _stage_tables(pipeline: Mapping[str, Any]) -> list[Group]:
    """Which layers each stage holds, where it is not an equal part of them in one chunk."""
    if pipeline["even"]:
        return []
    chunks = range(pipeline["chunks"])
    names = ["layers"] if len(chunks) == 1 else [f"chunk {chunk}" for chunk in chunks]
    table = _table(("stage", *names, "prediction layers"), numbers=True)
    for stage in pipeline["listed"]:
        table.add_row(
            str(stage["stage"]), *map(_layers_in_short, stage["chunks"]), str(stage["prediction_layers"])
        )
    title = f"Pipeline: {pipeline['stages']} stage(s) of {len(chunks)} chunk(s)"
    if pipeline["left_out"]:
        title += f" (the first and last of them; {pipeline['left_out']} left out)"
    return [_titled(title, table)]


def _layers_in_short(layers: Sequence[int]) -> str:
    """The first and last layer of a chunk, once where they are the same."""
    return "-".join(map(str, dict.fromkeys(layers))) or "none"


def _memory_table(memory: Mapping[str, Any]) -> Group:
    title = f"Memory of one rank ({memory['parameters']:,} parameters in the model"
    routed = memory["expert_parameters"]
    title += f", {routed:,} of them in experts)" if routed else ")"
    if memory["left_out"]:
        title += f" (the first and last stages; {memory['left_out']} left out)"
    columns = ["stage", "layers", "parameters", *(["of experts"] if routed else [])]
    names = ("weights", "gradients", "fp32 main", "optimizer", "in flight", "activations", "together")
    table = _table((*columns, *names), numbers=True)
    for stage in memory["stages"]:
        first, last = stage["stage"], stage["stage"] + stage["stages"] - 1
        name = str(first) if first == last else f"{first}-{last}"
        counts = [stage["parameters"], *([stage["expert_parameters"]] if routed else [])]
        sizes = [byte_count(stage[f"{part}_bytes"]) for part in _PARTS]
        sizes.insert(4, str(stage["passes_in_flight"]))
        table.add_row(name, str(stage["layers"]), *(f"{count:,}" for count in counts), *sizes)
    return _titled(title, table, "\n".join(_memory_notes(memory)))


_PARTS = ("parameter", "gradient", "main_parameter", "optimizer_state", "activation", "total")


def _memory_notes(memory: Mapping[str, Any]) -> list[str]:
    """Whether the plan fits, and what the estimate is of."""
    layers = {
        "torch": "activations are what torch layers keep on a CPU",
        "transformer_engine": "activations are what fused layers keep (Korthikanti et al. 2022)",
    }[memory["activations_of"]]
    even = ", with tokens routed evenly to experts" if memory["routing"] == "even" else ""
    notes = [f"{layers}{even}", f"not counted: {memory['not_counted']}"]
    gpu = memory["gpu"]
    if gpu is None:
        return notes
    stage, there = f"stage {gpu['fullest_stage']}", f"{gpu['name']} ({byte_count(gpu['memory_bytes'])})"
    if gpu["fits"]:
        return [f"fits {there}: {stage} leaves {byte_count(gpu['free_bytes'])}", *notes]
    return [f"does not fit {there}: {stage} takes {byte_count(-gpu['free_bytes'])} too much", *notes]


def _value_table(values: Iterable[Mapping[str, Any]]) -> Group:
    table = _table(("key", "value", "from"))
    for entry in values:
        table.add_row(entry["key"], _word(entry["value"]), entry["source"])
    return _titled("Effective values", table)


def _word(value: Any) -> str:
    """A value as YAML has it."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
