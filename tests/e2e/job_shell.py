"""The least of a shell: one job in the foreground of the terminal on standard input, continued by SIGUSR1.

python -m tests.e2e.job_shell ARGUMENTS OF tests.e2e.fault_programs

Ctrl-Z stops nothing in a session that nobody like this controls.
"""

import os
import signal
import sys


def main(arguments: list[str]) -> None:
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # or taking the terminal back would stop this process
    job = os.fork()
    if job == 0:
        os.setpgid(0, 0)
        os.tcsetpgrp(0, os.getpid())
        signal.signal(signal.SIGTTOU, signal.SIG_DFL)
        os.execv(sys.executable, [sys.executable, "-m", "tests.e2e.fault_programs", *arguments])

    def continue_in_foreground(signum: int, frame: object) -> None:
        os.tcsetpgrp(0, job)
        os.killpg(job, signal.SIGCONT)

    signal.signal(signal.SIGUSR1, continue_in_foreground)
    while True:
        _, status = os.waitpid(job, os.WUNTRACED)
        if not os.WIFSTOPPED(status):
            break
        os.tcsetpgrp(0, os.getpgrp())
        os.write(1, b"stopped\n")
    os.write(1, f"ended {os.waitstatus_to_exitcode(status)}\n".encode())


if __name__ == "__main__":
    main(sys.argv[1:])
