"""``scripts/setup``, its constraints files, the Makefile and ``.ci/run``, without any network."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
VERSIONS = ("3.12", "3.11")
RUNNING = "{}.{}".format(*sys.version_info)
CONSTRAINTS = {version: ROOT / "constraints" / f"python{version}.txt" for version in VERSIONS}


class Machine:
    """A copy of what set-up reads, on a machine whose PATH and home hold nothing but the given Pythons."""

    def __init__(self, folder: Path) -> None:
        self.checkout = folder / "checkout"
        self.bin = folder / "bin"
        self.home = folder / "home"
        for made in (self.checkout, self.bin, self.home):
            made.mkdir(parents=True)
        for name in ("pyproject.toml", "constraints", "scripts"):
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy2
            copy(ROOT / name, self.checkout / name)
        for tool in ("bash", "env", "dirname", "sort", "mkdir", "rm"):
            (self.bin / tool).symlink_to(shutil.which(tool))

    def put(self, path: Path, script: str) -> Path:
        """An executable shell script at ``path``."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!{self.bin}/bash\n{script}\n")
        path.chmod(0o755)
        return path

    def python(self, path: Path, version: str) -> Path:
        """A Python that answers set-up's question for its version, and nothing else."""
        return self.put(path, f'echo "{version} $0"')

    def pyenv_python(self, release: str) -> Path:
        """The same where pyenv puts the Python of a release such as 3.12.1."""
        version = release.rpartition(".")[0]
        return self.python(self.home / ".pyenv/versions" / release / "bin" / f"python{version}", version)

    def setup(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run ``scripts/setup``."""
        environment = {"PATH": str(self.bin), "HOME": str(self.home), **variables}
        command = [self.checkout / "scripts/setup", *arguments]
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=60, check=False
        )

    def which(self, **variables: str) -> str:
        """The interpreter that set-up would use."""
        done = self.setup("--which", **variables)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_3_12_is_preferred_wherever_it_lies(machine: Machine):
    machine.python(machine.bin / "python3.11", "3.11")
    newest = machine.pyenv_python("3.12.10")
    machine.pyenv_python("3.12.9")
    assert machine.which() == str(newest)
    on_path = machine.python(machine.bin / "python3.12", "3.12")
    assert machine.which() == str(on_path)


def test_a_shim_that_does_not_run_is_passed_over(machine: Machine):
    machine.put(machine.bin / "python3.12", "echo 'pyenv: python3.12: command not found' >&2; exit 127")
    real = machine.pyenv_python("3.12.1")
    assert machine.which() == str(real)


def test_pyenv_is_looked_for_in_pyenv_root_too(machine: Machine, tmp_path: Path):
    elsewhere = machine.python(tmp_path / "elsewhere/versions/3.12.3/bin/python3.12", "3.12")
    assert machine.which(PYENV_ROOT=str(tmp_path / "elsewhere")) == str(elsewhere)


def test_3_11_serves_where_there_is_no_3_12(machine: Machine):
    machine.python(machine.bin / "python3", "3.13")
    older = machine.python(machine.bin / "python3.11", "3.11")
    assert machine.which() == str(older)


def test_uv_is_asked_and_installs(machine: Machine):
    managed = machine.python(machine.home / "uv/python3.12", "3.12")
    managed.rename(managed.with_suffix(".notyet"))
    machine.put(
        machine.bin / "uv",
        f"""case "$*" in
  'python install 3.12') {shutil.which("mv")} {managed.with_suffix(".notyet")} {managed} ;;
  'python find --system 3.12') [[ -e {managed} ]] && echo {managed} ;;
  *) exit 2 ;;
esac""",
    )
    assert machine.setup("--dry-run").returncode == 1
    assert not managed.exists(), "--dry-run installs nothing"
    assert machine.which() == str(managed)


def test_without_a_python_it_refuses_and_says_what_would_do(machine: Machine):
    machine.python(machine.bin / "python3", "3.13")
    done = machine.setup()
    assert done.returncode == 1
    assert done.stdout == ""
    for word in ("3.12 3.11", "PATH", "pyenv", "uv", "PYTHON="):
        assert word in done.stderr
    assert not (machine.checkout / ".venv").exists()


@pytest.mark.parametrize("name", ["python3.11", "3.11"])
def test_python_chooses_by_version(machine: Machine, name: str):
    machine.python(machine.bin / "python3.12", "3.12")
    chosen = machine.pyenv_python("3.11.7")
    assert machine.which(PYTHON=name) == str(chosen)
    assert ".venv-3.11 with Python 3.11" in machine.setup("--dry-run", PYTHON=name).stderr


def test_python_chooses_by_path(machine: Machine, tmp_path: Path):
    mine = machine.python(tmp_path / "my own/python", "3.12")
    assert machine.which(PYTHON=str(mine)) == str(mine)
    assert ".venv-3.12 with Python 3.12" in machine.setup("--dry-run", PYTHON=str(mine)).stderr


@pytest.mark.parametrize(
    ("python", "message"),
    [
        ("python3.11", "found no Python 3.11"),
        ("python3.10", "supported are 3.12 3.11"),
        ("old", "is Python 3.9"),
        ("/nowhere/python", "does not run"),
    ],
)
@pytest.mark.parametrize("mode", ["--which", "--dry-run"])
def test_a_chosen_python_that_does_not_serve_is_refused_once(
    machine: Machine, python: str, message: str, mode: str
):
    machine.python(machine.bin / "python3.12", "3.12")
    machine.python(machine.bin / "old", "3.9")
    done = machine.setup(mode, PYTHON=python)
    assert done.returncode == 1
    assert message in done.stderr
    assert done.stderr.count("setup:") == 1


@pytest.fixture
def set_up(machine: Machine, tmp_path: Path) -> tuple[Machine, Path]:
    """A machine that is set up, by a Python that makes environments with a pip that only notes its calls."""
    calls = tmp_path / "pip calls"
    inner = f"""case "$*" in
  '-m pip '*) printf '%s\\n' "$*" >>'{calls}' ;;
  -) exec {sys.executable} - ;;
  *) echo "{RUNNING} $0" ;;
