"""Both sides of a new connection prove that they know a token of 32 bytes, before either reads anything else of the other. No I/O.

    program → host      MAGIC, a challenge
    host → program      MAGIC, a challenge, the response to the program's
    program → host      the response to the host's

A response is the HMAC-SHA256 of both challenges and the side, with the token as its key: neither side's own response serves as the
other's, and none is of use in another connection. This keeps out anyone who does not know the token. It is no encryption.
"""

import hmac
import os
from typing import Final

from percore._transport.wire import VERSION

TOKEN_SIZE: Final = 32
_CHALLENGE: Final = 32
_RESPONSE: Final = 32
_NAME: Final = b"percore"
MAGIC: Final = _NAME + bytes([VERSION])
"""What each side sends first: the name of the protocol and the version of its format."""

FIRST_SIZE: Final = len(MAGIC) + _CHALLENGE
"""Bytes of the program's first message."""
ANSWER_SIZE: Final = FIRST_SIZE + _RESPONSE
"""Bytes of the host's message."""
LAST_SIZE: Final = _RESPONSE
"""Bytes of the program's second message."""


class NotProven(Exception):
    """The other side does not know the token, or is no percore of this version."""


def _response(token: bytes, side: bytes, own: bytes, other: bytes) -> bytes:
    return hmac.digest(token, side + own + other, "sha256")


def _challenge_in(data: bytes, size: int) -> bytes:
    if len(data) != size or not data.startswith(_NAME):
        raise NotProven("it is no percore")
    if not data.startswith(MAGIC):
        raise NotProven(f"its percore speaks version {data[len(_NAME)]} of the protocol, and this one version {VERSION}")
    return data[len(MAGIC) : FIRST_SIZE]


class ProgramProof:
    """The program's side of one connection."""

    def __init__(self, token: bytes) -> None:
        self._token = token
        self._own = os.urandom(_CHALLENGE)
        self.first = MAGIC + self._own

    def last(self, answer: bytes) -> bytes:
        """Check the host's message, and return the second one to it.

        Raises:
            NotProven: the host does not know the token.
        """
        other = _challenge_in(answer, ANSWER_SIZE)
        if not hmac.compare_digest(answer[FIRST_SIZE:], _response(self._token, b"host", other, self._own)):
            raise NotProven("it does not know the token")
        return _response(self._token, b"program", self._own, other)


class HostProof:
    """The host's side of one connection."""

    def __init__(self, token: bytes) -> None:
        self._token = token
        self._own = os.urandom(_CHALLENGE)
        self._other = b""

    def answer(self, first: bytes) -> bytes:
        """Return the message that answers the program's first one.

        Raises:
            NotProven: the peer is no percore of this version.
        """
        self._other = _challenge_in(first, FIRST_SIZE)
        return MAGIC + self._own + _response(self._token, b"host", self._own, self._other)

    def check(self, last: bytes) -> None:
        """Check the program's second message.

        Raises:
            NotProven: the program does not know the token.
        """
        if not hmac.compare_digest(last, _response(self._token, b"program", self._other, self._own)):
            raise NotProven("it does not know the token")
