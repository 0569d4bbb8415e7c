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
- `Arm`, `PassSchedule`: what a custom arm is made of

Results print a summary, have a short repr and HTML in notebooks, and `to_frame()`, `to_latex()`, `plot(ax=)`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from steepen.errors import SteepenError as SteepenError
    from steepen.errors import UsageError as UsageError
    from steepen.model.arm import Arm as Arm
    from steepen.model.stages import PassSchedule as PassSchedule
    from steepen.requests.arms import Arms, BestPasses
    from steepen.requests.data import Prepare
    from steepen.requests.evaluate import Evaluate
    from steepen.requests.fit import Fit
    from steepen.requests.forecast import Downstream, Forecast
    from steepen.requests.keep import Keep
    from steepen.requests.ledger import Ledger
    from steepen.requests.models import Export, Generate, ImportModel
    from steepen.requests.next_runs import Next
    from steepen.requests.paper import Paper
    from steepen.requests.plan import Plan
    from steepen.requests.power import Power
    from steepen.requests.report import Pack, Unpack
    from steepen.requests.request import function
    from steepen.requests.spec import Spec
    from steepen.requests.status import Status
    from steepen.requests.study import dry_run_study as dry_run_study
    from steepen.requests.study import ladder as ladder
    from steepen.requests.study import study as study
    from steepen.requests.train import Train
    from steepen.results.runs import open_runs as open_runs
    from steepen.results.study import open_study as open_study

    next_runs = function(Next)
    pack = function(Pack)
    unpack = function(Unpack)
    ledger = function(Ledger)
    fit = function(Fit)
    spec = function(Spec)
    power = function(Power)
    keep = function(Keep)
    prepare = function(Prepare)
    plan = function(Plan)
    evaluate = function(Evaluate)
    paper = function(Paper)
    generate = function(Generate)
    export = function(Export)
    import_model = function(ImportModel)
    status = function(Status)
    arms = function(Arms)
    best_passes = function(BestPasses)
    forecast = function(Forecast)
    downstream = function(Downstream)
    train = function(Train)

    __version__: str

# Where each name is; with a class, the function of that request.
_LAZY = {
    "fit": "steepen.requests.fit:Fit",
    "power": "steepen.requests.power:Power",
    "next_runs": "steepen.requests.next_runs:Next",
    "keep": "steepen.requests.keep:Keep",
    "ledger": "steepen.requests.ledger:Ledger",
    "paper": "steepen.requests.paper:Paper",
    "spec": "steepen.requests.spec:Spec",
    "train": "steepen.requests.train:Train",
    "plan": "steepen.requests.plan:Plan",
    "arms": "steepen.requests.arms:Arms",
    "best_passes": "steepen.requests.arms:BestPasses",
    "prepare": "steepen.requests.data:Prepare",
    "evaluate": "steepen.requests.evaluate:Evaluate",
    "status": "steepen.requests.status:Status",
    "downstream": "steepen.requests.forecast:Downstream",
    "forecast": "steepen.requests.forecast:Forecast",
    "generate": "steepen.requests.models:Generate",
    "export": "steepen.requests.models:Export",
    "import_model": "steepen.requests.models:ImportModel",
    "pack": "steepen.requests.report:Pack",
    "unpack": "steepen.requests.report:Unpack",
    **dict.fromkeys(("ladder", "study", "dry_run_study"), "steepen.requests.study"),
    "open_study": "steepen.results.study",
    "open_runs": "steepen.results.runs",
    "Arm": "steepen.model.arm",
    "PassSchedule": "steepen.model.stages",
    **dict.fromkeys(("SteepenError", "UsageError"), "steepen.errors"),
}
__all__ = [  # noqa: RUF022  (in the order of the docstring)
    "fit",
    "power",
    "next_runs",
    "keep",
    "ledger",
    "paper",
    "arms",
    "plan",
    "best_passes",
    "spec",
    "prepare",
    "train",
    "evaluate",
    "generate",
    "export",
    "import_model",
    "ladder",
    "study",
    "dry_run_study",
    "open_study",
    "status",
    "report",  # pyright: ignore[reportUnsupportedDunderAll]  (the package, which can be called)
    "open_runs",
    "downstream",
    "forecast",
    "pack",
    "unpack",
    "Arm",
    "PassSchedule",
    "SteepenError",
    "UsageError",
]


def __getattr__(name: str) -> Any:
    """Load a name of the API on first use, so that `import steepen` loads neither numpy nor torch."""
    if name in _LAZY:
        place, _, request = _LAZY[name].partition(":")
        value = getattr(importlib.import_module(place), request or name)
        if request:
            value = importlib.import_module("steepen.requests.request").function(value)
        globals()[name] = value
        return value
    if name == "report":  # a package that can be called
        return importlib.import_module("steepen.report")
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
