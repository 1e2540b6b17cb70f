"""What ``prepare`` takes besides its own models: a built Megatron module, a function, another provider."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import reference_gpt
import torch
import torch.distributed as dist
from small_gpts import OPTIMIZERS, SEQUENCE, SIZES, VARIANTS, global_batch, parallel_plan, train_update
from small_gpts import whole_weights as weights_of
from torch.nn.functional import cross_entropy, embedding, linear

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "examples"))

VOCABULARY = 258
"""A built module's vocabulary is not padded, so tp=2 has to divide it."""

POSITIONS = SEQUENCE + 1
"""A built module's positions are what they are: nothing has to divide them."""

EXPERTS: dict[str, Any] = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_aux_loss_coeff": 0.01,
    "add_bias_linear": False,
}
"""A mixture of experts, whose auxiliary loss is scaled by fields of the module's own config."""

UPDATES = 5
LOSS_TOLERANCE = 1e-5
NORM_TOLERANCE = 1e-4

Curve = list[tuple[float, float]]

PLANS: list[dict[str, int]] = [
    {"dp_replicate": 2},
    {"dp_shard": 2, "microbatches": 3},
    {"tp": 2},
    {"pp": 2, "microbatches": 2},
    {"cp": 2},
    {"tp": 2, "pp": 2},
]


def ranks_of(sizes: dict[str, int]) -> int:
    return parallel_plan(**sizes).world_size


def section(variant: str = "gpt2") -> Any:
    """The ``model`` section of a variant with the vocabulary of these tests."""
    from mixle_megatron.config.model import ModelSection

    own = {"vocab_size": VOCABULARY, "max_position_embeddings": POSITIONS}
    return ModelSection(**(SIZES | (VARIANTS | {"experts": EXPERTS})[variant] | own))


def prepared(module: Any, *, precision: str = "fp32", pipeline: Any = None, **sizes: int) -> Any:
    from mixle_megatron.backend import MegatronBackend

    return MegatronBackend().prepare(
        module,
        plan=parallel_plan(**sizes),
        precision=precision,
        optimizer=OPTIMIZERS["adam"],
        device="cpu",
        **({} if pipeline is None else {"pipeline": pipeline}),
    )


def curve_of(opened: Any, updates: range = range(UPDATES)) -> Curve:
    receipts = [train_update(opened, update) for update in updates]
    return [(receipt.loss, receipt.extra["grad_norm"]) for receipt in receipts]


def assert_same_curve(actual: Curve, expected: Curve) -> None:
    """Every loss, and the norms of the first two updates, before those of two correct runs drift apart."""
    losses, norms = zip(*actual, strict=True)
    expected_losses, expected_norms = zip(*expected, strict=True)
    assert losses == pytest.approx(expected_losses, rel=LOSS_TOLERANCE, abs=0)
    assert norms[:2] == pytest.approx(expected_norms[:2], rel=NORM_TOLERANCE, abs=0)


def reference_curve(weights: dict[str, torch.Tensor], loss_of: Callable[..., torch.Tensor]) -> Curve:
    """Adam in float64 on ``loss_of(inputs, targets, weights)``."""
    weights = {name: weight.double().requires_grad_() for name, weight in weights.items()}
    adam, curve = reference_gpt.Adam(OPTIMIZERS["adam"]), []
    for update in range(UPDATES):
        loss = loss_of(*global_batch(update), weights)
        found = torch.autograd.grad(loss, list(weights.values()))
        norm = torch.stack([gradient.norm() for gradient in found]).norm()
        clip = min(1.0, OPTIMIZERS["adam"].clip_grad / (norm.item() + 1e-6))
        with torch.no_grad():
            gradients = [gradient * clip for gradient in found]
            adam.update(weights, dict(zip(weights, gradients, strict=True)), OPTIMIZERS["adam"].lr)
        curve.append((loss.item(), norm.item()))
    return curve


# A built module


@contextmanager
def callers_groups(*, instances: int | None = None, order: str = "tp-cp-ep-dp-pp", **sizes: int) -> Iterator:
    """What a caller of Megatron does before it builds a model."""
    from megatron.core import parallel_state, tensor_parallel

    from mixle_megatron.host import cpu_runtime

    plan = parallel_plan(**sizes)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=plan.tp,
        pipeline_model_parallel_size=plan.pp,
        context_parallel_size=plan.cp,
        expert_model_parallel_size=plan.ep,
        expert_tensor_parallel_size=plan.etp,
        num_distributed_optimizer_instances=plan.dp_replicate if instances is None else instances,
        order=order,
        create_gloo_process_groups=False,
    )
    try:
        with cpu_runtime():
            tensor_parallel.model_parallel_cuda_manual_seed(1)
            yield
    finally:
        parallel_state.destroy_model_parallel()
        parallel_state._global_process_group_list = None


