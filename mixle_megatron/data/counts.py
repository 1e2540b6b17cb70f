"""How far the build of a corpus is, and whom it tells."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Counts:
    """What has been done, all in all or since it was told last.

    Attributes:
        input_bytes: bytes of the input files, on the disk; while pieces are joined, tokens.
        documents: documents written.
        text_bytes: bytes of their text.
        tokens: tokens written.
    """

    input_bytes: int = 0
    documents: int = 0
    text_bytes: int = 0
    tokens: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(
            self.input_bytes + other.input_bytes,
            self.documents + other.documents,
            self.text_bytes + other.text_bytes,
            self.tokens + other.tokens,
        )


class BuildWatch:
    """Is told how a build goes, and may raise :class:`~mixle_megatron.data.build_errors.BuildStopped`.

    This one takes no notice.
    """

    def begin(self, stage: str, total: int, kept: Counts) -> None:
        """A stage begins: ``reading``, of ``total`` bytes, or ``joining``, of ``total`` tokens.

        Args:
            stage: its name.
            total: what ``input_bytes`` comes to when it is done.
            kept: what an earlier build has done of it.
        """

    def advance(self, done: Counts | None) -> None:
        """What has been done since; None, several times a second, where there is nothing to tell."""
