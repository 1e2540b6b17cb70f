"""Every command of the README runs, and the documents say what the code does."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mixle_megatron.cli import main as program
from mixle_megatron.host.redirections import REDIRECTIONS

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
RUNS = "run.dir={runs} checkpoint.every=0 evaluation.every=0 logging.progress=off"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)


def commands() -> list[str]:
    lines = "\n".join(blocks("sh")).splitlines()
    return [line.partition("  # ")[0].strip() for line in lines if line.strip()]


def shortened(command: str, runs: Path) -> str:
    """The command with what keeps it from the checkout's own runs, and short.

    ``make test`` runs one file of tests, since running them all is what runs this.
    """
    values = RUNS.format(runs=runs)
    if "fit.py" in command:
        (script,) = (source for source in blocks("python") if source.startswith("# fit.py"))
        (runs / "fit.py").write_text(script, encoding="utf-8")
        return command.replace("fit.py", str(runs / "fit.py"))
    extra = {
        "make demo": f' ARGS="{values} run.steps=2"',
        "make test": " TESTS=tests/test_joining.py",
    }
    if command in extra:
        return command + extra[command]
    return f"{command} {values}" if " pretrain " in command else command


@pytest.fixture(scope="module")
def environment() -> dict[str, str]:
    scripts = Path(sys.executable).parent
    return os.environ | {"PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}"}


@pytest.fixture(scope="module")
def first_run(tmp_path_factory: pytest.TempPathFactory, environment: dict[str, str]) -> Path:
    """The folder of a run with a checkpoint, as the README's first command leaves it."""
    runs = tmp_path_factory.mktemp("runs")
    command = f"mixle-megatron pretrain configs/tiny_gpt_cpu.yaml run.name=first run.steps=1 run.dir={runs}"
    words = shlex.split(f"{command} plan.dp_shard=1 evaluation.every=0 logging.progress=off")
    subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, check=True)
    return runs / "first"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory, environment: dict[str, str]) -> Path:
    """The prefix of the corpus that the README builds."""
    prefix = tmp_path_factory.mktemp("data") / "docs"
    (command,) = (each for each in commands() if " data build " in each)
    words = shlex.split(command.replace("runs/corpus", str(prefix)))
    subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, check=True)
    return prefix


@pytest.mark.parametrize("command", commands())
def test_a_command_of_the_readme_runs(
    command: str, tmp_path: Path, environment: dict[str, str], request: pytest.FixtureRequest
) -> None:
    if "runs/first" in command:
        command = command.replace("runs/first", str(request.getfixturevalue("first_run")))
    if " data " in command:
        build = " data build " in command
        prefix = tmp_path / "docs" if build else request.getfixturevalue("corpus")
        command = command.replace("runs/corpus", str(prefix))
    words = shlex.split(shortened(command, tmp_path))
    assert shutil.which(words[0], path=environment["PATH"])
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_readme_begins_with_the_two_commands() -> None:
    assert commands()[:2] == ["make demo", "make test"]


@pytest.mark.parametrize("source", [each for each in blocks("python") if not each.startswith("# fit.py")])
def test_the_python_of_the_readme_runs(source: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", source], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["1", "2", "3"]


def test_every_redirection_is_documented_with_its_reason() -> None:
    rows = [
        line
        for line in (ROOT / "docs" / "cpu.md").read_text(encoding="utf-8").splitlines()
        if line[:3] == "| `"
    ]
    documented = {
        (owner.strip(" `"), name, reason.strip())
        for _, owner, names, reason, _ in (row.split("|") for row in rows)
        for name in re.findall(r"`([^`]+)`", names)
    }
    assert documented == {(each.owner, each.name, each.reason) for each in REDIRECTIONS}


def test_exit_codes_are_documented() -> None:
    table = (ROOT / "docs" / "runs.md").read_text(encoding="utf-8")
    for code in (0, 1, program.EXIT_REFUSED, program.EXIT_STOPPED_EARLY):
        assert f"\n| {code} | " in table


def test_links_lead_somewhere() -> None:
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