def config_of(variant: str, sizes: dict[str, int], **changed: Any) -> Any:
    """A caller's own TransformerConfig: Megatron's defaults, but for what the model is."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    from mixle_megatron.models.gpt import GPT
    from mixle_megatron.translate import activation_function

    plan = parallel_plan(**sizes)
    model = dict(GPT(section(variant)).transformer_fields())
    model["activation_func"] = activation_function(model["activation_func"])
    # Megatron's fused activations and norms want CUDA, or compile a function of the graph on a CPU.
    of_plan = {
        "tensor_model_parallel_size": plan.tp,
        "pipeline_model_parallel_size": plan.pp,
        "context_parallel_size": plan.cp,
        "expert_model_parallel_size": plan.ep,
        "expert_tensor_parallel_size": plan.etp,
        "sequence_parallel": plan.tp > 1,
        "pipeline_dtype": torch.float32,
        "bias_activation_fusion": False,
    }
    return TransformerConfig(**(model | of_plan | changed))


def built(
    variant: str = "gpt2", seed: int = 1234, changed: dict[str, Any] | None = None, **sizes: int
) -> Any:
    """This rank's stage of a Megatron GPTModel, with the weights that ``GPT(seed=seed)`` has."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.process_groups_config import ProcessGroupCollection

    from mixle_megatron.models.decoder_spec import decoder_spec
    from mixle_megatron.models.gpt import GPT
    from mixle_megatron.models.initialisation import initialise
    from mixle_megatron.process_groups import MegatronGroups
    from mixle_megatron.translate import Host

    model, plan = GPT(section(variant), seed=seed), parallel_plan(**sizes)
    config = config_of(variant, sizes, **(changed or {}))
    groups = MegatronGroups(ProcessGroupCollection.use_mpu_process_groups(), (), False)
    module = GPTModel(
        config,
        decoder_spec(config, groups, Host.of(torch.device("cpu"))),
        vocab_size=VOCABULARY,
        max_sequence_length=POSITIONS,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        position_embedding_type=model.model.position_embedding_type,
        share_embeddings_and_output_weights=model.model.share_embeddings_and_output_weights,
    )
    initialise(module, model.initialisation, model.dimensions(plan.tp), groups)
    return module


def train_built(variant: str, seeds: tuple[int, ...], sizes: dict[str, int]) -> Curve:
    """What a built module learns; rank ``r`` builds it from ``seeds[r]``."""
    seed = seeds[dist.get_rank() % len(seeds)]
    with callers_groups(**sizes), prepared(built(variant, seed, **sizes), **sizes) as opened:
        return curve_of(opened)


def train_gpt(
    variant: str, precision: str = "fp32", sizes: dict[str, int] | None = None
) -> tuple[Curve, dict[str, torch.Tensor]]:
    """What the same model learns through ``mixle_megatron.GPT``, and on one rank what it starts from."""
    from mixle_megatron.models.gpt import GPT

    with prepared(GPT(section(variant)), precision=precision, **(sizes or {})) as opened:
        weights = weights_of(opened) if not sizes else {}
        return curve_of(opened), weights


@pytest.fixture(scope="module")
def references(run_on) -> dict[str, Curve]:
    """Each variant's curve in plain float64."""
    curves = {}
    for variant in ("gpt2", "gpt2_untied", "llama"):
        ((_, weights),) = run_on(1, train_gpt, variant)
        loss_of = partial(reference_gpt.mean_loss, model=section(variant))
        curves[variant] = reference_curve(weights, lambda x, y, w, loss_of=loss_of: loss_of(x, y, w))
    return curves


@pytest.mark.parametrize("variant", ["gpt2", "gpt2_untied", "llama"])
def test_built_module_on_one_rank_is_the_plain_float64_model(run_on, references, variant: str) -> None:
    (curve,) = run_on(1, train_built, variant, (1234,), {})
    assert_same_curve(curve, references[variant])


