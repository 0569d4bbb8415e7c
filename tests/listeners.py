"""The sockets on which a process and its descendants listen, from /proc."""

from __future__ import annotations

import contextlib
import ipaddress
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

LISTEN = "0A"  # state of a TCP socket in /proc/net


@dataclass(frozen=True)
class Listener:
    process: str
    address: str
    port: int

    @property
    def is_local(self) -> bool:
        address = ipaddress.ip_address(self.address)
        mapped = getattr(address, "ipv4_mapped", None)
        return (mapped or address).is_loopback


def descendants(process: int) -> Iterator[int]:
    yield process
    children: list[str] = []
    for task in Path(f"/proc/{process}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # the thread has just ended
            children += task.read_text().split()
    for child in children:
        yield from descendants(int(child))


def listeners(process: int) -> set[Listener]:
    """Sockets of a process and its descendants that accept TCP connections or UDP packets."""
    owners: dict[str, str] = {}
    for one in list(descendants(process)):
        with contextlib.suppress(OSError):  # it has just ended
            name = Path(f"/proc/{one}/comm").read_text().strip()
            for link in list(Path(f"/proc/{one}/fd").iterdir()):
                with contextlib.suppress(OSError):  # it was just closed
                    if (target := str(link.readlink())).startswith("socket:["):
                        owners[target[8:-1]] = name
    found: set[Listener] = set()
    for table in ("tcp", "tcp6", "udp", "udp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            open_udp = table.startswith("udp") and fields[2].endswith(":0000")  # not connected
            if fields[9] in owners and (fields[3] == LISTEN or open_udp):
                text, _, port = fields[1].partition(":")
                words = [bytes.fromhex(text[at : at + 8])[::-1] for at in range(0, len(text), 8)]
                address = ipaddress.ip_address(b"".join(words))
                found.add(Listener(owners[fields[9]], str(address), int(port, 16)))
    return found
