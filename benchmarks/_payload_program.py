"""The other process of the bare echo: `_payload_program.py THERE BACK PING PONG VIEWS`; it ends with its standard input.

Two memfds and two eventfds, which carry the number of bytes. With VIEWS (1, else 0) what lies in the memory is copied once,
into the memory for the way back, else taken out first. A script of its own, so that it imports nothing but a loop.
"""

from __future__ import annotations

import mmap
import os
import sys

import uvloop


def main(there: int, back: int, ping: int, pong: int, views: int) -> None:
    source, target = (memoryview(mmap.mmap(fd, 0)) for fd in (there, back))

    def answer() -> None:
        size = os.eventfd_read(ping)
        data = source[:size] if views else bytes(source[:size])
        target[:size] = data
        os.eventfd_write(pong, size)

    loop = uvloop.new_event_loop()
    loop.add_reader(ping, answer)
    loop.add_reader(sys.stdin.fileno(), loop.stop)
    loop.run_forever()
    loop.close()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
