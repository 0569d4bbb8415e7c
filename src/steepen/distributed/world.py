"""The processes of one run: joining, collectives, agreement between ranks, and how an error on one ends all.

Rank 0 prints, holds the run's lock and writes metrics and record. A world of one process has no process
group, and its collectives do nothing.
"""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import json
import signal
import socket
import threading
from collections.abc import Generator, Mapping
from dataclasses import replace
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import (
    PrefixStore,  # pyright: ignore[reportPrivateImportUsage]
    TCPStore,  # pyright: ignore[reportPrivateImportUsage]
)

from steepen.distributed.environment import ProcessEnvironment, process_environment
from steepen.distributed.monitor import Monitor, RankLost, rank_exit_code, report_fault
from steepen.errors import SteepenError, UsageError, failure_of

DEFAULT_TIMEOUT = 600.0  # seconds without progress after which a rank counts as hung
_COMMUNICATION_WORDS = ("gloo", "nccl", "connection", "timed out", "broken pipe", "socket", "peer")
_JOIN_SECONDS = 300.0  # for all processes to start and import torch


class RanksDiffer(UsageError):
    """The processes of a run do not have the same data, code or spec; every one of them raises this."""


class World:
    """This process among those of a run, with its device; `World()` is a single process on a CPU."""

    def __init__(
        self, environment: ProcessEnvironment | None = None, device: torch.device | None = None
    ) -> None:
        self.environment = environment or ProcessEnvironment()
        self.rank, self.size = self.environment.rank, self.environment.size
        self.device = device or torch.device("cpu")
        self.backend = "none"
        self.step = 0  # the last that `progress` was told
        self.monitor: Monitor | None = None
        self._host_group: Any = None
        self._background_group: Any = None  # used by the thread that writes checkpoints
        self._store: Any = None

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    def join(self, backend: str, timeout: float = DEFAULT_TIMEOUT) -> None:
        """Connect to the other processes and start watching them."""
        if self.size == 1:
            return
        where, wait = self.environment, datetime.timedelta(seconds=timeout)
        address = f"{where.address}:{where.port}"
        try:
            host = self.is_main and not where.store_is_elsewhere
            store = open_store(where.address, where.port, _JOIN_SECONDS, host=host)
            self._store = PrefixStore(f"steepen/{where.restart}", store)
            self.backend = backend
            dist.init_process_group(
                backend,
                store=PrefixStore("group", self._store),
                rank=self.rank,
                world_size=self.size,
                timeout=wait,
                device_id=self.device if backend == "nccl" else None,
            )
        except (RuntimeError, ValueError) as error:
            reason = str(error).splitlines()[0]
            raise SteepenError(
                f"rank {self.rank} of {self.size} could not reach the others at {address}: {reason}"
            ) from error
        # Flags and objects travel between hosts without waiting for the GPUs.
        self._host_group = dist.new_group(backend="gloo", timeout=wait)
        self._background_group = dist.new_group(backend="gloo", timeout=wait)
        connection = open_store(where.address, where.port, _JOIN_SECONDS)
        self.monitor = Monitor(
            PrefixStore(f"steepen/{where.restart}/monitor", connection),
            self.rank,
            self.size,
            timeout,
            hosts_store=self.is_main and not where.store_is_elsewhere,
        )
        self.monitor.start(self.barrier)

    def leave(self) -> None:
        """Wait for the others, stop watching them and close the process group."""
        if self.size == 1 or self.monitor is None:
            return
        # No rank stops its heartbeat before all have done their work, or it would seem lost; and none closes
        # its connections before all have stopped watching.
        self.barrier()
        self.monitor.stop()
        self.barrier()
        if self.is_main:  # it may host the store, which the others still need
            self._store.set("closing", "1")
            for rank in range(1, self.size):
                with contextlib.suppress(RuntimeError):
                    self._store.wait([f"closed/{rank}"], datetime.timedelta(seconds=10))
        else:
            with contextlib.suppress(RuntimeError):
                self._store.set(f"closed/{self.rank}", "1")
        dist.destroy_process_group()

    def progress(self, step: int, phase: str) -> None:
        """Tell the other ranks' monitors how far this one is."""
        self.step = step
        if self.monitor is not None:
            self.monitor.progress(step, phase)

    def barrier(self) -> None:
        """Wait until every rank is here."""
        if self.size > 1:
            dist.all_reduce(torch.zeros(1), group=self._host_group)

    def all_reduce_(self, tensor: Tensor) -> Tensor:
        """Sum a tensor over all ranks, in place; every rank gets the sum."""
        if self.size > 1:
            if tensor.is_cuda and self.backend == "gloo":
                host = tensor.cpu()
                dist.all_reduce(host, group=self._host_group)
                tensor.copy_(host)
            else:
                dist.all_reduce(tensor)
        return tensor

    def reduce_(self, tensor: Tensor, owner: int) -> Any:
        """Start adding a tensor over all ranks into the owner's; returns a handle with `wait`."""
        if tensor.is_cuda and self.backend == "gloo":  # gloo reduces host tensors only
            host = tensor.cpu()
            dist.reduce(host, owner, group=self._host_group)
            if self.rank == owner:
                tensor.copy_(host)
            return _DONE
        return dist.reduce(tensor, owner, async_op=True)

    def broadcast_(self, tensor: Tensor, owner: int) -> Any:
        """Start copying the owner's tensor to all ranks; returns a handle with `wait`."""
        if tensor.is_cuda and self.backend == "gloo":
            host = tensor.cpu()
            dist.broadcast(host, owner, group=self._host_group)
            if self.rank != owner:
                tensor.copy_(host)
            return _DONE
        return dist.broadcast(tensor, owner, async_op=True)

    def maximum(self, *values: float) -> list[float]:
        """The largest of each value over all ranks, exchanged between hosts."""
        if self.size == 1:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self._host_group)
        return tensor.tolist()

    def minimum(self, value: float) -> float:
        """The smallest of a value over all ranks."""
        return -self.maximum(-value)[0]

    def all_gather_objects(self, value: Any, *, background: bool = False) -> list[Any]:
        """Every rank's JSON value, by rank; `background` for calls outside the main thread."""
        if self.size == 1:
            return [value]
        group = self._background_group if background else self._host_group
        text = json.dumps(value).encode()
        length = torch.tensor([len(text)])
        lengths = [torch.zeros_like(length) for _ in range(self.size)]
        dist.all_gather(lengths, length, group=group)
        longest = int(max(int(each) for each in lengths))
        padded = torch.zeros(max(1, longest), dtype=torch.uint8)
        padded[: len(text)] = torch.frombuffer(bytearray(text or b" "), dtype=torch.uint8)[: len(text)]
        gathered = [torch.zeros_like(padded) for _ in range(self.size)]
        dist.all_gather(gathered, padded, group=group)
        return [
            json.loads(bytes(data[: int(size)].tolist()))
            for data, size in zip(gathered, lengths, strict=True)
        ]

    def broadcast_object(self, value: Any) -> Any:
        """Rank 0's JSON value, on every rank."""
        return self.all_gather_objects(value if self.is_main else None)[0]

    def require_agreement(self, digests: Mapping[str, str]) -> None:
        """Raise RanksDiffer on every rank if a digest (of data, code, spec, …) differs between ranks."""
        everywhere = self.all_gather_objects(dict(digests))
        for rank, there in enumerate(everywhere):
            for name, value in everywhere[0].items():
                if there[name] != value:
                    raise RanksDiffer(
                        f"rank {rank} has another {name} ({there[name][:16]}) than rank 0 ({value[:16]}); "
                        "every process must see the same data, code and spec."
                    )


