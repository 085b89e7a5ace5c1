"""percore against the libraries that people use today: `python -m benchmarks [row ...]`; `--help` lists the options.

`rows` has the rows by subject: a row is a function with a docstring, contestants, and the targets that percore set itself.

Each row runs in a process of its own. A peer takes part in the best of several settings: each is tried, and the fastest plays.
Every contestant is started and warmed up first; then all work once in each round, in an order that rotates. The figure is the
ratio of two contestants within one round, so that any disturbance of the machine touches both sides: the median of these
ratios, with the quartiles. Absolute times apply to this machine only. A peer that is not installed, or fails, is left out.

    rows         the measurements                           contestants    the parts that they are made of
    peers, bare  the other libraries; bare loops            calls          the functions that run in workers
    harness      what a row is, and how it is played        figures        quantiles, targets, units
    run          a row in a process of its own              results        judged, as JSON, against the record
    machine      its description, CPUs and memory           programs       scripts that rows start
    table, pages, plots                                     the terminal, docs/performance*.md, SVG
"""
