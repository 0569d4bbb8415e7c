"""Runs of Weights & Biases: of a project on its server, and of folders that were logged offline."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from steepen.tables.sources.tracked_runs import Points, TrackedRun, by_metric, flat, import_tracker
from steepen.utils.files import open_regular

BLOCK = 32768  # bytes: a run's file is a log of LevelDB's format, after a header of 7 bytes
HEADER = 7


def read(place: str) -> list[TrackedRun]:
    """The runs of ENTITY/PROJECT on the server that `wandb login` knows, or of a folder."""
    if Path(place).is_dir():
        return _read_folder(Path(place))
    wandb = import_tracker("wandb", "wandb", f"wandb:{place}")
    return [_server_run(run) for run in wandb.Api().runs(place)]


def _server_run(run: Any) -> TrackedRun:
    summary = by_metric([(0, dict(run.summary))])

    def history(metric: str) -> Points:
        rows = run.scan_history(keys=["_step", metric])
        return by_metric((int(row["_step"]), {metric: row.get(metric)}) for row in rows).get(metric, [])

    return TrackedRun(
        run.name, flat(run.config), list(summary), history, run.state,
        {name: points[-1][1] for name, points in summary.items()},
    )  # fmt: skip


def _read_folder(folder: Path) -> list[TrackedRun]:
    """The runs that were logged to files under a folder: wandb/offline-run-…/run-ID.wandb."""
    messages = import_tracker("wandb.proto.wandb_internal_pb2", "wandb", str(folder))
    runs: dict[str, TrackedRun] = {}
    for file in sorted(folder.rglob("*.wandb")):
        identity, run = _read_file(file, messages)
        runs[identity] = run  # a later file of the same run continues it
    return list(runs.values())


def _read_file(file: Path, messages: Any) -> tuple[str, TrackedRun]:
    settings: dict[str, Any] = {}
    rows: list[tuple[int, dict[str, Any]]] = []
    name, identity, state = file.stem, file.stem, "running"
    with open(file, "rb", opener=open_regular) as opened:
        content = opened.read()
    for data in _log_entries(content):
        record = messages.Record()
        record.ParseFromString(data)
        kind = record.WhichOneof("record_type")
        if kind == "run":
            name, identity = record.run.display_name or record.run.run_id, record.run.run_id
            settings |= _items(record.run.config.update)
        elif kind == "config":
            settings |= _items(record.config.update)
        elif kind == "history":
            values = _items(record.history.item)
            rows.append((int(values.get("_step", record.history.step.num)), values))
        elif kind == "exit":
            state = "finished" if record.exit.exit_code == 0 else "crashed"
    points = by_metric(rows)
    return identity, TrackedRun(name, flat(settings), list(points), lambda key: points.get(key, []), state)


def _items(items: Any) -> dict[str, Any]:
    """Values by name; JSON of W&B has NaN and Infinity as words."""
    return {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items}


def _log_entries(data: bytes) -> Iterator[bytes]:
    """The entries of a log; the last one may be incomplete while the run is being written."""
    at, entry = HEADER, bytearray()
    while at + 7 <= len(data):
        left = BLOCK - at % BLOCK
        _, length, kind = struct.unpack_from("<IHB", data, at) if left >= 7 else (0, 0, 0)
        if kind == 0:  # the end of a block
            at += left
            continue
        entry += data[at + 7 : at + 7 + length]
        at += 7 + length
        if at > len(data):
            return
        if kind in (1, 4):  # whole, or the last part
            yield bytes(entry)
            entry.clear()