@pytest.mark.parametrize("sizes", PLANS, ids=str)
def test_built_module_has_the_curve_of_one_rank_under_each_plan(run_on, references, sizes) -> None:
    for curve in run_on(ranks_of(sizes), train_built, "gpt2", (1234,), sizes):
        assert_same_curve(curve, references["gpt2"])


@pytest.mark.parametrize("sizes", [{"tp": 2}, {"pp": 2}], ids=str)
def test_built_llama_has_the_curve_of_one_rank(run_on, references, sizes) -> None:
    for curve in run_on(2, train_built, "llama", (1234,), sizes):
        assert_same_curve(curve, references["llama"])


def test_replicas_begin_with_the_parameters_of_the_first(run_on, references) -> None:
    for curve in run_on(2, train_built, "gpt2", (1234, 99), {"dp_shard": 2}):
        assert_same_curve(curve, references["gpt2"])


@pytest.mark.parametrize("sizes", [{}, {"dp_shard": 2, "ep": 2}, {"tp": 2, "dp_shard": 2}], ids=str)
def test_built_mixture_of_experts_has_the_curve_of_gpt(run_on, sizes: dict[str, int]) -> None:
    (expected, _), *_ = run_on(ranks_of(sizes), train_gpt, "experts", "fp32", sizes)
    for curve in run_on(ranks_of(sizes), train_built, "experts", (1234,), sizes):
        assert_same_curve(curve, expected)


def train_beside_plain_megatron(layers: str) -> tuple[list[float], list[float], float]:
    """A session on a module, and on its twin a loop that calls Megatron and torch alone.

    Gives both curves of losses, and the largest difference between the trained parameters.
    """
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    from mixle_megatron.models.decoder_spec import torch_layer_spec

    def build() -> Any:
        spec = get_gpt_layer_local_spec() if layers == "megatron" else torch_layer_spec(config)
        return GPTModel(config, spec, vocab_size=VOCABULARY, max_sequence_length=SEQUENCE)

    with callers_groups():
        config = config_of("gpt2", {}, init_method_std=0.1)
        module, twin = build(), build()
        twin.load_state_dict(module.state_dict())
        adam, losses = torch.optim.Adam(twin.parameters(), lr=OPTIMIZERS["adam"].lr), []
        for update in range(UPDATES):
            inputs, targets = global_batch(update)
            supervised, positions = targets != -100, torch.arange(SEQUENCE).expand_as(inputs)
            each = twin(inputs, positions, None, labels=targets.clamp(min=0))
            loss = (each * supervised).sum() / supervised.sum()
            adam.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(twin.parameters(), OPTIMIZERS["adam"].clip_grad)
            adam.step()
            losses.append(loss.item())
        with prepared(module) as opened:
            curve = curve_of(opened)
        pairs = zip(module.named_parameters(), twin.parameters(), strict=True)
        # a key's bias has no effect on attention, so that its gradient is rounding alone
        gaps = [float((one - other).abs().max()) for (name, one), other in pairs if "qkv.bias" not in name]
        return [loss for loss, _ in curve], losses, max(gaps)


@pytest.mark.parametrize("layers", ["megatron", "torch"])
def test_session_on_a_built_module_is_megatrons_own_forward_and_backward(run_on, layers: str) -> None:
    ((losses, expected, gap),) = run_on(1, train_beside_plain_megatron, layers)
    assert losses == pytest.approx(expected, rel=LOSS_TOLERANCE)
    assert gap < 0.02 * UPDATES * OPTIMIZERS["adam"].lr, "two hundredths of the way that adam can go"


def train_built_in(precision: str) -> Curve:
    changed = {precision: True, "params_dtype": {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]}
    with callers_groups(), prepared(built(changed=changed), precision=precision) as opened:
        return curve_of(opened)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_built_module_trains_in_half_precision(run_on, precision: str) -> None:
    (curve,) = run_on(1, train_built_in, precision)
    (((expected), _),) = run_on(1, train_gpt, "gpt2", precision)
    assert_same_curve(curve, expected)


def train_with_another_loops_hooks() -> Curve:
    def call_of_another_loop(*_arguments: Any, **_options: Any) -> Any:
        raise AssertionError("the session is a loop of its own")

    hooks = dict.fromkeys(
        ("grad_scale_func", "finalize_model_grads_func", "no_sync_func"), call_of_another_loop
    )
    with callers_groups():
        module = built(changed=hooks)
        with prepared(module) as opened:
            curve = curve_of(opened)
        assert module.config.grad_scale_func is call_of_another_loop
    return curve


