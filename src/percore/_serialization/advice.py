"""Error messages about objects that cannot be sent. They name the object and the reason, and say what to send instead."""

import inspect
import sys
import threading
from collections.abc import Callable
from typing import Any, Final, cast

from percore._common.callables import qualified_name
from percore._common.errors import RemoteError, with_article
from percore._serialization.exception_state import format_traceback, text_of, type_name_of
from percore._serialization.pickler import CANNOT, dump
from percore._serialization.reducers import CAREFUL

_PER_WORKER: Final = "make one in each worker, in the lifespan"
_FILE: Final = ("return its content or its path", "give its path, or its content")
_AWAIT: Final = ("await it in the worker and return its result", "await it, and give its result")

_INSTEAD: Final = {
    "coroutine": (_AWAIT[0], "give the function and its arguments, or await it and give its result"),
    "generator": ("return a list, or yield its items from a call of their own", "give a list, or map over it"),
    "async_generator": ("collect its items in the worker and return a list", "collect its items and give a list, or map over it"),
    "Task": _AWAIT,
    "Future": _AWAIT,
    "ClientResponse": (
        "return what you need of it, for example `return await response.text()`",
        "give what the call needs of it, for example `await response.text()`",
    ),
    "ClientSession": ("keep it in the lifespan and use percore.state() in the worker",) * 2,
    "Executor": (_PER_WORKER,) * 2,
    "lock": (_PER_WORKER,) * 2,
    "RLock": (_PER_WORKER,) * 2,
    "TextIOWrapper": _FILE,
    "BufferedReader": _FILE,
    "BufferedWriter": _FILE,
    "BufferedRandom": _FILE,
    "FileIO": _FILE,
    "module": ("return its name", "give its name"),
    "memoryview": ("return pickle.PickleBuffer(view), or bytes(view)", "give pickle.PickleBuffer(view), or bytes(view)"),
}
"""Advice by class name: for a result, and for an argument."""


def unpicklable(value: object, exc: BaseException) -> RemoteError:
    """Return the error that the caller gets for a result that cannot be pickled. It says what to return instead."""
    text = _told("the result", value, exc, "return plain data instead", 0)
    return RemoteError(type_name_of(exc), text, format_traceback(exc))


def unpicklable_item(value: object, exc: BaseException) -> RemoteError:
    """As `unpicklable`, for an item of a stream."""
    text = _told("the item", value, exc, "yield plain data instead", 0, "yield ")
    return RemoteError(type_name_of(exc), text, format_traceback(exc))


def unsendable(what: str, value: object, error: Exception) -> Exception:
    """Return the exception to raise instead of `error`, which pickling `value` raised. `what` names the value in the message.

    If pickle or cloudpickle raised `error`, return an error of the same class with a message that names the function and the
    argument, which theirs does not. If the user's code raised it, return `error` itself.
    """
    return _retold(error, _told(what, value, error, "send plain data instead", 1))


def unsendable_function(what: str, error: Exception, instead: str = "give what it needs as arguments") -> Exception:
    """Like `unsendable`, for a function. `instead`: where the function gets the objects that were pickled with it."""
    text = f"{what} cannot be pickled ({type_name_of(error)}: {text_of(error)})"
    return _retold(error, f"{text}; use a function of a module, and {instead}")


def _retold(error: Exception, text: str) -> Exception:
    if type(error) not in CANNOT:
        return error
    made = type(error)(text)
    made.__cause__ = error
    return made


def _told(what: str, value: object, exc: BaseException, otherwise: str, place: int, verb: str = "return ") -> str:
    culprit = _culprit(value)
    known = value if culprit is None else culprit
    # A subclass (a response class of the user, asyncio's C task) gets the advice for its known base.
    names = [base.__name__ for base in type(known).__mro__]
    contained = "is" if known is value else "contains"
    advice = next((_INSTEAD[name][place].replace("return ", verb) for name in names if name in _INSTEAD), None)
    if advice is None and type(known) in CAREFUL:
        return f"{what} {contained} {with_article(names[0])}: {text_of(exc)}"
    reason = f"{type_name_of(exc)}: {text_of(exc)}"
    return f"{what} {contained} {with_article(names[0])}, which cannot be pickled ({reason}); {advice or otherwise}"


def _culprit(value: object, depth: int = 3) -> object | None:
    """Find the first object in `value` of a type known to be unpicklable. Searches plain containers only: no user code runs."""
    if type(value) in CAREFUL or any(base.__name__ in _INSTEAD for base in type(value).__mro__):
        return value
    if not depth or type(value) not in (list, tuple, dict, set, frozenset):
        return None
    try:
        items = list(value.values() if isinstance(value, dict) else cast("list[object]", value))
    except RuntimeError:  # another thread is changing the container
        return None
    for item in items[:100]:
        found = _culprit(item, depth - 1)
        if found is not None:
            return found
    return None


