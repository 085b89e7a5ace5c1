"""Percore against what people use today: `python -m benchmarks [row ...] [--list] [--quick] [--json FILE] [--plots FOLDER]`.

A row is one module in `benchmarks/rows`: a docstring that says what is measured and why, contestants, and the targets
that percore set itself. To add a row, add a module there; nothing else lists them.

Every contestant of a row is started and warmed up first; then each round lets every one of them work once, in an order
that rotates. What is compared is the ratio of two contestants within one round, so that whatever else the machine does
meanwhile touches both sides; the figure is the median of these ratios, beside it their quartiles. Absolute times tell
something about this machine only. The peers (distex) come with the project's development requirements; one that is not
installed is left out, and the table says so.
"""
