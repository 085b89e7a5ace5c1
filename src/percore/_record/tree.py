"""Merges samples into trees: of functions, of their workers and stacks, and of workers, of their functions and stacks."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from percore._record.samples import Frame, Sample


@dataclass(slots=True)
class Node:
    """A frame with all that was above it.

    Attributes:
        name: what the flame graph shows.
        file: the path of its source; empty: it has none.
        count: in how many samples it was.
        above: the frames that it has called, by name and file.
    """

    name: str
    file: str = ""
    count: int = 0
    above: "dict[Frame, Node]" = field(default_factory=dict)

    def add(self, path: Iterable[Frame], count: int) -> None:
        """Count samples of this path, the outermost frame first."""
        node = self
        node.count += count
        for frame in path:
            node = node.above.setdefault(frame, Node(*frame))
            node.count += count

    def plain(self) -> dict[str, Any]:
        """Return the tree as JSON has it, the widest frames first."""
        above = sorted(self.above.values(), key=lambda node: (-node.count, node.name))
        return {"name": self.name, "file": self.file, "count": self.count, "above": [node.plain() for node in above]}


def by_function(samples: Iterable[Sample]) -> Node:
    """Return the tree whose frames are: the function that percore has called, the worker, then the stack."""
    root = Node("all functions")
    for worker, stack, count, _ in samples:
        first, *rest = stack
        root.add([first, Frame(worker, ""), *rest], count)
    return root


def by_worker(samples: Iterable[Sample]) -> Node:
    """Return the tree whose frames are: the worker, then the stack from the function that percore has called."""
    root = Node("all workers")
    for worker, stack, count, _ in samples:
        first, *rest = stack
        root.add([Frame(worker, ""), first, *rest], count)
    return root


def by_call(samples: Iterable[Sample]) -> Node:
    """Return the tree whose frames are: the function that percore has called, the worker, the call, then the stack."""
    root = Node("all calls")
    for worker, stack, count, call in samples:
        first, *rest = stack
        root.add([first, Frame(worker, ""), Frame(call, ""), *rest], count)
    return root


def short_names(functions: Iterable[str]) -> dict[str, str]:
    """Return the qualified names of functions by their last parts. One that two functions share means neither."""
    found: dict[str, str] = {}
    shared = set()
    for name in functions:
        last = name.rpartition(".")[2]
        if found.setdefault(last, name) != name:
            shared.add(last)
    return {last: name for last, name in found.items() if last not in shared}
