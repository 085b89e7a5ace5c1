"""Tables of the figures of snapshots, as text for terminals and as HTML for notebooks."""

from collections.abc import Sequence
from typing import NamedTuple


def mebibytes(size: int) -> str:
    """Return a number of bytes in MiB, as tables show it."""
    return f"{size / 2**20:.1f} MiB"


def duration(seconds: float | None) -> str:
    """Return a duration in us, ms or s, as tables show it; None: it is unknown."""
    if seconds is None:
        return "-"
    if seconds < 0.001:
        return f"{1e6 * seconds:.1f} us" if seconds < 1e-5 else f"{1e6 * seconds:.0f} us"
    return f"{1000 * seconds:.1f} ms" if seconds < 1 else f"{seconds:.1f} s"


def size(number: float | None) -> str:
    """Return a number of bytes in B, KiB or MiB, as tables show it; None: it is unknown."""
    if number is None:
        return "-"
    if number < 1024:
        return f"{number:.0f} B"
    return f"{number / 1024:.1f} KiB" if number < 2**20 else mebibytes(int(number))


class Table(NamedTuple):
    """A table. The last row may have the totals.

    Attributes:
        head: the headings of the columns.
        rows: the cells of each row, as many as there are headings.
        left: the columns of words, which are aligned to the left. Figures are aligned to the right.
    """

    head: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    left: frozenset[int]

    def text(self) -> str:
        """Return the table as lines of text, with its columns aligned."""
        lines = [self.head, *self.rows]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return "\n".join("  ".join(self._aligned(line, widths)).rstrip() for line in lines)

    def html(self) -> str:
        """Return the table as HTML. The cells are text: what looks like HTML in them is escaped."""
        head = "".join(self._cell("th", column, text) for column, text in enumerate(self.head))
        rows = ["".join(self._cell("td", column, text) for column, text in enumerate(row)) for row in self.rows]
        body = "".join(f"<tr>{row}</tr>" for row in rows)
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"

    def _aligned(self, line: tuple[str, ...], widths: list[int]) -> list[str]:
        cells = enumerate(zip(line, widths, strict=True))
        return [text.ljust(width) if column in self.left else text.rjust(width) for column, (text, width) in cells]

    def _cell(self, tag: str, column: int, text: str) -> str:
        from html import escape  # a millisecond of each start, for notebooks alone

        side = "left" if column in self.left else "right"
        return f'<{tag} style="text-align: {side}">{escape(text)}</{tag}>'
