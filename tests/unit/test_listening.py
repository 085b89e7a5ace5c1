"""The listening sockets of a pool: which slots have some and get connections, who listens where, and what is left of it."""

import errno
import os
import socket
import stat
import struct
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from percore._common.addresses import InternetAddress, UnixAddress
from percore._common.system import HAS_REUSEPORT
from percore._listening import binding, endpoints, steering
from percore._listening.endpoints import Endpoint, FileEndpoint, SharedEndpoint, SplitEndpoint, endpoint_of
from percore._listening.steering import program
from percore._scheduler.listening import SOON, has_served, plan
from tests.contract.listen_jobs import has_ipv6

ANY = InternetAddress(socket.AF_INET, ("127.0.0.1", 0))
IN_USE = os.strerror(errno.EADDRINUSE)
"""The C library's text."""
needs_reuseport = pytest.mark.skipif(not HAS_REUSEPORT, reason="the system gives all connections to one socket")


@dataclass(frozen=True)
class Slot:
    index: int
    is_served: bool = True
    is_failed: bool = False


def test_which_slots_have_sockets_and_get_connections(subtests: pytest.Subtests) -> None:
    for slots, used, kept, steered in [
        ([Slot(0), Slot(1)], {0, 1}, {0, 1}, {0, 1}),
        ([Slot(0, is_served=False), Slot(1)], {0, 1}, {0, 1}, {1}),  # a replacement starts
        ([Slot(0, is_served=False), Slot(1)], {1}, {0, 1}, {1}),  # or will start
        ([Slot(0, is_served=False), Slot(1, is_served=False)], set(), {0, 1}, {0, 1}),  # nobody serves: they wait in both
        ([Slot(0)], {0, 1}, {0, 1}, {0}),  # slot 1 was removed, and its worker drains
        ([Slot(0)], {0}, {0}, {0}),
        ([Slot(0, is_served=False)], {0, 1}, {0, 1}, {0}),
        ([Slot(0), Slot(1, is_served=False, is_failed=True)], {0}, {0}, {0}),  # given up
        ([Slot(0, is_served=False, is_failed=True)], set(), set(), set()),  # the runner is broken
        ([Slot(0, is_served=False, is_failed=True)], {0}, {0}, set()),  # what drains there may accept what waits
    ]:
        with subtests.test(slots=slots, used=used):
            assert tuple(map(set, plan(slots, used))) == (kept, steered)


def test_a_worker_that_was_ready_has_served_unless_its_lifespan_fails_soon() -> None:
    assert has_served(was_ready=True, has_failed=False, age=0.0)
    assert has_served(was_ready=True, has_failed=True, age=SOON)
    assert not has_served(was_ready=True, has_failed=True, age=SOON - 1)
    assert not has_served(was_ready=False, has_failed=False, age=SOON)


def test_the_program_chooses_among_the_given_sockets(subtests: pytest.Subtests) -> None:
    for numbers in [[0], [5], [0, 1], [3, 0, 2], list(range(1023))]:
        with subtests.test(numbers=numbers):
            assert [_run(program(numbers), random) for random in range(len(numbers) * 2)] == numbers * 2


def _run(code: bytes, random: int) -> int:
    """Interpret a program of the kernel's packet filter."""
    lines = list(struct.iter_unpack("=HBBI", code))
    assert len(lines) <= 4096, "more than the kernel takes"
    at, value = 0, -1
    while True:
        kind, if_true, if_false, number = lines[at]
        at += 1
        match kind:
            case 0x20:
                assert number == 2**32 - 0x1000 + 56
                value = random
            case 0x94:
                value %= number
            case 0x15:
                at += if_true if value == number else if_false
            case 0x06:
                return int(number)
            case _:
                pytest.fail(f"an unknown instruction {kind:#x}")


@contextmanager
def opened(address: InternetAddress | UnixAddress | socket.socket, slots: int = 1) -> Iterator[Endpoint]:
    endpoint = endpoint_of(address)
    endpoint.open(slots)
    try:
        yield endpoint
    finally:
        endpoint.close()


def _connect(endpoint: Endpoint) -> socket.socket:
    if endpoint.address.startswith("unix:"):
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(endpoint.address.removeprefix("unix:"))
        return sock
    host, _, port = endpoint.address.rpartition(":")
    return socket.create_connection((host.strip("[]"), int(port)))


