"""Certificates for tests, made by openssl."""

import shutil
import subprocess
from pathlib import Path

import pytest

from percore._transport.certificates import Certificates

needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificates")


def authority(folder: Path, name: str = "authority") -> Path:
    """Make an authority. Return the file of its certificate."""
    _make(folder, name, "-addext", "basicConstraints=critical,CA:TRUE")
    return folder / f"{name}.crt"


def issued(folder: Path, by: Path, name: str = "node", address: str = "127.0.0.1") -> Certificates:
    """Have an authority issue a certificate for this address."""
    own = ("-addext", f"subjectAltName=IP:{address},DNS:localhost", "-addext", "basicConstraints=CA:FALSE")
    _make(folder, name, *own, "-CA", str(by), "-CAkey", str(by.with_suffix(".key")))
    return Certificates(str(folder / f"{name}.crt"), str(folder / f"{name}.key"), str(by))


def _make(folder: Path, name: str, *more: str) -> None:
    files = ("-keyout", str(folder / f"{name}.key"), "-out", str(folder / f"{name}.crt"))
    kind = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2", "-subj", f"/CN={name}")
    subprocess.run(["openssl", "req", "-x509", *kind, *files, *more], check=True, capture_output=True)
