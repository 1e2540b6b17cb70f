#!/usr/bin/env bash
# Installs this checkout into an image, or into any environment of Python 3.12 or 3.11.
#
#   docker/install.sh cpu      every package in the version of constraints/pythonX.Y.txt
#   docker/install.sh gpu      on an image of NVIDIA's: what it built itself stays as it is (see below)
#   docker/install.sh KIND --constraints    prints the versions that KIND would be held to, and installs nothing
#
# PYTHON is the interpreter, by name or by its whole path (python3). pip's own settings, such as
# PIP_CONFIG_FILE and PIP_NO_CACHE_DIR, hold as ever.
#
# An image of NVIDIA's has a PyTorch, Transformer Engine, apex and CUDA libraries that were built for each
# other. pip would put others in their place, or beside them, to satisfy somebody's version. So each of them is
# constrained to the version that is there, and when pip is done they must be exactly those that were
# there. What else the image has is replaced only where this package needs another version; what it has
# not comes in the version that this package is tested with.
set -euo pipefail
shopt -s inherit_errexit
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly PYTHON=${PYTHON:-python3}
work=$(mktemp -d)
readonly work
trap 'rm -rf "$work"' EXIT

die() {
  printf 'install: %s\n' "$*" >&2
  exit 1
}

# kept_packages: "name==version" of what an image of NVIDIA's must keep, of those that are there
kept_packages() {
  "$PYTHON" - <<'END'
import re
from importlib.metadata import distributions

kept = re.compile(r"torch|torchvision|torchaudio|torchao|(pytorch-)?triton|apex|transformer-engine.*|flash-attn.*|(nvidia|cuda|cudnn|nvshmem)-.*")
found = {re.sub(r"[-_.]+", "-", each.metadata["Name"]).lower(): each.version for each in distributions()}
print("\n".join(f"{name}=={version}" for name, version in sorted(found.items()) if kept.fullmatch(name)))
END
}

# tested_where_absent: of the tested versions, those of packages that the image neither has nor constrains
tested_where_absent() {
  "$PYTHON" - "constraints/python$1.txt" "${PIP_CONSTRAINT:-}" <<'END'
import re, sys
from importlib.metadata import distributions
from pathlib import Path

def normal(name):
    return re.sub(r"[-_.]+", "-", name).lower()

def constrained(path):
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    return {normal(match[0]): line for line in lines if (match := re.match(r"[A-Za-z0-9][\w.-]*", line.strip()))}

tested, images = sys.argv[1], sys.argv[2].split()
known = {normal(each.metadata["Name"]) for each in distributions()}
known = known.union(*(constrained(path) for path in images))
print("\n".join(line for name, line in constrained(tested).items() if name not in known))
END
}

# constraints KIND X.Y
constraints() {
  case $1 in
    cpu) cat "constraints/python$2.txt" ;;
    gpu)
      kept_packages
      tested_where_absent "$2"
      ;;
    *) die "KIND is cpu or gpu, not '$1'" ;;
  esac
}

# copy_source: what the package is built from, where a build may write
copy_source() {
  mkdir "$work/source"
  cp -R pyproject.toml README.md LICENSE mixle_megatron "$work/source"
}

main() {
  local kind=${1:-} version
  version=$("$PYTHON" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
  [[ -f constraints/python$version.txt ]] || die "$PYTHON is Python $version; supported are 3.12 and 3.11"
  constraints "$kind" "$version" >"$work/constraints.txt"
  if [[ ${2:-} == --constraints ]]; then
    cat "$work/constraints.txt"
    return
  fi
  kept_packages >"$work/before.txt"
  copy_source
  local pip=("$PYTHON" -m pip install --disable-pip-version-check -c "$work/constraints.txt")
  # The build takes its setuptools from the environment: pip's -c does not reach an isolated build.
  "${pip[@]}" 'setuptools>=68'
  "${pip[@]}" --no-build-isolation "$work/source[tensorboard]"
  if [[ $kind == gpu ]]; then
    kept_packages | diff "$work/before.txt" - >&2 || die "pip changed what the image must keep: see above"
  fi
}

main "$@"
