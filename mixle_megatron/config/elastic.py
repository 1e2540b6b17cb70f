"""The plan of an elastic run, for the ranks that are there (``plan.elastic``).

What the model is split over stays as stated: tp, pp, cp, ep and etp. The data-parallel axes take what ranks
there are, and the global batch, which belongs to the experiment, is dealt out anew: micro_batch_size stays,
and microbatches and accumulation change.
"""

from __future__ import annotations

from dataclasses import replace
from math import gcd
from typing import Any

from mixle_megatron.config.check import located, rule_faults
from mixle_megatron.config.load import LoadedConfig
from mixle_megatron.config.schema import Config, effective_plan
from mixle_megatron.errors import Fault, Refused
from mixle_megatron.rules.nearest import divisors, listed, nearest

_MOST = 4
"""Worlds that a refusal names."""


def replanned(loaded: LoadedConfig, world_size: int) -> LoadedConfig:
    """The config under the plan that ``world_size`` ranks can execute; one that is not elastic as it is.

    What else is wrong with the config, its rules say afterwards.

    Raises:
        Refused: no number of data-parallel ranks gives that world the stated batch; with the nearest that do.
    """
    config = loaded.config
    if not config.plan.elastic:
        return loaded
    fitting = _fitted(config, world_size)
    if fitting is None:
        raise Refused(located([_misfit(config, world_size)], loaded.sources))
    return loaded if fitting is config else replace(loaded, config=fitting)


def changes(stated: Config, planned: Config) -> str:
    """What :func:`replanned` made of a plan, in a line."""
    before, after = effective_plan(stated).as_dict(), effective_plan(planned).as_dict()
    names = ("dp_replicate", "dp_shard", "gradient_accumulation_steps", "microbatches")
    return ", ".join(
        f"{name}={after[name]} (was {before[name]})" for name in names if after[name] != before[name]
    )


def _stated_world(config: Config) -> int:
    return config.plan.dp_replicate * config.plan.dp_shard * _ranks_of_a_replica(config)


def _ranks_of_a_replica(config: Config) -> int:
    return config.plan.tp * config.plan.pp * config.plan.cp


def _fitted(config: Config, world_size: int) -> Config | None:
    """The config with other data-parallel axes; None where these ranks cannot share batch or experts."""
    plan, batch = config.plan, config.batch
    if world_size == _stated_world(config):
        return config
    replicas, rest = divmod(world_size, _ranks_of_a_replica(config))
    if rest or not replicas or batch.global_batch_size % (batch.micro_batch_size * replicas):
        return None
    if replicas % plan.ep or plan.tp * plan.cp * replicas // plan.ep % plan.etp:
        return None
    calls = batch.global_batch_size // (batch.micro_batch_size * replicas)
    outer, accumulation = gcd(plan.dp_replicate, replicas), gcd(plan.gradient_accumulation_steps, calls)
    changed: dict[str, Any] = {
        "dp_replicate": outer,
        "dp_shard": replicas // outer,
        "gradient_accumulation_steps": accumulation,
    }
    if plan.microbatches != "auto":
        changed["microbatches"] = calls // accumulation
    return config.model_copy(update={"plan": plan.model_copy(update=changed)})


def _misfit(config: Config, world_size: int) -> Fault:
    """Why that world cannot go on with the run, and which would."""
    batch, plan, each = config.batch, config.plan, _ranks_of_a_replica(config)
    rule = (
        f"ranks cannot run this elastic plan: they have to be a multiple of plan.tp={plan.tp} · "
        f"plan.pp={plan.pp} · plan.cp={plan.cp} = {each}, and so many replicas have to share "
        f"batch.global_batch_size={batch.global_batch_size} in microbatches of {batch.micro_batch_size}"
    )
    if plan.ep * plan.etp > 1:
        rule += f", and plan.ep={plan.ep} and plan.etp={plan.etp} their experts"
    shares = divisors(batch.global_batch_size // batch.micro_batch_size)
    worlds = nearest(
        [each * share for share in shares if _works(config, each * share)], world_size, most=_MOST
    )
    remedy = f"start {listed(worlds)} ranks" if worlds else ""
    return Fault("world_size", world_size, rule, remedy)


def _works(config: Config, world_size: int) -> bool:
    """Whether so many ranks can run the config, by every rule."""
    fitting = _fitted(config, world_size)
    if fitting is None:
        return False
    return not rule_faults({name: getattr(fitting, name) for name in Config.model_fields}, world_size)
