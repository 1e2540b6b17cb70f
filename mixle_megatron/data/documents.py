"""Finding the documents of a text source: files, folders, globs and the library's own sources.

Only names and sizes are looked at, never contents. A document is one file; its name is its path
relative to what the user gave, so that it is the same wherever the corpus lies:

* a file is named by its base name;
* a folder's files, at any depth, by their path below it. Hidden entries and ``__pycache__`` are
  passed over, empty files too, and of the rest those count that end in one of ``data.suffixes``
  (:data:`TEXT_SUFFIXES` where it is not given). Links to folders are followed;
* a glob's files by their path below its fixed part. All files that it matches count, whatever
  their suffix; folders that it matches are read as folders. ``**`` crosses folders, for files;
* ``stdlib`` stands for the library sources (``.py``) of the Python that runs, without installed
  packages. A folder of that name is ``./stdlib``.

A file reached twice, by two paths or by a link, is one document under its first name.
"""

from __future__ import annotations

import difflib
import fnmatch
import glob
import os
import sysconfig
from collections.abc import Iterable, Sequence

from mixle_megatron.data.folder_walk import BYTECODE, Document, FolderWalk
from mixle_megatron.errors import Fault

STDLIB = "stdlib"
TEXT_SUFFIXES = (".txt", ".md", ".rst", ".py")
_INSTALLED = frozenset({"site-packages", "dist-packages"})


def find_documents(
    paths: Sequence[str], suffixes: Sequence[str] | None = None, *, keep_empty: bool = False
) -> tuple[list[Document], list[Fault]]:
    """All documents under ``paths``, and everything that is wrong with those paths.

    Args:
        paths: files, folders, globs or ``stdlib``, relative ones to the current folder.
        suffixes: which files of a folder count (``.txt`` or ``txt``, in any case); None for
            :data:`TEXT_SUFFIXES` in folders and ``.py`` in ``stdlib``.
        keep_empty: whether files that hold nothing are documents too.

    Returns:
        The documents, in the order of ``paths`` and by name within each, and the faults, all of
        field ``data.paths``. Where there are faults the list of documents is not complete.
    """
    if not paths:
        return [], [Fault("data.paths", None, "names nothing to read", "give files, folders or stdlib")]
    documents: dict[tuple[int, int], Document] = {}
    faults: list[Fault] = []
    for given in paths:
        found, wrong = _find_one(given, suffixes, keep_empty)
        faults += wrong
        for document in sorted(found, key=lambda each: each.name):
            documents.setdefault(document.inode, document)
    return list(documents.values()), faults


def _find_one(
    given: str, suffixes: Sequence[str] | None, keep_empty: bool
) -> tuple[list[Document], list[Fault]]:
    """The documents and faults of one path as the user wrote it."""
    if given == STDLIB:
        return _find_stdlib(_normalised(suffixes, (".py",)))
    if "\0" in given:
        return [], [Fault("data.paths", given, "is no path: it holds a null byte", "give a path that exists")]
    path = os.path.expanduser(given)
    endings = _normalised(suffixes, TEXT_SUFFIXES)
    if os.path.isdir(path):
        walk = _suffix_walk(endings, keep_empty)
        walk.folder(path)
        return walk.documents, _folder_faults(given, walk, endings)
    if os.path.lexists(path):
        walk = _suffix_walk(endings, keep_empty)
        walk.file(path, os.path.basename(path))
        return walk.documents, _file_faults(given, walk)
    if not glob.has_magic(path):
        return [], [_missing(given, path)]
    fixed, moving = _split_pattern(path)
    if "**" in moving:
        walk = _walk_crossing(fixed, moving, keep_empty)
    else:
        walk = _walk_glob(path, fixed, _suffix_walk(endings, keep_empty))
    if walk is None:
        return [], [Fault("data.paths", given, "matches no file", "give a pattern that matches text files")]
    return walk.documents, _folder_faults(given, walk, endings)


def _suffix_walk(endings: tuple[str, ...], keep_empty: bool) -> FolderWalk:
    """A walk on which those files of a folder count that end in one of ``endings``."""
    return FolderWalk(lambda name: name.lower().endswith(endings), keep_empty=keep_empty)


def _find_stdlib(endings: tuple[str, ...]) -> tuple[list[Document], list[Fault]]:
    """The library's own sources. What cannot be read there is left out: no user can mend it."""
    root = sysconfig.get_path("stdlib")
    walk = FolderWalk(lambda name: name.lower().endswith(endings), passed_over=_INSTALLED, follow_links=False)
    walk.folder(root, STDLIB)
    if walk.documents:
        return walk.documents, []
    rule = f"holds no file that ends in {', '.join(endings)} ({root})"
    return [], [Fault("data.paths", STDLIB, rule, "give a folder of text")]


def _walk_glob(path: str, fixed: str, walk: FolderWalk) -> FolderWalk | None:
    """What a pattern without ``**`` matches: files as they are, folders read as folders."""
    matches = sorted(match for match in glob.glob(path) if os.path.basename(match) != BYTECODE)
    for match in matches:
        name = os.path.relpath(match, fixed or os.curdir)
        if os.path.isdir(match):
            walk.folder(match, name)
        else:
            walk.file(match, name)
    return walk if matches else None


