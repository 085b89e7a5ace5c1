"""The hooks for PyInstaller. It finds them through the entry point `pyinstaller40`, which names `get_hook_dirs`."""

import os


def get_hook_dirs() -> list[str]:
    """Return the folder of `hook-percore.py`."""
    return [os.path.dirname(__file__)]
