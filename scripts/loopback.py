"""Runs a command in a network of its own, which has the loopback interface alone, with Ray's files under build/ray.

    python scripts/loopback.py COMMAND ARGUMENTS...
    python scripts/loopback.py --check          tells whether the system permits such a network

Ray listens on every interface, and writes into the home directory and /tmp.
"""

import fcntl
import os
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "build" / "ray"
LONGEST = 40
"""Bytes of the longest folder in which the names of Ray's sockets fit into the system's 107."""
SIOCSIFFLAGS, IFF_UP, IFF_RUNNING = 0x8914, 0x1, 0x40
INSIDE = "PERCORE_LOOPBACK"


def main() -> int:
    if os.environ.get(INSIDE):
        with socket.socket() as any_socket:
            fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sh", b"lo", IFF_UP | IFF_RUNNING))
        os.execvp(sys.argv[1], sys.argv[1:])
    unshare = ["unshare", "--map-root-user", "--net", "--"]
    if not shutil.which("unshare") or subprocess.run([*unshare, "true"], stderr=subprocess.DEVNULL, check=False).returncode:
        print("== this needs a network namespace (unshare --map-root-user --net), which this system forbids: nothing is run")
        return 1
    if sys.argv[1:] == ["--check"]:
        return 0
    (FOLDER / "home").mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="p") as short:
        folder = FOLDER
        if len(os.fsencode(folder)) > LONGEST:
            folder = Path(short, "r")
            folder.symlink_to(FOLDER)
        own = {"HOME": str(FOLDER / "home"), "RAY_TMPDIR": str(folder), "RAY_USAGE_STATS_ENABLED": "0", INSIDE: "1"}
        return subprocess.run([*unshare, sys.executable, __file__, *sys.argv[1:]], env=os.environ | own, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
