"""The key-value store through which the ranks and nodes of a run find each other."""

from __future__ import annotations

import datetime
import ipaddress
import socket

from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]


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
