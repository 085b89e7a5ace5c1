"""Starts a host as a child process."""

import json
import os
import subprocess
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

    from percore._transport.certificates import Certificates

_CODE: Final = """\
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from percore._node.main import serve
serve(sys.argv[2], int(sys.argv[3]), *sys.argv[4:])
"""


def start_host(
    python: str, address: str, token: bytes, path: "list[str] | None" = None, certificates: "Certificates | None" = None
) -> "tuple[subprocess.Popen[bytes], int | None]":
    """Start a host that listens on this address of the machine. Return its process and its port, or None if it has ended.

    It ends when its standard input is closed: with this process, at the latest. It writes to the standard output of this one.
    `path`: its `sys.path`. Default: that of this process. `certificates`: its files, for TLS.
    """
    told, tell = os.pipe()
    try:
        command = [python, "-c", _CODE, json.dumps(sys.path if path is None else path), address, str(tell)]
        command += certificates or ()
        process = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[tell])
    except BaseException:
        os.close(told)
        raise
    finally:
        os.close(tell)
    with open(told, "rb") as pipe:
        assert process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended
            process.stdin.write(token)
            process.stdin.flush()
        line = pipe.readline()
    return process, int(line) if line else None


def close_hosts(hosts: "Iterable[subprocess.Popen[bytes]]") -> None:
    """Let these hosts end, and wait for them."""
    for process in hosts:
        if process.stdin is not None:
            with suppress(BrokenPipeError):
                process.stdin.close()
    for process in hosts:
        process.wait()