def test_hooks_of_another_training_loop_are_not_called(run_on, references) -> None:
    (curve,) = run_on(1, train_with_another_loops_hooks)
    assert_same_curve(curve, references["gpt2"])


def train_twice(sizes: dict[str, int], precision: str) -> dict[str, Any]:
    """What one module is after a session, and whether a second one goes on from there."""
    bf16 = {"bf16": True, "params_dtype": torch.bfloat16} if precision == "bf16" else {}
    found: dict[str, Any] = {}
    with callers_groups(**sizes):
        module, twin = (built(changed=bf16, **sizes) for _ in range(2))
        marks = [sorted(vars(parameter)) for parameter in module.parameters()]
        before = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
        opened = prepared(module, precision=precision, **sizes)
        first = train_update(opened, 0)
        during = module.config.calculate_per_token_loss
        opened.close()
        parameters = dict(module.named_parameters())
        found["same object"] = opened.module is module
        found["per token"] = (during, module.config.calculate_per_token_loss)
        found["marks stay"] = marks == [sorted(vars(parameter)) for parameter in parameters.values()]
        found["trained"] = any(not torch.equal(parameters[name], before[name]) for name in before)
        found["own storage"] = all(
            parameter.untyped_storage().nbytes() == parameter.numel() * parameter.element_size()
            for parameter in parameters.values()
        )
        for parameter in parameters.values():
            parameter.sum().backward()
        found["gradients"] = all(parameter.grad.eq(1).all() for parameter in parameters.values())
        twin.load_state_dict(module.state_dict())
        with prepared(twin, precision=precision, **sizes) as fresh:
            expected = curve_of(fresh)
        with prepared(module, precision=precision, **sizes) as again:
            found["second session"] = (curve_of(again), expected)
        found["learnt"] = first.loss != expected[0][0]
    return found


@pytest.mark.parametrize(
    ("sizes", "precision"), [({}, "fp32"), ({"dp_shard": 2}, "bf16"), ({"tp": 2}, "fp32")], ids=str
)
def test_module_is_an_ordinary_one_afterwards_and_trains_again(run_on, sizes, precision: str) -> None:
    for found in run_on(ranks_of(sizes), train_twice, sizes, precision):
        actual, expected = found.pop("second session")
        assert actual == expected
        assert found.pop("per token") == (True, False)
        assert all(found.values()), found


def fail_in_the_second_update() -> dict[str, Any]:
    """A module whose session failed: the values of the first update, and fit for another session."""
    with callers_groups():
        module, twin = built(), built()
        with prepared(twin) as once:
            train_update(once, 0)
        opened = prepared(module)
        train_update(opened, 0)

        def broken(_module: Any, _arguments: Any) -> None:
            raise ArithmeticError("in forward")

        hook = module.decoder.register_forward_pre_hook(broken)
        with pytest.raises(ArithmeticError), opened:
            train_update(opened, 1)
        hook.remove()
        kept = zip(module.parameters(), twin.parameters(), strict=True)
        found = {"same object": opened.module is module}
        found["values of the first update"] = all(torch.equal(one, other) for one, other in kept)
        found["no marks"] = not any(hasattr(each, "main_grad") for each in module.parameters())
        with prepared(module) as again:
            found["trains again"] = train_update(again, 1).step == 1
        return found


def test_module_of_a_failed_session_stays_as_that_left_it(run_on) -> None:
    (found,) = run_on(1, fail_in_the_second_update)
    assert all(found.values()), found


def save_built(folder: str, sizes: dict[str, int]) -> float:
    """Save after two updates, and evaluate."""
    with callers_groups(**sizes), prepared(built(**sizes), **sizes) as opened:
        curve_of(opened, range(2))
        opened.save_checkpoint(folder)
        return opened.evaluate(*global_batch(7)).loss


def load_into_gpt(folder: str) -> float:
    from mixle_megatron.models.gpt import GPT

    with prepared(GPT(section(), seed=99)) as opened:
        assert opened.load_checkpoint(folder)["step"] == 2
        return opened.evaluate(*global_batch(7)).loss


def test_checkpoint_of_a_built_module_is_one_of_the_same_gpt(run_on, tmp_path: Path) -> None:
    folder = str(tmp_path / "saved")
    losses = run_on(2, save_built, folder, {"tp": 2})
    assert run_on(1, load_into_gpt, folder) == pytest.approx(losses[:1], rel=1e-6)


