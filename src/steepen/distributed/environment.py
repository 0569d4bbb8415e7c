"""The place of this process among the processes of a run, from the variables of torchrun or srun."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from steepen.errors import UsageError

LOOPBACK = "127.0.0.1"
_FIRST_PORT, _PORTS = 20_000, 20_000  # the rendezvous port of a Slurm step, derived from its job id


@dataclass(frozen=True)
class ProcessEnvironment:
    """Rank of this process, number of processes, and where rank 0 can be reached."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0  # among the processes of this machine
    address: str = LOOPBACK
    port: int = 29_500
    restart: int = 0  # times that torchrun has restarted the processes
    store_is_elsewhere: bool = False  # torchrun's agent hosts the key-value store

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, the only process that prints and writes the record."""
        return self.rank == 0


def process_environment(variables: Mapping[str, str] | None = None) -> ProcessEnvironment:
    """Read the variables that torchrun sets, else those of a Slurm step; else a world of one process."""
    found = os.environ if variables is None else variables
    try:
        if "RANK" in found and "WORLD_SIZE" in found:
            return ProcessEnvironment(
                rank=int(found["RANK"]),
                size=int(found["WORLD_SIZE"]),
                local_rank=int(found.get("LOCAL_RANK", "0")),
                address=found.get("MASTER_ADDR", LOOPBACK),
                port=int(found.get("MASTER_PORT", "29500")),
                restart=int(found.get("TORCHELASTIC_RESTART_COUNT", "0")),
                store_is_elsewhere=found.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            )
        # Set by srun only: inside a batch script without srun there is one process, whatever SLURM_NTASKS is.
        if int(found.get("SLURM_STEP_NUM_TASKS", "1")) > 1 and "SLURM_PROCID" in found:
            hosts = found.get("SLURM_STEP_NODELIST") or found.get("SLURM_JOB_NODELIST", LOOPBACK)
            one_node = found.get("SLURM_STEP_NUM_NODES") == "1"
            job = int(found.get("SLURM_JOB_ID", "0")) + int(found.get("SLURM_STEP_ID", "0"))
            return ProcessEnvironment(
                rank=int(found["SLURM_PROCID"]),
                size=int(found["SLURM_STEP_NUM_TASKS"]),
                local_rank=int(found.get("SLURM_LOCALID", "0")),
                address=found.get("MASTER_ADDR") or (LOOPBACK if one_node else first_host(hosts)),
                port=int(found.get("MASTER_PORT") or _FIRST_PORT + job % _PORTS),
                restart=int(found.get("SLURM_RESTART_COUNT", "0")),
            )
    except ValueError as error:
        raise UsageError(
            f"the variables of torchrun or srun cannot be read ({error}); start the run with "
            "`steepen train --gpus`, torchrun or srun."
        ) from error
    return ProcessEnvironment()


def first_host(hosts: str) -> str:
    """The first host of a Slurm node list: "gpu[03-05,9],cpu1" → "gpu03"."""
    match = re.match(r"([^,\[]+)(?:\[([^\],-]+)[^\]]*\]([^,]*))?", hosts)
    if match is None:
        raise UsageError(f"the Slurm node list {hosts!r} names no host.")
    name, number, suffix = match.groups()
    return f"{name}{number or ''}{suffix or ''}"
