"""The other process of the bare ping-pong: `_pong_program.py PING PONG`, two eventfds; it ends with its standard input.

A script of its own and not part of a module, so that it imports nothing but a loop.
"""

from __future__ import annotations

import os
import sys

import uvloop


def main(ping: int, pong: int) -> None:
    loop = uvloop.new_event_loop()
    loop.add_reader(ping, lambda: os.eventfd_write(pong, os.eventfd_read(ping)))
    loop.add_reader(sys.stdin.fileno(), loop.stop)
    loop.run_forever()
    loop.close()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
