"""How an error on one rank ends the run on all: one sentence, one exit code."""

from __future__ import annotations

import signal
import threading
from dataclasses import replace
from typing import NoReturn

import torch.distributed as dist

from steepen.distributed.monitor import RankLost, rank_exit_code, report_fault
from steepen.distributed.world import World
from steepen.errors import SteepenError, failure_of

_COMMUNICATION_WORDS = ("gloo", "nccl", "connection", "timed out", "broken pipe", "socket", "peer")


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
