"""What ``prepare`` refuses, and that it does so before any process group exists, with all faults at once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist
from small_gpts import SIZES, parallel_plan

from mixle_megatron.errors import Refused, Unsupported
from mixle_megatron.host import installed
from mixle_megatron.optimizer_settings import OptimizerSettings


@pytest.fixture(autouse=True)
def nothing_is_started(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No launcher's environment; and no group and no redirection after the refusal."""
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    yield
    assert not dist.is_initialized()
    assert not installed()


def refusal(model: dict[str, Any] | None = None, **arguments: Any) -> dict[str, str]:
    """What is wrong with each field, in words, that ``prepare`` refuses."""
    from mixle_megatron.backend import MegatronBackend
    from mixle_megatron.models.gpt import GPT

    arguments.setdefault("plan", parallel_plan())
    with pytest.raises(Refused) as caught:
        MegatronBackend().prepare(GPT.of(**(SIZES | (model or {}))), device="cpu", **arguments)
    faults = caught.value.faults
    assert all(str(fault) in str(caught.value) for fault in faults)
    return {fault.field: f"{fault.rule}; {fault.remedy}" for fault in faults} | {
        "kind": type(caught.value).__name__
    }


def test_all_faults_of_plan_model_world_and_optimizer_come_at_once() -> None:
    found = refusal(
        {"hidden_size": 30, "num_query_groups": 3, "num_layers": 4},
        plan=parallel_plan(tp=2, pp=3),
        precision="fp12",
        optimizer="adamax",
    )
    assert found.pop("kind") == "Refused"
    assert set(found) == {
        "plan.world_size",
        "model.hidden_size",
        "model.num_query_groups",
        "plan.tp",
        "plan.pp",
        "precision",
        "optimizer",
    }
    assert "use 1, 2 or 4" in found["plan.pp"]


def test_precisions_that_are_not_built_are_unsupported_by_name() -> None:
    found = refusal(plan=parallel_plan(cp=1, dp_shard=1), precision="fp8")
    assert found["kind"] == "Unsupported"
    assert issubclass(Unsupported, NotImplementedError)


def test_experts_are_asked_of_models_that_have_some() -> None:
    found = refusal(plan=parallel_plan(cp=2, dp_shard=2, ep=2, etp=2))
    assert "has no experts to split" in found["plan.ep"]
    assert "has no experts to split" in found["plan.etp"]
    assert "plan.cp" not in found


def test_schedule_that_megatron_would_assert_on_is_refused() -> None:
    found = refusal(optimizer=OptimizerSettings(lr=1e-3, min_lr=1.0, warmup_steps=5, decay_steps=5))
    assert set(found) == {"optimizer.min_lr", "optimizer.decay_steps", "kind"}


def test_recomputation_that_megatron_would_raise_on_is_refused() -> None:
    found = refusal({"recompute_granularity": "full"})
    assert set(found) == {"model.recompute_method", "model.recompute_num_layers", "kind"}


def test_arguments_that_contradict_each_other_are_refused() -> None:
    found = refusal(optimizer=OptimizerSettings(), lr=1.0, max_grad_norm=2.0)
    assert set(found) == {"lr", "max_grad_norm", "kind"}


def test_what_is_not_executed_is_said_together_with_other_faults() -> None:
    found = refusal(scheduler=object(), compile=True)
    assert set(found) == {"scheduler", "compile", "kind"}
    assert found["kind"] == "Unsupported"
    found = refusal(plan=parallel_plan(pp=2), compile=True)
    assert set(found) == {"compile", "plan.world_size", "kind"}
    assert found["kind"] == "Refused"


def test_module_that_is_no_provider_is_unsupported() -> None:
    from torch import nn

    from mixle_megatron.backend import MegatronBackend

    with pytest.raises(Unsupported, match="Linear is not a model this backend can build"):
        MegatronBackend().prepare(nn.Linear(2, 2), plan=parallel_plan())


def test_unknown_option_is_a_type_error_as_in_any_call() -> None:
    from mixle_megatron.backend import MegatronBackend
    from mixle_megatron.models.gpt import GPT

    with pytest.raises(TypeError, match="unexpected megatron backend options: colour"):
        MegatronBackend().prepare(GPT.of(**SIZES), plan=parallel_plan(), colour="red")


def test_half_of_a_launchers_environment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    found = refusal()
    assert {"WORLD_SIZE", "MASTER_PORT"} <= set(found)


def test_device_that_is_not_there_is_refused() -> None:
    from mixle_megatron.process_groups import choose_device

    with pytest.raises(Refused, match="neither 'cpu' nor 'cuda'"):
        choose_device("meta")
