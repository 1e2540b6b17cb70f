"""Counts the memory that autograd keeps between forward and backward passes, on real ranks."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks


class KeptStorages:
    """Storages that something keeps for a backward pass, each counted once while anything keeps it.

    Attributes:
        bytes: of all that are kept now.
        most: the most that they were.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        """Begin with nothing; parameters and buffers of ``module`` are never counted."""
        own = [*module.parameters(), *module.buffers()]
        self._own = {tensor.untyped_storage().data_ptr() for tensor in own}
        self._keepers: Counter[int] = Counter()
        self.bytes = self.most = 0

    def keep(self, tensor: torch.Tensor) -> int:
        """Count the tensor's storage once more; return by what :meth:`let_go` knows it."""
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        self._keepers[address] += 1
        if self._keepers[address] == 1 and address not in self._own:
            self.bytes += storage.nbytes()
            self.most = max(self.most, self.bytes)
        return address

    def let_go(self, address: int, size: int) -> None:
        """Take back one :meth:`keep` of a storage of ``size`` bytes."""
        self._keepers[address] -= 1
        if self._keepers[address] == 0 and address not in self._own:
            self.bytes -= size

    @contextmanager
    def counting(self, chunks: tuple[torch.nn.Module, ...]) -> Iterator[None]:
        """Count what autograd saves inside, and what chunks of a pipeline's stage give to the next one."""
        hooks = [chunk.register_forward_hook(self._keep_output) for chunk in chunks]
        with saved_tensors_hooks(lambda tensor: _Saved(self, tensor), lambda saved: saved.tensor):
            yield
        for hook in hooks:
            hook.remove()

    def _keep_output(self, _module: torch.nn.Module, _inputs: Any, output: torch.Tensor) -> None:
        if output.ndim == 3:  # hidden states, and not the losses of the last stage
            address, size = self.keep(output), output.untyped_storage().nbytes()
            weakref.finalize(output, self.let_go, address, size)


class _Saved:
    """A tensor that autograd saved, counted for as long as autograd holds it."""

    def __init__(self, storages: KeptStorages, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        address, size = storages.keep(tensor), tensor.untyped_storage().nbytes()
        weakref.finalize(self, storages.let_go, address, size)


def most_kept(opened: Any, rows: int, sequence: int, vocabulary: int) -> int:
    """The most bytes that a session keeps at once in one update on random tokens."""
    storages = KeptStorages(opened.module)
    generator = torch.Generator().manual_seed(7 + opened.data_parallel_rank)
    tokens = torch.randint(0, vocabulary, (rows, sequence), generator=generator)
    with storages.counting(opened.stage.chunks):
        opened.train_batch(tokens, tokens)
    assert storages.bytes == 0, "all of it is let go"
    return storages.most
