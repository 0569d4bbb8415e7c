"""`steepen.prepare`: text to tokens."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from steepen.data import Dataset


def prepare(source: Any, out: str | Path, *, tokenizer: str = "gpt2", **options: Any) -> Dataset:
    """Tokenize text into the directory `out`, and open it; data that is already there is only opened.

    `source` is what `steepen data prepare` takes (`"builtin"`, files, `"fineweb-edu:sample-10BT"`), or a
    function that returns documents. `options` are fields of `PrepareRequest`: val_tokens, max_tokens, …
    """
    from steepen.data.prepare import prepare as prepare_data
    from steepen.data.prepare_request import PrepareRequest

    sources: tuple[Any, ...] = (
        (source,) if isinstance(source, str | Path) or callable(source) else tuple(source)
    )
    named: tuple[Any, ...] = tuple(str(one) if isinstance(one, Path) else one for one in sources)
    return prepare_data(PrepareRequest(named, tokenizer=tokenizer, **options), Path(out))
