"""List the Python interpreters of this machine that percore supports: a line `version<TAB>path` each, the oldest first.

It looks on PATH and among pyenv's versions, and lists only interpreters that start: a pyenv shim is on PATH for inactive
versions too, and then only prints an error.
"""

import os
import shutil
import subprocess
from pathlib import Path

SUPPORTED = tuple(f"3.{minor}" for minor in range(11, 16))


def pyenv_root() -> Path | None:
    """Where pyenv keeps its versions, None without pyenv."""
    pyenv = shutil.which("pyenv")
    if pyenv is None:
        return None
    answer = subprocess.run([pyenv, "root"], capture_output=True, text=True, check=False)
    return Path(answer.stdout.strip()) if answer.returncode == 0 else None


def candidates(version: str) -> list[str]:
    """Paths that may be an interpreter of this version, the likeliest first."""
    found = [path for folder in os.get_exec_path() if (path := shutil.which(f"python{version}", path=folder))]
    root = pyenv_root()
    if root is not None:
        # Plain releases only: `3.13.0`, not `3.13.0t` (free-threaded) or the name of somebody's virtual environment.
        folders = [path for path in root.glob(f"versions/{version}.*") if path.name.replace(".", "").isdigit()]
        folders.sort(key=lambda path: int(path.name.rpartition(".")[2]), reverse=True)
        found += [str(folder / "bin" / f"python{version}") for folder in folders]
    return found


def works(python: str, version: str) -> bool:
    """Whether it starts, is that version, and can make an environment (some systems package venv apart)."""
    if not os.access(python, os.X_OK):
        return False
    code = "import ensurepip, sys, venv; print('%d.%d' % sys.version_info[:2])"
    answer = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    return answer.returncode == 0 and answer.stdout.strip() == version


def main() -> None:
    for version in SUPPORTED:
        python = next((python for python in candidates(version) if works(python, version)), None)
        if python is not None:
            print(version, python, sep="\t")


if __name__ == "__main__":
    main()
