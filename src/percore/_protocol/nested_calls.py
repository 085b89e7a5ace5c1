"""A nested call, that is, one that a call makes from inside its worker, as the worker asks the supervisor for it."""

from typing import Any, Final, NamedTuple, TypeAlias

from percore._protocol.messages import BrokenFrame, Kind

PlainKey: TypeAlias = str | bytes | int | float | tuple[Any, ...] | None
"""A key that travels as it is: the supervisor runs no code of the user to read it."""

MOST_TEXT: Final = 4096
CALLER_ENDED: Final = "the call that has asked percore.current_runner() for this runner has ended, and its calls end with it"
_MOST_PARTS: Final = 32
_PLAIN: Final = frozenset({str, bytes, int, float, bool, type(None)})
_KINDS: Final[tuple[tuple[type, ...], ...]] = (
    (int,),
    (int,),
    (str,),
    (str,),
    (str, bytes, int, float, bool, tuple, type(None)),
    (bool,),
    (int,),
    (tuple, type(None)),
    (dict, bytes, type(None)),
    (tuple,),
    (bytes, type(None)),
)
"""The types of the fields of a request."""
_known: Final[set[tuple[type, ...]]] = set()
"""The types of requests that were found right. There are less than a hundred."""


class RequestOptions(NamedTuple):
    """The options of a nested call that differ from the defaults.

    Attributes:
        retries: how many more attempts it gets; None: those of the runner.
        retry: a pickle of retry_on and backoff; None: their defaults.
        timeout, queue_timeout, hard_timeout: seconds, or None.
    """

    retries: int | None
    retry: bytes | None
    timeout: float | None
    queue_timeout: float | None
    hard_timeout: float | None


class NestedRequest(NamedTuple):
    """The body of an ASK.

    Attributes:
        caller: the id of the call that makes this one, without the number of an item.
        kind: `Kind.TASK` or `Kind.THREAD`.
        name: the qualified name of the function.
        module: the module of the function.
        key: the key that the user gave; None: none.
        inherits: whether the call belongs to the key of its caller, if that has one.
        prefetch: of a stream: how many items may be produced and not taken; 0: it is a call.
        options: a `RequestOptions` as a tuple; None: the defaults.
        context: values of context variables, as in `Terms`.
        shares: numbers of the shared objects in its arguments.
        pickle: the pickle of function, arguments and keyword arguments; None: it follows as an ASKED.
    """

    caller: int
    kind: int
    name: str
    module: str
    key: PlainKey
    inherits: bool
    prefetch: int
    options: tuple[Any, ...] | None
    context: dict[int | str, Any] | bytes | None
    shares: tuple[int, ...]
    pickle: bytes | None

    @classmethod
    def checked(cls, body: object) -> "NestedRequest":
        """Return the request in the body of an ASK.

        Raises:
            BrokenFrame: there is none.
        """
        if not isinstance(body, tuple) or (tuple(map(type, body)) not in _known and not _is_known(body)):
            raise BrokenFrame("a nested call whose fields are of other types")
        request = cls(*body)
        are_numbers = all(type(number) is int for number in request.shares)
        is_known = request.kind in (Kind.TASK, Kind.THREAD) and request.prefetch >= 0 and is_plain_key(request.key)
        if not is_known or not are_numbers or not (request.options is None or len(request.options) == len(RequestOptions._fields)):
            raise BrokenFrame(f"a nested call of {request.name!r} with fields that no worker sends")
        return request


def _is_known(body: tuple[Any, ...]) -> bool:
    types = tuple(map(type, body))
    is_known = len(types) == len(_KINDS) and all(map(_is_of, types, _KINDS))
    if is_known:
        _known.add(types)
    return is_known


def _is_of(kind: type, kinds: tuple[type, ...]) -> bool:
    """Whether a field may have this type. A pickle may be of a class of the engine's own."""
    return kind in kinds or (bytes in kinds and str not in kinds and issubclass(kind, bytes))


def is_plain_key(key: object) -> bool:
    """Whether a key can travel as it is: it is a scalar, or a tuple of such keys, and not too large."""
    kind = type(key)
    if isinstance(key, tuple):
        return kind is tuple and len(key) <= _MOST_PARTS and all(map(is_plain_key, key))
    return kind in _PLAIN and (not isinstance(key, str | bytes) or len(key) <= MOST_TEXT)
