"""Starts a host as a child process."""

import json
import os
import subprocess
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from percore._transport.certificates import Certificates

_CODE: Final = """\
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from percore._node.main import serve
serve(sys.argv[2], int(sys.argv[3]), *sys.argv[4:])
"""


class HostProcess:
    """A host that listens on an address of this machine.

    It ends when its standard input is closed: with this process, at the latest. It writes to the standard output of this one.
    """

    def __init__(
        self, python: str, address: str, path: "list[str] | None" = None, certificates: "Certificates | None" = None
    ) -> None:
        """Start it. `path`: its `sys.path`. Default: that of this process. `certificates`: its files, for TLS.

        Raises:
            OSError: it cannot be started; nothing is left behind.
        """
        told, tell = os.pipe()
        try:
            command = [python, "-c", _CODE, json.dumps(sys.path if path is None else path), address, str(tell)]
            command += certificates or ()
            self.process = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[tell])
        except BaseException:
            os.close(told)
            raise
        finally:
            os.close(tell)
        self._told = told

    def port(self, token: bytes) -> int | None:
        """Give it the token and return its port. None: it has ended. Blocks until then; call it once."""
        with open(self._told, "rb") as pipe:
            assert self.process.stdin is not None
            with suppress(BrokenPipeError):  # it has ended
                self.process.stdin.write(token)
                self.process.stdin.flush()
            line = pipe.readline()
        return int(line) if line else None

    def close(self) -> None:
        """Let it end."""
        if self.process.stdin is not None:
            with suppress(BrokenPipeError):
                self.process.stdin.close()
