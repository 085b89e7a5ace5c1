"""Build percore and install it as a user would: `python scripts/package.py PYTHON...`.

It builds the sdist and, from the sdist, the wheel into dist/, checks both with twine, and then, for each interpreter, installs the
wheel with its dependencies into a new environment in an empty folder and runs a program there.
"""

import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
DIST = ROOT / "dist"
USERS_NEED = {"src", "CHANGELOG.md", "LICENSE", "PKG-INFO", "README.md", "SECURITY.md", "pyproject.toml", ".gitignore"}

PROGRAM = """
import asyncio, sys, percore

def square(number: int) -> int:
    return number * number

async def double(number: int) -> int:
    return number * 2

async def main() -> None:
    async with percore.Runner(workers=2) as runner:
        assert await runner.map(square, range(4)) == [0, 1, 4, 9]
        assert await runner.run(double, 4) == 8
    print("percore", percore.__version__, "runs under Python", sys.version.split()[0])

if __name__ == "__main__":
    asyncio.run(main())
"""


def run(*command: str | Path, cwd: Path = ROOT) -> str:
    """Run a command, and return its output. If it fails, print the output and end this program."""
    done = subprocess.run([str(part) for part in command], cwd=cwd, text=True, stdout=subprocess.PIPE, check=False)
    if done.returncode:
        print(done.stdout)
        sys.exit(f"failed: {' '.join(map(str, command))}")
    return done.stdout


def build() -> Path:
    """Build both, check them, and return the wheel."""
    shutil.rmtree(DIST, ignore_errors=True)
    run(sys.executable, "-m", "build", "--outdir", DIST, ROOT)
    (sdist,), (wheel,) = DIST.glob("*.tar.gz"), DIST.glob("*.whl")
    run(sys.executable, "-m", "twine", "check", "--strict", sdist, wheel)
    with tarfile.open(sdist) as archive:
        found = {name.split("/")[1] for name in archive.getnames()}
    if more := found - USERS_NEED:
        sys.exit(f"the sdist has more than a user needs: {', '.join(sorted(more))}")
    print(f"built {sdist.name} ({sdist.stat().st_size // 1024} KiB) and {wheel.name} ({wheel.stat().st_size // 1024} KiB)")
    return wheel


def try_out(wheel: Path, python: str) -> None:
    """Install the wheel for this interpreter, and run a program."""
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        run(python, "-m", "venv", home / "venv")
        mine = home / "venv" / "bin" / "python"
        run(mine, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", wheel)
        (home / "program.py").write_text(PROGRAM)
        print(run(mine, "program.py", cwd=home), end="")


def main() -> None:
    wheel = build()
    for python in sys.argv[1:]:
        try_out(wheel, python)


if __name__ == "__main__":
    main()