def _dealt(endpoint: Endpoint, slots: list[int], count: int = 64) -> Counter[int]:
    """How many of so many connections the sockets of these slots get."""
    clients = [_connect(endpoint) for _ in range(count)]
    dealt: Counter[int] = Counter()
    for slot in slots:
        try:
            while True:
                endpoint.of(slot).accept()[0].close()
                dealt[slot] += 1
        except BlockingIOError:
            """Nothing waits there any more."""
    for client in clients:
        client.close()
    return dealt


@needs_reuseport
def test_each_slot_has_a_socket_of_one_port() -> None:
    with opened(ANY, 3) as endpoint:
        socks = [endpoint.of(slot) for slot in range(3)]
        assert {f"127.0.0.1:{sock.getsockname()[1]}" for sock in socks} == {endpoint.address}
        assert endpoint.of(1) is socks[1]
        for sock in socks:
            assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            assert not sock.getblocking()
            assert not sock.get_inheritable()
        dealt = _dealt(endpoint, [0, 1, 2])
        assert set(dealt) == {0, 1, 2}
        assert dealt.total() == 64


@needs_reuseport
def test_connections_are_steered_to_some_slots() -> None:
    with opened(ANY, 4) as endpoint:
        for slots in [{0, 2, 3}, {1}, {1}, {0, 1, 2, 3}, {3}]:
            endpoint.steer(slots)
            dealt = _dealt(endpoint, [0, 1, 2, 3])
            assert (set(dealt), dealt.total()) == (slots, 64)
        endpoint.steer(())  # nobody: it stays as it was
        assert set(_dealt(endpoint, [0, 1, 2, 3])) == {3}
        endpoint.keep({0, 2, 3})  # the system numbers them anew
        endpoint.steer({2, 3})
        assert set(_dealt(endpoint, [0, 2, 3])) == {2, 3}
        assert endpoint.of(1).getsockname() == endpoint.of(0).getsockname()  # a new one
        endpoint.steer({1})
        assert set(_dealt(endpoint, [0, 1, 2, 3])) == {1}


@needs_reuseport
def test_a_socket_that_is_added_gets_no_connection_before_it_is_steered_to() -> None:
    """Its worker may not start, and then it is closed, with all connections that nobody has accepted there."""
    with opened(ANY, 2) as endpoint:
        endpoint.steer({0, 1})
        endpoint.of(2)
        assert set(_dealt(endpoint, [0, 1, 2])) == {0, 1}
        endpoint.steer({0, 1, 2})
        assert set(_dealt(endpoint, [0, 1, 2])) == {0, 1, 2}


@needs_reuseport
def test_a_socket_without_a_number_is_noticed() -> None:
    with opened(ANY, 2) as endpoint:
        assert isinstance(endpoint, SplitEndpoint)
        endpoint._order.pop()
        with pytest.raises(AssertionError, match="connections would go to other slots"):
            endpoint.steer({0})


@needs_reuseport
def test_p6_an_interrupt_as_a_socket_is_closed_leaves_the_right_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(sock: socket.socket) -> None:
        sock.close()  # as the collector does with one that nobody has
        raise KeyboardInterrupt

    with opened(ANY, 3) as endpoint:
        with monkeypatch.context() as meanwhile:
            meanwhile.setattr(endpoints, "_end", interrupted)
            with pytest.raises(KeyboardInterrupt):
                endpoint.keep({0, 2})
        endpoint.keep({0, 2})
        endpoint.steer({2})
        assert set(_dealt(endpoint, [0, 2])) == {2}


@needs_reuseport
def test_a_system_that_does_not_steer_deals_to_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steering, "_ATTACH", 999)
    with opened(ANY, 2) as endpoint:
        endpoint.steer({1})
        assert not steering.steer(endpoint.of(0), [1])
        assert set(_dealt(endpoint, [0, 1])) == {0, 1}
    monkeypatch.undo()
    monkeypatch.setattr(steering, "_OTHER_NUMBERS", (os.uname().machine,))
    with opened(ANY, 2) as endpoint:
        assert not steering.steer(endpoint.of(0), [1])


@needs_reuseport
def test_the_socket_of_a_slot_that_is_not_kept_is_closed() -> None:
    with opened(ANY, 2) as endpoint:
        removed = endpoint.of(1)
        endpoint.keep({0})
        assert removed.fileno() == -1
        assert set(_dealt(endpoint, [0])) == {0}
        endpoint.keep(())
        with pytest.raises(ConnectionRefusedError):
            _connect(endpoint)


