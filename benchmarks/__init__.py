"""Percore against what people use today: `python -m benchmarks [row ...]`; `--help` tells the rest.

A row is one module in `benchmarks/rows`: a docstring that says what is measured and why, contestants, and the targets
that percore set itself. To add a row, add a module there; nothing else lists them.

Each row runs in a process of its own. A peer takes part at the best of several settings: each is tried, and the one that
was fastest plays. Every contestant is started and warmed up first; then each round lets every one of them work once, in
an order that rotates. What is compared is the ratio of two contestants within one round, so that whatever else the
machine does meanwhile touches both sides; the figure is the median of these ratios, beside it their quartiles. Absolute
times tell something about this machine only. A peer that is not installed, or fails, is left out, and the table says so.

    _harness    what a row is, and how it is played            _figures    quantiles, ratios, targets
    _verdicts   targets against what was measured              _plan       a run's time, shared between its rows
    _runs       a row in a process of its own, under a limit   _one_row    that process
    _results    a result as JSON, and back                     _regression a run against the one on record
    _table _docs _plots _machine                               what is printed, written and drawn
    peers       the other libraries, each in its words         calls       the functions that run in workers
"""
