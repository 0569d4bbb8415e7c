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
    target: str  # module:Class, or with a member the function that makes its class
    summary: str  # one line of `steepen --help`
    panel: str = "Commands"
    about: str = ""  # of a group: more of its help
    member: str = ""  # of a group whose requests one function makes: the study

    def load(self) -> type[Request[Any]]:
        """The class of the request."""
        module, _, attribute = self.target.partition(":")
        found = getattr(importlib.import_module(module), attribute)
        return found(self.member) if self.member else found


_HERE = "steepen.requests"
VERBS: dict[str, Verb] = {
    verb.name: verb
    for verb in (
        Verb("arms", f"{_HERE}.arms:Arms", "List the arms and their sizes.", PLAN),
        Verb("plan", f"{_HERE}.plan:Plan", "Plan one run: size, tokens, hyperparameters, cost.", PLAN),
        Verb("best-passes", f"{_HERE}.arms:BestPasses", "The best number of core passes at a size.",
             PLAN),
        Verb("power", f"{_HERE}.power:Power", "Statistical power of a planned ladder.", PLAN),
        Verb("train", f"{_HERE}.train:Train", "Train or resume one run.", RUN),
        Verb("study", "", "Run or resume a study: all its runs and its answer.", RUN,
             "A custom study is named module:function. [bold]steepen study NAME --help[/bold] has the "
             "options of a study."),
        *(Verb(f"study {one.name}", f"{_HERE}.study:request_of", one.question, member=one.name)
          for one in STUDIES.values()),
        Verb("data", "", "Prepare, show and verify tokenized text.", RUN),
        Verb("data prepare", f"{_HERE}.data:Prepare", "Tokenize text into shards."),
        Verb("data show", f"{_HERE}.data:ShowData", "Show what a prepared directory holds."),
        Verb("data verify", f"{_HERE}.data:VerifyData", "Verify every byte of a prepared directory."),
        Verb("status", f"{_HERE}.status:Status", "Show the progress of a study.", INSPECT),
        Verb("serve", f"{_HERE}.status:Serve", "Show studies in a browser while they run.", INSPECT),
        Verb("pack", f"{_HERE}.report:Pack", "Pack a study into one file, to share or move it.", INSPECT),
        Verb("unpack", f"{_HERE}.report:Unpack", "Unpack a study.", INSPECT),
        Verb("runs", f"{_HERE}.runs:ListRuns", "List, show, compare and clean runs.", INSPECT),
        Verb("runs show", f"{_HERE}.runs:ShowRun", "Show everything about a run."),
        Verb("runs compare", f"{_HERE}.runs:CompareRuns", "Show the fields in which two runs differ."),
        Verb("runs clean", f"{_HERE}.runs:CleanRuns", "Free disk space."),
        Verb("fit", f"{_HERE}.fit:Fit", "Fit scaling laws to a table and judge the arms.", ANALYSE),
        Verb("next", f"{_HERE}.next_runs:Next", "The runs to make next, or that none is worth it.",
             ANALYSE),
        Verb("keep", f"{_HERE}.keep:Keep", "Keep this change? An answer for programs.", ANALYSE),
        Verb("ledger", f"{_HERE}.ledger:Ledger", "Registered forecasts and how they did.", ANALYSE),
        Verb("paper", f"{_HERE}.paper:Paper", "Show a figure, table or claim of the paper.", ANALYSE),
        Verb("forecast", f"{_HERE}.forecast:Forecast", "Forecast CORE at a larger compute budget.", ANALYSE),
        Verb("downstream", f"{_HERE}.forecast:Downstream",
             "Scores along ladders, at equal loss, and beyond.", ANALYSE),
        Verb("report", f"{_HERE}.report:Report", "Write a study's page, figures and tables.", ANALYSE),
        Verb("eval", f"{_HERE}.evaluate:Evaluate", "Score a checkpoint: loss, CORE, KL depth, passes.",
             ANALYSE),
        Verb("eval filter", f"{_HERE}.evaluate:FilterTasks", "Select tasks above chance that improve."),
        Verb("eval fetch-core", f"{_HERE}.evaluate:FetchCore", "Download the CORE bundle."),
        Verb("generate", f"{_HERE}.models:Generate", "Continue a prompt with a trained network.", MODELS),
        Verb("export", f"{_HERE}.models:Export", "Export a run to transformers or safetensors.", MODELS),
        Verb("import", f"{_HERE}.models:ImportModel", "Import an exported model as a run.", MODELS),
    )
}  # fmt: skip


def find_verb(name: str) -> Verb | None:
    """The verb of some words; a study that is not listed is a custom one (`study module:function`)."""
    group, _, member = name.partition(" ")
    if name in VERBS or group != "study" or not member or member.startswith("-"):
        return VERBS.get(name)
    return Verb(name, f"{_HERE}.study:request_of", "", member=member)


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
    target = f"{kind.__module__}:{kind.__qualname__}"
    return next(verb for verb in VERBS.values() if verb.target == target)
