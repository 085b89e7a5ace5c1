"""The judgement of `percore doctor`: what the facts about a machine mean for percore, and what to do."""

from collections.abc import Iterator
from enum import Enum
from math import ceil, inf
from typing import Final, NamedTuple

from percore._cli.facts import Facts

_MIB: Final = 1 << 20
_LITTLE: Final = 256 * _MIB
"""Bytes of memory for each worker below which advice is due."""

_USUAL: Final = 10
"""Descriptors that each worker takes in the program, if the trial could not count them."""
_OWN: Final = 64
"""Descriptors that Python, percore's fork server and the program take."""


class Level(Enum):
    """How a finding is to be taken."""

    OK = "ok"
    NOTE = "note"
    """percore works, with less speed, less comfort or fewer workers."""

    PROBLEM = "problem"
    """percore does not work, or not as it should."""


class Finding(NamedTuple):
    """One finding.

    Attributes:
        name: what it is about.
        level: how it is to be taken.
        value: what was found.
        advice: what it means, and what to do; empty if nothing is to be done.
    """

    name: str
    level: Level
    value: str
    advice: str = ""


def judge(facts: Facts) -> list[Finding]:
    """Return the findings, in the order in which to show them."""
    return [
        _trial(facts),
        Finding("Python", Level.OK, facts.python + (", free-threaded" if facts.is_free_threaded else "")),
        _system(facts),
        *_cpus(facts),
        *_calls_of_the_system(facts),
        _uvloop(facts),
        *_limits(facts),
        *_memory(facts),
        _ptrace(facts),
        *_variables(facts),
    ]


def _trial(facts: Facts) -> Finding:
    trial = facts.trial
    if trial.seconds is None:
        return Finding(
            "a trial", Level.PROBLEM, trial.error, "percore could not start a worker. The page Troubleshooting has this text"
        )
    size = "" if trial.rss is None else f"; a worker has {_size(trial.rss)} (RES)"
    return Finding("a trial", Level.OK, f"a worker started and ran a call within {trial.seconds:.2f} s{size}")


def _system(facts: Facts) -> Finding:
    value = f"{facts.system}, start_method={facts.start_method}"
    if facts.start_method == "forkserver" or not facts.is_linux:
        return Finding("system", Level.OK, value)
    return Finding(
        "system",
        Level.NOTE,
        value,
        "each worker is a fresh interpreter, which starts more slowly: the fork server needs Linux 5.3, and in a container a "
        "seccomp profile that allows pidfd_open",
    )


def _cpus(facts: Facts) -> Iterator[Finding]:
    quota = "no quota" if facts.quota == inf else f"a quota of {facts.quota:g}"
    value = f"{facts.cpus} in the machine, {facts.allowed} by affinity, {quota} of the cgroup: {facts.workers} workers by default"
    if facts.quota < facts.allowed and facts.quota != ceil(facts.quota):
        advice = (
            f"the quota stops all of the program's processes for a part of the time when {facts.workers} workers are busy: "
            "give whole CPUs"
        )
        yield Finding("CPUs", Level.NOTE, value, advice)
    else:
        yield Finding("CPUs", Level.OK, value)
    if facts.cpus > facts.workers and not facts.threads_variable:
        yield Finding(
            "threads of libraries",
            Level.NOTE,
            "OMP_NUM_THREADS is not set",
            f"OpenBLAS, PyTorch and the like may start {facts.cpus} threads in each worker, for {facts.workers} usable CPUs: set "
            "OMP_NUM_THREADS=1 for programs that use them",
        )


def _calls_of_the_system(facts: Facts) -> Iterator[Finding]:
    where = "on Linux an old kernel or a seccomp profile refuses it" if facts.is_linux else "this system does not have it"
    for name, has, instead in (
        ("memfd", facts.memfd, f"shared memory is in deleted temporary files ({_size(facts.temporary)} are free there)"),
        ("eventfd", facts.eventfd, "workers are woken through sockets, which takes a little longer"),
        ("pidfd", facts.pidfd, "a thread waits for the end of each worker"),
        ("F_SETSIG", facts.setsig, "a thread of each worker ends it when the program dies, unless the worker is stopped"),
        (
            "SO_REUSEPORT",
            facts.reuseport,
            "the workers of listen= share one socket, and the system does not divide its connections",
        ),
    ):
        yield Finding(name, Level.OK, "yes") if has else Finding(name, Level.NOTE, "no", f"{instead}; {where}")