# What is refused of a built module


def refusal(module: Any, precision: str = "fp32", pipeline: Any = None, **sizes: int) -> dict[str, str]:
    """The faults that ``prepare`` finds, by field."""
    from mixle_megatron.errors import Refused

    with pytest.raises(Refused) as caught:
        prepared(module, precision=precision, pipeline=pipeline, **sizes)
    return {fault.field: f"{fault.value} {fault.rule}; {fault.remedy}" for fault in caught.value.faults}


def refused(case: str, sizes: dict[str, int]) -> dict[str, str]:
    """A module that does not fit the plan ``sizes``, and what is said of it."""
    return globals()[f"refused_{case}"](sizes)


def refused_config(sizes: dict[str, int]) -> dict[str, str]:
    with callers_groups(**sizes):
        changed = {"tensor_model_parallel_size": 1, "sequence_parallel": False, "fp8": None}
        return refusal(built(changed=changed, **sizes), **sizes)


def refused_ends(sizes: dict[str, int]) -> dict[str, str]:
    with callers_groups(**sizes):
        module = built(**sizes)
        module.pre_process = module.post_process = True
        return refusal(module, **sizes)


def refused_instances(sizes: dict[str, int]) -> dict[str, str]:
    with callers_groups(**sizes, instances=1):
        return refusal(built(**sizes), **sizes)


def refused_order(sizes: dict[str, int]) -> dict[str, str]:
    with callers_groups(**sizes, order="tp-cp-ep-pp-dp"):
        return refusal(built(**sizes), **sizes)


def refused_destroyed(sizes: dict[str, int]) -> dict[str, str]:
    from megatron.core import tensor_parallel

    from mixle_megatron.host import cpu_runtime
    from mixle_megatron.process_groups import destroy_groups, make_groups

    groups = make_groups(parallel_plan(**sizes))
    with cpu_runtime():
        tensor_parallel.model_parallel_cuda_manual_seed(1)
        module = built(**sizes)
    destroy_groups(groups)
    return refusal(module, **sizes)


def refused_wrapped(sizes: dict[str, int]) -> dict[str, str]:
    from megatron.core.transformer.module import Float16Module

    with callers_groups(**sizes):
        changed = {"bf16": True, "params_dtype": torch.bfloat16}
        module = built(changed=changed, **sizes)
        return refusal(Float16Module(module.config, module), "bf16", **sizes)


def refused_open(sizes: dict[str, int]) -> dict[str, str]:
    with callers_groups(**sizes), prepared(built(**sizes), **sizes) as opened:
        return refusal(opened.module, **sizes)


def refused_precision(sizes: dict[str, int]) -> dict[str, str]:
    from mixle_megatron.host import installed

    with callers_groups(**sizes):
        found = refusal(built(**sizes), "bf16", **sizes)
    assert not installed()
    return found


def refused_virtual(sizes: dict[str, int]) -> dict[str, str]:
    with callers_groups(**sizes):
        module = built(**sizes)
        module.config.virtual_pipeline_model_parallel_size = 2
        return refusal(module, **sizes)


def refused_chunks(sizes: dict[str, int]) -> dict[str, str]:
    """Virtual pipeline stages that the session is asked for, and the module has not."""
    from mixle_megatron.pipeline_split import PipelineSplit

    with callers_groups(**sizes):
        module = built(changed={"num_layers": 4}, **sizes)
        return refusal(module, pipeline=PipelineSplit(virtual_pipeline_model_parallel_size=2), **sizes)


def refused_vocabulary(sizes: dict[str, int]) -> dict[str, str]:
    with callers_groups(**sizes):
        module = built(**sizes)
        module.vocab_size = 257
        return refusal(module, **sizes)


