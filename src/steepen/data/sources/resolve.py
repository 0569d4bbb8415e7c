"""Resolve names of data sources to `Source` objects: built-in corpus, Hub dataset, function, or files.

A user-defined source is a function, or its name "module:attribute", that returns documents:

    # my_corpus.py
    def documents():
        for page in read_my_pages():
            yield page.text

    steepen data prepare my_corpus:documents --out data/mine

The function is called without arguments and must return the same documents in the same order every time. Its
documents are counted and hashed once before they are tokenized, so that a changed corpus is noticed; where
that extra pass is too slow, return a `Source` with a description and a size instead.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import cast

from steepen.data.sources import builtin, hub
from steepen.data.sources.readers import ReadOptions, file_source
from steepen.data.sources.source import Part, Source, SourceFunction, document_hash
from steepen.errors import SteepenError, UsageError
from steepen.utils.imports import MODULE_ATTRIBUTE, import_object


def custom_source(source: str | SourceFunction) -> Source:
    """Build a Source from a function, or from its name "module:attribute"."""
    if isinstance(source, str):
        name, found = source, import_object(source, "data source", values=Source)
    else:
        module = getattr(source, "__module__", None) or type(source).__module__
        name = f"{module}:{getattr(source, '__qualname__', type(source).__qualname__)}"
        found = source
    if isinstance(found, Source):
        return found
    if not callable(found):
        raise UsageError(f"the data source {name!r} is {found!r}; it must be a function or a Source.")
    function = cast("SourceFunction", found)
    result = function()
    if isinstance(result, Source):
        return result
    digest, documents, size = hashlib.sha256(), 0, 0
    for text in _documents(function, name, None, 0):
        digest.update(document_hash(text or ""))
        documents += 1
        size += len((text or "").encode("utf-8", "surrogatepass"))
    description = {
        "kind": "custom",
        "name": name,
        "documents": documents,
        "bytes": size,
        "sha256": digest.hexdigest(),
    }
    return Source(description, size, [Part(name, partial(_documents, function, name, digest.digest()))])


def _documents(
    function: SourceFunction, name: str, expected: bytes | None, start: int
) -> Iterator[str | None]:
    """The documents from number `start` on; raises if all of them are not those of the first pass."""
    result = function()
    assert not isinstance(result, Source)
    digest = hashlib.sha256()
    for text in islice(result, start, None):
        if text is not None and not isinstance(text, str):
            raise SteepenError(
                f"the data source {name!r} returned {type(text).__name__}, not str, as a document."
            )
        document = text if text is None or text.strip() else None
        digest.update(document_hash(document or ""))
        yield document
    if expected is not None and start == 0 and digest.digest() != expected:
        raise SteepenError(
            f"the data source {name!r} returned other documents than before; it must return the same ones in "
            "the same order every time."
        )


def resolve_source(
    names: Sequence[str | SourceFunction],
    options: ReadOptions,
    endpoint: str | None,
    staging: Path,
    log: Callable[[str], None],
) -> Source:
    """The source that the names (one or more) refer to; raises if there is nothing to read.

    `endpoint` is another Hub than huggingface.co, `staging` the directory for its downloads; `log` receives a
    line when something slow begins.
    """
    first = names[0]
    name, _, config = first.partition(":") if isinstance(first, str) else ("", "", "")
    if name == "builtin":
        found = partial(builtin.builtin_source, config)
    elif name in hub.REPOSITORIES:
        found = partial(hub.hub_source, name, config, options, endpoint=endpoint, staging=staging, log=log)
    elif not isinstance(first, str) or (MODULE_ATTRIBUTE.fullmatch(first) and not Path(first).exists()):
        found = partial(custom_source, first)
    else:
        return file_source([str(name) for name in names], options)
    if len(names) > 1:
        raise UsageError(
            f"source {first!r} cannot be mixed with others; prepare each into its own directory."
        )
    return found()
