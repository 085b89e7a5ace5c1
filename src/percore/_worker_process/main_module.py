"""The supervisor's `__main__` in a worker. It runs lazily, when a call first needs a name from it, and at most once.

A worker starts with an empty module as `__main__`. When pickle looks up a name that this module lacks, its `__getattr__` (PEP 562)
runs the user's script or module. The module is named `__mp_main__`, as in multiprocessing, so code under
`if __name__ == "__main__":` does not run. If no call needs a name from the script, it never runs. Importing `__mp_main__` also runs
it, by a finder. An empty module of that name in sys.modules would not do: pickle searches every module there for each object
without a `__module__`.

Guarantees:
- The main runs once. If it fails, the failure is remembered and raised at each later lookup.
- A thread that looks up a name in `__main__` or `__mp_main__` while another thread runs it waits until that run ends, because a
  function found halfway would lack its globals. The thread that runs it sees the names defined so far, as in any import cycle.
- After the run, `__main__` is the module whose dictionary is the globals of the main's functions.

Assumption: no two threads wait for each other's import. They would deadlock on a library module that does
`from __main__ import x` if the main imports it in one thread while a call imports it in another.
"""

import asyncio
import contextlib
import importlib.machinery
import importlib.util
import io
import logging
import sys
import threading
from collections.abc import Iterator
from types import CodeType, ModuleType, TracebackType
from typing import Any, Final

from percore._serialization.pickler import MainInfo, alias_main, main_info
from percore._worker import context
from percore._worker_process.multiprocessing_state import AfterImport

__all__ = ["MainInfo", "alias_main", "install", "main_info"]

logger: Final = logging.getLogger("percore")

# Keeps the original `__main__` alive: the interpreter runs the boot code in its dictionary but holds no reference to the module.
_replaced: list[ModuleType | None] = []


def install(info: MainInfo) -> None:
    """Replace this worker's `__main__` by a new module: lazy for a script or a module, empty if functions travel by value.

    Runs no user code.
    """
    main = ModuleType("__main__")
    if not info.by_value:
        importer = _Importer(info)
        # PEP 562: Python calls the module's `__getattr__` for missing names.
        vars(main)["__getattr__"] = importer.attribute
        # multiprocessing reads these if the user's code starts processes in this worker.
        if info.kind == "script":
            main.__file__ = info.target
        else:
            main.__spec__ = importlib.machinery.ModuleSpec(info.target, None)
        sys.meta_path.append(_Finder(importer))
    _replaced.append(sys.modules.get("__main__"))
    sys.modules["__main__"] = main


class _Importer:
    def __init__(self, info: MainInfo) -> None:
        self._info = info
        self._lock = threading.RLock()
        self._module: ModuleType | None = None
        self._failure: BaseException | None = None

    def attribute(self, name: str) -> object:
        """Return the attribute `name` of the user's main. Run the main first if it has not run yet.

        Raises:
            AttributeError: the main has no such attribute.
            ImportError: the main failed, now or at an earlier lookup; `__cause__` is the exception it raised.
        """
        # Much code looks at `__file__`, `__spec__` and `__path__` of every module, and pickle looks up `<lambda>` here for objects
        # that it finds nowhere else. Such lookups must not run the script.
        if name.startswith("__") or not name.isidentifier():
            raise AttributeError(f"module '__main__' has no attribute {name!r}")
        return getattr(self.module(), name)

    def module(self) -> ModuleType:
        """Return the user's main after it has run, or while this thread runs it. Raises ImportError as `attribute` does."""
        with self._lock:
            if self._failure is None and self._module is None:
                self._run()
            if self._module is None:
                if isinstance(self._failure, context.StartedByImport):
                    raise self._unguarded().with_traceback(_line_of_main(self._failure)) from None
                raise self._import_error() from self._failure
            return self._module

    def _unguarded(self) -> ImportError:
        return ImportError(f"your {self._kind} {self._info.target!r} {context.UNGUARDED}", name="__main__")

    @property
    def _kind(self) -> str:
        return "script" if self._info.kind == "script" else "module"

    def _import_error(self) -> ImportError:
        failure = self._failure
        try:
            reason = f"{type(failure).__qualname__}: {failure}"
        except Exception:  # its `__str__` failed, too
            reason = type(failure).__qualname__
        return ImportError(f"the worker could not import your {self._kind} {self._info.target!r}: {reason}", name="__main__")

    def _run(self) -> None:
        module = _running_main(self)
        # Set before the main runs: in an import cycle, this thread looks up names here while it runs the main.
        self._module = module
        sys.modules["__mp_main__"] = module  # dataclasses and typing look up the module of a class while they create it
        context.importing_main = True
        try:
            code = _prepare(module, self._info)
            with _without_running_loop():
                exec(code, vars(module))
        except BaseException as error:  # also SystemExit: sys.exit() in an unguarded script must not end the worker
            self._failure = error
            self._module = None
            sys.modules.pop("__mp_main__", None)
        else:
            module.__class__ = ModuleType
            sys.modules["__main__"] = module
        finally:
            context.importing_main = False