# Names that a worker cannot import


IMPORT_ERRORS: Final = (ModuleNotFoundError, AttributeError)
"""The errors that unpickling raises if it cannot import a name."""


_NO_NAME: Final = ("Can't get attribute", "module '")
"""How an AttributeError of unpickling begins: up to Python 3.14, and from 3.15 on."""


def advise_importing(error: BaseException) -> None:
    """Add a note to `error`, raised by unpickling a call, if the worker lacks a module or has another version of it."""
    if type(error) is ModuleNotFoundError:
        BaseException.add_note(
            error,
            "The worker could not import it. A worker has the sys.path that the program had when the worker was started: change "
            "sys.path before the runner is started, or call cloudpickle.register_pickle_by_value(module) in the program.",
        )
    elif type(error) is AttributeError and text_of(error).startswith(_NO_NAME):
        BaseException.add_note(
            error,
            "The worker has imported this module from its file, and does not see what the program has changed in it since "
            "(importlib.reload, %autoreload): start the runner anew, or call cloudpickle.register_pickle_by_value(module) in the "
            "program.",
        )


# The main thread


def advise_call(error: BaseException) -> None:
    """Add a note to `error`, raised by a call, if the call needed what workers lack: the main thread, or a debugger's input."""
    if _has_left_debugger(error):
        BaseException.add_note(
            error,
            "A worker has no standard input for breakpoint(). Use a debugger with a port: install remote-pdb, and set "
            "PYTHONBREAKPOINT=remote_pdb.set_trace and REMOTE_PDB_PORT=4444 in the environment of the program.",
        )
    elif (
        issubclass(type(error), ValueError | RuntimeError)
        and threading.current_thread() is not threading.main_thread()
        and "main thread" in text_of(error)
    ):
        BaseException.add_note(
            error,
            "The main thread of a worker runs the coroutine functions. With LoopPoolExecutor(max_threads=1) it runs the plain "
            "functions instead.",
        )


def _has_left_debugger(error: BaseException) -> bool:
    """Whether pdb has raised `error`, because its input has ended: BdbQuit, or from Python 3.14 on SystemExit."""
    bdb = sys.modules.get("bdb")
    if bdb is None or not issubclass(type(error), bdb.BdbQuit | SystemExit):
        return False
    frame, last = None, error.__traceback__
    while last is not None:
        frame, last = last.tb_frame, last.tb_next
    return issubclass(type(error), bdb.BdbQuit) or (frame is not None and frame.f_globals.get("__name__") == "pdb")


# Arguments


def blamed(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], can_pickle: Callable[[object], bool]
) -> tuple[str, object]:
    """Return a description of the argument that could not be pickled, and the argument.

    An argument of a type known to be unpicklable is found without running user code. Otherwise the arguments are pickled again, one
    by one, with `can_pickle`.
    """
    name = qualified_name(fn)
    parts: list[tuple[str | int, object]] = [*enumerate(args), *kwargs.items()]
    found = [part for part in parts if _culprit(part[1]) is not None] or (parts if len(parts) == 1 else [])
    if not found:
        found = [part for part in parts if not can_pickle(part[1])]
    if not found:
        return f"{name}(): one of the arguments", (args, kwargs) if kwargs else args
    place, value = found[0]
    return f"{name}(): {_argument(fn, place)}", value


def _argument(fn: Callable[..., Any], place: str | int) -> str:
    from percore._serialization.newer import signature_of

    if isinstance(place, str):
        return f"the argument {place!r}"
    try:
        parameters = [*signature_of(fn).parameters.values()][: place + 1]
    except Exception:  # a builtin, or a `__signature__` of the user that is wrong
        parameters = []
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    if len(parameters) > place and all(parameter.kind in kinds for parameter in parameters):
        return f"the argument {parameters[place].name!r}"
    return f"argument {place + 1}"


def can_pickle(obj: object, *, main_by_value: bool) -> bool:
    """Whether `dump` could pickle `obj`. This keeps nothing."""
    nowhere = Nowhere()
    try:
        dump(obj, nowhere, main_by_value=main_by_value, beside=nowhere)
    except Exception:
        return False
    return True


class Nowhere:
    """A file for picklers that discards everything written."""

    def __init__(self) -> None:
        self.buffers: list[memoryview] = []

    def write(self, data: object, /) -> None:
        """Discard `data`."""

    def contains(self, needle: bytes) -> bool:
        """Return False, since nothing is stored."""
        return False

    def reset(self) -> None:
        """Do nothing, since nothing is stored."""

    def keep(self, buffer: object) -> bool:
        """Return False: the buffer is left out of the pickle."""
        return False

    def write_buffers(self) -> None:
        """Do nothing, since no buffers are stored."""
