"""Walking folders for documents: in a fixed order, following links, noting what is wrong."""

from __future__ import annotations

import os
import stat
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass

BYTECODE = "__pycache__"


@dataclass(frozen=True)
class Document:
    """One file of text.

    Attributes:
        name: its path relative to what the user gave, with ``/`` between the parts.
        path: where it lies, absolute.
        size: in bytes; at least 1, unless empty files were asked for.
        mtime_ns: when it was last changed, in nanoseconds since the epoch.
        inode: device and inode, which two names of one file have in common.
    """

    name: str
    path: str
    size: int
    mtime_ns: int
    inode: tuple[int, int]


class FolderWalk:
    """Collects the documents under files and folders, and what stood in the way.

    Args:
        counts: whether a file of a folder counts, by its name (``name/`` and its path below the root).
        passed_over: names of folders that are not entered; ``__pycache__`` and hidden ones never are.
        follow_links: whether links to folders are followed.
        keep_empty: whether a file that holds nothing is a document; otherwise it is only counted.

    Attributes:
        documents: what was found, in no particular order.
        others: how many files did not count, by suffix.
        empty: how many files held nothing, where those are not kept.
        unreadable: files and folders that cannot be read, each with the system's reason.
        loops: links that lead back to a folder above them; they are not followed.
    """

    def __init__(
        self,
        counts: Callable[[str], bool],
        *,
        passed_over: Collection[str] = (),
        follow_links: bool = True,
        keep_empty: bool = False,
    ) -> None:
        self.documents: list[Document] = []
        self.others: Counter[str] = Counter()
        self.empty = 0
        self.unreadable: list[str] = []
        self.loops: list[str] = []
        self._counts = counts
        self._passed_over = {BYTECODE, *passed_over}
        self._follow_links = follow_links
        self._keep_empty = keep_empty

    def file(self, path: str, name: str) -> None:
        """Take one file, whatever its name; what is no regular file is left out."""
        try:
            status = os.stat(path)
        except OSError as error:
            self.unreadable.append(f"{path} ({error.strerror})")
            return
        if not stat.S_ISREG(status.st_mode):
            return
        if status.st_size == 0 and not self._keep_empty:
            self.empty += 1
        elif not os.access(path, os.R_OK):
            self.unreadable.append(f"{path} (Permission denied)")
        else:
            inode = (status.st_dev, status.st_ino)
            full = os.path.abspath(path)
            self.documents.append(Document(name, full, status.st_size, status.st_mtime_ns, inode))

    def folder(self, root: str, name: str = "") -> None:
        """Take all files under ``root`` that count, named ``name/`` and their path below it."""
        seen: set[tuple[int, int]] = set()
        pending: list[tuple[str, str, frozenset[tuple[int, int]]]] = [(root, name, frozenset())]
        while pending:
            path, below, above = pending.pop()
            try:
                status = os.stat(path)
                entries = sorted(os.scandir(path), key=lambda entry: entry.name)
            except OSError as error:
                self.unreadable.append(f"{path} ({error.strerror})")
                continue
            inode = (status.st_dev, status.st_ino)
            if inode in above:
                self.loops.append(path)
            elif inode not in seen:
                seen.add(inode)
                inner = self._take(entries, below)
                pending += [(*each, above | {inode}) for each in reversed(inner)]

    def _take(self, entries: list[os.DirEntry[str]], below: str) -> list[tuple[str, str]]:
        """Take the files among a folder's entries; returns path and name of the folders to enter."""
        folders = []
        for entry in entries:
            name = f"{below}/{entry.name}" if below else entry.name
            if entry.name.startswith(".") or entry.name in self._passed_over:
                continue
            if os.path.isdir(entry.path) if entry.is_symlink() else entry.is_dir():
                if self._follow_links or not entry.is_symlink():
                    folders.append((entry.path, name))
            elif self._counts(name):
                self.file(entry.path, name)
            else:
                self.others[os.path.splitext(entry.name)[1] or "without a suffix"] += 1
        return folders
