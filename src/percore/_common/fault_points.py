"""Places where tests kill, stop or fail a process on purpose.

    if POINTS:
        point("worker.outcome.published")

POINTS is False unless PERCORE_POINTS is set, so a place costs one global look-up. A plan for a place reads
`action@n#index.generation~state!`: do the action at the n-th passing (default: the first), in that worker only, counting only
passings in that state, and with `!` wait at the gate first. Everything but the action is optional. PERCORE_POINTS is either

    name=plan,name=plan     Read once, at import. Workers inherit it by the environment, and every process carries out all plans.
    /folder                 Each plan is a file in the folder, named after its place. Every passing looks for the file, so plans can
                            be added while the program runs. The process that carries out a plan first removes the file, so that
                            the plan is carried out once, and writes a line to the FIFO `hits`. The gate is the FIFO `gate`: each
                            byte in it lets one process through.
"""

import faulthandler
import os
import signal
from collections.abc import Callable
from threading import get_ident
from typing import NamedTuple

_PLANNED = os.environ.get("PERCORE_POINTS", "")
_FOLDER = _PLANNED if _PLANNED.startswith("/") else ""

POINTS = bool(_PLANNED)

observe: Callable[[], str] = str
"""Returns the states that this process is in, as words. Tests replace this function."""


class Strike(NamedTuple):
    action: str
    nth: int
    worker: str
    state: str = ""
    has_gate: bool = False


_here = ""
_passed: dict[str, int] = {}
_known: dict[str, tuple[str, int]] = {}


def _parse(text: str) -> dict[str, Strike]:
    plans = {}
    for entry in filter(None, text.split(",")):
        name, _, rest = entry.partition("=")
        plans[name] = _plan(rest, entry)
    return plans


def _plan(text: str, entry: str) -> Strike:
    rest, gate, _ = text.partition("!")
    rest, _, state = rest.partition("~")
    rest, _, worker = rest.partition("#")
    action, _, nth = rest.partition("@")
    if action not in _ACTIONS:
        raise ValueError(f"PERCORE_POINTS: {entry!r} asks for {action!r}; known are: {', '.join(_ACTIONS)}")
    return Strike(action, int(nth or 1), worker, state, bool(gate))


def _signal(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


def _fault(number: signal.Signals) -> None:
    faulthandler.disable()  # it would print a report of this intended fault
    signal.pthread_kill(get_ident(), number)  # to this thread: a signal to the process would arrive some steps later


def _exit_by_libc() -> None:
    import ctypes

    ctypes.CDLL(None).exit(0)


def _interrupt() -> None:
    raise KeyboardInterrupt


def _fail() -> None:
    raise OSError("failed on purpose by PERCORE_POINTS")


_ACTIONS: dict[str, Callable[[], object]] = {
    "kill": lambda: _signal(signal.SIGKILL),
    "segv": lambda: _fault(signal.SIGSEGV),
    "abrt": lambda: _fault(signal.SIGABRT),
    "bus": lambda: _fault(signal.SIGBUS),
    "stop": lambda: _signal(signal.SIGSTOP),
    "term": lambda: _signal(signal.SIGTERM),
    "exit": lambda: os._exit(0),
    "libcexit": _exit_by_libc,
    "interrupt": _interrupt,
    "fail": _fail,
    "tell": lambda: None,
}

_plans = _parse("" if _FOLDER else _PLANNED)


def this_is_worker(index: int, generation: int) -> None:
    """Set the name of this process, by which a plan can select one worker."""
    global _here
    _here = f"{index}.{generation}"


def point(name: str) -> None:
    """Pass the place `name`, and carry out the plan for it, if there is one."""
    plan = _look_up(name) if _FOLDER else _plans.get(name)
    if plan is None or (plan.worker and plan.worker != _here):
        return
    states = observe() if plan.state or _FOLDER else ""
    if plan.state and plan.state not in states.split():
        return
    passed = _passed[name] = _passed.get(name, 0) + 1
    if passed == plan.nth and (not _FOLDER or _is_ours(name, plan, states)):
        _ACTIONS[plan.action]()


def _look_up(name: str) -> Strike | None:
    try:
        with open(f"{_FOLDER}/{name}", encoding="ascii") as file:
            text, written_at = file.read(), os.fstat(file.fileno()).st_mtime_ns
    except FileNotFoundError:
        return None
    if _known.get(name) != (text, written_at):
        _known[name] = text, written_at
        _passed[name] = 0
    return _plan(text, f"{name}={text}")


def _is_ours(name: str, plan: Strike, states: str) -> bool:
    """Claim the plan, report it to `hits`, and wait at the gate. Return False if another process has claimed the plan before."""
    try:
        os.unlink(f"{_FOLDER}/{name}")
    except FileNotFoundError:
        return False
    with open(f"{_FOLDER}/hits", "wb", buffering=0) as hits:
        hits.write(f"{name} {plan.action} {plan.nth} {_here or '-'} {os.getpid()} {states}".rstrip().encode() + b"\n")
    if plan.has_gate:
        with open(f"{_FOLDER}/gate", "rb", buffering=0) as gate:
            gate.read(1)
    return True
