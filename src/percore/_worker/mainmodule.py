"""The supervisor's `__main__` in a worker: run when something of it is first needed, at most once.

A worker starts with an empty module as `__main__`. Pickle looks a name up in it, the name is missing, and PEP 562's
`__getattr__` runs the user's script or module, named `__mp_main__` as multiprocessing names it, so that what stands
under `if __name__ == "__main__":` does not run. A script whose functions all live elsewhere never runs. Importing
`__mp_main__` runs it too, by a finder: an empty module of that name would be asked for the name of every object without
a `__module__` that this worker pickles.

Guarantees:
- the main is run once; a failure is remembered and raised at each later need;
- whoever asks `__main__` for a name while another thread runs it waits for its end, because a function found half-way
  would miss its globals. The running thread itself sees what is there so far, as in any import cycle;
- names land in the very module whose dictionary is the functions' globals.

Assumption: no two threads wait for each other's import. A library module that does `from __main__ import x`, imported
by the main in one thread and by a call in another, would: each has what the other waits for.
"""

import asyncio
import contextlib
import importlib.machinery
import importlib.util
import io
import sys
import threading
from collections.abc import Iterator
from types import CodeType, ModuleType, TracebackType

from percore._ipc.pickles import MainInfo, alias_main, main_info
from percore._worker import context

__all__ = ["MainInfo", "alias_main", "install", "main_info"]

# The interpreter runs the boot code in the dictionary of the `__main__` it made, without a reference of its own.
_replaced: list[ModuleType | None] = []


def install(info: MainInfo) -> None:
    """Put a fresh `__main__` in the place of this worker's: lazy for a script or a module, else empty.

    Runs no user code.
    """
    main = ModuleType("__main__")
    if not info.by_value:
        importer = _Importer(info)
        # PEP 562: the module's own `__getattr__` is asked for what it does not have.
        vars(main)["__getattr__"] = importer.attribute
        # What multiprocessing reads when the user's code makes processes of its own in this worker.
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
        """Find `name` in the user's main, running that first if nobody has.

        Raises:
            AttributeError: it has no such name.
            ImportError: it could not be run, now or at an earlier need; the cause is what it raised.
        """
        # Everybody looks at `__file__`, `__spec__`, `__path__` of every module, and pickle looks for `<lambda>` here when it
        # finds an object nowhere else: no reasons to run a script.
        if name.startswith("__") or not name.isidentifier():
            raise AttributeError(f"module '__main__' has no attribute {name!r}")
        return getattr(self.module(), name)

    def module(self) -> ModuleType:
        """The user's main, run by now, or running in this very thread. Raises ImportError as `attribute` does."""
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
        except Exception:  # its `__str__` failed too
            reason = type(failure).__qualname__
        return ImportError(f"the worker could not import your {self._kind} {self._info.target!r}: {reason}", name="__main__")

    def _run(self) -> None:
        module = ModuleType("__mp_main__")
        # Set before it runs: the running thread comes back here for names, through an import cycle.
        self._module = module
        sys.modules["__mp_main__"] = module  # dataclasses and typing look up a class's module while it is being made
        context.importing_main = True
        try:
            code = _prepare(module, self._info)
            with _without_running_loop():
                exec(code, vars(module))
        except BaseException as error:  # sys.exit() at the end of an unguarded script, too: it must not end the worker
            self._failure = error
            self._module = None
            sys.modules.pop("__mp_main__", None)
        else:
            sys.modules["__main__"] = module
        finally:
            context.importing_main = False


def _line_of_main(failure: BaseException) -> TracebackType | None:
    """A traceback of nothing but the line of the user's main that led to a failure: what has no guard."""
    of_run = failure.__traceback__
    line = None if of_run is None else of_run.tb_next
    return None if line is None else TracebackType(None, line.tb_frame, line.tb_lasti, line.tb_lineno)


class _Finder:
    """Finds `__mp_main__` before anything of it was needed as `__main__`."""

    def __init__(self, importer: _Importer) -> None:
        self._importer = importer

    def find_spec(self, name: str, path: object, target: object = None) -> importlib.machinery.ModuleSpec | None:
        if name != "__mp_main__":
            return None
        # Run here and not in exec_module: by then the import system has put a module into sys.modules, perhaps over the
        # one that another thread is running at the moment.
        self._importer.module()
        return importlib.machinery.ModuleSpec(name, self)  # type: ignore[arg-type]  # importlib.abc costs more to import than it tells

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = self._importer.module()
        spec.loader_state = module.__spec__  # about to be replaced by `spec`
        return module

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__ = module.__spec__.loader_state


def _prepare(module: ModuleType, info: MainInfo) -> CodeType:
    """Set the module's dunders as running it would, and give its code."""
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
    # Not through a SourceFileLoader: that leaves a `__pycache__` beside the user's script.
    with io.open_code(path) as file:
        return compile(file.read(), path, "exec", dont_inherit=True)


@contextlib.contextmanager
def _without_running_loop() -> Iterator[None]:
    """Hide this thread's loop and task: asyncio.run() in an unguarded script is to get as far as percore's own error.

    Since 3.14 asyncio refuses to step a task inside another one whatever its loop, so the task is hidden as well.
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
