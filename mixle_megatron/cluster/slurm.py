"""A Slurm batch script: one task a rank, started by ``srun``, and queued again when it was stopped.

The behaviour of Slurm that this relies on is that of its manual pages ``sbatch(1)`` and ``srun(1)``:
``--signal`` without ``B:`` signals the steps and not the batch shell; ``srun`` ends with the highest exit
code of its tasks; ``--cpus-per-task`` is not handed on from ``sbatch`` to ``srun`` (since 22.05). The
options for containers are those of NVIDIA's pyxis.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import PurePosixPath

from mixle_megatron.cluster.job import STOPPED_EARLY, Job
from mixle_megatron.cluster.names import slurm_seconds, slurm_word_faults
from mixle_megatron.errors import Fault, refuse_if_any
from mixle_megatron.training.joining import FIRST_PORT, PORTS

LEFT_BEHIND = 300
"""Seconds that a rank may outlive the first one that has ended."""


@dataclass(frozen=True)
class SlurmOptions:
    """What of a batch script is not the run's.

    Attributes:
        name: of the job; None: run.name.
        partition: of the cluster, or several with commas.
        account: that the time is charged to.
        time: limit, in one of Slurm's forms; None: the partition's.
        cpus_per_task: cores of each rank.
        signal: seconds before the time limit at which the ranks are told to stop.
        container_image: for pyxis; None: the environment that the job is submitted from.
        container_mounts: ``SOURCE:TARGET[:FLAGS]`` with commas, beside the working folder and run.dir.
        setup: lines of shell that are run before the ranks are started.
    """

    name: str | None = None
    partition: str | None = None
    account: str | None = None
    time: str | None = None
    cpus_per_task: int = 4
    signal: int = 300
    container_image: str | None = None
    container_mounts: str | None = None
    setup: tuple[str, ...] = ()

    def job_name(self, job: Job) -> str:
        """The job's name."""
        return job.config.run.name if self.name is None else self.name


def sbatch_script(job: Job, options: SlurmOptions) -> str:
    """The script, for ``sbatch``.

    Raises:
        Refused: an option that Slurm would not take, or that contradicts another one.
    """
    refuse_if_any(slurm_faults(job, options))
    parts = (
        _directives(job, options),
        _folder(job),
        _rendezvous(),
        _environment(job),
        *([_setup(options.setup)] if options.setup else []),
        _start(job, options),
        _end(),
    )
    return "\n".join(parts)


def slurm_faults(job: Job, options: SlurmOptions) -> list[Fault]:
    """Everything that is wrong with the options."""
    faults = [
        *slurm_word_faults("--job-name", options.job_name(job)),
        *slurm_word_faults("--partition", options.partition),
        *slurm_word_faults("--account", options.account),
        *_time_faults(options),
    ]
    return faults + (_container_faults(job, options) if options.container_image else _mount_faults(options))


def _time_faults(options: SlurmOptions) -> list[Fault]:
    if options.time is None:
        return []
    seconds = slurm_seconds(options.time)
    if seconds is None:
        forms = "MINUTES, HOURS:MINUTES:SECONDS or DAYS-HOURS:MINUTES:SECONDS"
        return [Fault("--time", options.time, "is no time limit of Slurm's", f"write it as {forms}")]
    least = options.signal + 60
    if seconds > least:
        return []
    rule = f"is {seconds} s, and --signal={options.signal} may come up to 60 s early, before any training"
    return [Fault("--time", options.time, rule, f"use more than {least} s, or a smaller --signal")]


def _mount_faults(options: SlurmOptions) -> list[Fault]:
    if options.container_mounts is None:
        return []
    return [Fault("--container-mounts", options.container_mounts, "needs --container-image")]


def _container_faults(job: Job, options: SlurmOptions) -> list[Fault]:
    faults = []
    for mount in _stated_mounts(options):
        if not all(mount.split(":")) or len(mount.split(":")) > 3:
            rule = "is not SOURCE:TARGET or SOURCE:TARGET:FLAGS"
            faults.append(Fault("--container-mounts", mount, rule, "write it like /data:/data:ro"))
    path = job.config.run.dir
    if path.startswith("~") or ".." in PurePosixPath(path).parts:
        rule = "leads out of the working folder, which is what the container sees"
        faults.append(Fault("run.dir", path, rule, "use an absolute path, which is mounted"))
    return faults


def slurm_warnings(job: Job, options: SlurmOptions) -> list[Fault]:
    """Paths that the run states and its container will not see."""
    if options.container_image is None:
        return []
    seen = [*_targets(options), job.config.run.dir]
    return [
        Fault("--container-mounts", options.container_mounts, f"do not hold {path}, which the config states")
        for path in job.outside_paths
        if not _lies_in(path, seen)
    ]


def _stated_mounts(options: SlurmOptions) -> list[str]:
    return options.container_mounts.split(",") if options.container_mounts else []


