"""What the build of a corpus shows: a bar on a terminal, a line at every tenth elsewhere."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from time import perf_counter
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from mixle_megatron.data.build_errors import BuildStopped
from mixle_megatron.data.building import BuildRequest, Built, build_corpus
from mixle_megatron.data.counts import BuildWatch, Counts
from mixle_megatron.training.signals import STOPPING, StopRequest

_IN_WORDS = {"reading": "reading text", "joining": "joining pieces"}


def watched_build(request: BuildRequest) -> tuple[Built, float]:
    """Build, showing how it goes and ending it at Ctrl-C or SIGTERM; and the seconds that it took."""
    began = perf_counter()
    with _stop_request() as stop, _Shown(stop) as watch:
        built = build_corpus(request, watch)
    return built, perf_counter() - began


def summary_lines(prefix: str, built: Built, seconds: float) -> Iterator[str]:
    """What has been built, in words."""
    record = built.record
    size = f"{record.documents:,} documents, {record.tokens:,} tokens ({record.dtype})"
    text = f"{record.text_bytes / 1e6:,.1f} MB of text"
    if built.already:
        yield f"{prefix}: there already, from the same input: {size}, {text}"
        return
    speed = "" if built.kept else f" ({_speeds(record.text_bytes, record.tokens, seconds)})"
    yield f"{prefix}: {size}, {text} in {seconds:.1f} s{speed}"
    if built.kept:
        yield f"{built.kept} of {built.pieces} pieces were there from an earlier start"
    if record.empty_documents:
        yield f"{record.empty_documents:,} empty documents were left out"
    if record.bad_records:
        yield f"{record.bad_records:,} bad records were left out; {prefix}.json lists the first of them"


@contextmanager
def _stop_request() -> Iterator[StopRequest]:
    """Whether the process is asked to stop, while the context lasts."""
    before = {number: signal.getsignal(number) for number in STOPPING}
    try:
        yield StopRequest().install()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Shown(BuildWatch):
    """Shows a build, and stops it when it is asked to."""

    def __init__(self, stop: StopRequest) -> None:
        self._stop = stop
        console = Console(file=sys.stderr)
        self._terminal = console.is_terminal
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.fields[counts]}"),
            TimeRemainingColumn(),
            TextColumn("left"),
            console=console,
        )
        self._stage, self._total, self._done = "", 0, Counts()
        self._began, self._tenths = perf_counter(), 0

    def __enter__(self) -> _Shown:
        return self

    def __exit__(self, *_error: Any) -> None:
        if self._terminal:
            self._bar.stop()

    def begin(self, stage: str, total: int, kept: Counts) -> None:
        """Show a stage of the build from its beginning on; speeds are of what is done from now on."""
        if self._terminal:
            for task in self._bar.task_ids:
                self._bar.remove_task(task)
            self._bar.add_task(_IN_WORDS[stage], total=total, completed=kept.input_bytes, counts="")
            self._bar.start()
        self._stage, self._total, self._done = stage, total, Counts()
        self._kept, self._began = kept, perf_counter()
        self._tenths = 10 * kept.input_bytes // max(total, 1)

    def advance(self, done: Counts | None) -> None:
        """Show what has been done, and end the build if it is asked to stop."""
        if self._stop:
            raise BuildStopped(
                f"by {self._stop.signal_name}; what is done stays done: the same command goes on from there"
            )
        if done is not None:
            self._done += done
        if self._terminal:
            self._draw()
        else:
            self._say()

    def _draw(self) -> None:
        for task in self._bar.task_ids:
            self._bar.update(task, completed=self._completed, counts=self._counts())

    def _say(self) -> None:
        tenths = 10 * self._completed // max(self._total, 1)
        if tenths > self._tenths and self._stage == "reading":
            self._tenths = tenths
            print(f"{10 * tenths} %  {self._counts()}", file=sys.stderr, flush=True)

    @property
    def _completed(self) -> int:
        return min(self._kept.input_bytes + self._done.input_bytes, self._total)

    def _counts(self) -> str:
        if self._stage != "reading":
            return ""
        done, seconds = self._done, perf_counter() - self._began
        documents = self._kept.documents + done.documents
        return f"{documents:,} documents  {_speeds(done.text_bytes, done.tokens, seconds)}"


class ScanProgress:
    """A bar over the tokens of a corpus that is being read; nothing off a terminal."""

    def __init__(self, *, shown: bool) -> None:
        console = Console(file=sys.stderr)
        self._bar = Progress(
            TextColumn("reading tokens"),
            BarColumn(),
            TimeRemainingColumn(),
            TextColumn("left"),
            console=console,
        )
        self._context = self._bar if shown and console.is_terminal else nullcontext()
        self._task = self._bar.add_task("reading", total=None)

    def __enter__(self) -> ScanProgress:
        self._context.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._context.__exit__(*error)

    def __call__(self, tokens: int, total: int) -> None:
        """Show that ``tokens`` more of ``total`` are read."""
        self._bar.update(self._task, advance=tokens, total=total)


def _speeds(text_bytes: int, tokens: int, seconds: float) -> str:
    seconds = max(seconds, 1e-9)
    return f"{text_bytes / 1e6 / seconds:,.1f} MB/s  {tokens / seconds:,.0f} tokens/s"
