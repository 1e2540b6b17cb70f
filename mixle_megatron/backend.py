"""MegatronBackend: from a plan and a model to an open session."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, get_args

import torch
import torch.distributed as dist
from mixle.utils.parallel.training_contracts import BackendCapabilities, ParallelPlan
from mixle.utils.parallel.training_launchers import WorkerTopologyAttestation

from mixle_megatron import host as cpu_host
from mixle_megatron.attestation import agree_on_launch, compare_attestations
from mixle_megatron.callers_groups import parallel_state_faults
from mixle_megatron.capabilities import CAPABILITIES, capabilities
from mixle_megatron.capability.refusals import host_faults
from mixle_megatron.capability.torch_devices import facts_beside_torch
from mixle_megatron.checkpoint.stored_state import FULLY_RESHARDABLE, OptimizerFormat
from mixle_megatron.documents import DocumentBounds, bounds_faults
from mixle_megatron.errors import Fault, Unsupported, refuse_if_any
from mixle_megatron.evidence.numerics import with_evidence
from mixle_megatron.evidence.store import kept_evidence
from mixle_megatron.launch_environment import environment_faults
from mixle_megatron.loss_scaling import scale_losses
from mixle_megatron.models.built_module import BuiltModule, is_built
from mixle_megatron.models.causal_lm import WrappedCausalLM, is_causal_lm
from mixle_megatron.models.provider import ModelProvider, SessionTerms
from mixle_megatron.optimizer_choice import optimizer_receipt, resolve_optimizer
from mixle_megatron.optimizer_settings import OptimizerSettings
from mixle_megatron.pipeline_split import EVEN, PipelineSplit
from mixle_megatron.plan_record import PlanRecord
from mixle_megatron.process_groups import (
    available_world_size,
    choose_device,
    destroy_groups,
    make_groups,
    start_default_group,
)
from mixle_megatron.rules import NOT_EXECUTED, all_faults, verdict
from mixle_megatron.session import MegatronSession
from mixle_megatron.stage import Stage
from mixle_megatron.translate import Host


class MegatronBackend:
    """mixle's DistributedTrainingBackend on NVIDIA Megatron-Core."""

    capabilities: BackendCapabilities = CAPABILITIES

    def prepare(
        self,
        module: Any,
        *,
        plan: ParallelPlan,
        precision: str = "fp32",
        device: Any = None,
        optimizer: OptimizerSettings | str | None = None,
        lr: float | None = None,
        max_grad_norm: float | None = None,
        scheduler: Any = None,
        compile: bool = False,
        timeout_minutes: float = 30.0,
        seed: int = 1234,
        uneven_batches: bool = True,
        pipeline: PipelineSplit = EVEN,
        optimizer_format: OptimizerFormat = FULLY_RESHARDABLE,
        documents: DocumentBounds | None = None,
        attestation: WorkerTopologyAttestation | Mapping[str, Any] | None = None,
        **unknown: Any,
    ) -> MegatronSession:
        """Check everything, start the process groups, build this rank's stage and open a session.

        Args:
            module: mixle's ``CausalLM``; a Megatron model that is built already, which is then trained
                in place (:class:`BuiltModule`); or what describes a model and builds it, such as
                :class:`mixle_megatron.models.gpt.GPT` (a :class:`ModelProvider`).
            plan: the parallel plan; its world size is the number of ranks.
            precision: what the forward and backward passes compute in.
            device: ``cpu``, ``cuda`` or a torch.device; by default CUDA where there is some.
            optimizer: settings, or ``adam`` or ``sgd`` with the defaults of torch.optim; None is adam.
            lr: learning rate, where ``optimizer`` is a name or None (1e-3).
            max_grad_norm: largest gradient norm, where ``optimizer`` is a name or None (no clipping).
            scheduler: not executed; schedules are part of :class:`OptimizerSettings`.
            compile: not executed.
            timeout_minutes: after which a collective that some rank never joins fails.
            seed: what dropout draws from.
            uneven_batches: whether replicas may make different numbers of ``train_batch`` calls. False
                saves an exchange, and lets gradients be reduced during the backward pass on CUDA.
            pipeline: which layers each pipeline stage holds; virtual stages, uneven ones, or Megatron's
                layout string. By default equally many in one chunk.
            optimizer_format: how checkpoints of the session hold the optimizer's state:
                ``fully_reshardable`` loads under every plan; for ``dp_reshardable`` nothing is gathered,
                and it loads where only ``dp_replicate``, ``dp_shard`` and ``cp`` change.
            documents: what stops at the end of a document in rows that hold several: positions, attention.
                By default nothing does.
            attestation: what a launcher attested of this rank, such as mixle's Ray launcher. Its rank and
                world size have to be those that this process has; its coordinate is relabelled.

        Raises:
            Refused: something does not fit, with all faults, before any process group is made.
            Unsupported: it fits, but this version or host does not execute it.
            TypeError: an unknown keyword argument.
        """
        if unknown:
            raise TypeError(f"unexpected megatron backend options: {', '.join(sorted(unknown))}")
        provider = _provider_of(module)
        record = PlanRecord.from_plan(plan)
        dimensions = provider.dimensions(record.tp)
        refuse_if_any([] if dist.is_initialized() else environment_faults())
        terms = SessionTerms(record, precision, choose_device(device), pipeline, documents)
        faults = all_faults(
            record,
            model=dimensions,
            precision=precision,
            world_size=available_world_size(),
            split=pipeline,
        )
        settings, setting_faults = resolve_optimizer(optimizer, lr, max_grad_norm)
        faults += parallel_state_faults(record, experts=dimensions.num_moe_experts is not None)
        facts = facts_beside_torch(terms.device)
        faults += provider.faults(terms) + setting_faults + host_faults(precision, terms.device.type, facts)
        if documents is not None:
            faults += bounds_faults(documents, terms, provider, dimensions.vocab_size)
        verdict(faults + _not_executed_faults(scheduler, compile) + _format_faults(optimizer_format))
        host = Host.of(terms.device)
        if uneven_batches:
            # A replica that waits for others has no backward pass to reduce in.
            host = dataclasses.replace(host, overlaps_reduction=False)
        executed = capabilities(facts)
        session = self._open(
            provider,
            plan,
            host,
            settings,
            terms,
            timeout_minutes,
            seed,
            uneven_batches,
            executed,
            attestation,
        )
        session.optimizer_format = optimizer_format
        shown = kept_evidence(facts).evidence
        session.updates = with_evidence(session.updates, shown, precision, host.device.type)
        return session

    def _open(
        self,
        provider: ModelProvider,
        plan: ParallelPlan,
        host: Host,
        settings: OptimizerSettings,
        terms: SessionTerms,
        timeout_minutes: float,
        seed: int,
        uneven_batches: bool,
        executed: BackendCapabilities,
        attestation: WorkerTopologyAttestation | Mapping[str, Any] | None,
    ) -> MegatronSession:
        undo = []
        try:
            if not host.on_cuda:
                cpu_host.require()
                undo.append(cpu_host.release)
            start_default_group(host.device, timeout_minutes=timeout_minutes)
            agree_on_launch(plan, attestation)
            groups = make_groups(plan, split=terms.split, timeout_minutes=timeout_minutes)
            undo.append(lambda: destroy_groups(groups))
            compare_attestations(plan, groups)
            stage = Stage.build(
                provider,
                plan,
                groups,
                host,
                settings,
                terms.precision,
                seed,
                terms.split,
                terms.documents,
            )
            scale_losses(stage, terms.precision)
            return MegatronSession(
                stage,
                plan=plan,
                capabilities=executed,
                provider=provider,
                device=host.device,
                precision=terms.precision,
                optimizer_receipt=optimizer_receipt(settings),
                uneven_batches=uneven_batches,
                on_close=lambda: _undo(undo),
            )
        except BaseException:
            _undo(undo)
            raise


