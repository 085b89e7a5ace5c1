"""Pickling of arguments, results and exceptions: what travels, what does not, and what user code may do on the way."""

import asyncio
import contextlib
import copyreg
import errno
import functools
import io
import math
import pickle
import ssl
import subprocess
import sys
import threading
import traceback
from collections.abc import AsyncIterator, Callable, Iterator
from types import ModuleType
from typing import Any, NoReturn, TypeVar, cast

import aiohttp
import multidict
import pytest
from aiohttp import client_exceptions, client_reqrep, web
from aiohttp.http_exceptions import BadStatusLine
from yarl import URL

from percore._common.callables import full_name, name_in, qualified_name
from percore._common.errors import PayloadTooLarge, RemoteError, RemoteTraceback
from percore._serialization import reducers
from percore._serialization.advice import blamed, unpicklable, unsendable
from percore._serialization.exception_state import format_traceback
from percore._serialization.exceptions import dump_exception, load_exception
from percore._serialization.pickler import MainInfo, dump, is_by_reference, load, main_info


class Sink:
    """A File in memory that knows how often it was reset and refuses more than `limit` bytes."""

    def __init__(self, limit: int = 2**30) -> None:
        self.limit = limit
        self.data = b""
        self.resets = 0

    def write(self, data: Any, /) -> object:
        self.data += data.raw() if isinstance(data, pickle.PickleBuffer) else data
        if len(self.data) > self.limit:
            raise PayloadTooLarge(self.limit)
        return None

    def contains(self, needle: bytes) -> bool:
        return needle in self.data

    def reset(self) -> None:
        self.data = b""
        self.resets += 1


def there_and_back(obj: object, *, main_by_value: bool = False) -> Any:
    file = Sink()
    dump(obj, file, main_by_value=main_by_value)
    return load(file.data)


def arrived(exc: BaseException, *, main_by_value: bool = False) -> Any:
    return load_exception(dump_exception(exc, Sink, main_by_value=main_by_value).data)


E = TypeVar("E", bound=BaseException)


def raised(exc: E) -> E:
    try:
        raise exc
    except type(exc) as error:
        return error


def chain(exc: BaseException) -> list[type[BaseException]]:
    """The types along `__cause__`."""
    types = []
    cause = exc.__cause__
    while cause is not None:
        types.append(type(cause))
        cause = cause.__cause__
    return types


# Objects


def iter_nothing() -> Iterator[None]:
    yield


class Plain:
    def __init__(self, value: object) -> None:
        self.value = value

    @classmethod
    def build(cls) -> "Plain":
        return cls(1)

    def method(self) -> object:
        return self.value

    def __call__(self) -> object:
        return self.value


class Reduces:
    """Raises from `__reduce__`."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __reduce__(self) -> NoReturn:
        raise self.error


def test_ordinary_objects_go_by_pickle(subtests: pytest.Subtests) -> None:
    for main_by_value in [False, True]:
        for obj in [None, 1, "x", b"x" * 10**6, (1, [2, {"a": {3}}]), math.sqrt, Plain, Plain.build]:
            with subtests.test(obj=obj, main_by_value=main_by_value):
                file = Sink()
                dump(obj, file, main_by_value=main_by_value)
                assert file.resets == 0
                assert load(file.data) == obj
                assert load(memoryview(file.data)) == obj


def test_what_pickle_cannot_goes_by_cloudpickle() -> None:
    local = 40

    class Local:
        value = 2

    assert there_and_back(lambda: local + Local.value)() == 42
    assert there_and_back(functools.partial(lambda a, b: a + b, 1))(2) == 3
    assert there_and_back(Local) is Local, "cloudpickle's tracker keeps the identity of a class in one process"
    assert there_and_back(Plain(5).method)() == 5
    assert there_and_back(Plain(lambda: 6))()() == 6


def module_of(source: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module that workers cannot import."""
    module = ModuleType("only_here")
    exec(source, vars(module))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


_LATE = """
def fn(given: Missing, *, more: "Missing" = 2) -> Missing:
    return given + more

fn.mark = "kept"

class Class:
    field: Missing

    def method(self, given: Missing) -> int:
        return fn(given)
"""


@pytest.mark.skipif(sys.version_info < (3, 14), reason="annotations are evaluated when the function is made")
def test_annotations_that_nobody_can_evaluate_travel_as_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    module = module_of(_LATE, monkeypatch)
    fn = there_and_back(module.fn)
    assert (fn is not module.fn, fn(1), fn.mark, fn.__qualname__) == (True, 3, "kept", "fn")
    assert fn.__annotations__ == {"given": "Missing", "more": "Missing", "return": "Missing"}
    assert there_and_back(module.Class)().method(1) == 3
    assert blamed(module.fn, (iter_nothing(),), {}, bool)[0] == "fn(): the argument 'given'"
    with pytest.raises(NameError, match="Missing"):  # the program's own function is left as it was
        module.fn.__annotations__  # noqa: B018


_LAZY = """
lazy import json
lazy import concurrent.futures.thread
lazy from decimal import Decimal as Number
lazy import there_is_no_such_module

def fn(text):
    value, number = json.loads(text), Number(text)
    return [value, number, concurrent.futures.thread.ThreadPoolExecutor.__name__, [json for _ in "a"][0].__name__]

def guarded(there_is_no_such_module=0):
    return there_is_no_such_module

def broken():
    return there_is_no_such_module.name
"""


