"""`steepen.prepare` and `steepen.train`: data and one run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from steepen.results.runs import Run

if TYPE_CHECKING:
    from steepen.data import Dataset
    from steepen.runs.spec import RunSpec


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


def train(
    spec: RunSpec | Mapping[str, Any] | str | Path,
    data: str | Path | Dataset,
    *,
    runs: str | Path = "runs",
    quiet: bool = True,
    **options: Any,
) -> Run:
    """Train a run to its end in this process, or resume it; a finished run is returned as it is.

    `spec` is what `steepen.spec` returns, a dict, or a spec file. `options` are fields of `TrainOptions`:
    device, micro_batch, validate_every, checkpoint_every, trackers, …
    """
    from steepen.data import Dataset
    from steepen.results.runs import open_runs
    from steepen.runs.spec import RunSpec, read_spec
    from steepen.runs.store import RunStore
    from steepen.training.train_options import TrainOptions
    from steepen.training.trainer import train as train_run

    if isinstance(spec, str | Path):
        spec = read_spec(Path(spec))
    elif isinstance(spec, Mapping):
        spec = RunSpec.from_dict(dict(spec))
    dataset = Dataset.open(data) if isinstance(data, str | Path) else data
    train_run(spec, dataset, RunStore(Path(runs)), TrainOptions(quiet=quiet, **options))
    return open_runs(runs)[spec.hash]
