"""The parent: lets a program run, kills its processes as the seed says, and looks what is left when it has ended."""

import heapq
import os
import resource
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, NamedTuple

import pytest

from tests import leaks
from tests.chaos import calls, history
from tests.chaos.history import Kill, Round, Verdict
from tests.chaos.load import LIMIT
from tests.chaos.nemesis import KINDS, KINDS_OF_NODES, Fault, schedule
from tests.faults import Program, Watch

AT_MOST: Final = 400
"""Kills of one program: what it has written is compared when it has ended, and that has to fit into memory."""


class Part(NamedTuple):
    """A way to run the program.

    Attributes:
        dev: in Python's development mode, warnings being errors.
        share: of all kills.
        mean: seconds between two faults. A fresh interpreter takes its time to become a worker.
        nodes: on how many nodes the workers run, for which processes of this machine stand. 0: on none.
    """

    loop: str
    method: str
    dev: bool
    share: float
    mean: float = 0.1
    nodes: int = 0

    def __str__(self) -> str:
        nodes = f", {self.nodes} nodes" if self.nodes else ""
        return f"{self.loop}, {self.method}{nodes}" + (", development mode" if self.dev else "")


PARTS: Final = (
    Part("uvloop", "forkserver", dev=False, share=0.4),
    Part("asyncio", "forkserver", dev=True, share=0.3),
    Part("asyncio", "forkserver", dev=False, share=0.2),
    Part("uvloop", "spawn", dev=True, share=0.1, mean=0.5),
)

OVER_NODES: Final = (
    Part("uvloop", "forkserver", dev=False, share=0.4, mean=0.2, nodes=2),
    Part("asyncio", "forkserver", dev=True, share=0.3, mean=0.3, nodes=2),
    Part("asyncio", "forkserver", dev=False, share=0.3, mean=0.2, nodes=3),
)

SIGNALS: Final = {
    "kill": signal.SIGKILL,
    "segv": signal.SIGSEGV,
    "abrt": signal.SIGABRT,
    "exit": calls.EXIT,
    "libc exit": calls.LIBC_EXIT,
    "drain": signal.SIGTERM,
    "all": signal.SIGKILL,
    "host": signal.SIGKILL,
}
_HOST_STOPS: Final = 20
"""How many times as long as a worker a host is stopped. Some of them are lost meanwhile."""
_WITH_SERVER: Final = "with the fork server"


