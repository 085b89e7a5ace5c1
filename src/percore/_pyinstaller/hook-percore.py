"""The PyInstaller hook for percore. percore imports most of its modules by name, so PyInstaller does not find them."""

from PyInstaller.utils.hooks import collect_submodules

hiddenimports = collect_submodules("percore", filter=lambda name: not name.startswith("percore._pyinstaller"))
