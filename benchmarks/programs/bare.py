"""The other process of the bare loops: `bare.py PING PONG [THERE BACK [views]]`, which ends with its standard input.

PING and PONG are eventfds; THERE and BACK are memfds, if bytes are echoed: the eventfds then carry their number. With "views"
the bytes are copied once, from memory to memory; else they are taken out first. A script, so that it imports only a loop.
"""

from __future__ import annotations

import os
import sys

import uvloop


def main(ping: int, pong: int, *memories: int, views: bool) -> None:
    def answer() -> None:
        os.eventfd_write(pong, os.eventfd_read(ping))

    def echo() -> None:
        size = os.eventfd_read(ping)
        target[:size] = source[:size] if views else bytes(source[:size])
        os.eventfd_write(pong, size)

    if memories:
        import mmap

        source, target = (memoryview(mmap.mmap(fd, 0)) for fd in memories)
    loop = uvloop.new_event_loop()
    loop.add_reader(ping, echo if memories else answer)
    loop.add_reader(sys.stdin.fileno(), loop.stop)
    loop.run_forever()
    loop.close()


if __name__ == "__main__":
    *fds, last = sys.argv[1:]
    main(*map(int, fds if last == "views" else [*fds, last]), views=last == "views")
