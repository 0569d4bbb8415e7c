"""Start the processes of a run on this machine, one per GPU, through torch's elastic agent."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path

from steepen.distributed.environment import LOOPBACK
from steepen.distributed.monitor import FAULT_DIRECTORY_VARIABLE, LOST_EXIT_CODE

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
    command: Sequence[str],
    *,
    max_restarts: int = 0,
    print_message: Callable[[str], None],
    environment: dict[str, str] | None = None,
    nodes: NodeGroup | None = None,
) -> int:
    """Run `command` (program and arguments) in `count` processes to their end; returns an exit code.

    A rank that is killed or hangs stops all; they are then restarted up to `max_restarts` times and continue
    from the last checkpoint. SIGTERM and SIGINT are passed on: the ranks save and stop. `print_message`
    is given the sentence of every fault. With several `nodes` this starts the processes of one of them.
    """
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from steepen.distributed.rendezvous import BACKEND

    before = dict(os.environ)
    logging.disable(logging.ERROR)  # the agent logs every signal and exit code; faults are reported here
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # no stack traces of lost connections
    os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(SHUTDOWN_SECONDS)
    os.environ.update(environment or {})
    if nodes is None:  # nobody else has to reach the ranks
        for _, interface in socket.if_nameindex():
            if interface.startswith("lo"):
                os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
                os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
    config = LaunchConfig(
        min_nodes=1 if nodes is None else nodes.count,
        max_nodes=1 if nodes is None else nodes.count,
        nproc_per_node=count,
        rdzv_backend=BACKEND,
        rdzv_endpoint=f"{LOOPBACK}:0" if nodes is None else nodes.address,
        rdzv_configs={"node": 0 if nodes is None else nodes.node},
        max_restarts=max_restarts,
    )
    with (
        tempfile.TemporaryDirectory(prefix="steepen-faults-") as folder,
        _reporting(Path(folder), print_message) as faults,
    ):
        os.environ[FAULT_DIRECTORY_VARIABLE] = folder
        try:
            elastic_launch(config, command[0])(*command[1:])
            faults.look()
            faults.forget_lost()
        except SignalException as stopped:
            return faults.exit_code() or 128 + int(stopped.sigval)
        except ChildFailedError as failed:
            rank, first = failed.get_first_failure()
            number = -first.exitcode
            if faults.exit_code() is None and number in signal.valid_signals():
                print_message(f"rank {rank} was stopped by {signal.Signals(number).name}.")
            if number in signal.valid_signals():
                return 128 + number
            return faults.exit_code() or first.exitcode
        finally:
            os.environ.clear()
            os.environ.update(before)  # this process may start the ranks of other runs
        return faults.exit_code() or 0


class _Faults:
    """Faults that ranks have left in a directory, one file per attempt."""

    def __init__(self, folder: Path, print_message: Callable[[str], None]) -> None:
        self.folder, self.print_message = folder, print_message
        self.said: set[str] = set()
        self.last: int | None = None

    def look(self) -> None:
        """Report what is new."""
        for path in sorted(self.folder.glob("*.json")):
            if path.name not in self.said:
                fault = json.loads(path.read_text(encoding="utf-8"))
                self.said.add(path.name)
                self.last = int(fault["exit_code"])
                self.print_message(fault["sentence"])

    def exit_code(self) -> int | None:
        """Exit code of the last fault; None if there was none, or if a later attempt went well."""
        self.look()
        return self.last

    def forget_lost(self) -> None:
        """After an attempt that went well, earlier lost ranks do not matter."""
        if self.last == LOST_EXIT_CODE:
            self.last = None


@contextlib.contextmanager
def _reporting(folder: Path, print_message: Callable[[str], None]) -> Generator[_Faults]:
    """Report faults as they appear, from a thread."""
    faults, ended = _Faults(folder, print_message), threading.Event()

    def watch() -> None:
        while not ended.wait(0.5):
            faults.look()

    thread = threading.Thread(target=watch, name="steepen-faults", daemon=True)
    thread.start()
    try:
        yield faults
    finally:
        ended.set()
        thread.join()
        sys.stderr.flush()
