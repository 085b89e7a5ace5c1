"""What multiprocessing in a worker takes over from multiprocessing in the program.

multiprocessing hands these to the processes that it starts itself:

Authentication key  Proxies of a manager, and descriptors that travel with a call, are fetched with it.
Resource tracker    The process that removes named resources (shared memory, semaphores) when a program has ended. A worker with a
                    tracker of its own would have that remove shared memory of the program's when the worker ends: also where
                    the worker has merely attached it.

A worker does not import multiprocessing for that. It waits until the user's code does.
"""

import logging
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any, Final

Step = Callable[[Any], None]

logger: Final = logging.getLogger("percore")


def take_over(authkey: bytes, tracker: int | None) -> None:
    """Give multiprocessing the key and the tracker of the program as soon as it is imported here.

    Args:
        authkey: empty: the program has none.
        tracker: a descriptor to write to. None: the program had no resource tracker when this worker was started.
    """
    steps: dict[str, Step] = {}
    if authkey:
        steps["multiprocessing.process"] = lambda process: _set_key(process, authkey)
    if tracker is None:
        steps["multiprocessing.shared_memory"] = _leave_untracked
    else:
        steps["multiprocessing.resource_tracker"] = lambda module: _set_tracker(module, tracker)
    for name in list(steps):
        module = sys.modules.get(name)
        if module is not None:
            steps.pop(name)(module)
    sys.meta_path.insert(0, _AfterImport(steps))


def _set_key(process: Any, authkey: bytes) -> None:
    process.current_process().authkey = authkey


def _set_tracker(module: Any, tracker: int) -> None:
    # As multiprocessing.spawn does it.
    module._resource_tracker._fd = tracker


def _leave_untracked(shared_memory: Any) -> None:
    """The program had not imported shared memory when this worker was started, and has no tracker that could be asked.

    One of this worker's own would remove what the program goes on using. So nothing is tracked here.
    """
    shared_memory.resource_tracker = _NoTracker()
    logger.warning(
        "percore: a worker uses multiprocessing.shared_memory, which the program had not imported when the worker was started: "
        "shared memory that nobody unlinks is not removed when the program ends. Import multiprocessing.shared_memory in the "
        "program before the runner is started"
    )


class _NoTracker:
    """A resource tracker that tracks nothing."""

    def register(self, name: str, rtype: str) -> None:
        """Nobody is told."""

    def unregister(self, name: str, rtype: str) -> None:
        """Nobody is told."""


class _AfterImport:
    """A finder that does something with a module right after its import."""

    def __init__(self, steps: dict[str, Step]) -> None:
        self._steps = steps

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in self._steps:
            return None
        step = self._steps.pop(name)  # the other finders are asked through this one
        spec = find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, step)  # type: ignore[assignment]
        return spec


class _Loader:
    """The loader of a module, followed by one step more."""

    def __init__(self, loader: Any, step: Step) -> None:
        self._loader = loader
        self._step = step

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._step(module)