@pytest.mark.parametrize(
    ("case", "sizes", "expected"),
    [
        (
            "config",
            {"tp": 2},
            {
                "module.config.tensor_model_parallel_size": "1 is not 2, which the plan makes it",
                "module.config.sequence_parallel": "False is not True",
            },
        ),
        ("instances", {"dp_replicate": 2}, {"parallel_state.intra_dp_cp": "[0, 1] are not the ranks"}),
        (
            "order",
            {"pp": 2, "dp_shard": 2},
            {
                "module.pg_collection.pp": "are not the ranks",
                "parallel_state.pp": "are not the ranks",
                "parallel_state.dp_cp": "are not the ranks",
                "parallel_state.intra_dp_cp": "are not the ranks",
            },
        ),
        ("destroyed", {"tp": 2}, {"module.pg_collection.tp": "is no group that exists"}),
        (
            "wrapped",
            {},
            {
                "module.vocab_size": "is missing on Float16Module",
                "module.max_sequence_length": "without Float16Module",
                "module.pre_process": "whether it holds the embedding",
                "module.post_process": "whether it holds the output layer",
            },
        ),
        ("open", {}, {"module": "is in a DistributedDataParallel already"}),
        (
            "precision",
            {},
            {
                "module.config.params_dtype": "torch.float32 is not torch.bfloat16, which the arguments",
                "module.config.bf16": "False is not True",
            },
        ),
        ("virtual", {}, {"module.config.virtual_pipeline_model_parallel_size": "2 is not None"}),
        (
            "chunks",
            {"pp": 2, "microbatches": 2},
            {"module.config.virtual_pipeline_model_parallel_size": "None is not 2"},
        ),
        ("vocabulary", {"tp": 2}, {"model.padded_vocab_size": "is not a multiple of plan.tp=2"}),
    ],
)
def test_module_that_does_not_fit_is_refused(
    run_on, case: str, sizes: dict[str, int], expected: dict[str, str]
) -> None:
    for found in run_on(ranks_of(sizes), refused, case, sizes):
        assert set(found) == set(expected)
        for field, text in expected.items():
            assert text in found[field], field


def test_stages_whose_ends_are_wrong_are_refused(run_on) -> None:
    first, last = run_on(2, refused, "ends", {"pp": 2})
    assert set(first) == {"module.post_process"}
    assert set(last) == {"module.pre_process"}
    assert "True is not what stage 0 of plan.pp=2 has; build the module with" in first["module.post_process"]


# A function


def build_gpt(config: Any, groups: Any, host: Any) -> Any:
    """A function that builds one stage."""
    from megatron.core.models.gpt import GPTModel

    from mixle_megatron.models.decoder_spec import decoder_spec

    return GPTModel(
        config,
        decoder_spec(config, groups, host),
        vocab_size=VOCABULARY,
        max_sequence_length=POSITIONS,
        pre_process=groups.is_first_stage,
        post_process=groups.is_last_stage,
        pg_collection=groups.collection,
    )


def train_function(sizes: dict[str, int]) -> Curve:
    from mixle_megatron.models.callable_provider import CallableProvider

    fields = {
        "num_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "activation_func": "gelu",
        "init_method_std": 0.1,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }
    model = CallableProvider(build_gpt, fields, VOCABULARY, POSITIONS, seed=1234)
    with prepared(model, **sizes) as opened:
        return curve_of(opened)


@pytest.mark.parametrize("sizes", [{}, {"tp": 2}, {"pp": 2}], ids=str)
def test_function_builds_the_model_that_gpt_builds(run_on, references, sizes: dict[str, int]) -> None:
    for curve in run_on(ranks_of(sizes), train_function, sizes):
        assert_same_curve(curve, references["gpt2_untied"])


def test_bare_function_is_refused_with_what_takes_it() -> None:
    from mixle_megatron.errors import Unsupported

    with pytest.raises(Unsupported, match="give a function that builds a stage to CallableProvider"):
        prepared(build_gpt)


def test_sizes_that_the_plan_cannot_cut_are_refused_before_the_function_is_called() -> None:
    from mixle_megatron.errors import Refused
    from mixle_megatron.models.callable_provider import CallableProvider

    fields = {"num_layers": 3, "hidden_size": 32, "num_attention_heads": 4}
    with pytest.raises(Refused) as caught:
        prepared(CallableProvider(build_gpt, fields, 257, SEQUENCE, seed=None), tp=2, pp=2)
    assert {fault.field for fault in caught.value.faults} == {
        "plan.pp",
        "plan.world_size",
        "model.padded_vocab_size",
    }


# The provider of examples/hybrid_provider.py

PATTERNS = ["*-*-", "-**---"]


def hybrid(pattern: str) -> Any:
    from hybrid_provider import Hybrid

    return Hybrid(pattern, hidden_size=32, seq_length=SEQUENCE)


def train_hybrid(pattern: str, sizes: dict[str, int]) -> tuple[Curve, dict[str, torch.Tensor]]:
    """What it learns, and on one rank what it starts from."""
    with prepared(hybrid(pattern), **sizes) as opened:
        weights = {} if sizes else weights_of(opened)
        return curve_of(opened), weights