@pytest.mark.skipif(sys.version_info < (3, 15), reason="no import is lazy")
def test_a_lazy_import_that_a_function_uses_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    module = module_of(_LAZY, monkeypatch)
    fn = there_and_back(module.fn)
    assert fn("1") == [1, 1, "ThreadPoolExecutor", "json"]
    assert there_and_back(module.guarded)() == 0  # the lazy import of this name is left alone
    with pytest.raises(ImportError, match="there_is_no_such_module"):
        there_and_back(module.broken)
    module = module_of("lazy import json\nlazy from decimal import Decimal", monkeypatch)
    arrived = there_and_back(lambda: (module.json.loads("1"), module.Decimal(1)))
    assert arrived() == (1, 1)


@pytest.mark.skipif(sys.version_info < (3, 15), reason="there are no sentinels")
def test_a_sentinel_is_one_object_in_each_process(monkeypatch: pytest.MonkeyPatch) -> None:
    module = module_of("MARK = sentinel('MARK', repr='<mark>')\ndef fn(given=MARK): return given, given is MARK", monkeypatch)
    file, back = Sink(), Sink()
    dump([module.fn, module.MARK], file, main_by_value=False)
    with monkeypatch.context() as worker:
        worker.delitem(sys.modules, module.__name__)
        fn, mark = cast("Any", load(file.data))
        assert fn() == (mark, True)
        assert fn(cast("Any", load(file.data))[1]) == (mark, True)
        assert (mark is module.MARK, repr(mark)) == (False, "<mark>")
        dump(mark, back, main_by_value=False)
    assert load(back.data) is module.MARK


def test_proxies_of_multidict_travel() -> None:
    headers = multidict.CIMultiDictProxy(multidict.CIMultiDict([("A", "1"), ("a", "2")]))
    query = multidict.MultiDictProxy(multidict.MultiDict(b="3"))
    for copy in (there_and_back([headers, query]), there_and_back([headers, query, lambda: 1])):
        assert type(copy[0]) is multidict.CIMultiDictProxy
        assert copy[0].getall("A") == ["1", "2"]
        assert type(copy[1]) is multidict.MultiDictProxy
        assert copy[1] == {"b": "3"}
    with pytest.raises(TypeError):
        pickle.dumps(headers)  # the program's own pickle is left as it is


def test_copyreg_is_honoured_live(monkeypatch: pytest.MonkeyPatch) -> None:
    class Strange:
        def __reduce__(self) -> NoReturn:
            raise TypeError

    monkeypatch.setitem(copyreg.dispatch_table, Strange, lambda _: (int, ("7",)))
    assert there_and_back(Strange()) == 7
    assert there_and_back([Strange(), lambda: 1])[0] == 7


def test_copyreg_is_honoured_for_what_pickle_can_do_too(monkeypatch: pytest.MonkeyPatch) -> None:
    assert there_and_back(Plain(1)).value == 1
    monkeypatch.setitem(copyreg.dispatch_table, Plain, lambda _: (int, ("7",)))
    assert there_and_back(Plain(1)) == 7
    monkeypatch.setitem(copyreg.dispatch_table, Plain, lambda _: (int, ("8",)))
    assert there_and_back([Plain(1), lambda: 1])[0] == 8
    monkeypatch.undo()
    assert there_and_back(Plain(1)).value == 1


def test_standard_output_stays_standard_output(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO()))
    assert there_and_back((sys.stdout, lambda: 1))[0] is sys.stdout


def test_a_reducer_of_the_users_own_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(copyreg.dispatch_table, asyncio.Lock, lambda _: (int, ("7",)))
    assert there_and_back(asyncio.Lock()) == 7
    assert there_and_back([asyncio.Lock(), lambda: 1])[0] == 7


def test_what_was_imported_since_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Lock:
        """A base."""

    class LoopLock(Lock):
        """What anyio makes for one kind of loop."""

    library = ModuleType("anyio")
    library.Lock = Lock  # type: ignore[attr-defined]
    assert isinstance(there_and_back(LoopLock()), LoopLock)
    monkeypatch.setitem(sys.modules, "anyio", library)
    monkeypatch.setattr(reducers, "_modules", -1)  # where the real one was imported before, the number of modules is the same
    for thing in (Lock(), LoopLock(), [LoopLock(), lambda: 1]):
        with pytest.raises(TypeError, match=r"of anyio works within one event loop.*per_key=1"):
            dump(thing, Sink(), main_by_value=False)


@pytest.mark.parametrize("error", [ValueError("no"), SystemExit(3), KeyboardInterrupt(), RecursionError(), MemoryError()])
def test_errors_of_user_code_reach_the_caller_and_leave_the_file_empty(error: BaseException) -> None:
    file = Sink()
    with pytest.raises(type(error)) as caught:
        dump([b"x" * 200_000, Reduces(error)], file, main_by_value=False)
    assert caught.value is error
    assert file.data == b""
    assert file.resets == 1


@pytest.mark.parametrize("make", [threading.Lock, lambda: iter_nothing(), lambda: sys._getframe()])
def test_what_nothing_can_pickle_raises_and_leaves_the_file_empty(make: Callable[[], object]) -> None:
    file = Sink()
    with pytest.raises((TypeError, pickle.PicklingError)) as caught:
        dump([b"x" * 200_000, make()], file, main_by_value=False)
    assert file.data == b""
    assert caught.value.__context__ is None, "one error, not one during the handling of another"


