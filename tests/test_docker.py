"""What the images install, on a stand-in of NVIDIA's: torch and the like are linked, the rest installed.

No container engine is needed: ``docker/install.sh`` is what a Dockerfile runs.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from tiny_run import SMALL

from mixle_megatron.config.load import check_config, load_config
from mixle_megatron.training.node import node_of

ROOT = Path(__file__).parent.parent
DOCKER = ROOT / "docker"
BASE = ("torch", "tensorboard", "scipy")
"""What NVIDIA's image has, with all that it requires; it is gigabytes, and linked."""
TORCH = "2.10.0a0+b4e4ee81d3.nv25.12"
"""A version as NVIDIA gives one: a pre-release of a build that no registry has."""


def with_requirements(names: tuple[str, ...]) -> set[str]:
    """The distributions of those names here, and all that they require here, with CUDA's libraries."""
    here = {canonicalize_name(each.metadata["Name"]) for each in importlib.metadata.distributions()}
    found = {name for name in here if name.startswith(("nvidia-", "cuda-"))}
    waiting = [canonicalize_name(name) for name in names]
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        found.add(name)
        required = map(Requirement, importlib.metadata.requires(name) or [])
        waiting += [
            canonicalize_name(each.name)
            for each in required
            if each.marker is None or each.marker.evaluate({"extra": ""})
        ]
    return found - {"setuptools"}  # which the build brings


def paths_of(names: set[str]) -> set[Path]:
    """The folders and modules of the distributions in this environment."""
    paths = set()
    for name in names:
        here = importlib.metadata.distribution(name)
        tops = {file.parts[0] for file in here.files or []} - {"..", "__pycache__"}
        paths |= {Path(str(here.locate_file(top))) for top in tops if not top.endswith(".pth")}
    return paths


class Image:
    """An environment with what a base image has, and torch in its version."""

    def __init__(self, folder: Path, torch: str) -> None:
        self.home = folder / "home"
        self.home.mkdir(parents=True)
        venv.create(folder / "environment", with_pip=True)
        self.bin = folder / "environment" / "bin"
        (self.packages,) = folder.glob("environment/lib/python*/site-packages")
        for path in paths_of(with_requirements(BASE)):
            (self.packages / path.name).symlink_to(path)
        self.version(torch)

    def version(self, torch: str) -> None:
        """Let the image's torch be of another version."""
        (linked,) = self.packages.glob("torch-*.dist-info")
        copy = self.packages / f"torch-{torch.replace('-', '_')}.dist-info"
        shutil.copytree(linked, copy)
        metadata = (copy / "METADATA").read_text(encoding="utf-8")
        (copy / "METADATA").write_text(
            re.sub(r"^Version: .*$", f"Version: {torch}", metadata, flags=re.MULTILINE), encoding="utf-8"
        )
        linked.unlink()

    def run(self, *command: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run a command as the image's own user does: with nothing of this environment, in an empty home."""
        kept = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
        environment = kept | {
            "PATH": f"{self.bin}{os.pathsep}/usr/bin{os.pathsep}/bin",
            "HOME": str(self.home),
            "OMP_NUM_THREADS": "1",
        }
        return subprocess.run(
            [str(word) for word in command],
            cwd=self.home,
            env=environment | variables,
            capture_output=True,
            text=True,
            check=False,
        )


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Image:
    """NVIDIA's image after ``install.sh gpu``; without compiling, which nobody here would gain from."""
    image = Image(tmp_path_factory.mktemp("image"), TORCH)
    done = image.run(DOCKER / "install.sh", "gpu", PIP_NO_COMPILE="1")
    assert done.returncode == 0, done.stdout + done.stderr
    return image


def test_nothing_that_the_base_image_was_built_with_is_replaced(installed: Image) -> None:
    assert [path.name for path in installed.packages.glob("torch-*.dist-info")] == [
        f"torch-{TORCH}.dist-info"
    ]
    assert (installed.packages / "torch").is_symlink()
    assert (installed.packages / "mixle_megatron").is_dir()


def test_the_installed_program_diagnoses_and_trains(installed: Image, tmp_path: Path) -> None:
    """From the installed package alone: no file of the checkout is read but the config."""
    doctor = installed.run("mixle-megatron", "doctor", "--json")
    assert doctor.returncode == 0, doctor.stderr
    assert json.loads(doctor.stdout)
    config = shutil.copy(ROOT / "configs" / "tiny_gpt_cpu.yaml", installed.home)
    values = (*SMALL, "run.steps=5", "plan.dp_shard=1", "host.device=cpu")
    trained = installed.run("mixle-megatron", "pretrain", config, *values)
    assert trained.returncode == 0, trained.stdout + trained.stderr
    receipts = (installed.home / "runs" / "tiny-gpt" / "receipts.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in receipts] == [1, 2, 3, 4, 5]


def test_both_containers_of_the_compose_file_are_nodes_of_the_plan_that_they_run() -> None:
    composed = yaml.safe_load((DOCKER / "compose.yaml").read_text(encoding="utf-8"))
    nodes = []
    for service in composed["services"].values():
        nodes.append(node_of(service["environment"]))
        program, command, config, *values = service["command"]
        folders = dict(each.split(":")[1::-1] for each in service["volumes"])
        source = (DOCKER / folders[str(Path(config).parent)] / Path(config).name).resolve()
        loaded = load_config(source, values)
        assert (program, command) == ("mixle-megatron", "pretrain")
        assert loaded.config.run.dir in folders
        assert not check_config(loaded, world_size=nodes[-1].world_size)
    assert [node.index for node in nodes] == list(range(nodes[0].nodes))
    assert {node.address for node in nodes} == {next(iter(composed["services"]))}


@pytest.mark.parametrize(
    ("linter", "name"),
    [("hadolint", "Dockerfile"), ("hadolint", "Dockerfile.cpu"), ("shellcheck", "install.sh")],
)
def test_linters_find_nothing(linter: str, name: str) -> None:
    program = shutil.which(
        linter, path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    )
    if program is None:
        pytest.skip(f"{linter} is not installed")
    lint = subprocess.run([program, DOCKER / name], capture_output=True, text=True, check=False)
    assert (lint.returncode, lint.stdout) == (0, "")


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.cpu"])
def test_an_image_runs_as_its_own_user_and_reaps(name: str) -> None:
    """And its build sees what install.sh reads, which the ignore file lets through."""
    lines = (DOCKER / name).read_text(encoding="utf-8").splitlines()
    assert "USER ${USER_ID}" in lines
    assert 'ENTRYPOINT ["tini", "--"]' in lines
    seen = {line[1:] for line in (DOCKER / f"{name}.dockerignore").read_text().splitlines() if line[0] == "!"}
    read = {"constraints", "docker/install.sh", "pyproject.toml", "README.md", "LICENSE", "mixle_megatron"}
    assert seen == read
