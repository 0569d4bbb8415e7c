"""Which files of a Hub data set are a config and split: by its card, or by the names of its files.

A card (README.md) lists configs with globs of their files. Without such a list, a config is a folder and the
split is a word of a file's path (`train-00000.parquet`, `en/validation/0.jsonl.gz`); files that name no
split are training data. Both are the Hub's own conventions.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable
from typing import Any, cast

import yaml

from steepen.data.sources.readers import COMPRESSION_SUFFIXES, SUFFIXES
from steepen.errors import UsageError, nearest
from steepen.utils.yaml_io import load_yaml

READABLE = tuple(
    suffix + packed for suffix in (*SUFFIXES, ".json") if suffix != ".md" for packed in COMPRESSION_SUFFIXES
)
SPLIT_WORDS = {
    "train": {"train", "training"},
    "validation": {"validation", "valid", "val", "dev"},
    "test": {"test", "testing", "eval", "evaluation"},
}


def select_files(paths: Iterable[str], card: str, repository: str, config: str, split: str) -> list[str]:
    """The readable files of a config ("" is the default one) and split, in the order of their names."""
    readable = sorted(path for path in paths if path.endswith(READABLE))
    configs = card_configs(card)
    if configs:
        patterns = _patterns(configs, repository, config, split)
        found = [path for path in readable if any(fnmatch.fnmatchcase(path, pattern) for pattern in patterns)]
    else:
        found = [path for path in _in_folder(readable, repository, config) if _split_of(path) == split]
    if not found:
        raise UsageError(
            f"{repository} has no {', '.join(SUFFIXES[2:])} or .txt file of split {split!r}"
            f"{f' in {config}' if config else ''}; name another as hf:OWNER/NAME:CONFIG:SPLIT."
        )
    return found


def _in_folder(paths: list[str], repository: str, folder: str) -> list[str]:
    """The paths in a folder; all of them without one."""
    inside = [path for path in paths if not folder or path.startswith(f"{folder.strip('/')}/")]
    if folder and not inside:
        folders = sorted({path.rpartition("/")[0] for path in paths} - {""})
        known = f"; the nearest folders are {nearest(folder, folders)}" if folders else ""
        raise UsageError(f"{repository} has no folder {folder!r} with data{known}.")
    return inside


def card_configs(card: str) -> dict[str, Any]:
    """Files of each config by its name, from the card's front matter; empty if it lists none."""
    # Blanks but no line ends after the dashes: many empty lines would be tried in quadratic time.
    match = re.match(r"\s*---[ \t\r]*\n(.*?)\n---[ \t\r]*(?:\n|$)", card, re.DOTALL)
    try:
        header = load_yaml(match[1]) if match else None
    except yaml.YAMLError:
        return {}
    entries = header.get("configs") if isinstance(header, dict) else None
    found: dict[str, Any] = {}
    for entry in cast("list[Any]", entries) if isinstance(entries, list) else []:
        if isinstance(entry, dict) and "data_files" in entry:
            name = str(entry.get("config_name", "default"))
            found[name] = entry["data_files"]
            if entry.get("default") is True:
                found[""] = entry["data_files"]
    return found


def _patterns(configs: dict[str, Any], repository: str, config: str, split: str) -> list[str]:
    """Globs of a config's split."""
    splits = _splits(configs[_find_config(configs, repository, config)])
    if split not in splits:
        raise UsageError(f"{repository} has no split {split!r}; it has {', '.join(splits)}.")
    path = splits[split]
    return [str(one) for one in (path if isinstance(path, list) else [path])]


def _find_config(configs: dict[str, Any], repository: str, config: str) -> str:
    """The key of a config or, without a name, of the default one: so marked, so named, or the only one."""
    names = [name for name in configs if name]
    if config:
        if config not in configs:
            raise UsageError(
                f"{repository} has no config {config!r}; the nearest are {nearest(config, names)}."
            )
        return config
    found = next((name for name in ("", "default") if name in configs), None)
    if found is None and len(names) > 1:
        raise UsageError(
            f"{repository} has the configs {', '.join(names)}: name one, as hf:{repository}:{names[0]}."
        )
    return names[0] if found is None else found


def _splits(files: Any) -> dict[str, Any]:
    """The `data_files` of a config by split: one path or several are training data."""
    if isinstance(files, str) or (isinstance(files, list) and all(isinstance(one, str) for one in files)):
        return {"train": files}
    listed = cast("list[Any]", files) if isinstance(files, list) else []
    return {str(one.get("split")): one.get("path") for one in listed if isinstance(one, dict)}


def _split_of(path: str) -> str:
    words = re.split(r"[^a-z]+", path.lower())
    return next(
        (split for split, names in SPLIT_WORDS.items() if any(name in words for name in names)), "train"
    )
