"""CPU stand-ins for the parts of ``torch.cuda`` that Megatron-Core calls.

A CPU runs what it is given at once and in order, so a stream has nothing to order and an event
has always happened.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

CPU = torch.device("cpu")


class Event:
    """``torch.cuda.Event`` where all work before it is already done."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        pass

    def record(self, stream: Any = None) -> None:
        """Nothing is pending."""

    def wait(self, stream: Any = None) -> None:
        """Nothing is pending."""

    def synchronize(self) -> None:
        """Nothing is pending."""

    def query(self) -> bool:
        """Whether the event has happened: always."""
        return True


class Stream:
    """``torch.cuda.Stream`` on a device that has one queue."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        self.device = CPU
        self.device_type = 0
        self.device_index = 0
        self.stream_id = 0

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_error: Any) -> None:
        return None

    def wait_stream(self, stream: Any) -> None:
        """Nothing is pending."""

    def wait_event(self, event: Any) -> None:
        """Nothing is pending."""

    def record_event(self, event: Event | None = None) -> Event:
        """An event that has happened; Megatron waits for the one that is returned."""
        return event if event is not None else Event()

    def synchronize(self) -> None:
        """Nothing is pending."""

    def query(self) -> bool:
        """Whether all work of the stream is done: always."""
        return True

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """The least and the greatest priority: there is one."""
        return (0, 0)


_STREAM = Stream()


def current_stream(device: Any = None) -> Stream:
    """The only stream."""
    return _STREAM


def stream_context(stream: Any) -> Stream:
    """``with torch.cuda.stream(s):`` runs its body in place; Megatron enters one context repeatedly."""
    return _STREAM


def current_device() -> torch.device:
    """A device, where CUDA gives an index: every factory call and ``.to`` takes either."""
    return CPU


def no_effect(*_args: Any, **_kwargs: Any) -> None:
    """A call that has nothing to do on a CPU (synchronize, empty_cache, range_push, ...)."""


def one_device() -> int:
    """A rank without CUDA computes on one device."""
    return 1


def get_rng_state(device: Any = None, clone: bool = False, graph_safe: bool = False) -> torch.Tensor:
    """State of the CPU generator, which draws what the CUDA generator would (dropout)."""
    return torch.get_rng_state()


def set_rng_state(new_state: torch.Tensor, device: Any = None, graph_safe: bool = False) -> None:
    """Set the CPU generator's state."""
    torch.set_rng_state(new_state)


def manual_seed(seed: int) -> None:
    """Seed the CPU generator."""
    torch.random.default_generator.manual_seed(seed)


def is_cuda_device(device: Any) -> bool:
    """Whether a ``device`` argument names CUDA: a string, an index or a torch.device."""
    if isinstance(device, str):
        return device.startswith("cuda")
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, int) and not isinstance(device, bool)


def factory_on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A tensor factory that makes on the CPU what it is asked to make on CUDA, and pins nothing."""

    @functools.wraps(factory)
    def on_cpu(*args: Any, **kwargs: Any) -> torch.Tensor:
        if "device" in kwargs and is_cuda_device(kwargs["device"]):
            kwargs["device"] = CPU
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return factory(*args, **kwargs)

    return on_cpu


def to_on_cpu(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """``Tensor.to`` that stays on the CPU where it is asked to move to CUDA."""

    @functools.wraps(original)
    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args and not isinstance(args[0], torch.Tensor) and is_cuda_device(args[0]):
            args = (CPU, *args[1:])
        if "device" in kwargs and is_cuda_device(kwargs["device"]):
            kwargs["device"] = CPU
        return original(self, *args, **kwargs)

    return to


def itself(self: torch.Tensor, *_args: Any, **_kwargs: Any) -> torch.Tensor:
    """``Tensor.cuda`` and ``Tensor.pin_memory``: the tensor is where it is computed with."""
    return self


def type_named_as_cuda(original: Callable[..., Any]) -> Callable[..., Any]:
    """``Tensor.type()`` with the name that Megatron's optimizers compare with."""

    @functools.wraps(original)
    def type_name(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is not None:
            return original(self, dtype, *args, **kwargs)
        name = original(self)
        return name.replace("torch.", "torch.cuda.", 1) if self.device.type == "cpu" else name

    return type_name


def numbers_on_cpu(original: Callable[..., Any]) -> Callable[..., Any]:
    """``maybe_move_tensor_to_cpu`` that makes numpy of a tensor which is on the CPU already too."""

    @functools.wraps(original)
    def move(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        if as_numpy and torch.is_tensor(tensor) and not tensor.is_cuda:
            return tensor.numpy()
        return original(tensor, as_numpy=as_numpy, record_stream=record_stream)

    return move


def not_compiled(original: Callable[..., Any]) -> Callable[..., Any]:
    """The function that torch.compile was given."""
    return getattr(original, "_torchdynamo_orig_callable", original)


class MissingLayer:
    """A layer of Transformer Engine where there is none: nothing is an instance of it."""


def class_or_nothing_of_it(original: Any) -> type:
    """The class, or one without instances in place of what is none."""
    return original if isinstance(original, type) else MissingLayer


def unchanged(original: Any) -> Any:
    """What is there, or None under a name that was not."""
    return original
