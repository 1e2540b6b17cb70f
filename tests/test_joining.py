"""Which rank a process is, from the environment that its launcher made."""

from __future__ import annotations

import pytest

from mixle_megatron.errors import Refused
from mixle_megatron.launch_environment import environment_faults
from mixle_megatron.training.joining import FIRST_PORT, PORTS, first_host, is_first, is_one_of_many, join
from mixle_megatron.training.node import Node

SRUN = {
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_JOB_ID": "123456",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}
GIVEN = {"MASTER_ADDR": "n1", "MASTER_PORT": "29501"}
"""What mpirun -x hands on."""

TRAINJOB = {
    "PET_NNODES": "2",
    "PET_NPROC_PER_NODE": "4",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "job-node-0-0.job",
    "PET_MASTER_PORT": "29400",
}
"""As kubeflow/trainer 2.3 sets them: pkg/runtime/framework/plugins/torch/torch.go."""

PYTORCHJOB = {
    "PYTHONUNBUFFERED": "1",
    "MASTER_PORT": "23456",
    "PET_MASTER_PORT": "23456",
    "MASTER_ADDR": "job-master-0",
    "PET_MASTER_ADDR": "job-master-0",
    "WORLD_SIZE": "8",
    "RANK": "1",
    "PET_NODE_RANK": "1",
    "PET_NPROC_PER_NODE": "4",
    "PET_NNODES": "2",
}
"""As kubeflow/training-operator 1.9 sets them, RANK by pods: pkg/controller.v1/pytorch/envvar.go."""

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


def joined(environment: dict[str, str]) -> dict[str, str]:
    """What of torch's rendezvous an environment holds after it has joined as one rank."""
    environment = dict(environment)
    assert join(environment) is None
    assert environment_faults(environment) == []
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    return {name: environment[name] for name in names if name in environment}


def test_ranks_of_open_mpi_on_several_hosts_meet_where_mpirun_says() -> None:
    expected = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", **GIVEN}
    assert joined(OPEN_MPI | GIVEN) == expected


@pytest.mark.parametrize("job", ["PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"])
def test_ranks_of_open_mpi_on_one_host_need_nothing_else(job: str) -> None:
    alone = OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "1", job: "prterun-n1-32720@1"}
    first = joined(alone | {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "0"})
    second = joined(alone)
    assert (first["RANK"], second["RANK"]) == ("0", "1")
    assert first["MASTER_ADDR"] == second["MASTER_ADDR"] == "localhost"
    assert first["MASTER_PORT"] == second["MASTER_PORT"]
    assert FIRST_PORT <= int(first["MASTER_PORT"]) < FIRST_PORT + PORTS
    assert joined(alone | {job: "prterun-n1-32721@1"})["MASTER_PORT"] != first["MASTER_PORT"]


def test_one_process_under_mpirun_is_no_rank() -> None:
    environment = {name: "0" for name in OPEN_MPI} | {"OMPI_COMM_WORLD_SIZE": "1"}
    environment["OMPI_COMM_WORLD_LOCAL_SIZE"] = "1"
    assert joined(environment) == {}


def test_mpirun_under_slurm_is_mpiruns() -> None:
    """Its daemons are started by srun, and hand on to the ranks what srun told them."""
    assert joined(SRUN | OPEN_MPI | GIVEN)["RANK"] == "5"


@pytest.mark.parametrize("missing", sorted(OPEN_MPI))
def test_a_half_set_mpirun_is_refused_by_name(missing: str) -> None:
    with pytest.raises(Refused, match=f"{missing} is not set, but OMPI_COMM_WORLD_"):
        join({name: value for name, value in (OPEN_MPI | GIVEN).items() if name != missing})


@pytest.mark.parametrize("missing", sorted(GIVEN))
def test_ranks_of_mpirun_that_do_not_know_where_to_meet_are_refused(missing: str) -> None:
    with pytest.raises(Refused, match=f"{missing} is not set, .*mpirun -x {missing}="):
        join(OPEN_MPI | {name: value for name, value in GIVEN.items() if name != missing})


