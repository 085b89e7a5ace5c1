"""Binds listening sockets. An OSError says on which address percore cannot listen, why, and what to do."""

import errno
import os
import socket
import stat
from contextlib import closing, suppress
from typing import Final

from percore._common.addresses import InternetAddress, UnixAddress

BACKLOG: Final = 65_535
"""More than any system allows, so each socket has the longest backlog that the system allows."""

_UNCONNECTED: Final = "01"
_ACCEPTS: Final = 0x10000
"""In /proc/net/unix: the state of a socket that is connected to none, and the flag of one that listens."""

_ADVICE: Final = {
    errno.EADDRINUSE: "another program or runner listens there: end it, or choose another address",
    errno.EACCES: "a port below 1024 needs the right to use it (CAP_NET_BIND_SERVICE), and a path a folder that may be written to",
    errno.EADDRNOTAVAIL: "no network of this machine has this address",
    errno.ENOENT: "make its folder first",
}


def cannot_listen(address: object, error: OSError) -> OSError:
    """Return an error of the same class that names the address and says what to do."""
    code = error.errno or 0
    advice = f" ({_ADVICE[code]})" if code in _ADVICE else ""
    return OSError(code, f"percore cannot listen on {address}: {error.strerror or error}{advice}")


def bind_internet(address: InternetAddress, *, shares_port: bool) -> socket.socket:
    """Return a socket that listens on a TCP address. `shares_port`: as one of several sockets of this process (SO_REUSEPORT).

    Raises:
        OSError: the system refuses it; nothing is left behind.
    """
    sock = _internet_socket(address)
    try:
        if shares_port:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind(address.name)
        return listening(sock)
    except OSError as error:
        sock.close()
        raise cannot_listen(address, error) from None


def check_free(address: InternetAddress) -> None:
    """Check that nobody listens on the port. With SO_REUSEPORT the system would share it with other programs of the same user.

    Raises:
        OSError: somebody listens there, or the system refuses the address.
    """
    with closing(_internet_socket(address)) as sock:
        try:
            sock.bind(address.name)
        except OSError as error:
            raise cannot_listen(address, error) from None


def _internet_socket(address: InternetAddress) -> socket.socket:
    try:
        sock = socket.socket(address.family, socket.SOCK_STREAM)
    except OSError as error:
        raise cannot_listen(address, error) from None
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of an earlier program may still be ending
    if address.family == socket.AF_INET6:
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)  # "0.0.0.0:8080" and "[::]:8080" are two addresses
    return sock


def listening(sock: socket.socket) -> socket.socket:
    """Let a bound socket listen, and return it. It does not block: several workers may wait for one connection."""
    sock.listen(BACKLOG)
    sock.setblocking(False)
    return sock


def bind_unix(address: UnixAddress) -> socket.socket:
    """Return a socket that listens on a path. A socket file that a dead program has left there is replaced.

    Raises:
        OSError: the system refuses it, or there is a file at which somebody listens or that is no socket. Nothing is left behind.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        try:
            sock.bind(address.path)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            _remove_stale(address.path)
            sock.bind(address.path)
        return listening(sock)
    except OSError as error:
        sock.close()
        raise cannot_listen(address, error) from None


def _remove_stale(path: str) -> None:
    """Remove the file of a socket on which nobody listens.

    Raises:
        OSError: somebody listens there, or the file is no socket.
    """
    found = os.lstat(path)
    if not stat.S_ISSOCK(found.st_mode):
        raise FileExistsError(errno.EEXIST, "a file is there that is no socket")
    with closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            if _is_bound(path):  # somebody is about to listen
                raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE)) from None
        except BlockingIOError:
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE)) from None  # its backlog is full
        else:
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
    with suppress(FileNotFoundError):  # somebody has removed it, or has put another one there that may have its number
        if os.lstat(path).st_mtime_ns == found.st_mtime_ns:
            remove_file(path, identity_of(found))


def _is_bound(path: str) -> bool:
    """Whether a socket is bound to this path that does not listen yet, as far as the system tells."""
    with suppress(OSError), open("/proc/net/unix", errors="surrogateescape") as file:
        for line in file:
            _, _, _, flags, _, state, _, *name = line.rstrip("\n").split(None, 7)
            if name == [path] and state == _UNCONNECTED and not int(flags, 16) & _ACCEPTS:
                return True
    return False


def identity_of(status: os.stat_result) -> tuple[int, int]:
    """Return what tells a file from another one that later has its path."""
    return status.st_dev, status.st_ino


def remove_file(path: str, identity: tuple[int, int]) -> None:
    """Remove this file, unless there is another one in its place."""
    with suppress(OSError):  # somebody has removed it, or the folder may not be written to any more
        if identity_of(os.lstat(path)) == identity:
            os.unlink(path)
