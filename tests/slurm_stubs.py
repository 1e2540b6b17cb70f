"""Stand-ins for Slurm's programs, which start a job's ranks on this machine.

``sbatch`` reads the ``#SBATCH`` lines, sets what Slurm sets in a batch script, and runs the script, again if
it asked for that. ``srun`` starts the tasks of all nodes here, and ends as srun(1) does. The nodes are
loopback addresses. As a program this file is ``slurm_stubs.py PROGRAM ARGUMENTS``.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

OPTIONS = {
    *("cpus-per-task", "distribution", "kill-on-bad-exit", "wait", "output", "open-mode"),
    *("container-image", "container-mounts", "container-workdir", "no-container-mount-home"),
}
"""Options of srun and of pyxis that a script may use."""


def install(folder: Path, **environment: str) -> dict[str, str]:
    """Put the programs into a folder, and give the environment in which a script finds them.

    ``STUB_JOB_ID`` is the job's number. ``STUB_EXIT`` names exit codes of srun, one a start of the job, in
    place of starting ranks; ``STUB_STOP_AT`` is a text of the first rank's output at which all ranks are told
    to stop, as before a time limit; ``STUB_STARTS`` is how often the job is started at most.
    """
    programs = folder / "slurm"
    programs.mkdir()
    for name in ("sbatch", "srun", "scontrol"):
        program = programs / name
        program.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{__file__}" {name} "$@"\n')
        program.chmod(0o755)
    mine = Path(sys.executable).parent
    of_a_rank = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    known = {key: value for key, value in os.environ.items() if key not in of_a_rank}
    path = os.pathsep.join([str(programs), str(mine), os.environ["PATH"]])
    return known | {"PATH": path, "STUB_STATE": str(programs / "state.json")} | environment


def state() -> dict[str, list]:
    """What the programs were asked for so far, by their names."""
    path = Path(os.environ["STUB_STATE"])
    return json.loads(path.read_text()) if path.exists() else {"starts": [], "requeued": [], "signals": []}


def note(key: str, value: object) -> None:
    """Add to what the programs were asked for."""
    values = state()
    values[key].append(value)
    Path(os.environ["STUB_STATE"]).write_text(json.dumps(values))


def directives(script: Path) -> dict[str, str]:
    """The options that a script's ``#SBATCH`` lines state."""
    lines = [line for line in script.read_text().splitlines() if line.startswith("#SBATCH --")]
    return dict(line.removeprefix("#SBATCH --").partition("=")[::2] for line in lines)


def sbatch(script: str) -> int:
    """Run the script as slurmd does, and again for as long as it is queued again."""
    stated = directives(Path(script))
    number = os.environ["STUB_JOB_ID"]
    hosts = ",".join(f"127.0.0.{node + 1}" for node in range(int(stated["nodes"])))
    job = {
        "SLURM_JOB_ID": number,
        "SLURM_JOB_NAME": stated["job-name"],
        "SLURM_JOB_NODELIST": hosts,
        "SLURM_JOB_NUM_NODES": stated["nodes"],
        "SLURM_NTASKS_PER_NODE": stated["ntasks-per-node"],
        "SLURM_CPUS_PER_TASK": stated["cpus-per-task"],
    }
    note("signals", stated["signal"])
    while True:
        restarts = len(state()["starts"])
        counted = {"SLURM_RESTART_COUNT": str(restarts)} if restarts else {}
        with open(stated["output"].replace("%x", stated["job-name"]).replace("%j", number), "a") as log:
            done = subprocess.run(
                ["bash", script], env=os.environ | job | counted, stdout=log, stderr=subprocess.STDOUT
            )
        again = len(state()["requeued"]) > restarts
        if not again or restarts + 1 >= int(os.environ.get("STUB_STARTS", "9")):
            return done.returncode


def srun(*arguments: str) -> int:
    """Start every task of the job's nodes here, and give the highest exit code."""
    options, command = {}, list(arguments)
    while command[0].startswith("--"):
        name, _, value = command.pop(0).removeprefix("--").partition("=")
        assert name in OPTIONS, f"srun has no --{name}"
        options[name] = value
    note("starts", options)
    if "STUB_EXIT" in os.environ:
        return int(os.environ["STUB_EXIT"].split(",")[len(state()["starts"]) - 1])
    hosts = os.environ["SLURM_JOB_NODELIST"].split(",")
    each = int(os.environ["SLURM_NTASKS_PER_NODE"])
    tasks = [
        subprocess.Popen(
            command,
            env=os.environ | _task(hosts, each, rank),
            stdout=subprocess.PIPE if rank == 0 else _log(options, hosts, rank // each),
            stderr=subprocess.STDOUT,
        )
        for rank in range(len(hosts) * each)
    ]
    stop_at = os.environ.get("STUB_STOP_AT")
    with _log(options, hosts, 0) as log:
        for line in tasks[0].stdout:
            log.write(line)
            log.flush()
            if stop_at and stop_at.encode() in line:
                stop_at = None
                for task in tasks:
                    task.send_signal(signal.SIGTERM)
    codes = [task.wait() for task in tasks]
    return max(code if code >= 0 else 128 - code for code in codes)


def _task(hosts: list[str], each: int, rank: int) -> dict[str, str]:
    return {
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank % each),
        "SLURM_NODEID": str(rank // each),
        "SLURM_STEP_NUM_TASKS": str(len(hosts) * each),
        "SLURM_STEP_NODELIST": ",".join(hosts),
    }


def _log(options: dict[str, str], hosts: list[str], node: int):
    """The file of a node's output."""
    name = options["output"].replace("%n", str(node)).replace("%N", hosts[node])
    return open(name, "ab" if options["open-mode"] == "append" else "wb")


def scontrol(what: str, *arguments: str) -> int:
    """``show hostnames LIST`` and ``requeue JOB``."""
    if what == "requeue":
        note("requeued", arguments[0])
    else:
        assert (what, arguments[0]) == ("show", "hostnames")
        print("\n".join(arguments[1].split(",")))
    return 0


if __name__ == "__main__":
    sys.exit({"sbatch": sbatch, "srun": srun, "scontrol": scontrol}[sys.argv[1]](*sys.argv[2:]))
