"""Runs of TensorBoard: every folder with event files is one, with its hyperparameters where it has any."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from steepen.errors import UsageError
from steepen.tables.sources.tracked_runs import TrackedRun, flat, import_tracker
from steepen.utils.files import read_text

SETTINGS = ("hparams.yaml", "config.yaml")  # beside the event files, as Lightning and others write them


def read(place: str) -> list[TrackedRun]:
    """The runs under a folder. Folders inside a run's own (of `add_hparams`) belong to the run."""
    top = Path(place)
    folders = sorted({file.parent for file in top.rglob("*tfevents*") if file.is_file()})
    if not folders:
        raise UsageError(f"there are no event files of TensorBoard under {place}.")
    module = import_tracker(
        "tensorboard.backend.event_processing.event_accumulator", "tensorboard", str(place)
    )
    runs: list[Path] = []
    for one in folders:
        if not any(parent in runs for parent in one.parents):
            runs.append(one)
    return [
        _run(top, run, [one for one in folders if one == run or run in one.parents], module) for run in runs
    ]


def _run(top: Path, folder: Path, parts: list[Path], module: Any) -> TrackedRun:
    points: dict[str, list[tuple[int, float]]] = {}
    settings: dict[str, Any] = {}
    for part in parts:
        events = module.EventAccumulator(str(part), size_guidance={module.SCALARS: 0, module.TENSORS: 0})
        events.Reload()
        for tag in events.Tags()["scalars"]:
            # The first writer of a tag wins: add_hparams repeats final metrics in a folder of its own.
            points.setdefault(tag, [(event.step, event.value) for event in events.Scalars(tag)])
        for tag in events.Tags()["tensors"]:
            values = events.Tensors(tag)
            points.setdefault(tag, [(event.step, _scalar(event.tensor_proto)) for event in values])
        settings |= _hyperparameters(events)
    settings |= _settings_file(folder)
    name = str(folder.relative_to(top)) if folder != top else folder.name
    levels = {f"folder_{i}": word for i, word in enumerate(Path(name).parts, start=1)}
    tracked = {tag: own for tag, own in points.items() if not tag.startswith("_hparams_") and own}
    return TrackedRun(name, {**levels, **settings}, list(tracked), lambda tag: tracked.get(tag, []))


def _scalar(proto: Any) -> float:
    if any(one.size != 1 for one in proto.tensor_shape.dim):  # it may name any size, which would be allocated
        return float("nan")
    make = import_tracker("tensorboard.util.tensor_util", "tensorboard", "the run").make_ndarray
    value = make(proto).reshape(-1)
    return float(value[0]) if value.dtype.kind in "fiu" else float("nan")


def _hyperparameters(events: Any) -> dict[str, Any]:
    """What add_hparams has written: the start of its session."""
    content = events.summary_metadata.get("_hparams_/session_start_info")
    if content is None:
        return {}
    plugin = import_tracker("tensorboard.plugins.hparams.plugin_data_pb2", "tensorboard", "the run")
    data = plugin.HParamsPluginData.FromString(content.plugin_data.content)
    given = {name: (one, one.WhichOneof("kind")) for name, one in data.session_start_info.hparams.items()}
    return {name: None if kind is None else getattr(one, kind) for name, (one, kind) in given.items()}


def _settings_file(folder: Path) -> dict[str, Any]:
    import yaml

    from steepen.utils.yaml_io import load_yaml

    file = next((folder / name for name in SETTINGS if (folder / name).is_file()), None)
    try:
        values = None if file is None else load_yaml(read_text(file))
    except (yaml.YAMLError, OSError, UnicodeDecodeError):  # of another program, with types of its own
        return {}
    return flat(values) if isinstance(values, Mapping) else {}