def test_an_error_of_the_file_is_raised_as_it_is() -> None:
    file = Sink(limit=1000)
    with pytest.raises(PayloadTooLarge):
        dump(b"x" * 2000, file, main_by_value=False)
    assert file.data == b""


def test_deep_nesting_is_a_recursion_error() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises((RecursionError, pickle.PicklingError)):
        dump(deep, Sink(), main_by_value=False)
    while deep:  # its own deallocation is nobody's subject here
        deep = deep[0]


# Results that cannot be pickled


async def coroutine() -> None: ...


@pytest.mark.parametrize(
    ("make", "name", "advice"),
    [
        (lambda: object.__new__(aiohttp.ClientResponse), "ClientResponse", "return await response.text()"),
        (lambda: object.__new__(aiohttp.ClientSession), "ClientSession", "lifespan"),
        (lambda: iter_nothing(), "generator", "a list"),
        (threading.Lock, "lock", "in each worker"),
        (lambda: [1, {"a": threading.Lock()}], "the result contains a lock", "in each worker"),
        (sys._getframe, "frame", "plain data"),
    ],
)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_unpicklable_result_says_what_to_return(make: Callable[[], object], name: str, advice: str) -> None:
    error = unpicklable(make(), TypeError("cannot pickle it"))
    assert error.type_name == "TypeError"
    assert name in str(error)
    assert advice in str(error)
    assert "cannot pickle it" in str(error)
    assert "TypeError" in error.remote_traceback


def test_a_coroutine_as_result_says_to_await_it() -> None:
    coro = coroutine()
    assert "await it" in str(unpicklable(coro, TypeError("x")))
    coro.close()


def test_an_error_of_the_users_own_is_left_as_it_is() -> None:
    class Own(TypeError):
        """A subclass."""

    for error in (Own("no"), ValueError("no")):
        assert unsendable("f(): argument 1", 1, error) is error


# Exceptions as themselves


class TwoArguments(Exception):
    def __init__(self, host: str, port: int) -> None:
        super().__init__(f"{host}:{port}")
        self.host = host
        self.port = port


class Decorates(ValueError):
    def __init__(self, message: str) -> None:
        super().__init__(f"<{message}>")


class Slotted(OSError):
    __slots__ = ("__private", "extra")

    def __init__(self, extra: object) -> None:
        self.extra = extra
        self.__private = "p"
        super().__init__(errno.ENOENT, "gone", "a", None, "b")

    def private(self) -> str:
        return self.__private


class Guarded(Exception):
    """Puts properties and a `__setattr__` in front of everything."""

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(name)

    @property
    def args(self) -> Any:  # type: ignore[override]
        raise LookupError

    @property
    def __cause__(self) -> Any:  # type: ignore[override]
        raise LookupError


class Broken(Exception):
    def __str__(self) -> str:
        raise SystemExit(1)

    __repr__ = __str__


class Nonsense(Exception):
    def __reduce__(self) -> Any:
        return int, ("42",)


class RaisesOnDump(Exception):
    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __reduce__(self) -> NoReturn:
        raise self.error


class RaisesOnLoad(Exception):
    error: BaseException = ValueError("not here")

    def __setstate__(self, state: object) -> NoReturn:
        raise self.error


class ReducesWell(Exception):
    def __init__(self, a: int, b: int) -> None:
        super().__init__("sum")
        self.a, self.b = a, b

    def __reduce__(self) -> Any:
        return type(self), (self.a, self.b)


STANDARD: list[BaseException] = [
    ValueError("a", 1),
    KeyError("k"),
    OSError(errno.ENOENT, "gone", "file"),
    OSError("only text"),
    BlockingIOError(errno.EAGAIN, "again", 17),
    UnicodeDecodeError("utf-8", b"abc", 1, 2, "why"),
    ImportError("x", name="n", path="p"),
    SyntaxError("bad", ("f.py", 3, 4, "text")),
    subprocess.CalledProcessError(3, ["cmd"], b"out", b"err"),
    asyncio.IncompleteReadError(b"ab", 5),
    TimeoutError("late"),
    ssl.SSLError(1, "ssl"),
    TwoArguments("h", 1),
    Decorates("m"),
    ReducesWell(1, 2),
    RecursionError("deep"),
]


def test_an_exception_arrives_as_itself(subtests: pytest.Subtests) -> None:
    for exc in STANDARD:
        with subtests.test(exc=exc):
            exc.__dict__["extra"] = [1]
            back = arrived(raised(exc))
            assert type(back) is type(exc)
            assert back.args == exc.args
            assert str(back) == str(exc)
            assert {**vars(back)} == {**vars(exc)} or isinstance(exc, ReducesWell | asyncio.IncompleteReadError)
            assert isinstance(back.__cause__, RemoteTraceback)
            assert str(back.__cause__).startswith('\n"""\nTraceback')
            assert "raised(exc)" not in str(back)
            assert "in raised" in str(back.__cause__)


def test_c_fields_slots_and_guarded_attributes_are_put_back() -> None:
    back = arrived(Slotted([1]))
    assert (back.extra, back.private(), back.errno, back.filename, back.filename2) == ([1], "p", errno.ENOENT, "a", "b")
    assert arrived(BlockingIOError(errno.EAGAIN, "x", 17)).characters_written == 17
    assert type(arrived(Guarded(1))) is Guarded
    assert BaseException.args.__get__(arrived(Guarded(1))) == (1,)  # type: ignore[attr-defined]


