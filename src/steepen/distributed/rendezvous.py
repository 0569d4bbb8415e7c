"""How the nodes of a run meet: a fixed number of them, through a key-value store on node 0.

torch's own rendezvous listens on every interface and unpickles what any peer has stored. Here one machine
listens on its loopback interface only, and nothing that a peer can set is unpickled.
"""

from __future__ import annotations

from torch.distributed import PrefixStore, Store  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

from steepen.distributed.world import open_store

MEETING_SECONDS = 600.0  # for all nodes to have started
BACKEND = "steepen"


class _FixedNodes(RendezvousHandler):
    """Torch's elastic agents of `count` nodes; in every round of restarts all of them meet again."""

    def __init__(self, node: int, count: int, address: str, port: int) -> None:
        self.node, self.count, self.address = node, count, address
        self.round = 0
        self.store = open_store(address, port, MEETING_SECONDS, host=node == 0)

    def next_rendezvous(self) -> RendezvousInfo:
        self.round += 1
        met: Store = PrefixStore(f"round/{self.round}", self.store)
        met.set(f"node/{self.node}", "here")
        met.wait([f"node/{node}" for node in range(self.count)])
        return RendezvousInfo(
            met, self.node, self.count, RendezvousStoreInfo(self.address, int(self.store.port))
        )

    @property
    def use_agent_store(self) -> bool:
        return True  # the ranks use it too

    def num_nodes_waiting(self) -> int:
        return 0  # a fault stops the ranks of every node, and their agents restart them

    def get_backend(self) -> str:
        return BACKEND

    def get_run_id(self) -> str:
        return BACKEND

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def shutdown(self) -> bool:
        return True


def _create(parameters: RendezvousParameters) -> RendezvousHandler:
    address, _, port = parameters.endpoint.rpartition(":")
    return _FixedNodes(int(parameters.get("node", "0")), parameters.max_nodes, address, int(port))


rendezvous_handler_registry.register(BACKEND, _create)
