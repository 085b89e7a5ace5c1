"""Hours of work at a bounded rate, and whether anything grows meanwhile: python -m tests.soak, or `make soak`.

__main__   the parent: starts the program, reads /proc at its quiet points, keeps the series, and prints the verdict
program    the program under test: runners under the load of tests/chaos, an executor, and the changes and deaths of workers
samples    what is read of each process, and which series that makes
judge      whether a series grows: pure
"""
