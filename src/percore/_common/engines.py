"""The choice of an engine: what `engine=` of a runner takes, and how the engine is made of it.

An engine that needs no settings has a name in ENGINES. One with settings has a public class, derived from `EngineChoice`, whose
objects may be given to any number of runners. Each start of a runner asks the choice for a `Maker`. The options of a runner contain
the choice, so here they have no type.
"""

import sys
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from percore._common.system import has_gil

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop

ENGINES: Final[dict[str, str | None]] = {"processes": None, "threads": "ThreadsEngine", "auto": None}
"""The names for `engine=`, each with the public class that it stands for. None: processes, which need no choice.

"auto" stands for "threads" where threads run at once, else for "processes".
"""


class Maker:
    """Makes the engine of one runner: `open`, then `make` or `abandon`, each once."""

    async def open(self, options: Any) -> Any:
        """Prepare, and return the RunnerOptions with what only this engine can tell, such as how many workers there are.

        Whoever awaits this calls `abandon` if it raises or is cancelled.

        Raises:
            StartupFailed: the engine cannot be used.
        """
        return options

    def make(self, loop: "AbstractEventLoop", options: Any, main: Any, /) -> Any:
        """Return the engine: see `EngineFactory` in the runner's assembly."""
        raise NotImplementedError

    async def abandon(self) -> None:
        """Release what `open` has taken: no engine was made, or `make` has raised, or the engine was closed at once. Idempotent."""


class EngineChoice:
    """The base of the objects for `engine=`. Their settings are checked when they are made."""

    def _check(self, given: dict[str, Any]) -> None:
        """Check that this engine can keep the other options of a runner, which are those of its user, unchecked.

        Raises:
            TypeError, ValueError: it cannot keep one. The message names it, and says what to do instead.
        """

    def _maker(self) -> Maker:
        raise NotImplementedError

    def _engine_of_executor(self, loop: "AbstractEventLoop", options: Any, settings: Any, given: Any) -> Any:
        """Return the engine of a LoopPoolExecutor, with its settings and its initializer."""
        raise NotImplementedError

    def _check_executor(self) -> None:
        """Check that a LoopPoolExecutor can have this engine.

        Raises:
            ValueError: it cannot.
        """
        raise ValueError(f"engine={self!r} is an engine for percore.Runner, not for LoopPoolExecutor")


EngineName: TypeAlias = Literal["processes", "threads", "auto"]
AnyEngine: TypeAlias = EngineName | EngineChoice


def engine_of(value: object) -> EngineChoice | None:
    """Return the choice that `engine=` stands for. None: processes.

    Raises:
        TypeError, ValueError: it stands for no engine.
    """
    if value is None or isinstance(value, EngineChoice):
        return value
    if isinstance(value, type) and issubclass(value, EngineChoice):
        raise TypeError(f"give an object: engine=percore.{value.__name__}(), not engine=percore.{value.__name__}")
    names = ", ".join(f'"{name}"' for name in ENGINES)
    if not isinstance(value, str):
        raise TypeError(f"engine must be {names}, or an object such as percore.RayEngine(), not {value!r}")
    if value not in ENGINES:
        raise ValueError(f"engine must be {names}, or an object such as percore.RayEngine(), not {value!r}")
    home = ENGINES["threads" if value == "auto" and not has_gil() else value]
    choice: EngineChoice | None = None if home is None else getattr(sys.modules["percore"], home)()
    return choice