def test_the_object_of_an_attribute_error_stays_behind() -> None:
    with pytest.raises(AttributeError) as caught:
        threading.Lock().nothing  # type: ignore[attr-defined] # noqa: B018
    back = arrived(caught.value)
    assert type(back) is AttributeError
    assert back.name == "nothing"


def test_notes_attributes_and_references_to_itself_are_kept() -> None:
    exc = ValueError("v")
    exc.add_note("a note")
    exc.me = exc  # type: ignore[attr-defined]
    exc.args = (exc, 1)
    back = arrived(exc)
    assert back.__notes__ == ["a note"]
    assert back.me is back
    assert back.args == (back, 1)


def test_the_sent_exception_is_left_as_it_is() -> None:
    cause = KeyError("c")
    exc = ValueError("v")
    exc.__cause__ = cause
    before = (dict(vars(exc)), exc.__cause__, exc.__context__, exc.__suppress_context__)
    arrived(exc)
    assert (dict(vars(exc)), exc.__cause__, exc.__context__, exc.__suppress_context__) == before
    assert cause.__cause__ is None


def test_tools_that_obey_suppress_context_find_the_traceback_of_the_worker() -> None:
    """They take `__cause__` if it is set, and otherwise `__context__`, as Sentry's client does."""
    exc = ValueError("v")
    exc.__cause__ = KeyError("c")
    exc.__cause__.__context__ = OSError("o")
    back = arrived(exc)
    assert back.__suppress_context__
    assert back.__cause__.__suppress_context__
    assert isinstance(back.__cause__.__cause__, RemoteTraceback)


def test_suppress_context_of_a_cause_is_kept() -> None:
    exc = ValueError("v")
    exc.__cause__ = KeyError("c")
    exc.__suppress_context__ = False
    assert arrived(exc).__suppress_context__ is False


def test_the_context_is_told_in_the_text() -> None:
    exc = ValueError("the second")
    exc.__context__ = raised(KeyError("the first"))
    back = arrived(raised(exc))
    assert back.__context__ is None
    assert "During handling of the above exception" in str(back.__cause__)
    assert "the first" in str(back.__cause__)


# Causes


def test_the_chain_of_causes_is_kept_and_ends_in_the_traceback() -> None:
    exc, middle, last = ValueError("v"), TwoArguments("h", 2), asyncio.CancelledError()
    exc.__cause__ = middle
    middle.__cause__ = last
    back = arrived(exc)
    assert chain(back) == [TwoArguments, asyncio.CancelledError, RemoteTraceback]
    assert back.__cause__.port == 2
    text = "".join(traceback.format_exception(back))
    assert "h:2" in text
    assert "direct cause" in text


@pytest.mark.parametrize("length", [1, 2, 3])
def test_a_cycle_of_causes_is_cut_where_it_closes(length: int) -> None:
    excs: list[BaseException] = [ValueError(i) for i in range(length)]
    for i, exc in enumerate(excs):
        exc.__cause__ = excs[(i + 1) % length]
    back = arrived(raised(excs[0]))
    assert chain(back) == [ValueError] * (length - 1) + [RemoteTraceback]
    assert "".join(traceback.format_exception(back))


def test_a_cause_that_does_not_travel_costs_only_itself() -> None:
    exc, bad, last = ValueError("v"), RaisesOnDump(ValueError("inner")), KeyError("k")
    exc.__cause__ = bad
    bad.__cause__ = last
    back = arrived(exc)
    assert type(back) is ValueError
    assert chain(back) == [RemoteError, KeyError, RemoteTraceback]
    assert isinstance(back.__cause__, RemoteError)
    assert back.__cause__.type_name.endswith("RaisesOnDump")


def test_a_very_long_chain() -> None:
    first = exc = ValueError(0)
    for i in range(1, 3000):
        exc.__cause__ = ValueError(i)
        exc = exc.__cause__
    assert len(chain(arrived(first))) == 3000


# Exceptions that cannot be themselves


@pytest.mark.parametrize(
    "exc",
    [
        Nonsense("n"),
        RaisesOnLoad("n"),
        *(RaisesOnDump(e) for e in (ValueError("inner"), SystemExit(1), KeyboardInterrupt(), RecursionError("r"))),
    ],
    ids=lambda exc: f"{type(exc).__name__}",
)
def test_what_does_not_survive_becomes_a_remote_error(exc: BaseException) -> None:
    exc.__dict__["x"] = 1
    back = arrived(raised(exc))
    assert type(back) is RemoteError
    assert back.type_name == f"{__name__}.{type(exc).__qualname__}"
    assert back.text == str(exc)
    assert "in raised" in back.remote_traceback
    assert chain(back) == [RemoteTraceback]
    assert "The exception itself could not be sent" in back.__notes__[0]


def test_unpicklable_attributes_and_notes() -> None:
    with_lock = ValueError("v")
    with_lock.lock = threading.Lock()  # type: ignore[attr-defined]
    with_note = ValueError("v")
    with_note.__notes__ = [threading.Lock()]  # type: ignore[list-item]
    deep: list[Any] = []
    for _ in range(50_000):
        deep = [deep]
    with_depth = ValueError("v")
    with_depth.deep = deep  # type: ignore[attr-defined]
    for exc in (with_lock, with_note, with_depth):
        back = arrived(raised(exc))
        assert type(back) is RemoteError
        assert (back.type_name, back.text) == ("ValueError", "v")
    while deep:
        deep = deep[0]