@needs_reuseport
def test_a_copy_of_a_socket_that_is_not_kept_gets_no_connections() -> None:
    with opened(ANY, 3) as endpoint, endpoint.of(1).dup() as copy:  # as a process has it that becomes another program just now
        for slots in [{0, 2}, {0}]:
            endpoint.keep(slots)
            endpoint.steer(slots)
            dealt = _dealt(endpoint, [0])
            if 2 in slots:
                dealt += _dealt(endpoint, [2], 0)
            assert (set(dealt), dealt.total()) == (slots, 64)
        with pytest.raises(OSError, match="Invalid argument"):
            copy.accept()


def test_a_descriptor_that_the_program_has_closed_hinders_no_end(tmp_path: Path) -> None:
    for address in (ANY, UnixAddress(str(tmp_path / "s"))):
        with opened(address, 2) as endpoint:
            os.close(endpoint.of(1).fileno())
            endpoint.keep({0})
    assert not (tmp_path / "s").exists()


def test_without_reuseport_all_slots_share_a_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoints, "HAS_REUSEPORT", False)
    with opened(ANY, 2) as endpoint:
        assert type(endpoint) is SharedEndpoint
        assert endpoint.of(0) is endpoint.of(1)
        endpoint.steer({1})
        endpoint.keep({1})
        assert _dealt(endpoint, [0]).total() == 64
        endpoint.keep(())
        with pytest.raises(ConnectionRefusedError):
            _connect(endpoint)


def _port_of(sock: socket.socket) -> InternetAddress:
    return InternetAddress(sock.family, sock.getsockname())


@pytest.mark.parametrize("shares", [False, True], ids=["alone", "reuseport"])
def test_a_port_that_somebody_has_is_refused(monkeypatch: pytest.MonkeyPatch, shares: bool) -> None:
    monkeypatch.setattr(endpoints, "HAS_REUSEPORT", HAS_REUSEPORT and shares)
    # Its owner would share it, as a second runner on the same port does.
    with socket.create_server(("127.0.0.1", 0), reuse_port=True) as other:
        address = _port_of(other)
        told = (
            f"percore cannot listen on {address}: {IN_USE} "
            r"\(another program or runner listens there: end it, or choose another address\)"
        )
        with pytest.raises(OSError, match=told) as caught, opened(address):
            """Never."""
        assert caught.value.errno == errno.EADDRINUSE


def test_the_port_of_an_ended_program_is_free_at_once() -> None:
    with opened(ANY) as endpoint:
        assert isinstance(endpoint, SplitEndpoint | SharedEndpoint)
        sock = endpoint.of(0)
        address = _port_of(sock)
        client = _connect(endpoint)
        sock.setblocking(True)
        sock.accept()[0].close()  # the server closes first: its end of the connection lingers
        client.close()
    with opened(address) as endpoint:
        assert endpoint.address == str(address)


def test_an_address_of_another_machine_is_refused() -> None:
    address = InternetAddress(socket.AF_INET, ("192.0.2.1", 0))  # for documentation alone
    with pytest.raises(
        OSError, match=r"percore cannot listen on 192\.0\.2\.1:0: .* \(no network of this machine has this address\)"
    ):
        endpoint_of(address).open(2)


@pytest.mark.skipif(not has_ipv6(), reason="no IPv6")
def test_ipv6_does_not_take_the_port_of_ipv4() -> None:
    with opened(InternetAddress(socket.AF_INET6, ("::1", 0))) as endpoint:
        assert endpoint.of(0).getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY)
        assert _dealt(endpoint, [0]).total() == 64


# Paths


def test_a_path_is_served_and_removed(tmp_path: Path) -> None:
    path = tmp_path / "s"
    umask = os.umask(0o077)
    try:
        with opened(UnixAddress(str(path)), 2) as endpoint:
            assert type(endpoint) is FileEndpoint
            assert endpoint.address == f"unix:{path}"
            assert endpoint.of(0) is endpoint.of(1)
            assert stat.S_IMODE(path.stat().st_mode) == 0o700
            assert _dealt(endpoint, [0]).total() == 64
        assert not path.exists()
    finally:
        os.umask(umask)


