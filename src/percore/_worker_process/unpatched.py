"""gevent's monkey patching is left out in workers.

A gevent program calls `monkey.patch_all()` at the top of its script, and a worker that needs a function of the script imports it.
The threads that a worker starts would then be greenlets of its event loop's thread, which never runs them.
"""

import logging
import sys
from typing import Any, Final

from percore._worker_process.multiprocessing_state import AfterImport

logger: Final = logging.getLogger("percore")


def leave_unpatched() -> None:
    """From now on, the patching functions of `gevent.monkey` do nothing in this process."""
    if "gevent.monkey" not in sys.modules:
        sys.meta_path.insert(0, AfterImport({"gevent.monkey": _disarm}))


def _disarm(monkey: Any) -> None:
    def leave_out(*_args: Any, **_kwargs: Any) -> None:
        logger.debug("percore: gevent.monkey patches nothing in a worker, which runs calls in threads")

    for name in [name for name in vars(monkey) if name.startswith("patch_")]:
        setattr(monkey, name, leave_out)
