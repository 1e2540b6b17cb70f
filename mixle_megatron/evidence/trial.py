"""One trial on the rank that this process is: real updates, each held against a reference.

Nothing is gathered for it. A rank cuts its own part out of the reference as the model was cut, and compares
what it holds: so copies that have parted company (a tied embedding on two stages, replicas) are each seen.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from mixle.utils.parallel.training_contracts import ParallelPlan

from mixle_megatron.backend import MegatronBackend
from mixle_megatron.config.model import ModelSection
from mixle_megatron.evidence.claims import MICRO_BATCH, MICROBATCHES, MODELS, OPTIMIZER, SEED, UPDATES, Trial
from mixle_megatron.evidence.record import Error, RankOutcome
from mixle_megatron.models.gpt import GPT
from mixle_megatron.models.initialisation import is_vocabulary, shard, with_padding
from mixle_megatron.optimizer_settings import OptimizerSettings
from mixle_megatron.optimizer_shards import model_parameters, own_range, own_value
from mixle_megatron.pipeline_split import PipelineSplit
from mixle_megatron.session import MegatronSession
from mixle_megatron.stage import Stage, UpdateOutcome

Tensors = dict[str, torch.Tensor]
Update = dict[str, Any]
"""``loss``, a float, and ``gradient`` and ``parameters`` by logical name, whole, without rows of padding."""


def record(trial: Trial, path: str, device: str) -> None:
    """Train on one rank, and keep every update at ``path`` as the reference of other trials."""
    rows = MODELS[trial.model]["vocab_size"]
    kept: list[Update] = []
    with session_of(trial, trial.plan, device) as session:
        watch = GradientWatch(session.stage)
        for update in range(UPDATES):
            loss = train(session, update)
            gradient = {name: values.view(parameter.shape) for name, parameter, _, values in watch.held}
            parameters = {
                name: each.detach().float().clone() for name, each in session.stage.named_parameters()
            }
            kept.append(
                {
                    "loss": loss,
                    "gradient": without_padding(gradient, rows),
                    "parameters": without_padding(parameters, rows),
                }
            )
    torch.save(kept, path)


def save(trial: Trial, folder: str, device: str) -> None:
    """Make the first update under ``trial.saved_under``, and save."""
    with session_of(trial, trial.saved_under or {}, device) as session:
        train(session, 0)
        session.save_checkpoint(folder)


def compare(trial: Trial, reference: str, folder: str | None, device: str) -> RankOutcome:
    """Train under the trial's plan, and hold every update against the reference.

    Args:
        trial: the trial.
        reference: what :func:`record` kept.
        folder: the checkpoint to go on from, if any: its updates are not made again.
        device: ``cpu`` or ``cuda``.
    """
    expected: list[Update] = torch.load(reference, weights_only=True)
    loss, gradient, parameters = Error(), Error(), Error()
    digest = hashlib.sha256()
    with session_of(trial, trial.plan, device) as session:
        if folder is not None:
            session.load_checkpoint(folder)
        first = session.step
        part = OwnPart(session.stage, session.plan.tp, trial.model)
        watch = GradientWatch(session.stage)
        for update in range(first, UPDATES):
            actual = train(session, update)
            loss = loss.or_worse(_loss_error(actual, expected[update]["loss"], update))
            gradient = gradient.or_worse(part.gradient_error(watch.held, expected[update]["gradient"]))
            parameters = parameters.or_worse(part.parameter_error(expected[update]["parameters"]))
            digest.update(repr(actual).encode())
            for values in (*(held[3] for held in watch.held), *session.module.parameters()):
                digest.update(values.detach().float().cpu().numpy().tobytes())
        in_force = group_sizes(session)
    return RankOutcome(UPDATES - first, loss, gradient, parameters, digest.hexdigest(), in_force)


@contextmanager
def session_of(trial: Trial, sizes: Any, device: str) -> Iterator[MegatronSession]:
    """A session of the trial's model under a plan of these sizes."""
    replicas = sizes.get("dp_replicate", 1) * sizes.get("dp_shard", 1)
    with MegatronBackend().prepare(
        GPT(ModelSection(**MODELS[trial.model]), seed=SEED),
        plan=ParallelPlan(**sizes, microbatches=MICROBATCHES // replicas),
        precision=trial.precision,
        optimizer=OptimizerSettings(**OPTIMIZER),
        device=device,
        timeout_minutes=1.0,
        pipeline=PipelineSplit(**trial.pipeline) if sizes.get("pp", 1) > 1 else PipelineSplit(),
        optimizer_format=trial.optimizer_format,
    ) as session:
        yield session


def train(session: MegatronSession, update: int) -> float:
    """Make one update on this replica's microbatches; its loss over all of them.

    Raises:
        RuntimeError: nothing was committed.
    """
    inputs, targets = batch(update)
    own = slice(session.data_parallel_rank, None, session.data_parallel_size)
    receipt = session.train_batch(
        torch.cat(inputs.split(MICRO_BATCH)[own]), torch.cat(targets.split(MICRO_BATCH)[own])
    )
    if receipt.skipped:
        raise RuntimeError(f"update {update + 1} was skipped: {receipt.extra['reason']}")
    return receipt.loss


def batch(update: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets ``[rows, sequence]`` of an update; replicas have unequally many supervised ones."""
    sequence, vocabulary = MODELS["dense"]["seq_length"], MODELS["dense"]["vocab_size"]
    generator = torch.Generator().manual_seed(100 * SEED + update)
    rows = MICROBATCHES * MICRO_BATCH
    windows = torch.randint(0, vocabulary, (rows, sequence + 1), generator=generator)
    targets = windows[:, 1:].clone()
    targets[:, ::5] = -100
    targets[:MICRO_BATCH, : sequence // 2] = -100
    return windows[:, :-1], targets


class GradientWatch:
    """Keeps the gradient that this rank's shard of the optimizer is about to be updated with.

    That is after it was reduced, divided by the tokens and freed of the loss scale, and before it is clipped.

    Attributes:
        held: of the last update, for each parameter that this rank's shard has a part of: its logical name,
            the model's parameter, which elements of it flattened, and the gradient of these in fp32.
    """

    def __init__(self, stage: Stage) -> None:
        self.held: list[tuple[str, torch.Tensor, slice, torch.Tensor]] = []
        self._stage = stage
        self._update = stage.update
        stage.update = self._keep_and_update  # type: ignore[method-assign]

    def _keep_and_update(self) -> UpdateOutcome:
        names = {id(parameter): name for name, parameter in self._stage.named_parameters()}
        scale = float(self._stage.optimizer.get_loss_scale())
        self.held = []
        for part, parameter in model_parameters(self._stage.optimizer):
            if own_value(part, parameter) is not None:
                owned = own_range(part, parameter)
                values = parameter.main_grad.detach().view(-1)[owned].float() / scale
                self.held.append((names[id(parameter)], parameter, owned, values))
        return self._update()


class OwnPart:
    """Compares what this rank holds of a model with the part of the whole that it should be."""

    def __init__(self, stage: Stage, tp: int, model: str) -> None:
        self._stage = stage
        self._dimensions = GPT(ModelSection(**MODELS[model]), seed=SEED).dimensions(tp)

    def gradient_error(
        self, held: list[tuple[str, torch.Tensor, slice, torch.Tensor]], whole: Tensors
    ) -> Error:
        """Of the shards of a gradient."""
        error = Error()
        for name, parameter, owned, values in held:
            expected = self._own(whole[name], name, parameter).reshape(-1)[owned]
            error = error.or_worse(_error(values, expected, _scale(name, whole), name))
        return error

    def parameter_error(self, whole: Tensors) -> Error:
        """Of the parameters that the model computes with."""
        error = Error()
        for name, parameter in self._stage.named_parameters():
            expected = self._own(whole[name], name, parameter)
            error = error.or_worse(_error(parameter.detach().float(), expected, _scale(name, whole), name))
        return error

    def _own(self, whole: torch.Tensor, name: str, parameter: torch.Tensor) -> torch.Tensor:
        padded = with_padding(whole, self._dimensions) if is_vocabulary(name) else whole
        return shard(padded, parameter, self._stage.groups)


def group_sizes(session: MegatronSession) -> dict[str, int]:
    """How many ranks the groups have that Megatron made for each axis."""
    groups = session.stage.groups.collection
    replicas = groups.inter_dist_opt.size() if groups.inter_dist_opt else 1
    return {
        "dp_replicate": replicas,
        "dp_shard": groups.dp.size() // replicas,
        "tp": groups.tp.size(),
        "pp": groups.pp.size(),
        "cp": groups.cp.size(),
        "ep": groups.ep.size(),
        "etp": groups.expt_tp.size(),
    }


def without_padding(tensors: Tensors, vocabulary: int) -> Tensors:
    """The same with the tokens' rows alone, on the CPU."""
    return {
        name: (each[:vocabulary] if is_vocabulary(name) else each).cpu().clone()
        for name, each in tensors.items()
    }


def _loss_error(actual: float, expected: float, update: int) -> Error:
    difference = abs(actual - expected)
    return Error(difference, difference / abs(expected), f"update {update + 1}")


def _scale(name: str, whole: Tensors) -> float:
    """The largest number of a tensor; of one that is zero throughout, the largest of all tensors."""
    return float(whole[name].abs().max()) or max(float(each.abs().max()) for each in whole.values())


def _error(actual: torch.Tensor, expected: torch.Tensor, scale: float, name: str) -> Error:
    if actual.numel() == 0:
        return Error()
    difference = (actual.cpu() - expected).abs()
    if not bool(torch.isfinite(difference).all()):
        raise RuntimeError(f"{name} is not finite")
    largest = float(difference.max())
    return Error(largest, largest / scale, name)
