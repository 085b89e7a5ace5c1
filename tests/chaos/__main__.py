"""python -m tests.chaos: so many kills under load, and the figures. The exit code says whether anything happened that must not.

    --nodes            the workers run on several nodes, whose hosts and links are struck, too
    CHAOS_KILLS=1000   how many processes are killed (default 1000; 200 with --nodes)
    CHAOS_SEED=7       the decisions: which fault when, which call next (default: a new one, which is printed)

Decisions come again with the seed; when exactly the system does what, does not.
"""

import os
import sys
import time

import pytest

from tests.chaos import history
from tests.chaos.calls import RATES
from tests.chaos.history import Verdict
from tests.chaos.judge import OVER_NODES, PARTS, quiet, trial, trials

QUIET = 50


def main() -> int:
    os.environ["PERCORE_DEBUG"] = "1"  # the programs audit themselves; what they find is said on stderr
    is_over_nodes = "--nodes" in sys.argv[1:]
    kills = int(os.environ.get("CHAOS_KILLS") or (200 if is_over_nodes else 1000))
    seed = os.environ.get("CHAOS_SEED") or str(int.from_bytes(os.urandom(3), "big"))
    tell(f"chaos: {kills} kills, CHAOS_SEED={seed}")
    began = time.monotonic()
    total = Verdict()
    for part, its_seed, count in trials(kills, seed, OVER_NODES if is_over_nodes else PARTS):
        at = time.monotonic()
        try:
            verdict = trial(part, its_seed, count)
        except (pytest.fail.Exception, AssertionError) as error:
            verdict = Verdict()
            verdict.breach("hung", str(error))
        tell(f"  {part}: {sum(verdict.kills.values())} kills, {verdict.calls} calls, {time.monotonic() - at:.0f} s")
        total.add(verdict)
    report(total, time.monotonic() - began)
    for loop in () if is_over_nodes else ("asyncio", "uvloop"):
        alone = quiet(loop, QUIET)
        tell(f"  quiet, {loop}: {QUIET} kills, detection {spread(alone.detection)}, recovery {spread(alone.recovery)}")
    return 0 if total.is_clean else 1


def report(total: Verdict, seconds: float) -> None:
    """The figures."""
    taken_along = total.kills.pop("with the fork server", 0)
    refused = total.outcomes.pop("unpulled", 0) + total.outcomes.pop("full", 0)
    by_kind = ", ".join(f"{count} {kind}" for kind, count in total.kills.most_common())
    ends = ", ".join(f"{count} {name}" for name, count in total.outcomes.most_common())
    tell(f"  kills        {total.kills.total()} in {seconds:.0f} s: {by_kind}; {taken_along} more died with their fork server")
    tell(f"  calls        {total.calls} in {total.rounds} rounds: {ends}; {refused} more never accepted")
    tell(f"  changes      {', '.join(f'{count} {name}' for name, count in total.changes.most_common() if count)}")
    for breach in history.BREACHES:
        tell(f"  {breach:<12} {total.breaches[breach]}")
    tell("  starts       " + ", ".join(f"at most {most} of {RATES[key]}" for key, most in sorted(total.fullest.items())))
    tell(f"  blamed without having run: {total.unrun}")
    tell(f"  detection    {spread(total.detection)}")
    tell(f"  recovery     {spread(total.recovery)}")
    for sentence in total.sentences:
        tell(f"! {sentence}")


def tell(line: str) -> None:
    """At once: it takes minutes."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def spread(seconds: list[float]) -> str:
    """A distribution in milliseconds."""
    ordered = sorted(value * 1000 for value in seconds)
    if not ordered:
        return "not measured"
    p50, p99 = (ordered[min(len(ordered) - 1, int(len(ordered) * share))] for share in (0.5, 0.99))
    return f"p50 {p50:.1f} ms, p99 {p99:.1f} ms (n={len(ordered)})"


if __name__ == "__main__":
    sys.exit(main())