def test_a_broken_str_does_not_hurt() -> None:
    back = arrived(raised(Broken(1)))
    assert type(back) is Broken
    assert back.args == (1,)
    stuck = Broken(1)
    stuck.lock = threading.Lock()  # type: ignore[attr-defined]
    back = arrived(raised(stuck))
    assert type(back) is RemoteError
    assert back.text == "<exception str() failed>"


def test_an_exception_that_breaks_the_formatter_is_still_told() -> None:
    exc = SyntaxError("bad")
    exc.__notes__ = Broken(1)  # type: ignore[assignment]
    exc.lineno = Broken(2)  # type: ignore[assignment]
    assert "SyntaxError" in str(arrived(exc).__cause__)


class MyInterrupt(KeyboardInterrupt): ...


class MyBase(BaseException): ...


@pytest.mark.parametrize(
    ("exc", "name"),
    [
        (SystemExit(3), "SystemExit"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (GeneratorExit(), "GeneratorExit"),
        (asyncio.CancelledError("c"), "asyncio.exceptions.CancelledError"),
        (MyInterrupt(), f"{__name__}.MyInterrupt"),
        (MyBase("b"), f"{__name__}.MyBase"),
        (BaseExceptionGroup("g", [KeyboardInterrupt(), ValueError()]), "BaseExceptionGroup"),
    ],
)
def test_what_is_no_exception_becomes_a_remote_error(exc: BaseException, name: str) -> None:
    exc.__cause__ = KeyError("cause")
    back = arrived(raised(exc))
    assert type(back) is RemoteError
    assert (back.type_name, back.text) == (name, str(exc))
    assert chain(back) == [KeyError, RemoteTraceback]
    assert name in back.remote_traceback
    assert not hasattr(back, "__notes__")


@pytest.mark.parametrize("exc", [StopIteration(5), StopAsyncIteration("s")])
def test_stop_iteration_becomes_a_runtime_error(exc: Exception) -> None:
    back = arrived(raised(exc))
    assert type(back) is RuntimeError
    assert chain(back) == [type(exc), RemoteTraceback]
    assert back.__cause__ is not None
    assert back.__cause__.args == exc.args
    assert type(exc).__name__ in str(back)


# Groups


class Labelled(ExceptionGroup[Exception]):
    label: str

    def __new__(cls, label: str, excs: list[Exception]) -> "Labelled":
        group = super().__new__(cls, f"group {label}", excs)
        group.label = label
        return group


def test_a_group_arrives_with_its_members_and_their_causes() -> None:
    inner = ExceptionGroup("inner", [KeyError("k"), TwoArguments("h", 3)])
    inner.exceptions[0].__cause__ = OSError(errno.EIO, "io")
    group: Any = Labelled("l", [inner, ValueError("v")])
    group.add_note("noted")
    group.extra = 1
    back = arrived(raised(group))
    assert type(back) is Labelled
    assert (back.message, back.label, vars(back)["extra"], back.__notes__) == ("group l", "l", 1, ["noted"])
    first: Any = back.exceptions[0]
    assert [type(exc) for exc in back.exceptions] == [ExceptionGroup, ValueError]
    assert [type(exc) for exc in first.exceptions] == [KeyError, TwoArguments]
    assert first.exceptions[1].port == 3
    assert chain(first.exceptions[0]) == [OSError]
    assert chain(back) == [RemoteTraceback]
    assert back.subgroup(TwoArguments) is not None


def test_a_member_that_does_not_travel_costs_only_itself() -> None:
    back = arrived(ExceptionGroup("g", [ValueError("v"), Nonsense("n")]))
    assert type(back) is ExceptionGroup
    assert [type(exc) for exc in back.exceptions] == [ValueError, RemoteError]


def test_a_group_with_an_unpicklable_attribute_is_a_remote_error() -> None:
    group = ExceptionGroup("g", [ValueError("v")])
    group.lock = threading.Lock()  # type: ignore[attr-defined]
    back = arrived(group)
    assert type(back) is RemoteError
    assert back.type_name == "ExceptionGroup"


def test_a_member_that_is_caused_by_its_group_and_a_shared_member() -> None:
    member = ValueError("v")
    group = ExceptionGroup("g", [member, member])
    member.__cause__ = group
    back = arrived(raised(group))
    assert back.exceptions[0] is back.exceptions[1]
    assert back.exceptions[0].__cause__ is back


def test_a_base_group_as_a_cause_stays_itself() -> None:
    exc = ValueError("v")
    exc.__cause__ = BaseExceptionGroup("g", [KeyboardInterrupt()])
    assert chain(arrived(exc)) == [BaseExceptionGroup, RemoteTraceback]


# Classes that live nowhere in particular


def test_a_local_class_arrives_as_itself() -> None:
    class Local(TwoArguments):
        pass

    back = arrived(raised(Local("h", 4)))
    assert type(back) is Local
    assert back.port == 4
    group = arrived(ExceptionGroup("g", [Local("h", 5)]))
    assert type(group.exceptions[0]) is Local


def test_a_class_of_a_by_value_main_goes_by_value(monkeypatch: pytest.MonkeyPatch) -> None:
    class Main(TwoArguments):
        pass

    Main.__module__, Main.__qualname__ = "__main__", "Main"
    monkeypatch.setattr(sys.modules["__main__"], "Main", Main, raising=False)
    exc = Main("h", 6)
    by_value = dump_exception(exc, Sink, main_by_value=True).data
    by_reference = dump_exception(exc, Sink, main_by_value=False).data
    assert b"cloudpickle" in by_value
    assert b"cloudpickle" not in by_reference
    assert type(load_exception(by_value)) is Main
    file = Sink()
    dump(Main, file, main_by_value=True)
    assert b"cloudpickle" in file.data
    monkeypatch.delattr(sys.modules["__main__"], "Main")
    back = load_exception(by_reference)
    assert type(back) is RemoteError, "the class is only in the worker"
    assert (back.type_name, back.text) == ("Main", "h:6")
    assert "AttributeError" in back.__notes__[0]


def test_helpers_of_a_closure_go_by_reference_where_main_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    namespace: dict[str, Any] = vars(sys.modules["__main__"])
    exec("def percore_helper(): return 7\npercore_closure = lambda: percore_helper", namespace)
    try:
        closure = namespace["percore_closure"]
        assert there_and_back(closure)() is namespace["percore_helper"]
        assert there_and_back(closure, main_by_value=True)() is not namespace["percore_helper"]
    finally:
        del namespace["percore_helper"], namespace["percore_closure"]


# Bounds and bad bytes


def test_an_exception_that_is_too_large_arrives_as_payload_too_large() -> None:
    exc = raised(ValueError("x" * 50_000))
    back = load_exception(dump_exception(exc, lambda: Sink(limit=45_000), main_by_value=False).data)
    assert type(back) is PayloadTooLarge
    assert chain(back) == [RemoteTraceback]
    back = load_exception(dump_exception(exc, lambda: Sink(limit=3000), main_by_value=False).data)
    assert type(back) is PayloadTooLarge
    back = load_exception(dump_exception(exc, lambda: Sink(limit=10), main_by_value=False).data)
    assert type(back) is RemoteError
    assert "max_message" in str(back)


def test_a_refused_file_is_reset() -> None:
    files: list[Sink] = []

    def new_file() -> Sink:
        files.append(Sink(limit=45_000))
        return files[-1]

    result = dump_exception(ValueError("x" * 50_000), new_file, main_by_value=False)
    assert result is files[-1]
    assert [file.resets for file in files] == [1, 0]


@pytest.mark.parametrize("data", [b"", b"rubbish", pickle.dumps(7), pickle.dumps(((0, []), "t")), memoryview(b"")])
def test_bad_bytes_become_a_remote_error(data: bytes) -> None:
    assert type(load_exception(data)) is RemoteError


# Functions


class Stubborn:
    def __getattr__(self, name: str) -> NoReturn:
        raise ValueError(name)

    def __call__(self) -> None: ...


def test_qualified_names() -> None:
    assert qualified_name(coroutine) == "coroutine"
    assert qualified_name(functools.partial(functools.partial(coroutine), 1)) == "coroutine"
    assert qualified_name(Plain(1).method) == "Plain.method"
    assert qualified_name(Plain.build) == "Plain.build"
    assert qualified_name(Plain(1)) == "Plain"
    assert qualified_name(Plain) == "Plain"
    assert qualified_name(math.sqrt) == "sqrt"
    assert qualified_name(lambda: 1) == "test_qualified_names.<locals>.<lambda>"
    assert qualified_name(Stubborn()) == "Stubborn"


def test_what_goes_by_reference() -> None:
    fn: object
    for fn in (coroutine, math.sqrt, len, Plain, Plain.method, Plain.build, pickle.loads):
        assert is_by_reference(fn), fn
    wrapped = functools.wraps(coroutine)(lambda: None)
    others: list[object] = [
        lambda: 1,
        Plain(1).method,
        Plain(1),
        functools.partial(coroutine),
        [].append,
        wrapped,
        Stubborn(),
        1,
    ]
    for fn in others:
        assert not is_by_reference(fn), fn


def test_what_goes_by_reference_in_main(monkeypatch: pytest.MonkeyPatch) -> None:
    main = sys.modules["__main__"]
    monkeypatch.setattr(coroutine, "__module__", "__main__")
    monkeypatch.setattr(main, "coroutine", coroutine, raising=False)
    monkeypatch.setattr(main, "__spec__", None)
    monkeypatch.setattr(main, "__file__", __file__, raising=False)
    assert main_info() == MainInfo("script", __file__)
    assert is_by_reference(coroutine)
    monkeypatch.setattr(main, "__file__", "<stdin>")
    assert main_info() == MainInfo("value", "")
    assert not is_by_reference(coroutine)


# aiohttp


def same(back: Any, exc: Any) -> None:
    """`back` is `exc`, as far as its user can tell."""
    assert type(back) is type(exc), getattr(back, "__notes__", back)
    assert str(back) == str(exc) or "SSLContext object" in str(exc)
    for name in ("status", "message", "host", "port", "errno", "strerror", "url", "path", "expected", "got"):
        mine = getattr(exc, name, None)
        its = getattr(back, name, None)
        assert its == mine or (type(its) is type(RAW) and repr(its) == repr(mine))
    if isinstance(exc, aiohttp.ClientResponseError):
        assert back.request_info == exc.request_info
        assert back.headers == exc.headers
        assert type(back.headers) is type(exc.headers)


INFO = aiohttp.RequestInfo(URL("http://h/x"), "GET", multidict.CIMultiDictProxy(multidict.CIMultiDict(a="1")), URL("http://h/x#f"))
KEY = client_reqrep.ConnectionKey("h", 443, True, ssl.create_default_context(), URL("http://p"), None, 5, None)
RAW = aiohttp.http_parser.RawResponseMessage(
    aiohttp.HttpVersion11, 200, "OK", INFO.headers, ((b"a", b"1"),), True, None, False, False
)
CERTIFICATE = ssl.SSLCertVerificationError(1, "self-signed")
OS_ERROR = ConnectionRefusedError(errno.ECONNREFUSED, "refused")
MADE: dict[str, Callable[[type[Any]], BaseException]] = {
    **dict.fromkeys(
        [
            "ClientResponseError",
            "ContentTypeError",
            "WSServerHandshakeError",
            "ClientHttpProxyError",
            "TooManyRedirects",
        ],
        lambda cls: cls(INFO, (), status=404, message="m", headers=INFO.headers),
    ),
    **dict.fromkeys(
        ["ClientConnectorError", "ClientConnectorDNSError", "ClientProxyConnectionError", "ClientSSLError"],
        lambda cls: cls(KEY, OS_ERROR),
    ),
    "ClientConnectorSSLError": lambda cls: cls(KEY, OS_ERROR),
    "UnixClientConnectorError": lambda cls: cls("/s", KEY, OS_ERROR),
    "ClientConnectorCertificateError": lambda cls: cls(KEY, CERTIFICATE),
    "ServerDisconnectedError": lambda cls: cls(RAW),
    "ServerFingerprintMismatch": lambda cls: cls(b"e", b"g", "h", 1),
    "InvalidURL": lambda cls: cls("u", "why"),
}


def _with_a_text(cls: type[Any]) -> BaseException:
    exc: BaseException = cls("text")
    return exc


CLASSES = [
    cls for cls in vars(client_exceptions).values() if isinstance(cls, type) and issubclass(cls, BaseException)
    and cls.__module__ == client_exceptions.__name__
]  # fmt: skip


def test_every_exception_of_aiohttp_arrives_as_itself(subtests: pytest.Subtests) -> None:
    for cls in CLASSES:
        with subtests.test(cls=cls):
            exc = MADE.get(cls.__name__, _with_a_text)(cls)
            same(arrived(raised(exc)), exc)


def test_a_connection_key_arrives_with_a_context_that_trusts_nobody() -> None:
    back = arrived(client_exceptions.ClientConnectorError(KEY, OS_ERROR))
    assert back.ssl.verify_mode is ssl.CERT_REQUIRED
    assert back.ssl.cert_store_stats()["x509"] == 0
    assert back.os_error is back.args[1]
    assert type(back.os_error) is ConnectionRefusedError


async def _page(request: web.Request) -> web.StreamResponse:
    kind = request.match_info["kind"]
    if kind == "redirect":
        raise web.HTTPFound("/redirect", headers={"X-Hop": "1"})
    if kind == "once":
        raise web.HTTPFound("/missing")
    if kind == "reset":
        assert request.transport is not None
        request.transport.abort()
    if kind == "short":
        response = web.StreamResponse(headers={"Content-Length": "100"})
        await response.prepare(request)
        await response.write(b"part")
        assert request.transport is not None
        request.transport.abort()
        return response
    if kind == "slow":
        await asyncio.Event().wait()
    if kind == "page":
        return web.Response(text="hello")
    raise web.HTTPNotFound(headers={"X-Why": "gone"})


@contextlib.asynccontextmanager
async def site() -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_get("/{kind}", _page)
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    server = web.TCPSite(runner, "127.0.0.1", 0)
    await server.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@contextlib.contextmanager
def closed_port() -> Iterator[int]:
    import socket

    with socket.socket() as bound:  # bound and not listening: refused
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]


