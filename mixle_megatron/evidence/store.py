"""Where evidence is kept, and whether what is kept there counts on this host. No torch."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mixle_megatron.capability.facts import HostFacts
from mixle_megatron.capability.gather import facts_of_this_host
from mixle_megatron.checkpoint.durable import write_text
from mixle_megatron.errors import Fault, refuse_if_any
from mixle_megatron.evidence.origin import origin_of
from mixle_megatron.evidence.record import SCHEMA_VERSION, Evidence

VERIFY = "mixle-megatron verify"

STATUSES = {
    "none": "there is no evidence",
    "used": "it is of these versions and this machine",
    "other": "it is of other versions or another machine, and not used",
    "damaged": "it cannot be read, and is not used",
}
"""How evidence can stand on a host."""


@dataclass(frozen=True)
class Kept:
    """What is kept as evidence, and how it stands on a host.

    Attributes:
        path: the file.
        status: a key of :data:`STATUSES`.
        message: the status in words, with what differs.
        evidence: what is kept, where it is of this host's versions and machine; else None.
    """

    path: Path
    status: str
    message: str
    evidence: Evidence | None = None

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for ``doctor --json``."""
        claims = self.evidence.claims if self.evidence else ()
        return {
            "path": str(self.path),
            "status": self.status,
            "message": self.message,
            "made_at": self.evidence.made_at if self.evidence else None,
            "holds": [each.name for each in claims if each.holds],
            "does_not_hold": [
                {"name": each.name, "problem": each.problem} for each in claims if not each.holds
            ],
        }


def default_path(environment: Mapping[str, str] = os.environ) -> Path:
    """``evidence.json`` in the user's cache folder: ``XDG_CACHE_HOME``, or else ``~/.cache``."""
    cache = environment.get("XDG_CACHE_HOME")
    folder = Path(cache) if cache else Path("~/.cache").expanduser()
    return folder / "mixle-megatron" / "evidence.json"


def kept_evidence(facts: HostFacts | None = None, path: Path | None = None) -> Kept:
    """What is kept as evidence, judged for a host.

    Args:
        facts: those of the host; by default this one's.
        path: the file; by default the user's own.
    """
    path = default_path() if path is None else path
    if not path.is_file():
        return Kept(path, "none", f"there is none; {VERIFY} makes it")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        version = values["schema_version"]
        if version != SCHEMA_VERSION:
            return Kept(path, "other", _not_used(f"schema version {version}, not {SCHEMA_VERSION}"))
        evidence = Evidence.from_dict(values)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        message = f"{path} cannot be read ({type(error).__name__}: {error}); {VERIFY} makes it anew"
        return Kept(path, "damaged", message)
    here = origin_of(facts_of_this_host() if facts is None else facts)
    differences = evidence.origin.differences(here)
    if differences:
        return Kept(path, "other", _not_used("here is " + "; ".join(differences)))
    return Kept(path, "used", _in_words(evidence), evidence)


def keep(evidence: Evidence, path: Path) -> Evidence:
    """Write evidence, beside what is kept there of other claims and of the same origin.

    Returns:
        All that is kept now.
    """
    before = kept_evidence(path=path).evidence
    if before is not None and before.origin == evidence.origin:
        evidence = before.with_newer(evidence)
    write_text(path, json.dumps(evidence.as_dict(), indent=2, ensure_ascii=False) + "\n")
    return evidence


def writable(path: Path | None) -> Path:
    """The file that evidence is to be kept in, its folder made.

    Args:
        path: as it was asked for; None for the user's own.

    Raises:
        Refused: it cannot be written, which is to be known before minutes are spent.
    """
    path = default_path() if path is None else path.expanduser()
    refuse_if_any(_unwritable(path))
    return path


def _unwritable(path: Path) -> list[Fault]:
    if path.is_dir():
        return [Fault("--out", str(path), "is a folder", "name a file in it")]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return [Fault("--out", str(path), f"cannot be written: {error}")]
    if not os.access(path.parent, os.W_OK):
        return [Fault("--out", str(path), "is in a folder that cannot be written")]
    return []


def _not_used(why: str) -> str:
    return f"it is of another version or machine and not used: {why}; {VERIFY} makes it anew"


def _in_words(evidence: Evidence) -> str:
    named = [each for each in evidence.claims if each.kind != "combination" or not each.holds]
    holding = [each.name for each in named if each.holds]
    others = [each.name for each in named if not each.holds]
    said = f"of {evidence.made_at}, it shows {', '.join(holding) or 'nothing'}"
    return f"{said}; it does not show {', '.join(others)}" if others else said
