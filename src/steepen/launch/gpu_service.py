"""NVIDIA's Multi-Process Service: the kernels of several processes run on one GPU at the same time.

Without it the driver gives each process the GPU in turn, and a small run leaves most of it idle in its turn.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

CONTROL = "nvidia-cuda-mps-control"
PIPE_VARIABLE = "CUDA_MPS_PIPE_DIRECTORY"
# prctl(PR_SET_PDEATHSIG, SIGTERM) holds for the program that takes the place of the interpreter.
_START = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 15, 0, 0, 0); os.execvp(sys.argv[1], sys.argv[1:])"
)
_START_SECONDS, _STOP_SECONDS = 0.5, 20.0


@dataclass
class MultiProcessService:
    """A service of this process's own, with its files in a temporary folder that only its user can enter.

    It runs in the foreground of a child process, which the kernel ends together with this one: a launcher
    that receives SIGKILL leaves no service behind.
    """

    folder: Path
    process: subprocess.Popen[bytes]

    @property
    def environment(self) -> dict[str, str]:
        """Variables that make a process a client of the service."""
        return _environment(self.folder)

    @staticmethod
    def available() -> bool:
        """Whether it is installed, and the user does not run one already."""
        return PIPE_VARIABLE not in os.environ and shutil.which(CONTROL) is not None

    @staticmethod
    def start() -> MultiProcessService | None:
        """Start the service; None where it ends at once, as without the right to start one."""
        folder = Path(tempfile.mkdtemp(prefix="steepen-mps-"))
        process = subprocess.Popen(
            [sys.executable, "-c", _START, CONTROL, "-f"],
            env={**os.environ, **_environment(folder)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        service = MultiProcessService(folder, process)
        atexit.register(service.stop)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_START_SECONDS)
            service.stop()
            return None
        return service

    def stop(self) -> None:
        """End the service, after its clients have ended, and delete its files."""
        atexit.unregister(self.stop)
        self.process.terminate()
        try:
            self.process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


def _environment(folder: Path) -> dict[str, str]:
    return {PIPE_VARIABLE: str(folder), "CUDA_MPS_LOG_DIRECTORY": str(folder)}
