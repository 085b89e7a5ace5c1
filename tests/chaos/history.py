"""Compares what ran (the ledger), what the program was told (its record) and what was killed, round by round.

Nothing here believes percore: a round is judged from files and from what the judge did, when everybody in it is dead.
"""

import json
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

from tests.chaos import calls
from tests.chaos.order import Attempt, Life, attempts_of, disorders
from tests.marks import most_within

KILL_AFTER: Final = 2.0
"""That of the runners, in seconds."""

LEAST: Final = 5
"""Sentences kept of each kind of breach."""


class Kill(NamedTuple):
    """What the judge did to one process. `slot`: index of a worker, -1 where it had not told."""

    ns: int
    kind: str
    pid: int
    slot: int
    generation: int


class Entry(NamedTuple):
    """A call has begun."""

    uuid: int
    pid: int
    generation: int
    ns: int


class Outcome(NamedTuple):
    """A call has ended."""

    uuid: int
    kind: str
    attempts: int
    ns: int
    flags: str
    words: list[str]


@dataclass
class Round:
    """One runner's life.

    Attributes:
        told: what the program said in the end.
        kills: what was done to its processes.
        born: index and generation of each worker, by pid.
        hosts: the host of each worker on a node, by pid.
        struck: the hosts that were killed, stopped or cut off: their workers may end.
    """

    folder: Path
    told: dict[str, Any] = field(default_factory=dict)
    kills: list[Kill] = field(default_factory=list)
    born: dict[int, tuple[int, int]] = field(default_factory=dict)
    hosts: dict[int, int] = field(default_factory=dict)
    struck: set[int] = field(default_factory=set)

    def tell(self, story: str) -> None:
        """What the program said in the end, in JSON."""
        self.told = json.loads(story)

    def entries(self) -> Iterator[tuple[Entry, bool]]:
        """The ledger: entries, each with whether it is about the end of the call."""
        path = self.folder / "ledger"
        if path.exists():
            with path.open(encoding="ascii") as file:
                for line in file:
                    *numbers, last = line.split()
                    is_end = last == calls.ENDED
                    yield Entry(*map(int, numbers if is_end else [*numbers, last])), is_end

    def submitted(self) -> dict[int, int]:
        """When each call was submitted."""
        path = self.folder / "submitted"
        lines = path.read_text(encoding="ascii").splitlines() if path.exists() else []
        return {int(uuid): int(ns) for uuid, ns in map(str.split, lines)}

    def starts(self) -> dict[str, list[int]]:
        """The starts of calls with a rate, by key."""
        starts: dict[str, list[int]] = {}
        path = self.folder / "rates"
        if path.exists():
            for line in path.read_text(encoding="ascii").splitlines():
                key, ns = line.split()
                starts.setdefault(key, []).append(int(ns))
        return starts

    def outcomes(self) -> Iterator[Outcome]:
        """The record."""
        with (self.folder / "outcomes").open(encoding="utf-8") as file:
            for line in file:
                uuid, kind, attempts, ns, flags, *words = line.split()
                yield Outcome(int(uuid), kind, int(attempts), int(ns), flags, words)


BREACHES: Final = ("lost", "twice", "hung", "wrong value", "out of order", "over the rate", "left behind", "said on stderr")
"""None of these may happen, ever."""


@dataclass
class Verdict:
    """The figures of some rounds."""

    breaches: Counter[str] = field(default_factory=Counter)
    sentences: list[str] = field(default_factory=list)
    outcomes: Counter[str] = field(default_factory=Counter)
    kills: Counter[str] = field(default_factory=Counter)
    changes: Counter[str] = field(default_factory=Counter)
    calls: int = 0
    rounds: int = 0
    unrun: int = 0
    """Blamed without having run: they had begun, and died before their first statement."""
    detection: list[float] = field(default_factory=list)
    recovery: list[float] = field(default_factory=list)
    fullest: Counter[str] = field(default_factory=Counter)
    """Of each key with a rate, how many starts its fullest window held."""

    def breach(self, kind: str, sentence: str, count: int = 1) -> None:
        """Something that must not happen has happened."""
        if self.breaches[kind] < LEAST:
            self.sentences.append(f"{kind}: {sentence}")
        self.breaches[kind] += count

    def add(self, other: "Verdict") -> None:
        """Take over another's figures."""
        for name in ("breaches", "outcomes", "kills", "changes"):
            getattr(self, name).update(getattr(other, name))
        self.sentences += other.sentences
        self.calls += other.calls
        self.rounds += other.rounds
        self.unrun += other.unrun
        self.detection += other.detection
        self.recovery += other.recovery
        self.fullest |= other.fullest

    @property
    def is_clean(self) -> bool:
        """Whether nothing has happened that must not."""
        return not any(self.breaches.values())