def _targets(options: SlurmOptions) -> list[str]:
    """Where in the container the stated mounts lie; a mount of one word lies where its source does."""
    return [(mount.split(":") * 2)[1] for mount in _stated_mounts(options)]


def _lies_in(path: str, folders: Iterable[str]) -> bool:
    return any(PurePosixPath(path).is_relative_to(folder) for folder in folders)


def _mounted_run_dir(job: Job, options: SlurmOptions) -> str | None:
    """The run.dir that is mounted where it is; None where the working folder or a stated mount holds it."""
    path = job.config.run.dir
    return path if path.startswith("/") and not _lies_in(path, _targets(options)) else None


def _directives(job: Job, options: SlurmOptions) -> str:
    values = {
        "job-name": options.job_name(job),
        "partition": options.partition,
        "account": options.account,
        "time": options.time,
        "nodes": job.nodes,
        "ntasks-per-node": job.ranks_per_node,
        "gpus-per-node": job.ranks_per_node if job.uses_gpus else None,
        "cpus-per-task": options.cpus_per_task,
        "output": "%x-%j.log",
        "open-mode": "append",
    }
    lines = "".join(f"#SBATCH --{name}={value}\n" for name, value in values.items() if value is not None)
    return f"""\
#!/usr/bin/env bash
# {job.title}.
# Submit it with sbatch, from the folder that relative paths of the config start from.
{lines}# Slurm may queue the job again: when a node fails, and when this script asks for it.
#SBATCH --requeue
# The ranks, and not this script, are told to stop before the time limit: they write a checkpoint.
#SBATCH --signal=TERM@{options.signal}
set -euo pipefail
: "${{SLURM_JOB_ID:?submit this file with sbatch}}"
"""


def _folder(job: Job) -> str:
    return f"""\
# This job's folder, which all nodes have to see: the config as it was printed, and one log a node.
folder="$PWD/jobs/$SLURM_JOB_NAME-$SLURM_JOB_ID"
mkdir -p "$folder"
cat >"$folder/config.yaml" <<'CONFIG'
{job.config_text}CONFIG
"""


def _rendezvous() -> str:
    return f"""\
# The ranks meet at the first host, on a port that follows from the job, below those that Linux hands out.
hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
MASTER_ADDR=${{hosts%%$'\\n'*}}
MASTER_PORT=$(({FIRST_PORT} + SLURM_JOB_ID % {PORTS}))
export MASTER_ADDR MASTER_PORT
"""


def _environment(job: Job) -> str:
    lines = """\
# Without it every rank starts as many threads as its node has cores.
export OMP_NUM_THREADS="$SLURM_CPUS_PER_TASK"
"""
    if job.wants_one_connection:
        lines += """\
# Kernels start in the order of their launch, so that communication overlaps computation (before Blackwell).
export CUDA_DEVICE_MAX_CONNECTIONS=1
"""
    return lines


def _setup(setup: Iterable[str]) -> str:
    lines = "\n".join(setup)
    return f"""\
# Modules and environments read variables that nobody has set.
set +u
{lines}
set -u
"""


def _start(job: Job, options: SlurmOptions) -> str:
    mounted = _mounted_run_dir(job, options) if options.container_image else None
    made = f"mkdir -p {shlex.quote(mounted)}\n" if mounted else ""
    arguments = (
        '--cpus-per-task="$SLURM_CPUS_PER_TASK"',
        "--distribution=block",
        f"--kill-on-bad-exit=0 --wait={LEFT_BEHIND}",
        '--output="$folder/%n-%N.log" --open-mode=append',
        *(_container(mounted, options) if options.container_image else ()),
        'mixle-megatron pretrain "$folder/config.yaml" || code=$?',
    )
    command = " \\\n  ".join(arguments)
    return f"""\
# Consecutive ranks share a node (block). A rank that ends with {STOPPED_EARLY} must not take down those that
# still write (kill-on-bad-exit); what is left {LEFT_BEHIND} s after the first end waits for one that is lost.
# srun ends with the highest exit code of its ranks.
{made}code=0
srun {command}
"""


def _container(mounted: str | None, options: SlurmOptions) -> tuple[str, ...]:
    own = [f"{mounted}:{mounted}"] if mounted else []
    mounts = ",".join([*own, *_stated_mounts(options)])
    return (
        f"--container-image={shlex.quote(options.container_image or '')}",
        f'--container-mounts="$PWD:$PWD"{"," + shlex.quote(mounts) if mounts else ""}',
        '--container-workdir="$PWD"',
        "--no-container-mount-home",
    )


def _end() -> str:
    return f"""\
# {STOPPED_EARLY}: the ranks were stopped and wrote a checkpoint. Queue the job again, to go on from it.
if [[ $code -eq {STOPPED_EARLY} ]]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""
