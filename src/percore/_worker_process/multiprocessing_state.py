"""Passes the state of multiprocessing on to workers, as multiprocessing does to the processes that it starts itself.

Authentication key  It is needed to connect to a manager, and to fetch descriptors that are pickled with a call.
Resource tracker    The process that removes named resources (shared memory, semaphores) when the program has ended. If a worker had
                    its own tracker, that tracker would remove the program's shared memory when the worker ends, even if the worker
                    has merely attached it.
Processes           `current_process()` has a name and a number, and `parent_process()` is the program. Libraries ask for them to
                    find out whether they run in the main process, or which worker they run in.

A worker does not import multiprocessing for this. It waits until the user's code does.
"""

import logging
import os
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from typing import Any, Final, NamedTuple

from percore._worker_process.world import lifelines

Step = Callable[[Any], None]

logger: Final = logging.getLogger("percore")


class Parent(NamedTuple):
    """The process that starts workers, as multiprocessing knows it.

    Attributes:
        pid: its process id.
        name: its name.
        identity: its number among its siblings, after the numbers of its ancestors; empty for a main process.
    """

    pid: int
    name: str
    identity: tuple[int, ...]

    def child(self, index: int) -> tuple[str, tuple[int, ...]]:
        """Return the name and the identity of the worker of slot `index`. multiprocessing counts from 1."""
        identity = (*self.identity, index + 1)
        return f"PercoreProcess-{':'.join(map(str, identity))}", identity


# In the program


def parent() -> Parent:
    """Return this process, as the parent of workers."""
    process: Any = sys.modules.get("multiprocessing.process")
    if process is None:
        return Parent(os.getpid(), "MainProcess", ())
    me = process.current_process()
    return Parent(os.getpid(), me.name, tuple(me._identity))


def authkey() -> bytes:
    """Return the authentication key of this process. Empty: multiprocessing is not loaded."""
    process: Any = sys.modules.get("multiprocessing.process")
    return b"" if process is None else bytes(process.current_process().authkey)


def tracker() -> int | None:
    """Return the descriptor of this program's resource tracker. None: there is none, and shared memory is not imported either.

    If the program has imported `multiprocessing.shared_memory`, this starts the tracker unless it runs already: a worker may be the
    first process to create shared memory.

    Raises:
        OSError: the tracker cannot be started.
    """
    module: Any = sys.modules.get("multiprocessing.resource_tracker")
    if module is None:
        return None
    if "multiprocessing.shared_memory" not in sys.modules and module._resource_tracker._fd is None:
        return None
    fd: int = module.getfd()
    return fd


# In a worker


def take_over(parent: Parent, index: int, authkey: bytes, tracker: int | None) -> None:
    """Set the program's key and tracker, this process and its parent in multiprocessing, now or when user code imports it.

    Args:
        parent: the program.
        index: the slot of this worker.
        authkey: the program's authentication key; empty if it has none.
        tracker: a descriptor for writing to the program's resource tracker, or None if the program had no tracker when this worker
            was started.
    """
    steps: dict[str, Step] = {"multiprocessing.process": lambda process: _set_process(process, parent, index, authkey)}
    if tracker is None:
        steps["multiprocessing.shared_memory"] = _leave_untracked
    else:
        steps["multiprocessing.resource_tracker"] = lambda module: _set_tracker(module, tracker)
    for name in list(steps):
        module = sys.modules.get(name)
        if module is not None:
            steps.pop(name)(module)
    sys.meta_path.insert(0, AfterImport(steps))


def _set_process(process: Any, parent: Parent, index: int, authkey: bytes) -> None:
    me = process.current_process()
    if authkey:
        me.authkey = authkey
    me._name, me._identity = parent.child(index)
    me._parent_pid = parent.pid
    # The end of the program closes the other end of this pipe, so `parent_process().join()` returns then.
    process._parent_process = process._ParentProcess(parent.name, parent.pid, lifelines[-1])


def _set_tracker(module: Any, tracker: int) -> None:
    # multiprocessing.spawn does the same.
    module._resource_tracker._fd = tracker


def _leave_untracked(shared_memory: Any) -> None:
    """Disable tracking of shared memory here: the program had no resource tracker when this worker was started.

    A tracker of this worker would remove shared memory that the program still uses.
    """
    shared_memory.resource_tracker = SimpleNamespace(register=lambda _name, _kind: None, unregister=lambda _name, _kind: None)
    logger.warning(
        "percore: a worker uses multiprocessing.shared_memory, which the program had not imported when the worker was started: "
        "shared memory that nobody unlinks is not removed when the program ends. Import multiprocessing.shared_memory in the "
        "program before the runner is started"
    )


class AfterImport:
    """A finder that runs a step for each of some modules right after the import of the module."""

    def __init__(self, steps: dict[str, Step]) -> None:
        self._steps = steps
        self._asking = threading.local()
        """`name`: of the module that this thread looks for."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in self._steps or getattr(self._asking, "name", None) == name:
            return None
        self._asking.name = name  # `find_spec` below asks all finders, and this one now passes
        try:
            spec = find_spec(name)
        finally:
            self._asking.name = None
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, partial(self._loaded, name))  # type: ignore[assignment]
        return spec

    def _loaded(self, name: str, module: ModuleType) -> None:
        """Run the step of a module. Only now is it done: code may ask for a module's spec and not import it, or fail to."""
        step = self._steps.pop(name, None)
        if step is not None:
            step(module)


class _Loader:
    """The original loader of a module. After `exec_module` it runs one more step."""

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
