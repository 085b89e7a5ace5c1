"""How the addresses of `listen` are written, and what a runner says to other ones."""

import socket

import pytest

from percore._common.addresses import InternetAddress, UnixAddress, address_of, listen_of, name_of
from tests.contract.listen_jobs import has_ipv6

HERE = InternetAddress(socket.AF_INET, ("127.0.0.1", 8080))


def test_an_address_is_written_as_it_is_read(subtests: pytest.Subtests) -> None:
    for text in ["127.0.0.1:8080", "0.0.0.0:0", "[::1]:8080", "[::]:65535", "unix:/run/app.sock", "unix:/a b:80"]:
        with subtests.test(text=text):
            assert str(address_of(text)) == text
    assert address_of("127.0.0.1:8080") == HERE
    assert address_of("unix:/run/app.sock") == UnixAddress("/run/app.sock")
    assert str(address_of("[::1]:8080")) == str(address_of("[0:0::1]:08080"))
    assert str(HERE.with_port(1)) == "127.0.0.1:1"
    assert str(address_of("[::1]:0")._replace().with_port(7)) == "[::1]:7"  # type: ignore[union-attr]


def test_what_is_no_address_says_what_to_write(subtests: pytest.Subtests) -> None:
    for text, told in [
        ("127.0.0.1", "has no port: write "),
        ("", "has no port: write "),
        ("127.0.0.1:http", "has no port: write "),
        ("127.0.0.1:-1", "has no port: write "),
        ("127.0.0.1:65536", "has no port: write "),
        (":8080", 'names no address: write "127.0.0.1:8080" for this machine alone, or "0.0.0.0:8080" for all who can reach it'),
        ("*:80", 'names no address: write "127.0.0.1:80" for this machine alone'),
        ("localhost:8080", 'has no IP address, and percore looks up no names: write "127.0.0.1:8080" or "[::1]:8080"'),
        ("::1:8080", "has no IP address, and percore looks up no names"),
        ("[127.0.0.1]:8080", "has no IP address"),
        ("x" * 300 + ":80", "has no IP address"),
        ("unix:", "must have an absolute path of at most 107 bytes"),
        ("unix:app.sock", "must have an absolute path of at most 107 bytes"),
        ("unix:@app", "must have an absolute path of at most 107 bytes"),
        ("unix:/\0", "must have an absolute path of at most 107 bytes"),
        ("unix:/" + "é" * 60, "must have an absolute path of at most 107 bytes"),
    ]:
        with subtests.test(text=text), pytest.raises(ValueError) as caught:
            address_of(text)
        assert f"listen: {text!r} {told}" in str(caught.value)


def test_a_list_of_addresses_and_sockets(subtests: pytest.Subtests) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mine, socket.socket() as unbound, socket.socket(type=socket.SOCK_DGRAM) as udp:
        assert listen_of(()) == listen_of([]) == ()
        assert listen_of(iter(["127.0.0.1:8080", mine])) == (HERE, mine)
        assert listen_of(["127.0.0.1:0"] * 2)[0].port == 0  # type: ignore[union-attr]  # two ports
        udp.bind(("127.0.0.1", 0))
        with socket.create_server(("127.0.0.1", 0)) as closed:
            """It is closed now."""
        cases: list[tuple[object, type[Exception], str]] = [
            ("127.0.0.1:8080", TypeError, r"listen must be a list, such as listen=\[\"127.0.0.1:8080\"\], not '127.0.0.1:8080'"),
            (b"127.0.0.1:8080", TypeError, "listen must be a list"),
            (8080, TypeError, "listen must be a list"),
            (None, TypeError, "listen must be a list"),
            (mine, TypeError, "listen must be a list"),
            ([8080], TypeError, 'listen takes addresses, such as "127.0.0.1:8080", and sockets, not 8080'),
            ([("127.0.0.1", 8080)], TypeError, "listen takes addresses"),
            ([b"127.0.0.1:8080"], TypeError, "listen takes addresses"),
            (["127.0.0.1:8080", "127.0.0.1:08080"], ValueError, "listen has 127.0.0.1:8080 twice"),
            ([mine, mine], ValueError, r"listen has 127\.0\.0\.1:\d+ twice"),
            ([f"127.0.0.1:{port}" for port in range(1, 66)], ValueError, "listen may have 64 addresses, not 65"),
            ([unbound], ValueError, r"listen takes bound sockets: call bind\(\) of <socket"),
            ([udp], ValueError, "listen takes stream sockets, not <socket"),
            ([closed], ValueError, "listen has a socket that is closed"),
        ]
        for value, error, told in cases:
            with subtests.test(value=value), pytest.raises(error, match=told):
                listen_of(value)


def test_the_name_of_a_socket(tmp_path: object) -> None:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        assert name_of(sock) == f"127.0.0.1:{sock.getsockname()[1]}"
    if has_ipv6():
        with socket.create_server(("::1", 0), family=socket.AF_INET6) as sock:
            assert name_of(sock) == f"[::1]:{sock.getsockname()[1]}"
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(f"{tmp_path}/s")
        assert name_of(sock) == f"unix:{tmp_path}/s"