async def failure(url: str, **options: Any) -> aiohttp.ClientError:
    with pytest.raises(aiohttp.ClientError) as caught:
        await request(url, **options)
    return caught.value


async def request(url: str, *, json: bool = False, websocket: bool = False, **options: Any) -> None:
    async with aiohttp.ClientSession() as session:
        if websocket:
            await session.ws_connect(url)
            return
        async with session.get(url, raise_for_status=True, **options) as response:
            await (response.json() if json else response.read())


@pytest.mark.parametrize(
    ("path", "options", "expected"),
    [
        ("/missing", {}, "ClientResponseError"),
        ("/once", {}, "ClientResponseError"),
        ("/redirect", {"max_redirects": 3}, "TooManyRedirects"),
        ("/reset", {}, "ServerDisconnectedError"),
        ("/short", {}, "ClientPayloadError"),
        ("/slow", {"timeout": aiohttp.ClientTimeout(sock_read=0.01)}, "SocketTimeoutError"),
        ("/page", {"json": True}, "ContentTypeError"),
        ("/page", {"websocket": True}, "WSServerHandshakeError"),
        ("/page", {"proxy": "http://127.0.0.1:{closed}"}, "ClientProxyConnectionError"),
    ],
)
async def test_real_failures_of_aiohttp_arrive_as_themselves(path: str, options: dict[str, Any], expected: str) -> None:
    async with site() as base:
        with closed_port() as closed:
            filled = {k: v.format(closed=closed) if isinstance(v, str) else v for k, v in options.items()}
            exc = await failure(base + path, **filled)
    assert type(exc).__name__ == expected
    back = arrived(exc)
    same(back, exc)
    for mine, its in zip(getattr(exc, "history", ()), getattr(back, "history", ()), strict=True):
        assert (its.status, its.url, its.headers, its.closed) == (mine.status, mine.url, mine.headers, True)
        assert repr(its) == repr(mine)
    assert "in failure" in str([*_causes(back)][-1])


