"""Token streams on disk: built once by one process, mapped into memory by all of a node.

A cache is three files under one stem, which is a fingerprint of the inputs: ``STEM.train.bin`` and
``STEM.validation.bin`` (little-endian uint16 tokens, each document followed by the end token) and
``STEM.json``, which is written last and says how long the others must be. Each is written aside,
synced and renamed, so that no reader ever sees half of one. Builders exclude each other by a lock
that dies with its process; where a file system has no locks two of them may do the same work, and
then they put the same bytes in the same places.

Caches of other inputs stay where they are; any of them may be deleted while no run uses it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import glob
import hashlib
import json
import os
import secrets
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from mixle_megatron.data.byte_tokenizer import ByteTokenizer
from mixle_megatron.data.folder_walk import Document
from mixle_megatron.errors import Fault, Refused

FORMAT = 1
SPLITS = ("train", "validation")
Progress = Callable[[int, int], None]
_DTYPE = np.dtype("<u2")
_CHUNK = 8 << 20
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}


@dataclass(frozen=True)
class TokenStream:
    """The tokens of one split, on disk.

    Attributes:
        path: the file of little-endian uint16 tokens.
        num_tokens: how many there are, end tokens included.
        num_documents: how many documents, and so end tokens.
        digest: BLAKE2b of the tokens (hexadecimal): equal wherever the same text was split the same way.
    """

    path: str
    num_tokens: int
    num_documents: int
    digest: str

    @functools.cached_property
    def tokens(self) -> NDArray[np.uint16]:
        """All tokens, shape (num_tokens,), mapped read-only when first asked for."""
        if self.num_tokens == 0:
            return np.empty(0, dtype=_DTYPE)
        return np.memmap(self.path, dtype=_DTYPE, mode="r", shape=(self.num_tokens,))

    def __getstate__(self) -> dict[str, Any]:
        # A pickled map would be a copy of the data: the receiver maps the file itself.
        return {key: value for key, value in self.__dict__.items() if key != "tokens"}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.__dict__.update(state)


def open_or_build(
    splits: Mapping[str, Sequence[Document]],
    cache_dir: str | os.PathLike[str],
    progress: Progress | None = None,
) -> dict[str, TokenStream]:
    """The streams of ``splits``, from the cache if it holds them whole, and built into it if not.

    Any number of processes may call this at once: one builds, the others wait for it.

    Args:
        splits: the documents of ``train`` and ``validation``, in order.
        cache_dir: a folder, made if it is missing.
        progress: called as ``progress(done_bytes, total_bytes)`` after each piece, by the builder alone.

    Raises:
        Refused: a document cannot be read or changes meanwhile, or the cache cannot be written.
    """
    folder = os.path.abspath(cache_dir)
    stem = os.path.join(folder, f"text-{_fingerprint(splits)}")
    found = _open(stem)
    if found is not None:
        return found
    with cache_errors(folder):
        os.makedirs(folder, exist_ok=True)
        with locked(f"{stem}.lock") as alone:
            found = _open(stem)
            if found is None:
                if alone:
                    _remove_leftovers(stem)
                _build(splits, stem, progress)
                found = _open(stem)
    if found is None:
        raise Refused(
            [Fault("cache_dir", folder, "does not keep what is written to it", "use a local folder")]
        )
    return found


@contextlib.contextmanager
def written_aside(path: str) -> Iterator[IO[bytes]]:
    """A file that appears under ``path`` whole, when the block ends without an exception, or not at all."""
    aside = f"{path}.{_host()}.{os.getpid()}.{secrets.token_hex(4)}.aside"
    try:
        with open(aside, "xb") as handle:
            yield handle
            handle.flush()
            os.fsync(handle.fileno())
        os.replace(aside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(aside)
        raise


def _fingerprint(splits: Mapping[str, Sequence[Document]]) -> str:
    """What the streams are made from: format, files, sizes, times, and which split each went to.

    The seed and the options act through the choice and the split of documents alone.
    """
    described = [
        FORMAT,
        ByteTokenizer.name,
        [[split, each.path, each.size, each.mtime_ns] for split in SPLITS for each in splits[split]],
    ]
    return hashlib.blake2b(json.dumps(described).encode(), digest_size=12).hexdigest()


def _open(stem: str) -> dict[str, TokenStream] | None:
    """The streams under ``stem``, or None where they are missing or damaged."""
    try:
        with open(f"{stem}.json", "rb") as handle:
            record = json.load(handle)
        streams = {}
        for split in SPLITS:
            stream = TokenStream(path=f"{stem}.{split}.bin", **record["streams"][split])
            if os.path.getsize(stream.path) != stream.num_tokens * _DTYPE.itemsize:
                return None
            streams[split] = stream
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return streams


def _build(splits: Mapping[str, Sequence[Document]], stem: str, progress: Progress | None) -> None:
    """Write the three files of a cache, the record last."""
    total = sum(each.size for split in SPLITS for each in splits[split])
    done, record = 0, {}
    for split in SPLITS:
        digest, tokens = hashlib.blake2b(digest_size=16), 0
        with written_aside(f"{stem}.{split}.bin") as out:
            for piece in _token_pieces(splits[split]):
                data = memoryview(piece.astype(_DTYPE, copy=False)).cast("B")
                out.write(data)
                digest.update(data)
                tokens += piece.size
                if progress is not None:
                    done += int(piece.size - (piece[-1] == ByteTokenizer.eod))
                    progress(done, total)
        record[split] = {
            "num_tokens": tokens,
            "num_documents": len(splits[split]),
            "digest": digest.hexdigest(),
        }
    with written_aside(f"{stem}.json") as out:
        described = {"format": FORMAT, "tokenizer": ByteTokenizer.name, "dtype": "uint16", "streams": record}
        out.write(json.dumps(described, indent=2).encode())
    sync_folder(os.path.dirname(stem))


def _token_pieces(documents: Sequence[Document]) -> Iterator[NDArray[np.uint16]]:
    """The documents' tokens in order, in pieces of bounded size; a document's last ends with eod.

    Raises:
        Refused: a document cannot be read, or is not as long as when it was found.
    """
    encode = ByteTokenizer().encode
    for document in documents:
        read = 0
        try:
            with open(document.path, "rb") as handle:
                while piece := handle.read(_CHUNK):
                    read += len(piece)
                    if read == document.size:
                        yield np.append(encode(piece), np.uint16(ByteTokenizer.eod))
                    elif read < document.size:
                        yield encode(piece)
        except OSError as error:
            raise _unreadable(document, f"cannot be read: {error.strerror}", "make it readable") from error
        if read != document.size:
            raise _unreadable(document, "changed while it was read", "start again when it is complete")


def _unreadable(document: Document, rule: str, remedy: str) -> Refused:
    return Refused([Fault("data.paths", document.path, rule, remedy)])


@contextlib.contextmanager
def cache_errors(folder: str) -> Iterator[None]:
    """Turn the system's errors in writing the cache into a refusal."""
    try:
        yield
    except OSError as error:
        rule = f"cannot hold the token cache: {error.strerror or error}"
        raise Refused(
            [Fault("cache_dir", folder, rule, "give a writable folder with room for it")]
        ) from error


@contextlib.contextmanager
def locked(path: str) -> Iterator[bool]:
    """Hold the lock file ``path`` for the block; False where the file system has no locks."""
    with open(path, "ab") as handle:
        yield _lock(handle)


def _lock(handle: IO[bytes]) -> bool:
    """Wait for the lock of an open file, which its closing gives back; False where there are none."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return False
    return True


def _remove_leftovers(stem: str) -> None:
    """Delete what builders on this host, killed before their time, left of this cache."""
    for left in glob.glob(f"{glob.escape(stem)}.*.{glob.escape(_host())}.*.aside"):
        with contextlib.suppress(OSError):
            os.unlink(left)


def sync_folder(folder: str) -> None:
    """Make the renames in a folder durable, where its file system can."""
    number = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            os.fsync(number)
    finally:
        os.close(number)


def _host() -> str:
    return socket.gethostname().split(".")[0] or "host"
