"""Resolve names of data sources to `Source` objects: built-in corpus, Hub dataset, function, or files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from steepen.data.sources import builtin, hub
from steepen.data.sources.custom_source import custom_source
from steepen.data.sources.files import file_source
from steepen.data.sources.readers import ReadOptions
from steepen.data.sources.source import Source, SourceFunction
from steepen.errors import UsageError
from steepen.utils.imports import MODULE_ATTRIBUTE


def resolve_source(
    names: Sequence[str | SourceFunction],
    options: ReadOptions,
    endpoint: str | None,
    staging: Path,
    log: Callable[[str], None],
) -> Source:
    """The source that the names refer to; raises if there is nothing to read.

    `endpoint` is another Hub than huggingface.co, `staging` the directory for its downloads; `log` receives a
    line when something slow begins.
    """
    if not names:
        raise UsageError(
            "no source given; name files, a glob, builtin, hf:OWNER/NAME, fineweb or a function."
        )
    first = names[0]
    name, _, config = first.partition(":") if isinstance(first, str) else ("", "", "")
    is_builtin, is_hub = name in builtin.NAMES, name in hub.REPOSITORIES
    is_custom = not isinstance(first, str) or (
        not is_builtin
        and not is_hub
        and MODULE_ATTRIBUTE.fullmatch(first) is not None
        and not Path(first).exists()
    )
    if (is_builtin or is_hub or is_custom) and len(names) > 1:
        raise UsageError(
            f"source {first!r} cannot be mixed with others; prepare each into its own directory."
        )
    if is_custom:
        return custom_source(first)
    if is_builtin:
        return builtin.builtin_source(config)
    if is_hub:
        return hub.hub_source(name, config, options, endpoint=endpoint, staging=staging, log=log)
    return file_source([str(name) for name in names], options)