class Nemesis:
    """Strikes at the processes of one program."""

    def __init__(self, program: int, part: Part, control: int) -> None:
        """`control`: a pipe to the program, which cuts links."""
        self.kills = 0
        self._control = control
        self.stops = 0
        self._program = program
        self._part = part
        self._doomed: set[int] = set()
        self._stopped: set[int] = set()
        self._known: dict[int, tuple[int, int]] = {}
        self._round: Round
        self._everybody: Watch
        self._later: list[tuple[float, int, Callable[[], None]]] = []

    def begin(self, one: Round, everybody: Watch) -> None:
        """From now on what is struck belongs to this round. All of the one before is gone, its numbers may come again."""
        self._round, self._everybody = one, everybody
        self._doomed.clear()
        self._stopped.clear()
        self._later.clear()
        self._known = one.born

    def strike(self, fault: Fault) -> bool:
        """Do it. False: no worker is up just now. Those that are coming up are struck only beside one that is: a runner whose
        workers die ten times in a row before they begin a call gives up, as it has to."""
        servers, workers = self._processes()
        if not any(pid in self._known for pid in workers):
            return False
        kind = fault.kind
        if kind == "fork server" and self._part.method != "forkserver":
            kind = "all"
        hosts = [pid for pid in _children(self._program) if pid not in self._doomed and pid not in self._stopped]
        candidates = servers if kind == "fork server" else hosts if kind in ("host", "stop host", "link") else workers
        if not candidates:
            return False
        victim = candidates[int(fault.target * len(candidates))]
        if candidates is hosts:
            self._strike_host(victim, fault)
        elif kind == "fork server":
            self._kill_server(victim)
        elif kind in ("stop", "stop and kill"):
            self._stop(victim, fault)
        else:
            for pid in workers if kind == "all" else [victim]:
                self._kill(pid, kind)
        return True

    def due(self) -> float:
        """When the next stopped process has to go on."""
        return self._later[0][0] if self._later else float("inf")

    def act(self) -> None:
        """Do what is due."""
        while self._later and self._later[0][0] <= time.monotonic():
            heapq.heappop(self._later)[2]()

    def _processes(self) -> tuple[list[int], list[int]]:
        """Fork servers and workers that nobody has struck yet, in the order of their birth; those that are just being born too."""
        first = [pid for pid in _children(self._program) if pid not in self._doomed]
        if self._part.nodes:
            first = [pid for host in first for pid in _children(host) if pid not in self._doomed]
        if self._part.method != "forkserver":
            return [], [pid for pid in first if pid not in self._stopped]
        workers = [pid for server in first for pid in _children(server)]
        return first, [pid for pid in workers if pid not in self._doomed and pid not in self._stopped]

    def _kill(self, pid: int, kind: str, signum: int | None = None) -> None:
        if kind in ("segv", "abrt") and self._part.dev and pid not in self._known:
            kind = "kill"  # in development mode it would print its stacks, until the lifespan forbids that
        self._everybody.add(pid)
        ns = time.monotonic_ns()
        if self._everybody.send(pid, SIGNALS[kind] if signum is None else signum):
            self._note(ns, kind, pid)
            self.kills += 1
            if kind != "drain":
                self._doomed.add(pid)

    def _note(self, ns: int, kind: str, pid: int) -> None:
        index, generation = self._known.get(pid, (-1, -1))
        self._round.kills.append(Kill(ns, kind, pid, index, generation))

    def _strike_host(self, host: int, fault: Fault) -> None:
        """Its workers may end from now on: with it, or because it is lost."""
        self._everybody.add(host)
        self._round.struck.add(host)
        if fault.kind == "host":
            self._kill(host, "host")
        elif fault.kind == "link":
            os.write(self._control, b"c%d\n" % host)
            self._note(time.monotonic_ns(), "link", host)
            self.kills += 1
            self._doomed.add(host)
        else:
            self._stop(host, fault._replace(pause=_HOST_STOPS * fault.pause))

    def _stop(self, pid: int, fault: Fault) -> None:
        self._everybody.add(pid)
        if not self._everybody.send(pid, signal.SIGSTOP):
            return
        self.stops += 1
        self._stopped.add(pid)
        when = time.monotonic() + fault.pause
        heapq.heappush(self._later, (when, self.stops, lambda: self._go_on(pid, fault.kind)))

    def _go_on(self, pid: int, kind: str) -> None:
        self._stopped.discard(pid)
        if kind == "stop and kill":
            self._kill(pid, kind, signal.SIGKILL)
        else:
            self._everybody.send(pid, signal.SIGCONT)

    def _kill_server(self, server: int) -> None:
        """It takes its workers along. Stopped first, so that none is born unseen."""
        self._everybody.add(server)
        if not self._everybody.send(server, signal.SIGSTOP):
            return
        workers = [pid for pid in _children(server) if pid not in self._doomed]
        for pid in workers:
            self._everybody.add(pid)
        ns = time.monotonic_ns()
        if self._everybody.send(server, signal.SIGKILL):
            self._note(ns, "fork server", server)
            self.kills += 1
            for pid in workers:
                self._note(ns, _WITH_SERVER, pid)
            self._doomed.update(workers, [server])


def _children(pid: int) -> list[int]:
    with suppress(OSError):
        tasks = sorted(Path(f"/proc/{pid}/task").iterdir())
        return sorted(int(child) for task in tasks for child in (task / "children").read_text().split())
    return []