def _undo(steps: list[Any]) -> None:
    while steps:
        steps.pop()()


def _provider_of(module: Any) -> ModelProvider:
    """What builds the stages of ``module``: itself, or what makes a provider of it."""
    if isinstance(module, ModelProvider):
        return module
    if is_built(module):
        return BuiltModule(module)
    if is_causal_lm(module):
        return WrappedCausalLM(module)
    remedy = "give it a mixle CausalLM, a Megatron model, a mixle_megatron.GPT or another ModelProvider"
    if callable(module) and not isinstance(module, torch.nn.Module):
        remedy = "give a function that builds a stage to CallableProvider, with what has to be known before"
    raise Unsupported(
        [Fault("module", type(module).__name__, "is not a model this backend can build", remedy)]
    )


def _format_faults(optimizer_format: str) -> list[Fault]:
    known = get_args(OptimizerFormat)
    if optimizer_format in known:
        return []
    return [Fault("optimizer_format", optimizer_format, f"is not one of {', '.join(known)}")]


def _not_executed_faults(scheduler: Any, compile: bool) -> list[Fault]:
    faults = []
    if scheduler is not None:
        rule = NOT_EXECUTED + "schedules are part of the optimizer's settings"
        remedy = "set schedule, warmup_steps and decay_steps in OptimizerSettings"
        faults.append(Fault("scheduler", type(scheduler).__name__, rule, remedy))
    if compile:
        rule = NOT_EXECUTED + "torch.compile is not built in"
        faults.append(Fault("compile", True, rule, "use compile=False"))
    return faults
