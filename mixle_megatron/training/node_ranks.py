"""Starting the ranks of one node among several.

torch's agents of several nodes would meet, restart and stop ranks together, and end with the codes that
they know. Here the scheduler does all that for whole nodes, and its rules go by exit codes; so this starts
processes, passes signals on to them, waits, and says how they ended.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Collection, Sequence
from time import monotonic

from mixle_megatron.training.launch import EXIT_FAILED, EXIT_REFUSED, how_it_ended, signals_passed_on
from mixle_megatron.training.node import Node

_STOPPED_EARLY = 3
_GRACE = 5.0
"""Seconds that ranks have to say what is wrong, once one of them has failed."""


def launch_node_ranks(node: Node, arguments: Sequence[str], *, threads_per_rank: int) -> int:
    """Run ``python -m mixle_megatron ARGUMENTS`` as each rank of the node, and wait for all of them.

    Returns:
        0 if every rank ended well; 3 if they were stopped and wrote a checkpoint; 2 if a rank refused its
        input; else 1.
    """
    command = [sys.executable, "-m", "mixle_megatron", *arguments]
    threads = {"OMP_NUM_THREADS": str(threads_per_rank)}
    with signals_passed_on():
        return _wait(
            [
                subprocess.Popen(command, env=os.environ | threads | node.rank_environment(local_rank))
                for local_rank in range(node.ranks)
            ],
            first_rank=node.index * node.ranks,
        )


def _wait(processes: Sequence[subprocess.Popen[bytes]], *, first_rank: int) -> int:
    """Wait for all ranks, or for the first that fails: the others, which would wait for it, are ended."""
    running = {process.pid: process for process in processes}
    while running:
        # A container's first process is the parent of every orphan in it, too.
        pid, status = os.wait()
        if pid not in running:
            continue
        ended = running.pop(pid)
        ended.returncode = os.waitstatus_to_exitcode(status)
        if ended.returncode not in (0, _STOPPED_EARLY):
            _end(running.values())
            return _report(first_rank + processes.index(ended), ended.returncode)
    return max(process.returncode for process in processes)


def _end(processes: Collection[subprocess.Popen[bytes]]) -> None:
    """Kill what has not ended by itself a moment later."""
    until = monotonic() + _GRACE
    for process in processes:
        try:
            process.wait(max(0.0, until - monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _report(rank: int, code: int) -> int:
    if code == EXIT_REFUSED:
        return EXIT_REFUSED
    print(f"rank {rank} {how_it_ended(code)}; the other ranks of this node were stopped.", file=sys.stderr)
    return EXIT_FAILED
