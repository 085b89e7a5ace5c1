"""Broadcasts: each of their calls is for one worker alone, and runs there beside all others.

A worker holds few of them at once. One that does not answer (it is stopped, or its loop is blocked) keeps those that it has, also
after their callers have given up: so what else is meant for it waits here, in order, until it has answered, or has gone.
"""

from typing import TYPE_CHECKING

from percore._calls import Call
from percore._core.dispatch import BESIDE
from percore._member import Member
from percore._messages import Kind

if TYPE_CHECKING:
    from percore._supervisor import Supervisor


class Beside:
    """The calls of broadcasts that wait for a place in their worker."""

    def __init__(self, supervisor: "Supervisor") -> None:
        self._supervisor = supervisor
        self.waiting: dict[Member, dict[Call, None]] = {}
        """By worker, in order. No worker is there without a call."""
        self._homes: dict[Call, Member] = {}

    def __len__(self) -> int:
        """How many calls wait here."""
        return len(self._homes)

    def submit(self, call: Call, member: Member) -> None:
        """Send a call to its worker, or let it wait until there is a place for it."""
        if member.load[Kind.BESIDE] < BESIDE and member not in self.waiting:
            self._send(call, member)
        else:
            self.waiting.setdefault(member, {})[call] = None
            self._homes[call] = member

    def remove(self, call: Call) -> None:
        """The call waits no more. It may be one that did not."""
        member = self._homes.pop(call, None)
        if member is not None:
            calls = self.waiting[member]
            del calls[call]
            if not calls:
                del self.waiting[member]

    def advance(self) -> None:
        """Workers may have answered, or take no more calls: send what has a place now, and end what will have none."""
        for member in list(self.waiting):
            is_seated = member in self._supervisor.dispatch.seats
            while member in self.waiting and (not is_seated or member.load[Kind.BESIDE] < BESIDE):
                call = next(iter(self.waiting[member]))
                self.remove(call)
                if is_seated:
                    self._send(call, member)
                else:
                    self._supervisor.unanswered(member, call)

    def _send(self, call: Call, member: Member) -> None:
        try:
            member.send(call)
        except BaseException as error:
            self._supervisor.failed_with(call, error)

    def withdraw(self) -> list[Call]:
        """Take everything that waits out."""
        calls = list(self._homes)
        self._homes.clear()
        self.waiting.clear()
        return calls