def _running_main(importer: _Importer) -> ModuleType:
    """Return a module for the main. Until its class is changed, another thread that looks up a name in it waits for the importer.

    Pickles of other workers name `__mp_main__`, so they find this module, and not the `__main__` that waits.
    """

    class RunningMain(ModuleType):
        def __getattribute__(self, name: str) -> object:
            if name.isidentifier() and not name.startswith("__"):
                importer.module()
            return ModuleType.__getattribute__(self, name)  # not by `super`: the class may have changed meanwhile

    return RunningMain("__mp_main__")


def _line_of_main(failure: BaseException) -> TracebackType | None:
    """Return a traceback with a single entry: the line of the user's main that led to the failure, and that lacks a guard."""
    of_run = failure.__traceback__
    line = None if of_run is None else of_run.tb_next
    return None if line is None else TracebackType(None, line.tb_frame, line.tb_lasti, line.tb_lineno)


class _Finder:
    """Finds `__mp_main__` when it is imported before any name of `__main__` was looked up."""

    def __init__(self, importer: _Importer) -> None:
        self._importer = importer

    def find_spec(self, name: str, path: object, target: object = None) -> importlib.machinery.ModuleSpec | None:
        if name != "__mp_main__":
            return None
        # Run it here instead of in exec_module: by then the import system has put a module into sys.modules, and may have replaced
        # one that another thread is running.
        self._importer.module()
        return importlib.machinery.ModuleSpec(name, self)  # type: ignore[arg-type]  # importlib.abc is slow to import

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = self._importer.module()
        spec.loader_state = module.__spec__  # the import system is about to replace it by `spec`
        return module

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__ = module.__spec__.loader_state


def _prepare(module: ModuleType, info: MainInfo) -> CodeType:
    """Set the module attributes (`__file__`, `__spec__` and so on) as running it would, and return its code."""
    if info.kind == "script":
        module.__file__ = info.target
        return _script_code(info.target)
    spec = importlib.util.find_spec(info.target)
    if spec is None or spec.loader is None:
        raise ModuleNotFoundError(f"No module named {info.target!r}", name=info.target)
    code: CodeType | None = spec.loader.get_code(info.target)  # type: ignore[attr-defined]
    if code is None:
        raise ImportError(f"no code object available for {info.target!r}", name=info.target)
    module.__spec__ = spec
    module.__loader__ = spec.loader
    module.__package__ = spec.parent
    module.__file__ = spec.origin
    return code


def _script_code(path: str) -> CodeType:
    if path.endswith(".pyc"):
        code = importlib.machinery.SourcelessFileLoader("__mp_main__", path).get_code("__mp_main__")
        if code is None:
            raise ImportError(f"no code object in {path!r}", path=path)
        return code
    # SourceFileLoader would leave a `__pycache__` directory next to the user's script.
    with io.open_code(path) as file:
        return compile(file.read(), path, "exec", dont_inherit=True)


@contextlib.contextmanager
def _without_running_loop() -> Iterator[None]:
    """Hide this thread's running loop and task, so that asyncio.run() in an unguarded script reaches percore's own error.

    The task is hidden because Python 3.14 and later refuse to step a task inside another one, even of another loop.
    """
    loop = asyncio._get_running_loop()
    if loop is None:
        yield
        return
    task = asyncio.current_task(loop)
    if task is not None:
        asyncio.tasks._leave_task(loop, task)
    asyncio._set_running_loop(None)
    try:
        yield
    finally:
        asyncio._set_running_loop(loop)
        if task is not None:
            asyncio.tasks._enter_task(loop, task)


# gevent


def leave_unpatched() -> None:
    """From now on, the patching functions of `gevent.monkey` do nothing in this process.

    A gevent program calls `monkey.patch_all()` at the top of its script, and a worker that needs a function of the script runs it.
    The threads that a worker starts would then be greenlets of its event loop's thread, which never runs them.
    """
    if "gevent.monkey" not in sys.modules:
        sys.meta_path.insert(0, AfterImport({"gevent.monkey": _disarm}))


def _disarm(monkey: Any) -> None:
    def leave_out(*_args: Any, **_kwargs: Any) -> None:
        logger.debug("percore: gevent.monkey patches nothing in a worker, which runs calls in threads")

    for name in [name for name in vars(monkey) if name.startswith("patch_")]:
        setattr(monkey, name, leave_out)