@pytest.mark.parametrize("environment", [TRAINJOB, PYTORCHJOB], ids=["TrainJob", "PyTorchJob"])
def test_a_pod_of_several_ranks_starts_those_of_its_node(environment: dict[str, str]) -> None:
    environment = dict(environment)
    address, port = environment["PET_MASTER_ADDR"], int(environment["PET_MASTER_PORT"])
    node = join(environment)
    assert node == Node(index=1, nodes=2, ranks=4, address=address, port=port)
    assert not is_one_of_many(environment)
    assert not is_first(environment)
    assert environment["WORLD_SIZE"] == "8"
    ranks = [joined(environment | node.rank_environment(local_rank)) for local_rank in range(4)]
    assert [rank["RANK"] for rank in ranks] == ["4", "5", "6", "7"]
    assert [rank["LOCAL_RANK"] for rank in ranks] == ["0", "1", "2", "3"]
    assert {rank["MASTER_ADDR"] for rank in ranks} == {address}


@pytest.mark.parametrize("environment", [TRAINJOB, PYTORCHJOB], ids=["TrainJob", "PyTorchJob"])
def test_a_pod_of_one_rank_is_that_rank(environment: dict[str, str]) -> None:
    one = {"PET_NPROC_PER_NODE": "1"} | ({"WORLD_SIZE": "2"} if "WORLD_SIZE" in environment else {})
    rank = joined(environment | one)
    assert (rank["RANK"], rank["WORLD_SIZE"], rank["LOCAL_RANK"]) == ("1", "2", "0")


def test_what_has_one_meaning_is_completed() -> None:
    """Of a JobSet that states its nodes and its first pod, and of a single node."""
    jobset = {"PET_NNODES": "4", "PET_MASTER_ADDR": "a-node-0-0.a", "JOB_COMPLETION_INDEX": "3"}
    assert joined(jobset) == {
        **{"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "0"},
        **{"MASTER_ADDR": "a-node-0-0.a", "MASTER_PORT": "29500"},
    }
    node = join({"PET_NNODES": "1", "PET_NPROC_PER_NODE": "8"})
    assert node == Node(index=0, nodes=1, ranks=8, address="localhost", port=29500)


def test_an_indexed_job_of_one_rank_a_pod_is_joined_by_its_index() -> None:
    given = {"WORLD_SIZE": "4", "MASTER_ADDR": "a-node-0-0.a", "MASTER_PORT": "1234"}
    assert joined(given | {"JOB_COMPLETION_INDEX": "2"})["RANK"] == "2"
    assert joined({"JOB_COMPLETION_INDEX": "2"}) == {}


def test_workers_of_torchrun_in_a_pod_stay_as_they_are() -> None:
    worker = PYTORCHJOB | {"RANK": "6", "LOCAL_RANK": "2", "TORCHELASTIC_RUN_ID": "none"}
    environment = dict(worker)
    assert join(environment) is None
    assert environment == worker


@pytest.mark.parametrize("missing", ["PET_NNODES", "PET_NODE_RANK", "PET_MASTER_ADDR"])
def test_a_half_set_node_is_refused_by_name(missing: str) -> None:
    with pytest.raises(Refused, match=f"{missing} is not set, but other variables of a node"):
        join({name: value for name, value in TRAINJOB.items() if name != missing})


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"PET_NNODES": "1:4"}, "PET_NNODES=1:4 is no whole number; state one number of nodes"),
        ({"PET_NPROC_PER_NODE": "auto"}, "PET_NPROC_PER_NODE=auto is no whole number; .*numProcPerNode"),
        ({"PET_NODE_RANK": "2"}, "PET_NODE_RANK=2 is none of PET_NNODES=2 nodes"),
        ({"PET_NPROC_PER_NODE": "0"}, "PET_NPROC_PER_NODE=0 starts no rank"),
        ({"PET_MASTER_PORT": "http"}, "PET_MASTER_PORT=http is no whole number"),
    ],
)
def test_a_node_that_is_described_wrongly_is_refused(changed: dict[str, str], said: str) -> None:
    with pytest.raises(Refused, match=said):
        join(TRAINJOB | changed)


def test_the_first_of_a_job_speaks_for_it() -> None:
    speaks = ({}, {"RANK": "0"}, {"RANK": "0", "PET_NODE_RANK": "1"}, {"PET_NODE_RANK": "0"})
    assert all(map(is_first, speaks))
    assert not any(
        map(is_first, ({"RANK": "1"}, {"PET_NODE_RANK": "1"}, {"RANK": "2", "PET_NODE_RANK": "0"}))
    )