def _uvloop(facts: Facts) -> Finding:
    if facts.uvloop:
        return Finding("uvloop", Level.OK, facts.uvloop)
    if facts.uvloop is None:
        return Finding("uvloop", Level.NOTE, "not installed", "workers run asyncio's own loop, which is slower: pip install uvloop")
    return Finding("uvloop", Level.NOTE, "switched off by PERCORE_WITHOUT", "workers run asyncio's own loop, which is slower")


def _limits(facts: Facts) -> Iterator[Finding]:
    each, workers = facts.trial.descriptors or _USUAL, facts.workers
    if facts.files is None:
        yield Finding("open files", Level.OK, "no limit")
    else:
        value = f"{facts.files} (ulimit -n); each worker takes {each} in the program"
        enough = facts.files >= _OWN + workers * each
        advice = f"that is too few for {workers} workers and the program's own files: ulimit -n 65536"
        yield Finding("open files", Level.OK, value) if enough else Finding("open files", Level.PROBLEM, value, advice)
    needed = 2 + workers * (1 + min(32, workers + 4))
    if facts.processes is None:
        yield Finding("processes", Level.OK, "no limit")
    elif facts.processes >= needed:
        yield Finding("processes", Level.OK, f"{facts.processes}")
    else:
        advice = f"{workers} workers with all their threads need {needed}: raise ulimit -u or --pids-limit, or give fewer threads="
        yield Finding("processes", Level.NOTE, f"{facts.processes}", advice)
    for name, size, option in (("address space", facts.address_space, "-v"), ("file size", facts.file_size, "-f")):
        if size is not None:
            advice = f"shared memory counts in full: fewer large messages fit. Without the limit (ulimit {option} unlimited) all do"
            yield Finding(name, Level.NOTE, f"{_size(size)} (ulimit {option})", advice)


def _memory(facts: Facts) -> Iterator[Finding]:
    if facts.room is None:
        yield Finding("memory", Level.OK, "this system does not say how much is left")
    elif facts.room < _LITTLE * facts.workers:
        advice = f"that is less than {_size(_LITTLE)} for each of {facts.workers} workers: give workers= if your program needs more"
        yield Finding("memory", Level.NOTE, f"{_size(facts.room)} are left", advice)
    else:
        yield Finding("memory", Level.OK, f"{_size(facts.room)} are left")
    shm = "there is none" if facts.shm is None else f"{_size(facts.shm)} are free"
    yield Finding("/dev/shm", Level.OK, f"{shm}; percore does not use it")


def _ptrace(facts: Facts) -> Finding:
    scope = facts.ptrace_scope
    if facts.may_trace or not scope:
        return Finding("ptrace", Level.OK, "allowed: py-spy and debuggers can look into workers")
    who = "nobody" if scope >= 3 else "root"
    advice = (
        f"only {who} can look into workers with py-spy or a debugger: give a container the capability SYS_PTRACE, or set "
        "kernel.yama.ptrace_scope=0"
    )
    return Finding("ptrace", Level.NOTE, f"kernel.yama.ptrace_scope={scope}", advice)


def _variables(facts: Facts) -> Iterator[Finding]:
    for name, value in facts.variables.items():
        if name == "PERCORE_METRICS" and value == "0":
            advice = "calls are not measured: statistics() has no functions, and percore top and record cannot see the program"
        elif name in ("PERCORE_WITHOUT", "PERCORE_POINTS"):
            advice = "this variable is for tests of percore: unset it in production"
        elif name in ("PERCORE_METRICS", "PERCORE_TRACEBACKS"):
            advice = ""
        else:
            advice = "percore knows no such variable"
        yield Finding(name, Level.NOTE if advice else Level.OK, value, advice)


def _size(size: int) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 1 << 30 else f"{size // _MIB} MiB"