def judge(one: Round) -> Verdict:
    """Compare. What the program has seen of itself counts too."""
    verdict = Verdict(rounds=1, kills=Counter(kill.kind for kill in one.kills), changes=Counter(one.told.get("changes", {})))
    where = f"round {one.told['round']} (closed {one.told['closing']}, {one.told['settings']})"
    for left in one.told["left"]:
        verdict.breach("left behind", f"{left} after {where}")
    for wrong in one.told["wrong"]:
        verdict.breach("wrong value", f"{wrong} in {where}")
    if one.told["hung"]:
        verdict.breach("hung", f"{one.told['hung']} calls had not ended at the end of {where}", one.told["hung"])
    _Comparison(one, verdict, where).run()
    return verdict


class _Comparison:
    """Of the files of one round."""

    def __init__(self, one: Round, verdict: Verdict, where: str) -> None:
        self._round = one
        self._verdict = verdict
        self._where = where
        self._entries: dict[int, list[Entry]] = {}
        self._ends: dict[int, list[Entry]] = {}
        self._submitted = one.submitted()
        self._first: dict[int, int] = {}
        """When each worker began its first call."""
        self._latest: dict[int, int] = {}
        """When each worker has written its last entry."""
        for entry, is_end in one.entries():
            (self._ends if is_end else self._entries).setdefault(entry.uuid, []).append(entry)
            self._latest[entry.pid] = max(entry.ns, self._latest.get(entry.pid, entry.ns))
            if not is_end:
                self._first[entry.pid] = min(entry.ns, self._first.get(entry.pid, entry.ns))
        self._killed = {kill.pid for kill in one.kills if kill.kind != "drain"}
        self._killed |= {pid for pid, host in one.hosts.items() if host in one.struck}
        stuck = [outcome.uuid for outcome in one.outcomes() if outcome.kind == "stuck"]
        self._overran = {entry.pid for uuid in stuck for entry in self._entries.get(uuid, ())}
        """Workers that percore kills, because a call has not ended after its hard_timeout."""
        verdict.changes["worker with a stuck call"] += len(self._overran - self._killed)
        self._failed: dict[int, int] = {}
        """When the last call that had begun in a dead worker was told so."""

    def run(self) -> None:
        """All that can be said."""
        seen: set[int] = set()
        for outcome in self._round.outcomes():
            if outcome.uuid in seen:
                self._breach("twice", outcome, "ended a second time")
            seen.add(outcome.uuid)
            self._look(outcome)
        last = self._round.told["last"]
        lost = set(range(1, last + 1)) - seen
        missing = max(0, len(lost) - self._round.told["hung"])
        if missing:
            self._verdict.breach("lost", f"calls {sorted(lost)[:5]} never ended in {self._where}", missing)
        for uuid in self._entries.keys() - seen - lost:
            self._verdict.breach("wrong value", f"call {uuid} ran and was never submitted in {self._where}")
        self._look_at_rates()
        self._measure()

    def _look_at_rates(self) -> None:
        for key, starts in self._round.starts().items():
            rate = calls.RATES[key]
            most = most_within(starts, rate.per)
            self._verdict.fullest[key] = max(self._verdict.fullest[key], most)
            if most > rate.n:
                self._verdict.breach("over the rate", f"{most} calls of {key} began within {rate.per} s in {self._where}")

    def _breach(self, kind: str, outcome: Outcome, why: str) -> None:
        self._verdict.breach(kind, f"call {outcome} {why}; entered: {self._entries.get(outcome.uuid, [])} in {self._where}")

    def _look(self, outcome: Outcome) -> None:
        ran = self._entries.get(outcome.uuid, [])
        name = outcome.words[0]
        self._verdict.outcomes[name] += 1
        self._verdict.calls += name not in ("unpulled", "full")
        if len(ran) > max(1, outcome.attempts):
            self._breach("twice", outcome, f"ran {len(ran)} times")
        if not is_right(outcome):
            self._breach("wrong value", outcome, "is not what it has to give")
        if name in _RESULTS and not ran and outcome.words != ["all"]:  # a broadcast, at a moment at which nobody was ready
            self._breach("wrong value", outcome, "has a result and never ran")
        is_whole = outcome.kind != "everywhere"  # the first failure of a broadcast is told, and the others go on
        is_late = is_whole and (name in _RESULTS or name == "died") and any(entry.ns > outcome.ns for entry in ran)
        if is_late and not self._may_begin_late(outcome, ran):
            self._breach("twice", outcome, "began after its end was told")
        if name == "timeout" and outcome.kind.startswith("impatient") and ran:
            self._breach("twice", outcome, "was said never to run, and ran")
        if name in ("full", "unpulled") and ran:
            self._breach("twice", outcome, "was refused and ran all the same")
        if name == "died":
            self._look_at_death(outcome, ran)
        self._look_at_order(outcome, ran)

    def _look_at_order(self, outcome: Outcome, ran: list[Entry]) -> None:
        """The call's events of all processes, in the order of the one clock that they share."""
        attempts = attempts_of(ran, self._ends.get(outcome.uuid, []))
        life = Life(self._submitted.get(outcome.uuid), attempts, outcome.ns, outcome.kind, outcome.words, "z" in outcome.flags)
        for disorder in disorders(life, self._last_sign):
            self._breach("out of order", outcome, disorder)

    def _last_sign(self, attempt: Attempt) -> int:
        """When the worker of an attempt has written its last entry; 0 for one that a lost node may keep alive for a while."""
        is_cut_off = self._round.hosts.get(attempt.pid) in self._round.struck
        return 0 if is_cut_off else self._latest[attempt.pid]

    def _may_begin_late(self, outcome: Outcome, ran: list[Entry]) -> bool:
        """Whether a lost node explains it: the program knows of the loss before the node's workers have ended.

        The error says that the call may have begun.
        """
        is_said = outcome.words[:2] == ["died", "1"]
        return is_said and all(self._round.hosts.get(entry.pid) in self._round.struck for entry in ran if entry.ns > outcome.ns)

    def _look_at_death(self, outcome: Outcome, ran: list[Entry]) -> None:
        started, pid, attempts = outcome.words[1] == "1", int(outcome.words[2]), int(outcome.words[3])
        pids = {entry.pid for entry in ran}
        if not started and len(ran) > attempts and outcome.kind != "everywhere":
            self._breach("wrong value", outcome, "had not begun so often, says its error")
        if started and pid not in self._killed and not self._may_be_killed(outcome, ran, pid):
            self._breach("wrong value", outcome, "was ended by a death that nobody caused")
        made_all = attempts == outcome.attempts or (attempts < outcome.attempts and "z" in outcome.flags)
        if started and not made_all and outcome.kind != "everywhere":
            self._breach("wrong value", outcome, "did not make all its attempts")
        if started and attempts == 1 and pids and pid not in pids and outcome.kind != "everywhere":
            self._breach("wrong value", outcome, "ran in another worker than its error says")
        self._verdict.unrun += started and pid not in pids
        if started:
            self._failed[pid] = max(outcome.ns, self._failed.get(pid, 0))

    def _may_be_killed(self, outcome: Outcome, ran: list[Entry], pid: int) -> bool:
        """Whether percore may have killed its worker, because another call there was stuck: it had most of `kill_after` to end."""
        return pid in self._overran and any(entry.pid == pid and outcome.ns - entry.ns > KILL_AFTER / 2 * 1e9 for entry in ran)

    def _measure(self) -> None:
        """How long it took from a kill to the failures, and to the first call of the replacement."""
        begun: dict[int, list[tuple[int, int]]] = {}
        for pid, ns in self._first.items():
            index, generation = self._round.born[pid]
            begun.setdefault(index, []).append((generation, ns))
        for place, kill in enumerate(self._round.kills):
            if kill.kind in _AT_ONCE and kill.pid in self._failed:
                self._verdict.detection.append((self._failed[kill.pid] - kill.ns) / 1e9)
            later = [ns for generation, ns in begun.get(kill.slot, ()) if generation > kill.generation and ns > kill.ns]
            again = [other.ns for other in self._round.kills[place + 1 :] if other.slot == kill.slot or other.slot < 0]
            if kill.kind in _AT_ONCE and later and (not again or min(later) < again[0]):
                self._verdict.recovery.append((min(later) - kill.ns) / 1e9)