class FlagExchange:
    """The largest of each value over all ranks, under way between hosts."""

    def __init__(self, world: World, values: tuple[float, ...]) -> None:
        self.tensor = torch.tensor(values, dtype=torch.float64)
        self.work: Any = None
        if world.size > 1:
            group = world._host_group  # pyright: ignore[reportPrivateUsage]
            self.work = dist.all_reduce(self.tensor, dist.ReduceOp.MAX, group=group, async_op=True)

    def result(self) -> list[float]:
        """The maxima, once every rank has given its values."""
        if self.work is not None:
            self.work.wait()
            self.work = None
        return self.tensor.tolist()


class _Done:
    """A handle of work that has ended."""

    def wait(self) -> None:
        """Return at once."""


_DONE = _Done()


@contextlib.contextmanager
def joined_world(
    device: torch.device, *, shared_device: bool = False, timeout: float = DEFAULT_TIMEOUT
) -> Generator[World]:
    """Join the processes that torchrun or srun started, and leave them when done.

    NCCL connects GPUs, gloo CPUs and several ranks on one GPU (`shared_device`).
    """
    world = World(process_environment(), device)
    backend = "nccl" if device.type == "cuda" and not shared_device else "gloo"
    world.join(backend, timeout)
    try:
        yield world
    except BaseException:
        if world.monitor is not None:
            world.monitor.stop()
        raise
    world.leave()


def is_communication_error(error: BaseException) -> bool:
    """Whether a collective failed, usually because another rank is gone."""
    if isinstance(error, dist.DistError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(word in text for word in _COMMUNICATION_WORDS)


def stop_all_ranks(world: World, error: BaseException, step: int, *, agreed: bool) -> NoReturn:
    """End this process after an error; the sentence is reported once, by the rank where it happened.

    `agreed` marks an error that every rank raises at the same step (a signal, a diverged loss): rank 0
    reports it. Any other stops the other ranks through their monitors.
    """
    if world.size == 1 or world.monitor is None:
        raise error
    if is_communication_error(error):
        # torchrun sends SIGTERM to the ranks that are left; this one first finds out which is lost.
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        error = world.monitor.explain(error)
    failure = failure_of(error)
    if agreed:
        if not world.is_main:
            raise SystemExit(rank_exit_code(failure))
    else:
        if not isinstance(error, RankLost):
            sentence = f"rank {world.rank} failed at step {step:,}: {failure.message}"
            failure = replace(failure, message=sentence)
        try:
            first = world.monitor.announce(failure)
        except RuntimeError:  # the store is gone, and with it the rank that hosted it: every rank notices
            first = world.rank == 1 or not isinstance(error, RankLost)
        if not first:
            world.monitor.exit_as_announced()
    if report_fault(failure):
        raise SystemExit(rank_exit_code(failure))
    if agreed or not isinstance(error, SteepenError):
        raise error
    error.args = (failure.message,)
    raise error


def open_store(address: str, port: int, seconds: float, *, host: bool = False) -> TCPStore:
    """Connect to the key-value store at an address, or `host` it there; port 0 is any free one.

    A store at a loopback address cannot be reached from other machines.
    """
    listener = None
    if host and _is_loopback(address):  # by itself a store listens on all interfaces
        listener = socket.create_server((address, port))
        port = listener.getsockname()[1]
    return TCPStore(
        address,
        port,
        is_master=host,
        timeout=datetime.timedelta(seconds=seconds),
        wait_for_workers=False,
        master_listen_fd=None if listener is None else listener.detach(),
    )


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:  # a host name: other machines may know it by another address
        return False
