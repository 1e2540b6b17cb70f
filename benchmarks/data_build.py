"""Times ``data build`` against Megatron-LM's own way of building a corpus; prints one JSON object.

    python benchmarks/data_build.py
    python benchmarks/data_build.py --megabytes 300 --pairs 7
    python benchmarks/data_build.py --megabytes 200 --pairs 1 --tokenizers hf

Megatron-LM's way is the loop of its preprocessing tool: one process a core, each with its share of the
files, takes a line, parses it, has its tokenizer make a list of ids of it, and adds that to an
``IndexedDatasetBuilder``; the datasets of the processes are then joined by ``add_index``. ``tight`` is the
same loop written as well as it can be around that builder: ids are arrays, which are copied and never
lists. Both write the same documents of the same files: JSON lines, made of the sources, headers and notes
of the Python library and of all installed packages: a few hundred megabytes, none of it twice. ``hf`` is a
byte-level BPE that the package ``tokenizers`` trains on some of them.

``ratio`` is their time over that of ``data build``, taken in turn. ``memory`` is the peak of the resident
memory of the command with all its processes, on the corpus and on one of a quarter of its size.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from itertools import chain, islice
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import numpy as np
import psutil
from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

from mixle_megatron.data.building import BuildRequest, build_corpus
from mixle_megatron.data.corpus_tokenizers import open_tokenizer
from mixle_megatron.training.quiet import quieten

FIGURE = 1.0
FILES = 16
VOCABULARY = 8192
SMALLER = 4
TRAINED_ON = 400
SUFFIXES = (".py", ".pyi", ".h", ".hpp", ".cuh", ".c", ".txt", ".md", ".rst")
END = "<|end|>"

Encode = Callable[[str], Any]


def installed_texts() -> Iterator[str]:
    """The texts of the Python library and of installed packages, without what is no UTF-8."""
    library, packages = (Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib"))
    own = (path for path in sorted(library.rglob("*")) if "site-packages" not in path.parts)
    for path in chain(own, sorted(packages.rglob("*"))):
        if path.suffix in SUFFIXES and path.is_file():
            try:
                yield path.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                continue


def write_corpus(folder: Path, megabytes: float) -> list[str]:
    """Files of JSON lines, of that size together; what is installed comes again only if it is too little."""
    folder.mkdir()
    written, turn = 0, 0
    files = [(folder / f"{number:02}.jsonl").open("w", encoding="utf-8") for number in range(FILES)]
    while written < megabytes * 1e6:
        for number, text in enumerate(installed_texts()):
            line = json.dumps({"text": f"# {turn}\n{text}", "source": number}) + "\n"
            written += files[number % FILES].write(line)
            if written >= megabytes * 1e6:
                break
        turn += 1
    for file in files:
        file.close()
    return [file.name for file in files]


def trained_tokenizer(folder: Path) -> str | None:
    """``hf:`` and the path of a byte-level BPE of some of the texts; None without the package."""
    try:
        from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    except ModuleNotFoundError:
        return None
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(islice(installed_texts(), TRAINED_ON), trainer)
    path = folder / "tokenizer.json"
    tokenizer.save(str(path))
    return f"hf:{path}"


# Megatron-LM's way


def megatrons_encode(name: str) -> tuple[Encode, int]:
    """Text to a list of ids as Megatron-LM's tokenizers do it, and the end token."""
    if name == "byte":
        return lambda text: list(text.encode("utf-8")), 256
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(name.removeprefix("hf:"))
    return lambda text: tokenizer.encode(text).ids, tokenizer.token_to_id(END)


def tight_encode(name: str) -> tuple[Encode, int]:
    """Text to ids in the shortest time."""
    if name == "byte":
        return lambda text: np.frombuffer(text.encode("utf-8"), dtype=np.uint8), 256
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(name.removeprefix("hf:"))
    return lambda text: tokenizer.encode_batch_fast([text])[0].ids, tokenizer.token_to_id(END)


