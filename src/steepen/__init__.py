"""steepen: does a change to an architecture make its scaling law steeper, or only lower?

Everything that a notebook needs is here, and loaded when it is first used:

- `fit`, `power`: scaling laws and verdicts of a table, and how large a ladder must be
- `next_runs`: the runs to make next, and whether they are worth it
- `keep`: whether a change is better than the noise, and at another scale too
- `ledger`: registered forecasts, their scores and calibration
- `paper`: a figure, table or claim of the paper, from its authors' runs or your own studies
- `arms`, `plan`, `spec`, `best_passes`: the arms, the cost of a run, its specification, the best passes
- `prepare`, `train`, `evaluate`, `generate`: data, one run, its scores and its text
- `ladder`, `study`, `dry_run_study`, `open_study`, `status`, `report`: a question with all its runs
- `open_runs`: the runs of a directory, filtered, as a frame
- `downstream`, `forecast`: scores along ladders, at equal loss, and beyond the runs
- `export`, `import_model`, `pack`, `unpack`: models in other formats, and a study as one file
- `Arm`, `StageSchedule`: what a custom arm is made of

Results print a summary, have a short repr and HTML in notebooks, and `to_frame()`, `to_latex()`, `plot(ax=)`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # what `__getattr__` loads, for editors and type checkers
    from steepen.errors import SteepenError as SteepenError
    from steepen.errors import UsageError as UsageError
    from steepen.model.arm import Arm as Arm
    from steepen.model.stages import StageSchedule as StageSchedule
    from steepen.requests.arms import arms as arms
    from steepen.requests.arms import best_passes as best_passes
    from steepen.requests.data import prepare as prepare
    from steepen.requests.evaluate import evaluate as evaluate
    from steepen.requests.fit import fit as fit
    from steepen.requests.forecast import downstream as downstream
    from steepen.requests.forecast import forecast as forecast
    from steepen.requests.keep import keep as keep
    from steepen.requests.ledger import ledger as ledger
    from steepen.requests.models import export as export
    from steepen.requests.models import generate as generate
    from steepen.requests.models import import_model as import_model
    from steepen.requests.next_runs import next_runs as next_runs
    from steepen.requests.paper import paper as paper
    from steepen.requests.plan import plan as plan
    from steepen.requests.power import power as power
    from steepen.requests.report import pack as pack
    from steepen.requests.report import unpack as unpack
    from steepen.requests.spec import spec as spec
    from steepen.requests.status import status as status
    from steepen.requests.study import dry_run_study as dry_run_study
    from steepen.requests.study import ladder as ladder
    from steepen.requests.study import study as study
    from steepen.requests.train import train as train
    from steepen.results.runs import open_runs as open_runs
    from steepen.results.study import open_study as open_study

    report: Any  # a package, which can be called
    __version__: str

# The module of each name of the API, in the order of the docstring.
MODULES = {
    "fit": "requests.fit",
    "power": "requests.power",
    "next_runs": "requests.next_runs",
    "keep": "requests.keep",
    "ledger": "requests.ledger",
    "paper": "requests.paper",
    "arms": "requests.arms",
    "plan": "requests.plan",
    "best_passes": "requests.arms",
    "spec": "requests.spec",
    "prepare": "requests.data",
    "train": "requests.train",
    "evaluate": "requests.evaluate",
    "generate": "requests.models",
    "export": "requests.models",
    "import_model": "requests.models",
    "ladder": "requests.study",
    "study": "requests.study",
    "dry_run_study": "requests.study",
    "open_study": "results.study",
    "status": "requests.status",
    "report": "report",  # the package itself, which can be called
    "open_runs": "results.runs",
    "downstream": "requests.forecast",
    "forecast": "requests.forecast",
    "pack": "requests.report",
    "unpack": "requests.report",
    "Arm": "model.arm",
    "StageSchedule": "model.stages",
    "SteepenError": "errors",
    "UsageError": "errors",
}
__all__ = list(MODULES)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    """Load a name of the API on first use, so that `import steepen` loads neither numpy nor torch."""
    if name in MODULES:
        module = importlib.import_module(f"steepen.{MODULES[name]}")
        globals()[name] = value = module if name == "report" else getattr(module, name)
        return value
    if name == "__version__":
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version("steepen")
        except PackageNotFoundError:  # run from a source tree that is not installed
            return _source_version()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """The names of the API."""
    return sorted({*globals(), *__all__, "__version__"})


def _source_version() -> str:
    """The version in the pyproject.toml beside `src/`, or "unknown" if there is none."""
    import tomllib
    from pathlib import Path

    try:
        text = (Path(__file__).resolve().parents[2] / "pyproject.toml").read_text(encoding="utf-8")
        return str(tomllib.loads(text)["project"]["version"])
    except (OSError, KeyError, ValueError, IndexError):
        return "unknown"
