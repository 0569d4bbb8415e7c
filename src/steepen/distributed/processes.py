"""Start the processes of a run on this machine, one per GPU, through torch's elastic agent."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from steepen.distributed.environment import LOOPBACK
from steepen.distributed.monitor import FAULT_DIRECTORY_VARIABLE, LOST_EXIT_CODE
from steepen.errors import Failure
from steepen.utils.codec import from_builtins
from steepen.utils.json_io import read_json, write_json

SHUTDOWN_SECONDS = 300  # for the ranks to save after SIGTERM, before they are killed


@dataclass(frozen=True)
class NodeGroup:
    """This node among the nodes of a run, and HOST:PORT on node 0 at which they meet."""

    node: int
    count: int
    address: str

    @staticmethod
    def parse(text: str) -> NodeGroup:
        """From "NODE/NODES HOST:PORT"."""
        place, address = text.split()
        node, count = place.split("/")
        return NodeGroup(int(node), int(count), address)


def start_processes(
    count: int,
    program: Sequence[str],
    task: Mapping[str, Any],
    *,
    max_restarts: int = 0,
    print_message: Callable[[str], None],
    environment: dict[str, str] | None = None,
    nodes: NodeGroup | None = None,
) -> Failure | None:
    """Run a task in `count` processes to their end; returns why they failed, None if they did not.

    `program` are arguments of the Python interpreter; a file that holds the task as JSON follows them. A rank
    that is killed or hangs stops all; they are then restarted up to `max_restarts` times and continue from
    the last checkpoint; `print_message` is given the sentence of the fault. SIGTERM and SIGINT are passed on:
    the ranks save and stop. With several `nodes` this starts the processes of one of them.
    """
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from steepen.distributed.rendezvous import BACKEND

    place = nodes or NodeGroup(0, 1, f"{LOOPBACK}:0")
    config = LaunchConfig(
        min_nodes=place.count,
        max_nodes=place.count,
        nproc_per_node=count,
        rdzv_backend=BACKEND,
        rdzv_endpoint=place.address,
        rdzv_configs={"node": place.node},
        max_restarts=max_restarts,
    )
    with (
        _environment_of_ranks(environment or {}, alone=nodes is None),
        tempfile.TemporaryDirectory(prefix="steepen-ranks-") as folder,
        _Faults(Path(folder) / "faults", max_restarts, print_message) as faults,
    ):
        os.environ[FAULT_DIRECTORY_VARIABLE] = str(faults.folder)
        file = Path(folder) / "task.json"
        write_json(file, dict(task))
        try:
            elastic_launch(config, sys.executable)(*program, str(file))
        except SignalException as stopped:
            signal_name = signal.Signals(int(stopped.sigval)).name
            stop = Failure("Interrupted", f"stopped by {signal_name}.", 128 + int(stopped.sigval), True)
            return faults.last() or stop
        except ChildFailedError as failed:
            rank, first = failed.get_first_failure()
            number = -first.exitcode
            if number not in signal.valid_signals():
                end = f"rank {rank} ended with exit code {first.exitcode}."
                return faults.last() or Failure("Failed", end, first.exitcode)
            end = f"rank {rank} was stopped by {signal.Signals(number).name}."
            return replace(faults.last() or Failure("Killed", end), exit_code=128 + number, transient=True)
        fault = faults.last()
        # After an attempt that went well, earlier lost ranks do not matter.
        return None if fault is not None and fault.exit_code == LOST_EXIT_CODE else fault


@contextlib.contextmanager
def _environment_of_ranks(own: Mapping[str, str], *, alone: bool) -> Generator[None]:
    """Set what ranks inherit; afterwards all is as it was: this process may start the ranks of other runs."""
    before = dict(os.environ)
    logging.disable(logging.ERROR)  # the agent logs every signal and exit code; faults are reported here
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # no stack traces of lost connections
    os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(SHUTDOWN_SECONDS)
    os.environ.update(own)
    if alone:  # nobody else has to reach the ranks
        for _, interface in socket.if_nameindex():
            if interface.startswith("lo"):
                os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
                os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


class _Faults:
    """Faults that ranks leave in a directory, a file per attempt named by its number; watched in a block."""

    def __init__(self, folder: Path, max_restarts: int, print_message: Callable[[str], None]) -> None:
        self.folder, self.max_restarts, self.print_message = folder, max_restarts, print_message
        self.seen: dict[int, Failure] = {}
        folder.mkdir()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="steepen-faults", daemon=True)

    def __enter__(self) -> _Faults:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()
        sys.stderr.flush()

    def _watch(self) -> None:
        while not self._ended.wait(0.5):
            self._look()

    def _look(self) -> None:
        """Read what is new, and print a fault after which the ranks are restarted."""
        for path in sorted(self.folder.glob("*.json")):
            if int(path.stem) not in self.seen:
                fault = self.seen[int(path.stem)] = from_builtins(Failure, read_json(path))
                if fault.exit_code == LOST_EXIT_CODE and int(path.stem) < self.max_restarts:
                    self.print_message(fault.message)

    def last(self) -> Failure | None:
        """The fault of the last attempt that had one."""
        self._look()
        return self.seen[max(self.seen)] if self.seen else None