esac"""
    template = machine.put(tmp_path / "template", inner)
    machine.put(
        machine.bin / "python3",
        f"""if [[ $1 == -m ]]; then
  mkdir -p "$3/bin" && {shutil.which("cp")} '{template}' "$3/bin/python"
else
  echo "{RUNNING} $0"
fi""",
    )
    done = machine.setup()
    assert done.returncode == 0, done.stderr
    assert done.stdout == ".venv\n"
    return machine, calls


def test_packages_come_by_name_within_the_constraints(set_up: tuple[Machine, Path]):
    calls = set_up[1].read_text().splitlines()
    assert len(calls) == 2
    assert all(f"-c constraints/python{RUNNING}.txt" in call for call in calls)
    assert calls[-1].endswith("-e .[dev]")


def test_repeating_does_nothing(set_up: tuple[Machine, Path]):
    machine, calls = set_up
    before = calls.read_text()
    for path in machine.checkout.rglob("*"):
        os.utime(path)
    again = machine.setup()
    assert (again.returncode, again.stdout, again.stderr) == (0, ".venv\n", "")
    assert calls.read_text() == before
    assert "up to date" in machine.setup("--dry-run").stderr


@pytest.mark.parametrize("changed", ["pyproject.toml", f"constraints/python{RUNNING}.txt", "scripts/setup"])
def test_what_it_depends_on_sets_up_again(set_up: tuple[Machine, Path], changed: str):
    machine, calls = set_up
    path = machine.checkout / changed
    path.write_text(path.read_text() + "\n# changed\n")
    before = calls.read_text()
    assert "setting up .venv" in machine.setup("--dry-run").stderr
    assert calls.read_text() == before, "--dry-run installs nothing"
    assert machine.setup().returncode == 0
    assert calls.read_text() != before
    assert "up to date" in machine.setup("--dry-run").stderr


def test_a_moved_checkout_sets_up_again(set_up: tuple[Machine, Path]):
    machine, _calls = set_up
    machine.checkout = machine.checkout.rename(machine.checkout.with_name("moved"))
    assert "setting up .venv" in machine.setup("--dry-run").stderr


def test_a_failed_installation_leaves_no_stamp(set_up: tuple[Machine, Path]):
    machine, _calls = set_up
    pin = machine.checkout / f"constraints/python{RUNNING}.txt"
    pin.write_text("# changed\n")
    python = machine.checkout / ".venv/bin/python"
    python.write_text(python.read_text().replace("'-m pip '*) ", "'-m pip '*) exit 1; "))
    assert machine.setup().returncode != 0
    assert "setting up .venv" in machine.setup("--dry-run").stderr


@pytest.mark.parametrize("version", VERSIONS)
def test_constraints_are_names_and_versions_only(version: str):
    lines = CONSTRAINTS[version].read_text().splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    assert all(re.fullmatch(r"[a-z0-9-]+==[0-9][0-9a-z.]*", pin) for pin in pins)
    names = [pin.partition("==")[0] for pin in pins]
    assert names == sorted(set(names))
    assert not re.search(r"https?:|/\w+/", "\n".join(lines[1:]))


@pytest.mark.parametrize("version", VERSIONS)
def test_every_dependency_is_pinned(version: str):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wanted = project["project"]["dependencies"] + project["project"]["optional-dependencies"]["dev"]
    wanted += project["build-system"]["requires"]
    names = {re.match(r"[A-Za-z0-9_.-]+", requirement)[0].lower() for requirement in wanted}
    pinned = {line.partition("==")[0] for line in CONSTRAINTS[version].read_text().splitlines()}
    assert names <= pinned


def test_both_pythons_get_the_megatron_that_is_tested_on_them():
    pins = {version: CONSTRAINTS[version].read_text() for version in VERSIONS}
    assert "megatron-core==0.19.2\n" in pins["3.12"]
    assert "megatron-core==0.16.1\n" in pins["3.11"]


@pytest.mark.parametrize("script", [".ci/run", "scripts/setup"])
def test_scripts_parse_and_are_executable(script: str):
    subprocess.run(["bash", "-n", ROOT / script], check=True)
    assert os.access(ROOT / script, os.X_OK)


def test_make_lists_its_targets():
    listed = subprocess.run(["make"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for target in ("setup", "demo", "test", "lint", "clean"):
        assert f"make {target}" in listed
