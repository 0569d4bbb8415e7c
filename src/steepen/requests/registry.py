"""The verbs by name. A verb's module is imported when the verb is used, never for `steepen --help`."""

from __future__ import annotations

import functools
import importlib
from dataclasses import dataclass
from typing import Any

from steepen.errors import UsageError, nearest
from steepen.requests.request import Request

# Groups of `steepen --help`, in the order in which a project uses them.
PLAN = "Plan"
RUN = "Run"
INSPECT = "Inspect"
ANALYSE = "Analyse"
MODELS = "Models"


@dataclass(frozen=True)
class Verb:
    """A row of the registry: the words on the command line, and where the request is.

    A verb without a target is a group, whose members have its name before their own (`data prepare`).
    """

    name: str
    target: str  # module:Class
    summary: str  # one line of `steepen --help`
    panel: str = "Commands"

    def load(self) -> Any:
        """The class of the request."""
        module, _, attribute = self.target.partition(":")
        return getattr(importlib.import_module(module), attribute)


_HERE = "steepen.requests"
_CLI = "steepen.cli"
VERBS: dict[str, Verb] = {
    verb.name: verb
    for verb in (
        Verb("arms", f"{_CLI}.plan:arms", "List the arms and their sizes.", PLAN),
        Verb("plan", f"{_CLI}.plan:plan", "Plan one run: size, tokens, hyperparameters, cost.", PLAN),
        Verb("best-passes", f"{_CLI}.best_passes:best_passes", "The best number of core passes at a size.",
             PLAN),
        Verb("power", f"{_HERE}.power:Power", "Statistical power of a planned ladder.", PLAN),
        Verb("train", f"{_HERE}.train:Train", "Train or resume one run.", RUN),
        Verb("study", f"{_CLI}.study:study", "Run or resume a study: all its runs and its answer.", RUN),
        Verb("data", f"{_CLI}.data:app", "Prepare, show and verify tokenized text.", RUN),
        Verb("status", f"{_CLI}.status:status", "Show the progress of a study.", INSPECT),
        Verb("serve", f"{_CLI}.serve:serve", "Show studies in a browser while they run.", INSPECT),
        Verb("pack", f"{_CLI}.pack:pack", "Pack a study into one file, to share or move it.", INSPECT),
        Verb("unpack", f"{_CLI}.pack:unpack", "Unpack a study.", INSPECT),
        Verb("runs", f"{_HERE}.runs:ListRuns", "List, show, compare and clean runs.", INSPECT),
        Verb("runs show", f"{_HERE}.runs:ShowRun", "Show everything about a run."),
        Verb("runs compare", f"{_HERE}.runs:CompareRuns", "Show the fields in which two runs differ."),
        Verb("runs clean", f"{_HERE}.runs:CleanRuns", "Free disk space."),
        Verb("fit", f"{_HERE}.fit:Fit", "Fit scaling laws to a table and judge the arms.", ANALYSE),
        Verb("forecast", f"{_HERE}.forecast:Forecast", "Forecast CORE at a larger compute budget.", ANALYSE),
        Verb("downstream", f"{_HERE}.forecast:Downstream",
             "Scores along ladders, at equal loss, and beyond.", ANALYSE),
        Verb("report", f"{_CLI}.report:report", "Write a study's page, figures and tables.", ANALYSE),
        Verb("eval", f"{_HERE}.evaluate:Evaluate", "Score a checkpoint: loss, CORE, KL depth, passes.",
             ANALYSE),
        Verb("eval filter", f"{_HERE}.evaluate:FilterTasks", "Select tasks above chance that improve."),
        Verb("eval fetch-core", f"{_HERE}.evaluate:FetchCore", "Download the CORE bundle."),
        Verb("generate", f"{_HERE}.models:Generate", "Continue a prompt with a trained network.", MODELS),
        Verb("export", f"{_HERE}.models:Export", "Export a run to transformers or safetensors.", MODELS),
        Verb("import", f"{_HERE}.models:ImportModel", "Import an exported model as a run.", MODELS),
    )
}  # fmt: skip


def load(name: str) -> type[Request[Any]]:
    """The request of a verb; raises UsageError for a name that is none."""
    verb = VERBS.get(name)
    if verb is None or not verb.target:
        known = [one.name for one in VERBS.values() if one.target]
        raise UsageError(f"there is no verb {name!r}; the nearest are {nearest(name, known)}.")
    return verb.load()


@functools.cache
def verb_of(kind: type[Request[Any]]) -> Verb:
    """The row of a request's class."""
    target = f"{kind.__module__}:{kind.__qualname__}"
    return next(verb for verb in VERBS.values() if verb.target == target)
