"""An engine whose payloads lie elsewhere: the messages of a process engine, passed on through a socket pair in this process.

    supervisor ── RelayEngine ── RelayStore, a RelayWorker and a RelayChannel for each worker     the near half: payloads are bytes
                      │
                 socket pair                                                                      frames, in order
                      │
                 Far ─────────── a Station for each worker ── process engine ── worker            the far half: parcels of its arena

The contract suite passes with it, although it is neither local memory nor a fake. So nothing above the seam
(`percore._protocol.interfaces`) counts on either. Processes on another machine would need the same two halves: `near` is the engine
that the supervisor sees, `store` has its payloads, `far` runs the workers, and `wire` carries frames. Only `RelayEngine` knows that
both halves have one loop. The codec and the layout of payloads are those of percore's processes, since these read them.

What differs from local memory: a signal takes effect a moment after `kill`, nobody knows how far a call has come before its worker
has ended, and results are copied.

Invariants:

- Frames arrive in order, each exactly once. So do the messages of each worker, in both directions.
- EXIT is the last frame of a worker: the far half reads its last messages first. It carries how far every call had come.
- The near half numbers payloads, the far half has a parcel for each number, and neither ever uses the other's number as its own.
- Each half discards a payload once: the far half when the near half does. A payload is sent once, however many messages name it.
- The near half has at most `room` payloads in the far half's store. So that store has room for each one that arrives, and a call
  that is cancelled while its payload waits for room has not been sent.
- A frame has at most MOST bytes. Every message fits into one, and into a frame of the worker's ring; a larger payload is sent in
  parts.

`RelayEngine.aclose` checks that both halves have the same payloads then, and that nothing else lies in the far half's store.
"""
