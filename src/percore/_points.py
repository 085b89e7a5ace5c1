"""Places where tests kill, stop or fail a process on purpose.

    if POINTS:
        point("worker.outcome.published")

POINTS is False unless PERCORE_POINTS is set, so a place costs one global look-up. The variable lists
`name=action@n#index.generation`: at the n-th passing (default: the first) of that place (in that worker only, when given) do the
action. It is read once, at import; the environment carries it to the workers.
"""

import os
import signal
from typing import NamedTuple

POINTS = bool(os.environ.get("PERCORE_POINTS"))


class Plan(NamedTuple):
    action: str
    nth: int
    worker: str


_here = ""
_passed: dict[str, int] = {}


def _parse(text: str) -> dict[str, Plan]:
    plans = {}
    for entry in filter(None, text.split(",")):
        name, _, rest = entry.partition("=")
        rest, _, worker = rest.partition("#")
        action, _, nth = rest.partition("@")
        if action not in _ACTIONS:
            raise ValueError(f"PERCORE_POINTS: {entry!r} asks for {action!r}; known are: {', '.join(_ACTIONS)}")
        plans[name] = Plan(action, int(nth or 1), worker)
    return plans


def _signal(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


def _interrupt() -> None:
    raise KeyboardInterrupt


def _fail() -> None:
    raise OSError("failed on purpose by PERCORE_POINTS")


_ACTIONS = {
    "kill": lambda: _signal(signal.SIGKILL),
    "segv": lambda: _signal(signal.SIGSEGV),
    "abrt": lambda: _signal(signal.SIGABRT),
    "bus": lambda: _signal(signal.SIGBUS),
    "stop": lambda: _signal(signal.SIGSTOP),
    "exit": lambda: os._exit(0),
    "interrupt": _interrupt,
    "fail": _fail,
}

_plans = _parse(os.environ.get("PERCORE_POINTS", ""))


def this_is_worker(index: int, generation: int) -> None:
    """Name this process for the plans that are meant for one worker alone."""
    global _here
    _here = f"{index}.{generation}"


def point(name: str) -> None:
    """Pass the place `name`: do what PERCORE_POINTS planned for it, if anything."""
    plan = _plans.get(name)
    if plan is None or (plan.worker and plan.worker != _here):
        return
    passed = _passed[name] = _passed.get(name, 0) + 1
    if passed == plan.nth:
        _ACTIONS[plan.action]()
