"""Runs pytest, and what failed once more by itself: python scripts/once_more.py PYTEST_ARGUMENT ...

For CI, which asks whether a change broke something: a test that fails beside five thousand others and passes alone a
moment later did not find that. It is a defect all the same, of percore or of the test, so both outputs are printed and a
last line names it. More than three failures are no accident and are not run again. The exit status is that of the last
run.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

AT_MOST = 3
FAILED = 1  # pytest's exit status


def pytest(*arguments: str) -> int:
    return subprocess.run([sys.executable, "-m", "pytest", *arguments], check=False).returncode


def main(arguments: list[str]) -> int:
    with tempfile.TemporaryDirectory(prefix="percore-once-more-") as cache:
        status = pytest("-o", f"cache_dir={cache}", *arguments)
        record = Path(cache, "v", "cache", "lastfailed")
        failed = list(json.loads(record.read_text())) if record.exists() else []
    if status != FAILED or not 0 < len(failed) <= AT_MOST:
        return status
    print(f"== {len(failed)} failed: once more, alone", flush=True)
    options = [one for one in arguments if one.startswith("--rows=")]
    status = pytest("-p", "no:cacheprovider", *options, *failed)
    if status == 0:
        print(f"== flaky: failed once and passed alone, to be mended: {' '.join(failed)}", flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
