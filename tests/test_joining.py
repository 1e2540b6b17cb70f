"""Which rank a process is, from the environment that its launcher made."""

from __future__ import annotations

import pytest

from mixle_megatron.errors import Refused
from mixle_megatron.launch_environment import environment_faults
from mixle_megatron.training.joining import first_host, is_one_of_many, join

SRUN = {
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_JOB_ID": "123456",
}
TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("n1", "n1"),
        ("a,b", "a"),
        ("gpu[07-09,12],login1", "gpu07"),
        ("r[3]c", "r3c"),
        ("x-y[001,004]", "x-y001"),
    ],
)
def test_the_first_host_of_a_node_list(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


def test_ranks_of_srun_get_the_environment_of_torchrun() -> None:
    environment = dict(SRUN)
    join(environment)
    assert is_one_of_many(environment)
    assert environment_faults(environment) == []
    assert {name: environment[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")} == {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "MASTER_ADDR": "gpu07",
    }
    assert 20_000 <= int(environment["MASTER_PORT"]) < 30_000


def test_ranks_of_torchrun_stay_as_they_are() -> None:
    environment = SRUN | TORCHRUN
    join(environment)
    assert environment == SRUN | TORCHRUN


@pytest.mark.parametrize("environment", [{}, {"SLURM_JOB_ID": "1", "SLURM_PROCID": "0", "SLURM_NTASKS": "8"}])
def test_a_shell_and_a_batch_script_are_no_ranks(environment: dict[str, str]) -> None:
    join(environment)
    assert not is_one_of_many(environment)


@pytest.mark.parametrize("missing", sorted(SRUN.keys() - {"SLURM_STEP_NUM_TASKS"}))
def test_a_half_set_srun_is_refused_by_name(missing: str) -> None:
    with pytest.raises(Refused, match=missing):
        join({name: value for name, value in SRUN.items() if name != missing})


@pytest.mark.parametrize("missing", sorted(TORCHRUN))
def test_a_half_set_torchrun_is_refused_by_name(missing: str) -> None:
    with pytest.raises(Refused, match=missing):
        join({name: value for name, value in TORCHRUN.items() if name != missing})


def test_a_rank_that_is_no_number_is_refused() -> None:
    with pytest.raises(Refused, match="RANK=two"):
        join(TORCHRUN | {"RANK": "two"})