def _causes(exc: BaseException) -> Iterator[BaseException]:
    while exc.__cause__ is not None:
        exc = exc.__cause__
        yield exc


async def test_a_refused_and_an_invalid_connection_arrive_as_themselves() -> None:
    with closed_port() as port:
        for url, options in (
            (f"http://127.0.0.1:{port}/", {}),
            (f"https://127.0.0.1:{port}/", {"ssl": ssl.create_default_context()}),
            (f"https://127.0.0.1:{port}/", {"ssl": aiohttp.Fingerprint(b"x" * 32)}),
            ("http://", {}),
            ("mailto:x", {}),
        ):
            exc = await failure(url, **options)
            if not isinstance(getattr(exc, "ssl", None), aiohttp.Fingerprint):  # its str shows an address in memory
                same(arrived(exc), exc)
            else:
                assert arrived(exc).ssl.fingerprint == b"x" * 32


async def test_a_plain_server_asked_for_tls_arrives_as_itself() -> None:
    async with site() as base:
        exc = await failure(base.replace("http:", "https:") + "/page")
    assert isinstance(exc, client_exceptions.ClientConnectorSSLError | client_exceptions.ClientConnectorError)
    same(arrived(exc), exc)


def test_http_exceptions_of_the_parser_travel() -> None:
    back = arrived(BadStatusLine("line", "why"))
    assert type(back) is BadStatusLine
    assert back.args == ("line",)