def one_process(files: Sequence[str], prefix: str, name: str, tight: bool, dtype: type) -> None:
    """What each process does with its share of the files."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    encode, end = (tight_encode if tight else megatrons_encode)(name)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for path in files:
        with open(path, encoding="utf-8") as file:
            for line in file:
                ids = encode(json.loads(line)["text"])
                if tight:
                    document = np.empty(len(ids) + 1, dtype=dtype)
                    document[:-1], document[-1] = ids, end
                else:
                    document = [*ids, end]
                builder.add_document(document, [len(document)])
    builder.finalize(f"{prefix}.idx")


def build_by_hand(files: Sequence[str], prefix: str, name: str, workers: int, *, tight: bool) -> None:
    """One process a core, then ``add_index``."""
    dtype = DType.optimal_dtype(257 if name == "byte" else VOCABULARY)
    context = multiprocessing.get_context("forkserver")
    parts = [f"{prefix}.{number}" for number in range(workers)]
    processes = [
        context.Process(target=one_process, args=(files[number::workers], part, name, tight, dtype))
        for number, part in enumerate(parts)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        if process.exitcode:
            raise RuntimeError(f"a process ended with {process.exitcode}")
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for part in parts:
        builder.add_index(part)
        os.unlink(f"{part}.bin")
        os.unlink(f"{part}.idx")
    builder.finalize(f"{prefix}.idx")


# Measuring


def seconds_of(work: Callable[[], Any], prefix: Path) -> float:
    """The time of one build, after which its files are deleted."""
    began = perf_counter()
    work()
    seconds = perf_counter() - began
    for path in prefix.parent.glob(f"{prefix.name}.*"):
        path.unlink()
    return seconds


def compared(files: Sequence[str], folder: Path, name: str, workers: int, pairs: int) -> dict[str, Any]:
    """Medians over the pairs, the first of which, to start servers and caches, is left out."""
    prefix = folder / "out"
    eod_token = None if name == "byte" else END
    request = BuildRequest(files, name, str(prefix), workers=workers, eod_token=eod_token)
    ways = {
        "ours": lambda: build_corpus(request),
        "megatron": lambda: build_by_hand(files, str(prefix), name, workers, tight=False),
        "tight": lambda: build_by_hand(files, str(prefix), name, workers, tight=True),
    }
    rounds = [{way: seconds_of(work, prefix) for way, work in ways.items()} for _ in range(pairs + 1)][1:]
    found: dict[str, Any] = {
        "seconds": {way: round(statistics.median(each[way] for each in rounds), 2) for way in ways}
    }
    for way in ("megatron", "tight"):
        ratios = sorted(round(each[way] / each["ours"], 3) for each in rounds)
        found[way] = {"ratio": statistics.median(ratios), "ratios": ratios}
    return found


def peak_memory(files: Sequence[str], folder: Path, name: str, workers: int) -> float:
    """The most that the command and its processes have resident at once, in megabytes."""
    prefix = folder / "out"
    words = [sys.executable, "-m", "mixle_megatron", "data", "build", "--tokenizer", name]
    words += ["--output", str(prefix), "--workers", str(workers)]
    words += [] if name == "byte" else ["--eod-token", END]
    words += [word for path in files for word in ("--input", path)]
    peak = 0
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        root = psutil.Process(process.pid)
        while process.poll() is None:
            peak = max(peak, resident(root))
            sleep(0.02)
        if process.returncode:
            raise RuntimeError(f"the build ended with {process.returncode}")
    for path in prefix.parent.glob(f"{prefix.name}.*"):
        path.unlink()
    return round(peak / 1e6, 1)


def resident(root: psutil.Process) -> int:
    """Bytes that a process and all below it have resident."""
    total = 0
    try:
        for process in (root, *root.children(recursive=True)):
            total += process.memory_info().rss
    except psutil.NoSuchProcess:
        pass  # one that has just ended
    return total


def memory_of(
    smaller: Sequence[str], files: Sequence[str], folder: Path, name: str, workers: int
) -> dict[str, float]:
    """The peak on a part of the corpus and on all of it, and how they compare."""
    small, large = (peak_memory(each, folder, name, workers) for each in (smaller, files))
    return {f"megabytes of 1/{SMALLER}": small, "megabytes": large, "growth": round(large / small, 3)}


def same_tokens(files: Sequence[str], folder: Path, workers: int) -> bool:
    """Whether both ways write the same documents, in whatever order their shares have them."""
    build_corpus(BuildRequest(files, "byte", str(folder / "ours"), workers=workers))
    build_by_hand(files, str(folder / "theirs"), "byte", workers, tight=False)
    ours, theirs = (np.fromfile(folder / f"{name}.bin", dtype=np.uint16) for name in ("ours", "theirs"))
    for path in [*folder.glob("ours.*"), *folder.glob("theirs.*")]:
        path.unlink()
    return np.array_equal(np.bincount(ours), np.bincount(theirs))


def installed(name: str) -> str | None:
    """A package's version, or None without it."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=float, default=64, help="of JSON lines")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--folder", help="where everything is written; by default the system's own")
    parser.add_argument("--tokenizers", nargs="+", choices=("byte", "hf"), default=["byte", "hf"])
    parser.add_argument("--no-memory", action="store_true", help="leave the memory unmeasured")
    given = parser.parse_args()
    quieten()
    multiprocessing.set_forkserver_preload(["mixle_megatron.data.shards"])
    result: dict[str, Any] = {"benchmark": "data_build", "figure": FIGURE}
    with tempfile.TemporaryDirectory(dir=given.folder) as name:
        folder = Path(name)
        files = write_corpus(folder / "corpus", given.megabytes)
        if not same_tokens(files, folder, given.workers):
            raise RuntimeError("the two ways write other tokens")
        names = {"byte": "byte", "hf": trained_tokenizer(folder) if "hf" in given.tokenizers else None}
        for kind in given.tokenizers:
            tokenizer = names[kind]
            if tokenizer is None:
                result[kind] = "the package tokenizers is not installed"
            else:
                open_tokenizer(tokenizer)
                result[kind] = compared(files, folder, tokenizer, given.workers, given.pairs)
        if not given.no_memory:
            smaller = write_corpus(folder / "smaller", given.megabytes / SMALLER)
            result["memory"] = {
                kind: memory_of(smaller, files, folder, name, given.workers)
                for kind, name in names.items()
                if kind in given.tokenizers and name
            }
    result |= {
        "megabytes": given.megabytes,
        "workers": given.workers,
        "load_average": round(os.getloadavg()[1], 2),
        "versions": {name: installed(name) for name in ("megatron-core", "torch", "tokenizers")},
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
