"""Run a function on several ranks: forked processes that gloo connects on this machine."""

from __future__ import annotations

import gc
import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
import torch._dynamo  # pyright: ignore[reportUnusedImport]  # imported by training: here, not in every rank

from steepen.distributed.environment import ProcessEnvironment
from steepen.distributed.world import World

TIMEOUT = 120.0


def free_port() -> int:
    """A TCP port that is free now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def on_ranks(size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Call `function(world, *arguments)` on every rank of a world; returns the results by rank.

    The ranks are forked, so that arguments need no pickling and torch is not imported again. A world of one
    runs in this process.
    """
    if size == 1:
        return [function(World(), *arguments)]
    if torch.cuda.is_available():
        pytest.skip("forks ranks, which a process that sees a GPU cannot: set CUDA_VISIBLE_DEVICES= (empty)")
    context = multiprocessing.get_context("fork")
    port = free_port()
    ends: list[Any] = []
    processes: list[Any] = []
    for rank in range(size):
        here, there = context.Pipe()
        environment = ProcessEnvironment(rank, size, rank, port=port)
        process = context.Process(target=_rank, args=(there, environment, function, arguments))
        process.start()
        there.close()
        ends.append(here)
        processes.append(process)
    results: list[Any] = []
    try:
        for rank, end in enumerate(ends):
            assert end.poll(TIMEOUT), f"rank {rank} of {size} did not answer"
            failed, value = end.recv()
            assert not failed, f"rank {rank} of {size} failed:\n{value}"
            results.append(value)
    finally:
        for process in processes:
            process.join(10)
            process.kill()
    return results


def _rank(
    end: Connection, environment: ProcessEnvironment, function: Callable[..., Any], arguments: Any
) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    gc.freeze()  # collections need not go through what the parent has
    try:
        world = World(environment)
        world.join("gloo", TIMEOUT)
        end.send((False, function(world, *arguments)))
        world.leave()
    except BaseException:
        end.send((True, traceback.format_exc()))
    finally:
        end.close()
        os._exit(0)  # without pytest's exit handlers
