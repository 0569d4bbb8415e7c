"""Run `steepen` as a process that exits when its parent dies (`python -m steepen.launch.subprocess_entry`).

A launcher that receives SIGKILL cannot stop its runs. On Linux the kernel then sends each of them SIGTERM, on
which training saves and stops; on other systems they train to their end, and a new launcher waits for them.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys

PARENT_PID_VARIABLE = "STEEPEN_PARENT"  # set by the launcher to its process id
_PR_SET_PDEATHSIG = 1


def terminate_with_parent() -> None:
    """Have the kernel send SIGTERM when the parent ends; exit if it has ended already."""
    parent = os.environ.pop(PARENT_PID_VARIABLE, None)
    if parent is None or not sys.platform.startswith("linux"):
        return
    import ctypes

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
    if os.getppid() != int(parent):  # it ended before prctl
        sys.exit(128 + signal.SIGTERM)


if __name__ == "__main__":
    terminate_with_parent()
    runpy.run_module("steepen", run_name="__main__", alter_sys=True)
