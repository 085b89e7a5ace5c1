"""The command line: `percore top`, `percore record`, `percore doctor` and `percore bench`."""

import argparse
import os
import signal
import sys
from collections.abc import Sequence

import percore


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command and exit with its status. `arguments`: those of the command line; None: those of this program."""
    options = _parser().parse_args(arguments)
    try:
        status = _run(options)
        if sys.stdout is not None:  # the program was started without one
            sys.stdout.flush()
    except KeyboardInterrupt:
        status = 128 + signal.SIGINT
    except BrokenPipeError:  # `percore top | head`: the reader has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter flushes it once more when it ends
        status = 128 + signal.SIGPIPE
    sys.exit(status)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="percore", description="Tools for programs that use percore.")
    parser.add_argument("--version", action="version", version=f"percore {percore.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    what = "show what the workers and functions of a running program do"
    top = commands.add_parser("top", help=what, description=f"{what.capitalize()}. Without a PID: list this user's programs.")
    top.add_argument("pid", nargs="?", type=int, metavar="PID", help="the program's process id")
    top.add_argument("--interval", type=_seconds, default=1.0, metavar="S", help="seconds between two views (default: 1)")
    top.add_argument("--by-worker", action="store_true", help="show the figures of each function by worker, too")
    top.add_argument("--once", action="store_true", help="write one view as text and end")
    top.add_argument("--json", action="store_true", help="write one view, or the list of programs, as JSON and end")
    what = "sample where the workers of a running program are, and write a flame graph"
    record = commands.add_parser("record", help=what, description=f"{what.capitalize()}.")
    record.add_argument("pid", type=int, metavar="PID", help="the program's process id: percore top lists them")
    record.add_argument("-o", "--output", required=True, metavar="OUT", help="a file: x.html, or x.json for speedscope")
    record.add_argument("--seconds", type=_seconds, default=10.0, metavar="S", help="for how long (default: 10)")
    record.add_argument("--rate", type=_rate, default=20.0, metavar="N", help="samples of each worker in a second (default: 20)")
    how = "what reads the stacks; auto: profiling.sampling of Python 3.15 or py-spy where permitted, else faulthandler (default)"
    samplers = ("auto", "faulthandler", "profiling.sampling", "py-spy")
    record.add_argument("--sampler", choices=samplers, default="auto", help=how)
    what = "say what this machine gives to percore, and what to do about what it lacks"
    doctor = commands.add_parser("doctor", help=what, description=f"{what.capitalize()}. Status 1: percore does not work here.")
    doctor.add_argument("--json", action="store_true", help="write JSON")
    what = "compare percore with the standard library on this machine, in less than a minute"
    bench = commands.add_parser("bench", help=what, description=f"{what.capitalize()}. The figures mean little if it is busy.")
    bench.add_argument("--json", action="store_true", help="write JSON")
    bench.add_argument("--workers", type=int, metavar="N", help="workers of each pool (default: the usable CPUs)")
    return parser


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.1 <= seconds <= 3600:
        raise argparse.ArgumentTypeError(f"a number of seconds from 0.1 to 3600, not {text!r}")
    return seconds


def _rate(text: str) -> float:
    try:
        rate = float(text)
    except ValueError:
        rate = 0.0
    if not 1 <= rate <= 1000:
        raise argparse.ArgumentTypeError(f"a number of samples from 1 to 1000, not {text!r}")
    return rate


def _run(options: argparse.Namespace) -> int:
    if options.command == "top":
        return _top(options)
    if options.command == "record":
        from percore._record.record import record

        return record(options.pid, options.output, seconds=options.seconds, rate=options.rate, sampler=options.sampler)
    if options.command == "doctor":
        from percore._cli.doctor import doctor

        return doctor(as_json=options.json)
    from percore._cli.bench import bench

    return bench(workers=options.workers, as_json=options.json)


def _top(options: argparse.Namespace) -> int:
    try:
        from percore._top.top import top
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("rich", "psutil"):
            raise
        print(f"percore top needs {error.name}: pip install 'percore[cli]'", file=sys.stderr)
        return 1
    show = {"once": options.once, "as_json": options.json, "by_worker": options.by_worker}
    return top(options.pid, interval=options.interval, **show)