_AT_ONCE: Final = frozenset({"kill", "segv", "abrt"})
_RESULTS: Final = frozenset({"value", "error", "bytes", "pair", "remote", "all"})


def is_right(outcome: Outcome) -> bool:
    """Whether a call of this kind may end so."""
    match outcome.words:
        case ["died", started, *_]:
            return started == "1" or "z" in outcome.flags or outcome.kind == "everywhere"
        case ["cancelled"]:
            return "c" in outcome.flags
        case ["closed"]:
            return "z" in outcome.flags
        case ["dropped" | "unpulled" | "full"]:
            return True
        case ["timeout"]:
            return outcome.kind in (
                "slow",
                "slow_in_thread",
                "slow_and_retried",
                "doomed",
                "doomed_in_thread",
                "stuck",
            ) or outcome.kind.startswith("impatient")
    return outcome.words == _right_words(outcome) or _is_cut_attempt(outcome)


def _is_cut_attempt(outcome: Outcome) -> bool:
    """Closing lets nobody wait for a further attempt."""
    return outcome.kind == "flaky" and outcome.words == ["error", str(calls.answer(outcome.uuid))] and "z" in outcome.flags


def _right_words(outcome: Outcome) -> list[str]:
    uuid, answer = outcome.uuid, str(calls.answer(outcome.uuid))
    match outcome.kind:
        case "large_result" | "large_item" | "echo":
            pattern = calls.pattern(uuid)
            return ["bytes", str(len(pattern)), str(zlib.crc32(pattern))]
        case "failing":
            return ["error", answer]
        case "tiny_failing" if calls.fails(uuid):
            return ["error", answer]
        case "tiny_pair":
            return ["pair", answer, str(uuid % 200)]
        case "exiting":
            return ["remote", "SystemExit"]
        case "unpicklable":
            return ["remote", "TypeError"]
        case "everywhere":
            return ["all", *[answer] * (len(outcome.words) - 1)]
    return ["value", answer]
