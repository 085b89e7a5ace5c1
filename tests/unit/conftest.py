"""Hypothesis: no deadlines, since these machines are noisy; the same examples every time where a failure could not be looked at."""

import os

from hypothesis import settings

settings.register_profile("here", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, database=None)
settings.load_profile("ci" if os.environ.get("CI") else "here")
