"""The commands of a `console` block: `$ command`, then the output that the page shows."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

ANY = "..."


@dataclass
class Command:
    line: str
    expected: list[str] = field(default_factory=list)

    @property
    def serves(self) -> bool:
        """Whether it is a server, which runs until the end of the page."""
        return self.line.endswith("&")


def commands_of(text: str) -> Iterator[Command]:
    command = None
    for line in text.splitlines():
        if command is not None and command.line.endswith("\\"):
            command.line = f"{command.line[:-1]} {line.strip()}"
        elif line.startswith("$ "):
            if command is not None:
                yield command
            command = Command(line[2:].rstrip())
        else:
            assert command is not None, f"output without a command: {line!r}"
            command.expected.append(line.rstrip())
    if command is not None:
        yield command


def matches(expected: list[str], output: str, *, start: bool = False) -> bool:
    """Whether the output is as expected: a line `...` stands for any lines, `...` within a line for any text.

    Several spaces stand for as many as a table needs that is as wide as its figures. With `start`, more may follow.
    """
    pattern = "".join(r"(?:.*\n)*?" if line.strip() == ANY else _line(line) + r"\n" for line in expected)
    lines = "".join(f"{line.rstrip()}\n" for line in output.splitlines())
    return (re.match if start else re.fullmatch)(pattern, lines) is not None


def _line(line: str) -> str:
    return ".*".join(re.sub(r"(\\ ){2,}", r"\\ {2,}", re.escape(part)) for part in line.split(ANY))
