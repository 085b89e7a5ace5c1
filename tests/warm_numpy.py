"""What a fork server that has numpy as well imports before it forks: see tests/warm.py."""

import os

os.environ["OPENBLAS_NUM_THREADS"] = "1"  # a process with threads is no fork server; each worker gets the program's environment

import numpy as np

from percore._worker_process import main

__all__ = ["main", "np"]
