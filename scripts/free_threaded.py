"""Build a free-threaded CPython 3.14: `python scripts/free_threaded.py FOLDER [--pgo]`, as `make python3.14t` does.

The source is Debian's, because PyPI has no interpreters. The name of a tarball and its SHA-256 say what is built, and the
configuration of apt says where it is fetched. Debian removes old versions, so several are tried, the newest first. The build needs
apt, a C compiler, make and the headers of the libraries that CPython uses. Two CPUs take three minutes; with `--pgo`, for figures
to publish, twenty.
"""

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

# Tarball's version -> SHA-256. A new one is entered by hand, after its figures.
SOURCES = {
    "3.14.7": "3b48dac8fb59f62eaa67ac83c1eb12bda1b7a08406dd286e252c11a66be27f81",
    "3.14.6": "143b1dddefaec3bd2e21e3b839b34a2b7fb9842272883c576420d605e9f30c63",
    "3.14.5": "7e32597b99e5d9a39abed35de4693fa169df3e5850d4c334337ffd6a19a36db6",
    "3.14.4": "d923c51303e38e249136fc1bdf3568d56ecb03214efdef48516176d3d7faaef8",
}
PACKAGE = "python3.14"
APT_HELPER = "/usr/lib/apt/apt-helper"
NEEDS = "build-essential libssl-dev libffi-dev zlib1g-dev libbz2-dev liblzma-dev libsqlite3-dev libreadline-dev uuid-dev"
# The tests of executors, for `make stdlib-one`, and what they import.
TESTS = ("__init__.py", "support", "test_concurrent_futures", "test_importlib")
# It must be free-threaded, and must have the modules that percore and its tests import.
CHECK = (
    "import sys, ssl, ctypes, sqlite3, lzma, zlib, ensurepip, venv, test.test_concurrent_futures.test_process_pool\n"
    "sys.exit(sys._is_gil_enabled())"
)


def debian_pools() -> list[str]:
    """Where this machine's apt gets Debian's packages from."""
    asked = ["apt-get", "indextargets", "--format", "$(REPO_URI)", "Created-By: Packages", "Component: main"]
    answer = subprocess.run(asked, capture_output=True, text=True, check=True)
    return sorted({uri.rstrip("/") + "/" for uri in answer.stdout.split()}, key=lambda uri: ("security" in uri, uri))


def fetched(folder: Path) -> Path:
    """The newest tarball that can be had. It ends the program if there is none."""
    refused = []
    for version, digest in SOURCES.items():
        name = f"{PACKAGE}_{version}.orig.tar.xz"
        for pool in debian_pools():
            uri = f"{pool}pool/main/{PACKAGE[0]}/{PACKAGE}/{name}"
            command = [APT_HELPER, "download-file", uri, str(folder / name), f"SHA256:{digest}"]
            answer = subprocess.run(command, capture_output=True, text=True, check=False)
            if answer.returncode == 0:
                verified(folder / name, digest)
                return folder / name
            refused.append(f"{name}: {(answer.stderr.strip().splitlines() or ['no reason given'])[0]}")
    sys.exit("\n".join(["found no source of a free-threaded CPython:", *refused]))


def verified(tarball: Path, digest: str) -> None:
    found = hashlib.sha256(tarball.read_bytes()).hexdigest()
    if found != digest:
        sys.exit(f"{tarball.name} has the SHA-256 {found}, and not {digest}")


def run(*command: str | Path, cwd: Path, log: Path) -> None:
    """Run a step of the build. If it fails, show the end of the log, and end the program."""
    with log.open("a") as output:
        done = subprocess.run(list(map(str, command)), cwd=cwd, stdout=output, stderr=output, check=False)
    if done.returncode:
        print(*log.read_text(errors="replace").splitlines()[-30:], sep="\n")
        sys.exit(f"failed: {' '.join(map(str, command))}; {log} has its output; it needs {NEEDS}")


def install(part: Path, target: Path) -> None:
    target.parent.mkdir(exist_ok=True)
    if part.is_dir():
        shutil.copytree(part, target)
    else:
        shutil.copy2(part, target)


def build(tarball: Path, target: Path, *, pgo: bool) -> None:
    """Build it beside the target, and put it there at the end: a target that exists is whole."""
    log = target.with_name(f"{target.name}.log")
    log.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="cpython-") as name:
        folder = Path(name)
        with tarfile.open(tarball) as archive:
            archive.extractall(folder, filter="data")
        (source,) = folder.iterdir()
        options = ["--disable-gil", "--disable-test-modules", *(["--enable-optimizations", "--with-lto"] if pgo else [])]
        run("./configure", "--quiet", f"--prefix={target}", *options, cwd=source, log=log)
        run("make", f"-j{os.cpu_count()}", cwd=source, log=log)
        run("make", "install", f"DESTDIR={folder / 'installed'}", cwd=source, log=log)
        made = Path(f"{folder / 'installed'}{target}")
        (library,) = made.glob("lib/python3.*t")
        for name in TESTS:
            part = source / "Lib" / "test" / name
            install(part, library / "test" / name)
        run(made / "bin" / "python3", "-I", "-c", CHECK, cwd=folder, log=log)
        shutil.rmtree(target, ignore_errors=True)
        made.rename(target)


def main() -> None:
    parser = argparse.ArgumentParser(description="Build a free-threaded CPython.")
    parser.add_argument("folder", type=Path, help="where it is installed; what is there is replaced")
    parser.add_argument("--pgo", action="store_true", help="with profile-guided optimisation, for figures to publish")
    asked = parser.parse_args()
    target = asked.folder.resolve()
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="source-") as folder:
        build(fetched(Path(folder)), target, pgo=asked.pgo)
    print(f"{target / 'bin' / 'python3'} is free-threaded")


if __name__ == "__main__":
    main()
