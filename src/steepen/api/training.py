"""`steepen.prepare`, `steepen.train` and `steepen.evaluate`: data, one run, and its scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from steepen.api.result import Result, new_axes
from steepen.results.runs import Run

if TYPE_CHECKING:
    from steepen.data import Dataset
    from steepen.evaluation.evaluate_run import Evaluation
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


def evaluate(
    run: str | Path | Run,
    data: str | Path | Dataset,
    *,
    core: str | Path | None = None,
    core_examples: int | None = None,
    kl_depth: bool = False,
    passes: Sequence[int] = (),
    device: str = "auto",
    precision: str = "auto",
    update_record: bool | None = None,
    **request: Any,
) -> EvaluationResult:
    """Score a run (or one of its checkpoints) on prepared data, and save the scores beside it.

    `core` is the directory of the CORE bundle, `kl_depth` measures KL effective depth, `passes` are numbers
    of core passes to measure the loss at. Further fields are those of `EvaluationRequest`.
    """
    from steepen.evaluation.evaluate_run import EvaluationRequest
    from steepen.evaluation.evaluate_run import evaluate as evaluate_run

    if core is not None:
        from steepen.evaluation.core.bundle import Bundle
        from steepen.evaluation.core.run_suite import CoreOptions

        request |= {"core": Bundle.open(Path(core)), "core_options": CoreOptions(examples=core_examples)}
    wanted = EvaluationRequest(kl_depth=kl_depth, passes=tuple(passes), **request)
    path = run.path if isinstance(run, Run) else run
    found = evaluate_run(path, data, wanted, device=device, precision=precision, update_record=update_record)
    return EvaluationResult(found)


@dataclass(frozen=True, eq=False, repr=False)
class EvaluationResult(Result):
    """Scores of a checkpoint; `scores` has them all as nested dicts."""

    evaluation: Evaluation

    @property
    def scores(self) -> dict[str, Any]:
        """The scores as JSON values."""
        return self.evaluation.scores

    def headline(self) -> str:
        """Run, step and validation loss."""
        scores = self.scores
        return f"run {scores['run']} at step {scores['step']}: loss {scores['validation']['loss']:.4f}"

    def summary(self) -> str:
        """One line per score, and the notes."""
        from steepen.utils.formatting import format_value

        lines = [f"{row['score']}: {format_value(row['value'], 5)}" for row in self.to_rows()]
        return "\n".join([self.headline(), *lines, *(f"note: {note}" for note in self.evaluation.notes)])

    def to_dict(self) -> dict[str, Any]:
        """The scores as JSON values."""
        return self.scores

    def to_rows(self) -> list[dict[str, Any]]:
        """One row per score: loss, bits per byte, CORE and its tasks, KL depth, loss at each passes."""
        from steepen.runs.row import score_fields

        validation = self.scores["validation"]
        found = {"loss": validation["loss"], "bits_per_byte": validation.get("bits_per_byte")}
        found |= score_fields(self.scores)
        return [{"score": name, "value": value} for name, value in found.items() if value is not None]

    def plot(self, ax: Any = None) -> Any:
        """Draw the KL divergence after each executed block, or the loss against passes; returns the Axes."""
        from steepen.report.colours import ARM_TITLES
        from steepen.report.figure import plot_panel
        from steepen.report.score_panels import kl_depth_panel, passes_panel

        ax = new_axes(ax)
        depth, passes = self.scores.get("kl_depth"), self.scores.get("test_time_passes")
        if depth is not None:
            plot_panel(ax, kl_depth_panel({"network": depth}), ARM_TITLES)
        elif passes is not None:
            plot_panel(ax, passes_panel({"network": passes}), ARM_TITLES)
        else:
            rows = self.to_rows()
            ax.barh([row["score"] for row in rows], [row["value"] for row in rows])
        return ax
