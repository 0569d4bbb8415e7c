"""The verbs by name. A verb's module is imported when the verb is used, never for `steepen --help`."""

from __future__ import annotations

import functools
import importlib
from dataclasses import dataclass
from typing import Any

from steepen.errors import UsageError, nearest
from steepen.requests.request import Request
from steepen.studies.registry import STUDIES

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
    target: str  # module:Class beside this file, or with a member the function that makes its class
    summary: str  # one line of `steepen --help`
    panel: str = "Commands"
    about: str = ""  # of a group: more of its help
    member: str = ""  # of a group whose requests one function makes: the study

    def load(self) -> type[Request[Any]]:
        """The class of the request."""
        module, _, attribute = self.target.partition(":")
        found = getattr(importlib.import_module(f"steepen.requests.{module}"), attribute)
        return found(self.member) if self.member else found


VERBS: dict[str, Verb] = {
    verb.name: verb
    for verb in (
        Verb("arms", "arms:Arms", "List the arms and their sizes.", PLAN),
        Verb("plan", "plan:Plan", "Plan one run: size, tokens, hyperparameters, cost.", PLAN),
        Verb("best-passes", "arms:BestPasses", "The best number of core passes at a size.", PLAN),
        Verb("power", "power:Power", "Statistical power of a planned ladder.", PLAN),
        Verb("train", "train:Train", "Train or resume one run.", RUN),
        Verb("study", "", "Run or resume a study: all its runs and its answer.", RUN,
             "A custom study is named module:function. [bold]steepen study NAME --help[/bold] has the "
             "options of a study."),
        *(Verb(f"study {one.name}", "study:request_of", one.question, member=one.name)
          for one in STUDIES.values()),
        Verb("data", "", "Prepare, show and verify tokenized text.", RUN),
        Verb("data prepare", "data:Prepare", "Tokenize text into shards."),
        Verb("data show", "data:ShowData", "Show what a prepared directory holds."),
        Verb("data verify", "data:VerifyData", "Verify every byte of a prepared directory."),
        Verb("status", "status:Status", "Show the progress of a study.", INSPECT),
        Verb("serve", "status:Serve", "Show studies in a browser while they run.", INSPECT),
        Verb("pack", "report:Pack", "Pack a study into one file, to share or move it.", INSPECT),
        Verb("unpack", "report:Unpack", "Unpack a study.", INSPECT),
        Verb("runs", "runs:ListRuns", "List, show, compare and clean runs.", INSPECT),
        Verb("runs show", "runs:ShowRun", "Show everything about a run."),
        Verb("runs compare", "runs:CompareRuns", "Show the fields in which two runs differ."),
        Verb("runs clean", "runs:CleanRuns", "Free disk space."),
        Verb("fit", "fit:Fit", "Fit scaling laws to a table and judge the arms.", ANALYSE),
        Verb("next", "next_runs:Next", "The runs to make next, or that none is worth it.", ANALYSE),
        Verb("keep", "keep:Keep", "Keep this change? An answer for programs.", ANALYSE),
        Verb("ledger", "ledger:Ledger", "Registered forecasts and how they did.", ANALYSE),
        Verb("paper", "paper:Paper", "Show a figure, table or claim of the paper.", ANALYSE),
        Verb("forecast", "forecast:Forecast", "Forecast CORE at a larger compute budget.", ANALYSE),
        Verb("downstream", "forecast:Downstream",
             "Scores along ladders, at equal loss, and beyond.", ANALYSE),
        Verb("report", "report:Report", "Write a study's page, figures and tables.", ANALYSE),
        Verb("eval", "evaluate:Evaluate", "Score a checkpoint: loss, CORE, KL depth, passes.", ANALYSE),
        Verb("eval filter", "evaluate:FilterTasks", "Select tasks above chance that improve."),
        Verb("eval fetch-core", "evaluate:FetchCore", "Download the CORE bundle."),
        Verb("generate", "models:Generate", "Continue a prompt with a trained network.", MODELS),
        Verb("export", "models:Export", "Export a run to transformers or safetensors.", MODELS),
        Verb("import", "models:ImportModel", "Import an exported model as a run.", MODELS),
    )
}  # fmt: skip


def find_verb(name: str) -> Verb | None:
    """The verb of some words; a study that is not listed is a custom one (`study module:function`)."""
    group, _, member = name.partition(" ")
    if name in VERBS or group != "study" or not member or member.startswith("-"):
        return VERBS.get(name)
    return Verb(name, "study:request_of", "", member=member)


def load(name: str) -> type[Request[Any]]:
    """The request of a verb; raises UsageError for a name that is none."""
    verb = find_verb(name)
    if verb is None or not verb.target:
        known = [one.name for one in VERBS.values() if one.target]
        raise UsageError(f"there is no verb {name!r}; the nearest are {nearest(name, known)}.")
    return verb.load()


@functools.cache
def verb_of(kind: type[Request[Any]]) -> Verb:
    """The row of a request's class."""
    target = f"{kind.__module__.rpartition('.')[2]}:{kind.__qualname__}"
    return next(verb for verb in VERBS.values() if verb.target == target)