def hybrid_loss(
    pattern: str, inputs: torch.Tensor, targets: torch.Tensor, weights: dict[str, torch.Tensor]
) -> torch.Tensor:
    """The mean loss of the hybrid model, written out."""
    model = SimpleNamespace(
        hidden_size=32,
        num_attention_heads=4,
        num_query_groups=None,
        kv_channels=None,
        normalization="LayerNorm",
        layernorm_epsilon=1e-5,
        activation_func="gelu",
        gated_linear_unit=False,
        qk_layernorm=False,
        position_embedding_type="rope",
        rotary_percent=1.0,
        rotary_base=10_000,
    )
    x = embedding(inputs, weights["embedding.word_embeddings.weight"])
    for index, kind in enumerate(pattern):
        layer = f"decoder.layers.{index}"
        if kind == "*":
            normed = reference_gpt.layer_norm(x, weights, f"{layer}.input_layernorm", model)
            x = x + reference_gpt.attention(normed, weights, f"{layer}.self_attention", model)
        else:
            normed = reference_gpt.layer_norm(x, weights, f"{layer}.pre_mlp_layernorm", model)
            x = x + reference_gpt.feed_forward(normed, weights, f"{layer}.mlp", model)
    x = reference_gpt.layer_norm(x, weights, "decoder.final_norm", model)
    logits = linear(x, weights["output_layer.weight"])
    return cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)


@pytest.fixture(scope="module")
def hybrid_curves(run_on) -> dict[str, Curve]:
    """Each pattern's curve on one rank, which is that of the plain float64 model."""
    curves = {}
    for pattern in PATTERNS:
        ((curve, weights),) = run_on(1, train_hybrid, pattern, {})
        assert_same_curve(curve, reference_curve(weights, partial(hybrid_loss, pattern)))
        curves[pattern] = curve
    return curves


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("sizes", PLANS, ids=str)
def test_hybrid_model_has_the_curve_of_one_rank_under_each_plan(
    run_on, hybrid_curves, pattern: str, sizes: dict[str, int]
) -> None:
    for curve, _ in run_on(ranks_of(sizes), train_hybrid, pattern, sizes):
        assert_same_curve(curve, hybrid_curves[pattern])


def save_hybrid(folder: str, sizes: dict[str, int]) -> Curve:
    """Save after two updates, and go on."""
    with prepared(hybrid("*-*-"), **sizes) as opened:
        curve_of(opened, range(2))
        opened.save_checkpoint(folder)
        return curve_of(opened, range(2, 4))


def load_hybrid(folder: str, sizes: dict[str, int]) -> Curve:
    with prepared(hybrid("*-*-"), **sizes) as opened:
        opened.load_checkpoint(folder)
        return curve_of(opened, range(2, 4))


def test_hybrid_model_goes_on_under_another_plan(run_on, tmp_path: Path) -> None:
    folder = str(tmp_path / "saved")
    expected = run_on(2, save_hybrid, folder, {"tp": 2})
    actual = run_on(2, load_hybrid, folder, {"pp": 2})
    assert_same_curve(actual[0], expected[0])


def test_hybrid_pattern_with_other_layers_is_refused() -> None:
    assert set(refusal(hybrid("*-M"))) == {"pattern"}


def run_example(arguments: list[str]) -> list[float]:
    from hybrid_provider import main

    return main(arguments)


def test_example_learns_the_same_on_one_rank_and_on_two(run_on) -> None:
    (alone,) = run_on(1, run_example, ["--steps", "3"])
    assert alone[2] < alone[0]
    for losses in run_on(2, run_example, ["--steps", "3", "--dp_shard", "2"]):
        assert losses == pytest.approx(alone, rel=LOSS_TOLERANCE)


# The document


def blocks() -> list[str]:
    text = (ROOT / "docs" / "providers.md").read_text(encoding="utf-8")
    return re.findall(r"^```python\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


def test_the_document_names_every_method_of_a_provider() -> None:
    from mixle_megatron.models.provider import ModelProvider

    text = (ROOT / "docs" / "providers.md").read_text(encoding="utf-8")
    methods = {name for name in vars(ModelProvider) if not name.startswith("_")}
    assert {name for name in methods if f"`{name}(" in text} == methods


@pytest.mark.parametrize("source", blocks())
def test_python_of_the_document_runs(source: str) -> None:
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