def test_a_file_may_be_any_object_with_the_three_methods() -> None:
    class Buffer(io.BytesIO):
        def contains(self, needle: bytes) -> bool:
            return needle in self.getvalue()

        def reset(self) -> None:
            self.seek(0)
            self.truncate()

    file = Buffer()
    dump({"a": 1}, file, main_by_value=True)
    assert load(file.getvalue()) == {"a": 1}


def test_a_traceback_of_percore_alone_keeps_its_innermost_frame() -> None:
    inner = compile("raise LookupError('of percore')", load_exception.__code__.co_filename, "exec")
    outer = compile("exec(inner)", dump_exception.__code__.co_filename, "exec")
    try:
        exec(outer, {"inner": inner})
    except LookupError as error:
        error.__traceback__ = error.__traceback__.tb_next  # type: ignore[union-attr]  # without this test's own frame
        text = format_traceback(error)
    assert text.count('File "') == 1
    assert text.endswith("LookupError: of percore\n")


def test_a_traceback_whose_causes_go_in_a_circle_ends() -> None:
    one, two = KeyError("one"), KeyError("two")
    one.__cause__, two.__cause__ = two, one
    assert "KeyError: 'two'" in format_traceback(one)


class Grows:
    """Makes the tables of the picklers out of date in the midst of a pickling."""

    def __init__(self, grow: Callable[[], object]) -> None:
        self.grow = grow
        self.reduced = 0

    def __reduce__(self) -> tuple[Any, ...]:
        self.reduced += 1
        self.grow()
        return int, ("0",)


class OwnLock(asyncio.Lock):
    """A type that the fast picklers must leave to the careful one."""


def test_an_object_is_pickled_once_although_the_tables_have_grown_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    def grow() -> None:
        type("Unrelated", (asyncio.Lock,), {})
        monkeypatch.setitem(sys.modules, "grown_by_a_test", ModuleType("grown_by_a_test"))

    thing = Grows(grow)
    assert there_and_back([thing, subprocess.Popen]) == [0, subprocess.Popen]
    assert thing.reduced == 1


def test_what_an_older_table_has_got_wrong_is_pickled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    there_and_back(1)
    monkeypatch.delitem(reducers.FAST, OwnLock)
    with pytest.raises(TypeError, match="OwnLock of asyncio works within one event loop"):
        there_and_back([Grows(lambda: monkeypatch.setattr(reducers, "_modules", -1)), OwnLock()])


def test_a_registration_in_the_midst_of_a_pickling_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copyreg, "dispatch_table", copyreg.dispatch_table.copy())
    thing = Grows(lambda: copyreg.pickle(Unregistered, lambda _: cast(Any, (str, ("registered",)))))
    assert there_and_back([thing, Unregistered()]) == [0, "registered"]


class Unregistered:
    def __reduce__(self) -> tuple[Any, ...]:
        return str, ("not registered",)


def test_full_names() -> None:
    assert full_name(math.sqrt) == "math.sqrt"
    assert full_name(functools.partial(functools.partial(math.sqrt), 1)) == "math.sqrt"
    assert full_name(Plain(1).method) == full_name(Plain(2).method) == f"{__name__}.Plain.method"
    assert full_name(Plain(1)) == full_name(Plain) == f"{__name__}.Plain"
    assert full_name(len) == "builtins.len"
    assert name_in("__mp_main__", "f") == name_in("__main__", "f") == "__main__.f"
    assert name_in(None, "f") == name_in("", "f") == "f"
    assert len(name_in("m" * 300, "f")) == 256
