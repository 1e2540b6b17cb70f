"""What a run begins from that has no checkpoints of its own (``run.resume``), judged by the files alone.

No process group is there yet. What only the built model can tell, its tensors by name, is compared when
the checkpoint is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from mixle_megatron.config.schema import Config, effective_plan, model_dimensions
from mixle_megatron.errors import CheckpointError, Fault, Refused

FROM, WHAT = "run.resume.from", "run.resume.what"

_SEEN_IN_SHAPES = (
    *("num_layers", "hidden_size", "vocab_size", "normalization", "gated_linear_unit", "add_bias_linear"),
    *("qk_layernorm", "share_embeddings_and_output_weights", "multi_latent_attention"),
    *("num_moe_experts", "mtp_num_layers"),
)
"""Sizes of a model that its tensors have by themselves, whatever the others are."""

_SEEN_IN_EXPERTS = ("moe_ffn_hidden_size", "moe_shared_expert_intermediate_size")
_SEEN_IN_LATENTS = ("q_lora_rank", "kv_lora_rank")


def begun(config: Config) -> tuple[Config, list[Fault]]:
    """``config`` as a run begins with it that has no checkpoints, and every reason that it cannot.

    The decay of the learning rate that an older run fixed is kept where the config states none.
    """
    resume = config.run.resume
    if resume is None:
        return config, []
    # torch reads what is in a checkpoint; the process that launches ranks does without it otherwise.
    from mixle_megatron.checkpoint.origin import find_origin

    try:
        folder = find_origin(resume.path, FROM, checksums=False).folder
        if resume.what == "model":
            return config, _model_faults(config, folder)
        return _gone_on(config, folder)
    except Refused as refused:
        return config, list(refused.faults)


def _gone_on(config: Config, folder: Path) -> tuple[Config, list[Fault]]:
    """The same for everything that a session's checkpoint holds."""
    from mixle_megatron.checkpoint.common_state import read_common
    from mixle_megatron.checkpoint.fitting import plan_faults
    from mixle_megatron.checkpoint.opening import optimizer_of, read_session
    from mixle_megatron.checkpoint.stored_state import stored_state

    try:
        payload, metadata = read_session(folder)
    except CheckpointError as error:
        return config, [Fault(WHAT, "all", f"cannot be gone on with: {error}", "use model")]
    step, writer, plan = payload["step"], optimizer_of(payload), payload["parallel_plan"]
    faults = _model_faults(config, folder)
    faults += plan_faults(stored_state(metadata), str(folder), effective_plan(config), plan)
    if writer is not None and writer != config.optimizer.name:
        rule = f"cannot go on with {folder}, which {writer} wrote"
        remedy = f"use {writer}, or {WHAT}=model"
        faults.append(Fault("optimizer.name", config.optimizer.name, rule, remedy))
    if "consumed_samples" not in (payload.get("loader_state") or {}):
        rule = f"cannot be gone on with: {folder} has no place in the data of a pretraining run"
        faults.append(Fault(WHAT, "all", rule, "use model"))
    if step >= config.run.steps:
        rule = f"is not above the {step} that {folder} has made"
        faults.append(Fault("run.steps", config.run.steps, rule, f"use more, or {WHAT}=model"))
    return _with_decay(config, read_common(folder, metadata).get("scheduler") or {}), faults


def _with_decay(config: Config, schedule: Mapping[str, Any]) -> Config:
    if config.optimizer.decay_steps is not None or "lr_decay_steps" not in schedule:
        return config
    decay = {"decay_steps": schedule["lr_decay_steps"]}
    return config.model_copy(update={"optimizer": config.optimizer.model_copy(update=decay)})


def _model_faults(config: Config, folder: Path) -> list[Fault]:
    """Where the checkpoint's model has other sizes, as far as its manifest or its tensors tell."""
    from mixle_megatron.checkpoint.export_source import KnownModel, known_wrongly, open_checkpoint
    from mixle_megatron.checkpoint.manifest import MANIFEST, read_manifest

    stated = read_manifest(folder).facts.model if (folder / MANIFEST).is_file() else None
    if stated is None:
        return known_wrongly(open_checkpoint(folder).tensors, KnownModel(config.model))
    ours, theirs = _seen_in_shapes(asdict(model_dimensions(config))), _seen_in_shapes(stated)
    return [
        Fault(f"model.{name}", ours[name], f"is {theirs[name]} in {folder}", f"use {theirs[name]}")
        for name in ours
        if name in theirs and ours[name] != theirs[name]
    ]


def _seen_in_shapes(sizes: Mapping[str, Any]) -> dict[str, Any]:
    """Those of a model's sizes that show in its tensors; not all that do."""
    names = [*_SEEN_IN_SHAPES]
    names += ["ffn_hidden_size"] if sizes.get("num_moe_experts") is None else _SEEN_IN_EXPERTS
    if sizes.get("multi_latent_attention"):
        names += _SEEN_IN_LATENTS
    if sizes.get("position_embedding_type") == "learned_absolute":
        names.append("max_position_embeddings")
    return {name: sizes[name] for name in names if name in sizes}


def unseen_differences(config: Config, folder: Path) -> list[str]:
    """What no tensor shows, and the checkpoint's run had otherwise: legal here, and worth a warning."""
    from mixle_megatron.checkpoint.export_source import known_model
    from mixle_megatron.checkpoint.import_weights import described_faults

    try:
        theirs = known_model(folder, None).section
    except Refused as refused:  # a later version may have written it
        return [f"the config of {folder}'s run cannot be read, to compare its model: {refused}"]
    return [str(replace(fault, remedy="")) for fault in described_faults(folder, theirs, config.model)]
