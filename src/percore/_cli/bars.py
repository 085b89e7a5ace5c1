"""Bars of text, for figures side by side in a terminal."""

from collections.abc import Sequence
from typing import Final

_FULL: Final = "█"
_PARTS: Final = " ▏▎▍▌▋▊▉"


def bars(rows: Sequence[tuple[str, float, str]], width: int = 40) -> list[str]:
    """Return a line for each row: its name, a bar as long as its value, and its figure. The longest bar has `width` columns.

    `rows`: name, value (not negative) and figure as text.
    """
    most = max((value for _, value, _ in rows), default=0.0)
    names = max((len(name) for name, _, _ in rows), default=0)
    return [
        f"{name.ljust(names)}  {_bar(value / most * width if most else 0.0).ljust(width)}  {figure}" for name, value, figure in rows
    ]


def _bar(length: float) -> str:
    eighths = round(length * 8)
    full, part = divmod(eighths, 8)
    return _FULL * full + (_PARTS[part] if part else "")