def _walk_crossing(fixed: str, moving: Sequence[str], keep_empty: bool) -> FolderWalk | None:
    """What a pattern with ``**`` matches: files at any depth below what stands before it.

    The walk is our own, as that of the standard library runs in circles where links do.
    """
    walk = FolderWalk(lambda name: _matches(moving, name.split("/")), keep_empty=keep_empty)
    crossing = moving.index("**")
    heads = glob.glob(os.path.join(fixed, *moving[:crossing])) if crossing else [fixed or os.curdir]
    for head in sorted(filter(os.path.isdir, heads)):
        walk.folder(head, os.path.relpath(head, fixed or os.curdir) if crossing else "")
    met = walk.documents or walk.empty or walk.unreadable or walk.loops
    walk.others.clear()
    return walk if met else None


def _split_pattern(path: str) -> tuple[str, list[str]]:
    """A pattern's fixed leading folder (``""`` for none) and its remaining segments."""
    segments = path.split("/")
    first = next(i for i, segment in enumerate(segments) if glob.has_magic(segment))
    moving = [
        segment
        for i, segment in enumerate(segments[first:])
        if segment and not (segment == "**" and i and segments[first + i - 1] == "**")
    ]
    fixed = "/".join(segments[:first])
    return ("/" if first == 1 and path.startswith("/") else fixed), moving


def _matches(pattern: Sequence[str], parts: Sequence[str]) -> bool:
    """Whether the segments of a glob match those of a relative path; ``**`` matches any number."""
    if not pattern:
        return not parts
    if pattern[0] == "**":
        return any(_matches(pattern[1:], parts[skipped:]) for skipped in range(len(parts) + 1))
    return bool(parts) and fnmatch.fnmatchcase(parts[0], pattern[0]) and _matches(pattern[1:], parts[1:])


def _normalised(suffixes: Iterable[str] | None, default: tuple[str, ...]) -> tuple[str, ...]:
    """Suffixes in lower case, each with its dot."""
    if not suffixes:
        return default
    return tuple(each.lower() if each.startswith(".") else f".{each.lower()}" for each in suffixes)


def _folder_faults(given: str, walk: FolderWalk, endings: tuple[str, ...]) -> list[Fault]:
    """What is wrong with a folder or glob: links in a circle, unreadable files, or no text at all."""
    faults = []
    if walk.loops:
        rule = f"holds a link that leads back to a folder above it: {_some(walk.loops)}"
        faults.append(Fault("data.paths", given, rule, "remove the link"))
    if walk.unreadable:
        rule = f"holds {len(walk.unreadable)} entries that cannot be read: {_some(walk.unreadable)}"
        faults.append(Fault("data.paths", given, rule, "make them readable or give a glob without them"))
    if not walk.documents and not faults:
        faults.append(_nothing(given, walk, endings))
    return faults


def _nothing(given: str, walk: FolderWalk, endings: tuple[str, ...]) -> Fault:
    """The fault of a folder or glob without a single document, with what was found in its place."""
    if walk.others:
        there = ", ".join(f"{count} {suffix}" for suffix, count in walk.others.most_common(5))
        rule = f"holds no file that ends in {', '.join(endings)}; found {there}"
        named = [suffix for suffix, _ in walk.others.most_common() if suffix.startswith(".")]
        remedy = (
            f"set data.suffixes, for instance [{named[0]}]"
            if named
            else f"give a glob: {given.rstrip('/')}/*"
        )
        return Fault("data.paths", given, rule, remedy)
    rule = f"holds only empty files ({walk.empty})" if walk.empty else "holds no files"
    return Fault("data.paths", given, rule, "give a folder that holds text")


def _file_faults(given: str, walk: FolderWalk) -> list[Fault]:
    """What is wrong with a file that was named itself."""
    if walk.documents:
        return []
    if walk.unreadable:
        return [Fault("data.paths", given, f"cannot be read: {walk.unreadable[0]}", "make it readable")]
    rule = "is an empty file" if walk.empty else "is neither a regular file nor a folder"
    return [Fault("data.paths", given, rule, "give a file that holds text")]


def _missing(given: str, path: str) -> Fault:
    """The fault of a path that is not there, with the nearest name that is."""
    folder, base = os.path.split(path.rstrip("/"))
    try:
        neighbours = os.listdir(folder or os.curdir)
    except OSError:
        return Fault("data.paths", given, "does not exist", f"there is no readable folder {folder} either")
    near = difflib.get_close_matches(base, neighbours if folder else [*neighbours, STDLIB], n=1)
    remedy = f"did you mean {os.path.join(folder, near[0])}?" if near else "give a path that exists"
    return Fault("data.paths", given, "does not exist", remedy)


def _some(names: Sequence[str], limit: int = 3) -> str:
    """The first few of many names."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
