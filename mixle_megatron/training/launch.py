"""Starting the ranks of a plan on this host, through torch's elastic launcher."""

from __future__ import annotations

import dataclasses
import logging
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import psutil

from mixle_megatron.training.signals import STOPPING

EXIT_FAILED, EXIT_REFUSED = 1, 2


def launch_local_ranks(ranks: int, arguments: Sequence[str], *, threads_per_rank: int) -> int:
    """Run ``python -m mixle_megatron ARGUMENTS`` as that many ranks, and wait for all of them.

    Ctrl-C and SIGTERM are passed on to the ranks, which then end at a step boundary in their own
    time: torch's agent would kill them after 30 seconds, which may be less than a checkpoint takes.

    Returns:
        0 if every rank ended well, 2 if a rank refused its input, else 1.
    """
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    os.environ["OMP_NUM_THREADS"] = str(threads_per_rank)
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    config = LaunchConfig(**_known(LaunchConfig, _launch_config(ranks)))
    with signals_passed_on():
        try:
            elastic_launch(config, sys.executable)("-m", "mixle_megatron", *arguments)
            return 0
        except ChildFailedError as error:
            return _report(error)


@contextmanager
def signals_passed_on() -> Iterator[None]:
    """Hand Ctrl-C and SIGTERM on to this process's children, which end in their own time."""
    previous = {number: signal.signal(number, _pass_on) for number in STOPPING}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _launch_config(ranks: int) -> dict[str, Any]:
    return {
        "min_nodes": 1,
        "max_nodes": 1,
        "nproc_per_node": ranks,
        "run_id": f"mixle-megatron-{os.getpid()}",
        "rdzv_backend": "c10d",
        "rdzv_endpoint": "localhost:0",
        "local_addr": "localhost",
        "max_restarts": 0,
        "signals_to_handle": "SIGHUP,SIGQUIT",
    }


def _known(cls: type, values: dict[str, Any]) -> dict[str, Any]:
    """The fields that this torch's LaunchConfig has; older ones have no ``signals_to_handle``."""
    names = {field.name for field in dataclasses.fields(cls)}
    return {name: value for name, value in values.items() if name in names}


def _pass_on(number: int, _frame: FrameType | None) -> None:
    for child in psutil.Process().children():
        child.send_signal(number)


def _report(error: Any) -> int:
    """Say in one message which rank failed first and why; its own output is above."""
    rank, failure = error.get_first_failure()
    if failure.exitcode == EXIT_REFUSED:
        return EXIT_REFUSED
    cause = failure.message.strip().splitlines()
    print(f"rank {rank} {how_it_ended(failure.exitcode)}; the other ranks were stopped.", file=sys.stderr)
    if cause and failure.exitcode >= 0 and "To enable traceback" not in cause[-1]:
        print(f"  {cause[-1]}", file=sys.stderr)
    return EXIT_FAILED


def how_it_ended(exit_code: int) -> str:
    """A rank's exit code in words; a negative one is the signal that killed it."""
    if exit_code < 0:
        return f"was killed by {signal.Signals(-exit_code).name}"
    return f"ended with exit code {exit_code}"
