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

    __version__: str

_LAZY = {
    "fit": "steepen.requests.fit",
    "power": "steepen.requests.power",
    "next_runs": "steepen.requests.next_runs",
    "keep": "steepen.requests.keep",
    "ledger": "steepen.requests.ledger",
    "paper": "steepen.requests.paper",
    "spec": "steepen.requests.spec",
    "train": "steepen.requests.train",
    "plan": "steepen.requests.plan",
    **dict.fromkeys(("arms", "best_passes"), "steepen.requests.arms"),
    "prepare": "steepen.requests.data",
    "evaluate": "steepen.requests.evaluate",
    **dict.fromkeys(("ladder", "study", "dry_run_study"), "steepen.requests.study"),
    "open_study": "steepen.results.study",
    "status": "steepen.requests.status",
    **dict.fromkeys(("downstream", "forecast"), "steepen.requests.forecast"),
    "open_runs": "steepen.results.runs",
    **dict.fromkeys(("generate", "export", "import_model"), "steepen.requests.models"),
    **dict.fromkeys(("pack", "unpack"), "steepen.requests.report"),
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
        value = getattr(importlib.import_module(_LAZY[name]), name)
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
