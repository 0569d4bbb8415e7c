"""A Slurm of one node on this machine, from Debian's packages (slurmctld, slurmd, slurm-client, munge)."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Generator
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "sinfo")
CONFIG = """
ClusterName=steepen
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmctldPort={controller}
SlurmdPort={daemon}
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,batch_sched_delay=0
ReturnToService=2
KillWait=20
MinJobAge=300
NodeName={host} NodeAddr=127.0.0.1 CPUs={cores} State=UNKNOWN
PartitionName=main Nodes={host} Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:4
"""


def missing() -> str:
    """Why Slurm cannot be started here; empty if it can."""
    absent = [name for name in PROGRAMS if shutil.which(name, path=_path()) is None]
    if absent:
        return f"no {', '.join(absent)}: install Debian's slurmctld, slurmd, slurm-client and munge"
    return "" if os.geteuid() == 0 else "slurmd and munged are started as root"


def _path() -> str:
    return f"{os.environ['PATH']}:/usr/sbin"


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


@contextlib.contextmanager
def local_slurm(folder: Path) -> Generator[dict[str, str]]:
    """Start the daemons, with all their files in a folder; yields the environment that sbatch needs."""
    for name in ("munge", "state", "spool"):
        (folder / name).mkdir(parents=True, mode=0o755)
    folder.chmod(0o755)
    key = folder / "munge" / "key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o600)
    controller, daemon = _free_ports(2)
    host = socket.gethostname().partition(".")[0]
    config = folder / "slurm.conf"
    config.write_text(
        CONFIG.format(
            host=host, folder=folder, controller=controller, daemon=daemon, cores=os.cpu_count() or 1
        )
    )
    munge = [
        f"--{name}={folder / 'munge' / name}" for name in ("socket", "pid-file", "log-file", "seed-file")
    ]
    commands = (
        ["munged", "--foreground", "--force", f"--key-file={key}", *munge],
        ["slurmctld", "-D", "-i", "-f", str(config)],
        ["slurmd", "-D", "-f", str(config), "-N", host],
    )
    environment = {"SLURM_CONF": str(config), "PATH": _path()}
    daemons: list[subprocess.Popen[bytes]] = []
    try:
        for command in commands:
            log = (folder / f"{command[0]}.out").open("wb")
            daemons.append(
                subprocess.Popen(command, env={**os.environ, **environment}, stdout=log, stderr=log)
            )
            log.close()
            time.sleep(0.5)
        _wait_until_idle({**os.environ, **environment}, folder)
        yield environment
    finally:
        for one in reversed(daemons):
            one.terminate()
        for one in daemons:
            try:
                one.wait(20)
            except subprocess.TimeoutExpired:
                one.kill()


def _wait_until_idle(environment: dict[str, str], folder: Path) -> None:
    state = ""
    for _ in range(120):
        done = subprocess.run(
            ["sinfo", "-h", "-o", "%t"], env=environment, capture_output=True, text=True, check=False
        )
        state = (done.stdout + done.stderr).strip()
        if state == "idle":
            return
        time.sleep(0.5)
    logs = "\n".join(path.read_text(errors="replace")[-1500:] for path in folder.glob("*.log"))
    raise RuntimeError(f"Slurm did not start ({state}): {logs}")