class Trial:
    """One program from its start to its end."""

    def __init__(self, part: Part, seed: str, kills: int, folder: Path) -> None:
        self._part = part
        self._seed = seed
        self._wanted = kills
        self._folder = folder
        self._faults = schedule(seed, part.mean, KINDS_OF_NODES if part.nodes else KINDS)
        self._next = next(self._faults)
        self._rounds: list[Round] = []
        self._everybody = Watch()
        self._left: list[str] = []
        self._ended = (0, 0.0)

    def run(self) -> Verdict:
        """Until there were enough kills, and the program has ended.

        Raises:
            pytest.fail.Exception: it hangs, or ends before its time; the stacks are in the text.
        """
        before = leaks.snapshot()
        control = self._folder / "control"
        os.mkfifo(control)
        nodes = str(self._part.nodes)
        arguments = ["chaos", self._part.loop, self._part.method, self._seed, str(self._folder), str(control), nodes]
        stderr = self._folder / "stderr"
        writer = os.open(control, os.O_RDWR)
        try:
            with Program(*arguments, stderr=stderr, dev=self._part.dev, module="tests.chaos.program") as program, self._everybody:
                self._attend(program, writer)
                assert program.end() == 0, program.stderr
        finally:
            os.close(writer)
        verdict = Verdict()
        for one in self._rounds:
            verdict.add(history.judge(one))
        for left in [*self._left, *leaks.since(before)]:
            verdict.breach("left behind", left)
        if said := stderr.read_text():
            verdict.breach("said on stderr", said)
        return verdict

    def _attend(self, program: Program, control: int) -> None:
        nemesis = Nemesis(program.pid, self._part, control)
        due = time.monotonic()
        self._ended = (0, due)
        is_told = False
        while True:
            nemesis.act()
            if not is_told and time.monotonic() >= due and self._rounds:
                if nemesis.strike(self._next):
                    self._next = next(self._faults)
                due = time.monotonic() + self._next.after
            if not is_told and nemesis.kills >= self._wanted:
                os.write(control, b".\n")
                is_told = True
            wait = min(nemesis.due(), float("inf") if is_told else due) - time.monotonic()
            line = program.next_line(min(LIMIT, max(0.0, wait)))
            if line == "over":
                return
            if line is not None:
                self._hear(line, program, nemesis)
            elif time.monotonic() > self._ended[1] + LIMIT:
                program.hangs(f"nothing has ended for {LIMIT:g} s")

    def _hear(self, line: str, program: Program, nemesis: Nemesis) -> None:
        word, _, rest = line.partition(" ")
        match word:
            case "born":
                pid, index, generation, host = map(int, rest.split())
                self._rounds[-1].born[pid] = (index, generation)
                self._rounds[-1].hosts[pid] = host
                self._everybody.add(pid)
            case "progress":
                if int(rest) != self._ended[0]:
                    self._ended = (int(rest), time.monotonic())
            case "begins":
                self._rounds.append(Round(self._folder / rest))
                nemesis.begin(self._rounds[-1], self._everybody)
                self._ended = (0, time.monotonic())
            case "round":
                self._end_round(rest)
            case _:
                pytest.fail(f"the program ended with {program.process.wait()}, or said {line!r}:\n{program.stderr}")

    def _end_round(self, told: str) -> None:
        one = self._rounds[-1]
        one.tell(told)
        # Its close has waited for each process; whoever is alive now was left behind. Workers of a lost node end by themselves.
        left = self._everybody.wait_gone(LIMIT if self._part.nodes else 0)
        self._left += [f"process {pid} after round {one.told['round']}" for pid in left]
        self._everybody.forget()


def trial(part: Part, seed: str, kills: int) -> Verdict:
    """Let one program run until there were so many kills, and compare. See `Trial.run`."""
    with tempfile.TemporaryDirectory(prefix="percore-chaos-") as folder, _no_core_files():
        return Trial(part, seed, kills, Path(folder)).run()


def trials(kills: int, seed: str, parts: Sequence[Part] = PARTS) -> Iterator[tuple[Part, str, int]]:
    """The programs for so many kills: how each is run, its seed, its number of kills."""
    for part in parts:
        rest = max(1, round(kills * part.share))
        number = 0
        while rest > 0:
            number += 1
            share = min(rest, AT_MOST)
            rest -= share
            yield part, f"{seed}/{part}/{number}", share


@contextmanager
def _no_core_files() -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_CORE, limits)


def quiet(loop: str, times: int) -> Verdict:
    """The figures of a runner that does nothing but one call. `times` kills."""
    verdict = Verdict(rounds=1, calls=2 * times)
    with tempfile.TemporaryDirectory(prefix="percore-chaos-") as folder:
        stderr = Path(folder) / "stderr"
        with Program("quiet", loop, str(times), stderr=stderr, module="tests.chaos.program") as program:
            for _ in range(times):
                pid = int(program.expect("holds"))
                ns = time.monotonic_ns()
                os.kill(pid, signal.SIGKILL)
                failed, served = program.told("failed")
                verdict.detection.append((failed - ns) / 1e9)
                verdict.recovery.append((served - ns) / 1e9)
                verdict.kills["kill"] += 1
            program.expect("over")
            assert program.end() == 0, program.stderr
    return verdict