def test_the_file_of_a_dead_program_is_replaced(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(path)
        dead.listen()
    with opened(UnixAddress(path)) as endpoint:
        assert _dealt(endpoint, [0]).total() == 64


@pytest.mark.parametrize("backlog", [0, 10], ids=["full", "free"])
def test_a_path_on_which_somebody_listens_is_refused(tmp_path: Path, backlog: int) -> None:
    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as living, socket.socket(socket.AF_UNIX) as client:
        living.bind(path)
        living.listen(backlog)
        client.connect(path)
        with pytest.raises(OSError, match=IN_USE), opened(UnixAddress(path)):
            """Never."""
        assert os.path.exists(path)


@pytest.mark.skipif(sys.platform != "linux", reason="the system does not tell which paths are bound")
def test_a_path_on_which_somebody_is_about_to_listen_is_refused(tmp_path: Path) -> None:
    path = str(tmp_path / "a path")
    with socket.socket(socket.AF_UNIX) as starting:
        starting.bind(path)
        with pytest.raises(OSError, match=IN_USE), opened(UnixAddress(path)):
            """Never."""
        starting.listen()
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(path)
            accepted = starting.accept()[0]
    with closing(accepted), opened(UnixAddress(path)) as endpoint:  # a connection of a server that has ended is in nobody's way
        assert _dealt(endpoint, [0]).total() == 64


def test_a_file_that_comes_while_a_dead_one_is_looked_at_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two programs find the file of a dead one. The other one replaces it first, and its file may have the same number."""
    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(path)
    os.utime(path, (0, 0))
    with socket.socket(socket.AF_UNIX) as other:

        def late(_: str) -> bool:
            os.unlink(path)
            other.bind(path)
            other.listen()
            return False

        monkeypatch.setattr(binding, "_is_bound", late)
        monkeypatch.setattr(binding, "identity_of", lambda _: (0, 0))
        with pytest.raises(OSError, match=IN_USE), opened(UnixAddress(path)):
            """Never."""
        assert stat.S_ISSOCK(os.lstat(path).st_mode)


def test_a_path_that_cannot_be_had_says_why(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("precious")
    with pytest.raises(FileExistsError, match=rf"percore cannot listen on unix:{file}: a file is there that is no socket"):
        endpoint_of(UnixAddress(str(file))).open(1)
    assert file.read_text() == "precious"
    with pytest.raises(FileNotFoundError, match=r"No such file or directory \(make its folder first\)"):
        endpoint_of(UnixAddress(str(tmp_path / "no" / "s"))).open(1)


def test_a_file_that_another_program_has_put_there_stays(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with opened(UnixAddress(str(path))):
        path.unlink()
        path.write_text("another one")
    assert path.read_text() == "another one"


# Sockets of the user


@pytest.mark.parametrize("listens", [False, True], ids=["bound", "listening"])
def test_a_socket_of_the_user_stays_open(listens: bool) -> None:
    with socket.socket() as mine:
        mine.bind(("127.0.0.1", 0))
        if listens:
            mine.listen()
        with opened(mine, 2) as endpoint:
            assert endpoint.address == str(_port_of(mine))
            assert endpoint.of(0) is endpoint.of(1) is not mine
            assert _dealt(endpoint, [1]).total() == 64
        client = _connect(endpoint)  # it still listens
        client.close()


def test_a_socket_that_was_closed_meanwhile_is_refused() -> None:
    mine = socket.create_server(("127.0.0.1", 0))
    endpoint = endpoint_of(mine)
    mine.close()
    with pytest.raises(OSError, match="percore cannot listen on a socket of yours: Bad file descriptor"):
        endpoint.open(1)


def test_a_socket_that_cannot_listen_is_refused() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as connected,
        closing(server.accept()[0]),
        pytest.raises(OSError, match=r"percore cannot listen on 127\.0\.0\.1:\d+: Invalid argument"),
    ):
        endpoint_of(connected).open(1)


# Ends


def test_a_fork_keeps_no_socket_and_no_file(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with opened(ANY, 2) as split, opened(UnixAddress(str(path))) as file:
        numbers = [split.of(0).fileno(), split.of(1).fileno(), file.of(0).fileno()]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # 3.12 on: this process may have threads. The child uses none
            child = os.fork()
        if child == 0:
            left = [number for number in numbers if os.path.exists(f"/dev/fd/{number}")]
            split.close()
            file.close()
            endpoints._close_all()
            os._exit(len(left))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert path.exists()
        assert _dealt(file, [0]).total() == 64


def test_the_end_of_the_interpreter_closes_all(tmp_path: Path) -> None:
    """A program that ends without closing its runner leaves no file, and no warning."""
    path = tmp_path / "s"
    code = f"""
from percore._common.addresses import address_of
from percore._listening.endpoints import endpoint_of
for text in ("127.0.0.1:0", "unix:{path}"):
    endpoint_of(address_of(text)).open(2)
"""
    done = subprocess.run([sys.executable, "-X", "dev", "-c", code], capture_output=True, text=True, check=True)
    assert (done.stderr, path.exists()) == ("", False)
