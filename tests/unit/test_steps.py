"""Which locks a thread of a worker may hold when a garbage collection runs a `__del__` of the user that waits for a nested call.

Every lock of the rooms of which code runs in workers is held by steps alone, in which such a wait is refused, or is in `SPARED`.
"""

import ast
import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, SimpleNamespace
from typing import Any

import pytest

import percore
from percore._common.steps import is_in_step, is_step
from percore._protocol.shared import _of_thread
from percore._serialization import reducers
from percore._transport.leases import Leases
from percore._worker.families import Family
from percore._worker.pacing import Pacing
from percore._worker.server import Server
from percore._worker.streams import ThreadStream
from percore._worker.threads import Threads
from percore._worker.turns import SwitchInterval
from percore._worker_process.log_forwarding import LogWriter

SOURCE = Path(percore.__file__).parent
ROOMS = ("_common", "_protocol", "_serialization", "_transport", "_worker", "_worker_process")

LOOP = "the loop takes it, and a wait is refused in the loop; its threads are spared or steps"
SPARED = {
    "_protocol/shared.py:Copy.value": "user code runs under it, which unpickles; who waits for a call there lets go of it",
    "_protocol/shared.py:others_may_build": "in `Family.wait`, which is a step",
    "_protocol/shared.py:Copy._build": "for arithmetic, within which no collection runs in a thread",
    "_protocol/shared.py:Copy.forget": LOOP,
    "_protocol/shared.py:Copy._gone": LOOP,
    "_transport/connection.py:Connection": "hosts have them; their workers' calls run in other processes",
    "_worker/answers.py:Answers.function": "user code runs under it, which unpickles; threads alone want the same function",
    "_worker/batches.py:BatchResults.flush": "the loop never waits for it",
    "_worker/batches.py:BatchResults.flush_kept": LOOP,
    "_worker/families.py:Families._answer": LOOP,
    "_worker/families.py:Families.fail": LOOP,
    "_worker/server.py:Server._receive_some": LOOP,
    "_worker/streams.py:_Stream._add": "the loop never waits for it",
    "_worker/streams.py:_Stream.flush": "the loop never waits for it",
    "_worker/streams.py:_Stream._flush_last": "the loop never waits for it",
    "_worker/streams.py:ThreadStream._flush_kept": LOOP,
    "_worker/turns.py:Turns._wait_for_turn": "nobody waits for a turn for longer than a few milliseconds",
    "_worker_process/main_module.py:_Importer.module": "user code runs under it, the program's main module, as under an import",
}


def uses_of_locks(path: Path) -> Iterator[str]:
    """The qualified names of the functions of a module that take a lock which this module makes."""
    tree = ast.parse(path.read_text())
    names = {
        target.attr if isinstance(target, ast.Attribute) else target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Call)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if ast.unparse(node.value.func) in {"threading.Lock", "threading.RLock", "Lock", "RLock"}
        if isinstance(target, ast.Attribute | ast.Name)
    } - {"gate", "turn"}  # locks of one thread, which waits in them: it has looked before, or is about to

    def is_lock(node: ast.AST) -> bool:
        return (node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")) in names

    def visit(node: ast.AST, scope: tuple[str, ...]) -> Iterator[str]:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            scope = (*scope, node.name)
        if (isinstance(node, ast.withitem) and is_lock(node.context_expr)) or (
            isinstance(node, ast.Attribute) and node.attr == "acquire" and is_lock(node.value)
        ):
            yield ".".join(scope)
        for child in ast.iter_child_nodes(node):
            yield from visit(child, scope)

    yield from visit(tree, ())


def code_of(path: Path, name: str) -> CodeType:
    module = importlib.import_module(".".join(("percore", *path.relative_to(SOURCE).with_suffix("").parts)))
    found: Any = module
    for part in name.split("."):
        found = vars(found)[part]
    code: CodeType = found.__code__
    return code


def test_every_lock_that_threads_of_calls_take_is_of_a_step_or_spared_with_a_reason() -> None:
    unused, wrong = set(SPARED), []
    for room in ROOMS:
        for path in sorted((SOURCE / room).rglob("*.py")):
            for name in set(uses_of_locks(path)):
                place = f"{path.relative_to(SOURCE)}:{name}"
                spared = {one for one in (place, place.rpartition(".")[0]) if one in SPARED}
                unused -= spared
                if bool(spared) is is_step(code_of(path, name)):
                    wrong.append(place)
    assert not wrong, f"neither a step (percore._common.steps) nor spared, or both: {wrong}"
    assert not unused, f"spared, and takes no lock: {unused}"


class Looked(Exception):
    """A lock was asked for."""


@contextmanager
def lock_that_looks() -> Iterator[None]:
    """A lock under which a collection begins at once."""
    assert is_in_step(sys._getframe()), "a wait under this lock would not be refused"
    raise Looked
    yield


def refresh() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reducers, "_lock", lock_that_looks())
        patch.setattr(reducers, "is_current", lambda: False)
        reducers.refresh()


def test_a_wait_in_the_midst_of_a_step_is_refused() -> None:
    def of(**attributes: Any) -> Any:
        return SimpleNamespace(**attributes)

    steps: dict[str, Callable[[], object]] = {
        "pacing": lambda: Pacing.began(of(_lock=lock_that_looks()), 1),
        "turns": lambda: SwitchInterval.shorten(of(_lock=lock_that_looks()), of(), is_wanted=True),
        "leases": lambda: Leases._give_up(of(_lock=lock_that_looks()), 1),
        "tickets": lambda: Server._take_with_ticket(of(_tickets_lock=lock_that_looks()), 1),
        "threads": lambda: Threads._leave(of(_gate=lock_that_looks()), 1),
        "logs": lambda: LogWriter.write(of(_lock=lock_that_looks(), _ring=of(size=1 << 20)), b""),
        "reducers": refresh,
    }
    for name, run in steps.items():
        try:
            run()
        except Looked:
            continue
        raise AssertionError(f"{name} took no lock")


def test_the_loop_does_not_wait_for_a_stream_whose_thread_waits_for_it() -> None:
    """The thread holds the lock of its stream, and a `__del__` that a collection runs there waits for a nested call."""
    sent: list[int] = []
    channel: Any = SimpleNamespace(
        loop=None, pack_values=lambda *_: b"", send_from_thread=lambda _op, call_id, _body: sent.append(call_id)
    )
    answers: Any = SimpleNamespace(passes=lambda _: True)
    stream = ThreadStream(channel, answers, 7, 10, *(None, None))  # type: ignore[arg-type]
    stream._add("item")
    stream._is_watched = True
    with stream._lock:
        stream._flush_kept()  # waits for ever if it waits at all
        assert (sent, stream._is_watched) == ([], False)
    stream._flush_kept()
    assert sent == [7]


def test_a_wait_is_refused_while_another_one_lets_go_of_shared_objects_and_takes_them_again() -> None:
    """The second one would let go of them, too, or wait while this thread holds what the loop wants."""

    class Looks:
        def release(self) -> None:
            in_step.append(is_in_step(sys._getframe()))

        acquire = release

    in_step = list[bool]()
    plain = SimpleNamespace(step_aside=lambda _: None, come_back=lambda _: None)
    family = Family(SimpleNamespace(plain=plain), 1)  # type: ignore[arg-type]
    _of_thread.builds = [SimpleNamespace(building=Looks())]
    try:
        family.wait(lambda: None)
    finally:
        _of_thread.builds = []
    assert in_step == [True, True]
