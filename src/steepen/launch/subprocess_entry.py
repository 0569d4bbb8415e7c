"""Start `steepen` as a child that does not outlive its parent (`python -m steepen.launch.subprocess_entry`).

A launcher that is killed outright cannot stop its runs. On Linux the kernel then sends each of them SIGTERM,
on which training saves and stops; elsewhere they train on to their end, and who asks for them waits.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys

PARENT = "STEEPEN_PARENT"  # the process id of who started us
_PR_SET_PDEATHSIG = 1


def follow_parent() -> None:
    """Ask for SIGTERM at the parent's death; leave at once if it is dead already."""
    parent = os.environ.pop(PARENT, None)
    if parent is None or not sys.platform.startswith("linux"):
        return
    import ctypes

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
    if os.getppid() != int(parent):  # it died before we asked
        sys.exit(128 + signal.SIGTERM)


if __name__ == "__main__":
    follow_parent()
    runpy.run_module("steepen", run_name="__main__", alter_sys=True)
