"""A run of a map: it hands the results over as a list or as a stream. `Feeder` submits the items, and `InFlight` keeps them."""

from collections.abc import AsyncGenerator, Callable
from typing import Any, Final

from percore._common.callables import qualified_name
from percore._common.inputs import Inputs
from percore._common.log import Faults
from percore._map.feeder import Feeder
from percore._map.in_flight import InFlight
from percore._map.progress import Counts, Watcher, display_of
from percore._map.results import Failure, Listed, Ordered, Results
from percore._map.rows import Spec
from percore._scheduler.map_life import MapEvent, MapLife, MapPhase
from percore._supervisor.supervisor import Supervisor

_STEP: Final = 12
_STATES: Final = {
    MapPhase.NEW: "not used",
    MapPhase.BEGUN: "running",
    MapPhase.FEEDING: "running",
    MapPhase.FED: "running",
    MapPhase.STOPPED: "failed",
    MapPhase.CLOSED: "ended",
}


class MapRun:
    """The run of a map. It does not refer to the `Map`, so a stream that is under way ends when the user drops the map."""

    def __init__(self, supervisor: Supervisor, fn: Callable[..., Any], inputs: Inputs, spec: Spec) -> None:
        """The calls get the values that the context variables have now."""
        self._supervisor = supervisor
        self._fn = fn
        self._inputs = inputs
        self._spec = spec
        contexts, self._span = supervisor.contexts, None
        if contexts is not None and contexts.tracing is not None:
            self._span = contexts.tracing.begin(fn)
        self._context = None if contexts is None else contexts.capture(self._span)
        self._life = MapLife()
        self._parts: tuple[InFlight, Feeder] | None = None
        self._watcher: Watcher | None = None
        """Shows how far the map is. None: nothing does, or the map has not begun."""

    async def collect(self) -> list[Any]:
        """Run the map to its end and return all results. A map that is closed meanwhile returns an empty list.

        Raises:
            BaseException: the first error of an item, or the error of an input.
        """
        life, results = self._life, Listed(ordered=self._spec.ordered)
        items = self._begin(results)
        if items is None:
            return []
        try:
            self._watch()
            while not items.is_over():
                await items.wait()
            life.check()
            return results.values if not life.is_closed else []
        except BaseException as error:
            self._failed(error)
            raise
        finally:
            await self.close()

    async def stream(self) -> AsyncGenerator[Any]:
        """Yield the results one by one."""
        life, spec = self._life, self._spec
        results = Ordered() if spec.ordered else Results()
        items = self._begin(results)
        if items is None:
            return
        ready = results.ready
        try:
            self._watch()
            while life.gives:
                if not ready:
                    if items.is_over():
                        break
                    await items.wait()
                    continue
                values, size = ready.popleft()
                # Count each result if the user has set a window, or if results take memory. Otherwise count them by the dozen,
                # with the last result of each dozen.
                step = 1 if spec.window is not None or size else _STEP
                kept = 0
                for value in values:
                    kept += 1
                    if kept >= step:
                        items.hand_over(kept, size)
                        kept = 0
                    if type(value) is Failure:
                        value.unwrap()
                    yield value
                    if not life.gives:
                        break
                items.hand_over(kept, size)
            self._check()
        except BaseException as error:
            self._failed(error)
            raise
        finally:
            await self.close()

    def counts(self) -> Counts:
        """Return how far the map has come."""
        state = _STATES[self._life.now]
        if self._parts is None:
            return Counts(state, 0, 0, 0)
        items, _ = self._parts
        return Counts(state, items.window.ended, items.failures, items.window.pulled)

    def _check(self) -> None:
        if not self._life.is_closed:
            self._life.check()

    def _failed(self, error: BaseException) -> None:
        if self._span is not None:
            self._span.ended(error)

    def _begin(self, results: Results) -> InFlight | None:
        """As `_begun`, but an error ends the span of the map."""
        try:
            return self._begun(results)
        except BaseException as error:
            self._failed(error)
            raise

    def _begun(self, results: Results) -> InFlight | None:
        """Hold the function and start the feeder. Return None if the map is closed.

        `collect` and `stream` call this when the first result is requested, since from then on they are sure to close the map.
        """
        supervisor, inputs, spec, life = self._supervisor, self._inputs, self._spec, self._life
        if life.is_closed:  # closed before the first result was requested
            return None
        function = supervisor.functions.hold(self._fn)
        try:
            inputs.open()
        except BaseException:
            supervisor.functions.retire(function, ())
            raise
        if life.is_closed:  # user code run by `hold` or `open` has closed the map
            supervisor.functions.retire(function, ())
            return None
        items = InFlight(supervisor, function, spec, self._context, results, life)
        feeder = Feeder(items, inputs, spec)
        self._parts = items, feeder
        supervisor.dispatch.open(items.queue)
        supervisor.closing.enders[feeder.end] = None
        supervisor.pool.changes.resized.add(items.resized)
        if life.is_closed:  # a garbage collection has run user code that has closed the map
            self._leave(items, feeder)
            return None
        feeder.begin()
        return items

    def _leave(self, items: InFlight, feeder: Feeder) -> None:
        """Cancel the items, and let nothing of the supervisor refer to this map."""
        self._supervisor.closing.enders.pop(feeder.end, None)
        self._supervisor.pool.changes.resized.discard(items.resized)
        faults = Faults("a map was closed")
        if self._watcher is not None:
            with faults:  # user code
                self._watcher.end()
        items.close(faults)
        faults.finish()

    def _watch(self) -> None:
        """Show the progress, if that is asked for. This runs user code, so the map must be sure to be closed."""
        display = display_of(self._spec.progress)
        if display is not None:
            supervisor, name = self._supervisor, qualified_name(self._fn)
            self._watcher = Watcher(supervisor.loop, display, name, self._inputs.total(), self.counts, supervisor.busy)

    async def close(self) -> None:
        """Cancel the items under way and close the generators among the inputs. The map yields no more results. Idempotent.

        If this is cancelled, the items are cancelled and the generators closed all the same, but the feeder may not have ended.
        """
        if self._life.is_closed:
            return
        self._life.advance(MapEvent.CLOSE)
        if self._parts is None:  # the map has not begun
            return
        items, feeder = self._parts
        items.wake()
        try:
            self._leave(items, feeder)
        finally:
            await feeder.close()
            if self._span is not None:
                self._span.ended(None)
