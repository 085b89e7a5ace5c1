"""The command line: `percore doctor` and `percore bench`."""

import argparse
import signal
import sys
from collections.abc import Sequence

import percore


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command and exit with its status. `arguments`: those of the command line; None: those of this program."""
    options = _parser().parse_args(arguments)
    try:
        sys.exit(_run(options))
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="percore", description="Tools for programs that use percore.")
    parser.add_argument("--version", action="version", version=f"percore {percore.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    what = "say what this machine gives to percore, and what to do about what it lacks"
    doctor = commands.add_parser("doctor", help=what, description=f"{what.capitalize()}. Status 1: percore does not work here.")
    doctor.add_argument("--json", action="store_true", help="write JSON")
    what = "compare percore with the standard library on this machine, in less than a minute"
    bench = commands.add_parser("bench", help=what, description=f"{what.capitalize()}. The figures mean little if it is busy.")
    bench.add_argument("--json", action="store_true", help="write JSON")
    bench.add_argument("--workers", type=int, metavar="N", help="workers of each pool (default: the usable CPUs)")
    return parser


def _run(options: argparse.Namespace) -> int:
    if options.command == "doctor":
        from percore._cli.doctor import doctor

        return doctor(as_json=options.json)
    from percore._cli.bench import bench

    return bench(workers=options.workers, as_json=options.json)
