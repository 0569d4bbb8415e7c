"""Evaluate CORE: every task and seed, each saved when finished, so that an evaluation can be resumed.

The flow: a bundle's items (`bundle`) become prompts in tokens (`prompt_encoding`), prompts rows of a batch,
whose losses the network gives (`scorer`); from these come outcomes of examples and scores of tasks
(`results`).
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from steepen.distributed.world import World
from steepen.errors import UsageError
from steepen.evaluation.core.bundle import Bundle, Task
from steepen.evaluation.core.prompt_encoding import Example, TaskEncoder, TextEncoder
from steepen.evaluation.core.results import Outcome, SuiteScores, TaskScore, make_outcome
from steepen.evaluation.core.scorer import (
    Row,
    ScoredModel,
    Scorer,
    make_batches,
    make_rows,
    supports_attention_mask,
)
from steepen.evaluation.core.suite import AUTHORS, find_convention
from steepen.utils.files import open_regular, write_atomically
from steepen.utils.json_io import parse_json
from steepen.utils.progress import StageProgressCallback
from steepen.utils.threads import map_ahead

PREFETCHED_JOBS = 3  # whose prompts are in memory, that which is scored included
PROTOCOL = 3  # incremented whenever the same settings would give other scores


@dataclass(frozen=True)
class CoreOptions:
    """Which examples to evaluate, and the batch size."""

    seeds: tuple[int, ...] | None = None  # of the demonstrations; None: the convention's
    examples: int | None = None  # maximum per task, always the same ones; None: all
    tasks: tuple[str, ...] | None = None  # labels; None: all of the bundle
    token_budget: int | None = None  # padded tokens per batch; None: by device
    share_prefixes: bool = True
    convention: str = AUTHORS.name

    def __post_init__(self) -> None:
        seeds = self.chosen_seeds  # raises for an unknown convention
        if not seeds or len(set(seeds)) < len(seeds) or min(seeds) < 0:
            raise UsageError(f"`seeds` = {seeds} are not valid: give one or more different counts from 0.")
        if self.tasks is not None and not self.tasks:
            raise UsageError("no task is given; name one or more.")

    @property
    def chosen_seeds(self) -> tuple[int, ...]:
        """The seeds given, or the convention's."""
        return find_convention(self.convention).seeds if self.seeds is None else self.seeds


@dataclass(frozen=True)
class _Job:
    """One task with one seed."""

    task: Task
    seed: int
    examples: int

    @property
    def name(self) -> str:
        return f"{self.task.label}.seed{self.seed}.jsonl"

    @property
    def label(self) -> str:
        return f"{self.task.label}, seed {self.seed}"

    @property
    def work(self) -> float:
        """Estimated cost, for the ETA: characters of the prompts, shared prefixes counted once."""
        sample = self.task.items[:: max(1, len(self.task.items) // 50)]
        shown = sum(sum(map(len, item.candidate(item.gold))) for item in sample)
        asked = sum(sum(map(len, item.contexts + item.answers)) for item in sample)
        return self.examples * (self.task.shots * shown + asked) / len(sample)


def evaluate_core(
    network: ScoredModel,
    tokenizer: TextEncoder,
    bundle: Bundle,
    options: CoreOptions | None = None,
    *,
    passes: int | None = None,
    folder: Path | None = None,
    progress: StageProgressCallback | None = None,
    world: World | None = None,
) -> SuiteScores:
    """Score a network on a bundle; with `world`, the examples are shared out among its ranks.

    With `folder`, every task's outcomes are saved there as JSON lines when it is done, and tasks already
    saved are not scored again: the folder must belong to exactly these settings (see `settings_key`).
    """
    options = options or CoreOptions()
    world = world or World()
    jobs = list(_jobs(bundle, options))
    found = _saved_jobs(folder, jobs, world)
    left = [job for job in jobs if job.name not in found]
    total, done = sum(job.work for job in jobs), sum(job.work for job in jobs if job.name in found)
    scorer = _JobScorer(network, tokenizer, options, passes, world)
    # Prompts of the next few jobs are encoded while one is scored.
    encoded = map_ahead(scorer.encode, left, 1, PREFETCHED_JOBS - 1, "steepen-prompts")
    with closing(encoded):
        for number, job in enumerate(left):

            def report(fraction: float, job: _Job = job, before: float = done) -> None:
                if progress:
                    progress("CORE", before + job.work * fraction, total, detail=job.label)

            world.progress(number, job.label)
            found[job.name] = _gather(scorer.score(job.task, *next(encoded), report), world)
            # Saved task by task, and whole: an evaluation that is stopped resumes with the next task.
            if world.is_main and folder is not None:
                write_atomically(folder / job.name, "".join(map(_line, found[job.name])))
            done += job.work
    by_task = [list(own) for _, own in groupby(jobs, lambda job: job.task.label)]
    scores = [TaskScore.of(own[0].task, {job.seed: found[job.name] for job in own}) for own in by_task]
    return SuiteScores(tuple(scores), options.chosen_seeds, options.convention)


def _gather(mine: list[Outcome], world: World) -> list[Outcome]:
    """The outcomes of all ranks in the order of the examples: rank r has the examples r, r + ranks, …"""
    parts = world.all_gather_objects(list(map(vars, mine)))
    values = sorted((value for part in parts for value in part), key=lambda value: value["index"])
    return list(map(_outcome, values))


def _outcome(value: dict[str, Any]) -> Outcome:
    """An outcome from JSON values."""
    return replace(Outcome(**value), losses=tuple(value["losses"]))


class _JobScorer:
    """Encodes and scores jobs, or this rank's examples of them, with one network."""

    def __init__(
        self,
        network: ScoredModel,
        tokenizer: TextEncoder,
        options: CoreOptions,
        passes: int | None,
        world: World,
    ) -> None:
        self.world = world
        self.tokenizer, self.context = tokenizer, network.shape.context
        self.scorer = Scorer(network, passes)
        self.convention = find_convention(options.convention)
        self.share_prefixes = options.share_prefixes and supports_attention_mask(network)
        on_gpu = self.scorer.device.type == "cuda"
        self.token_budget = options.token_budget or (131_072 if on_gpu else 4096)
        self.mask_budget = 1 << (26 if on_gpu else 22)
        self.encoder: TaskEncoder | None = None

    def encode(self, job: _Job) -> tuple[list[Example], list[Row]]:
        """A job's examples and their rows; the spans of an example have consecutive numbers."""
        if self.encoder is None or self.encoder.task is not job.task:  # one for all seeds of a task
            self.encoder = TaskEncoder(job.task, self.tokenizer, self.context, self.convention)
            if job.examples == len(job.task.items):
                self.encoder.encode_all()
        mine = range(self.world.rank, job.examples, self.world.size)
        examples = [self.encoder.example(index, job.seed) for index in mine]
        rows: list[Row] = []
        spans = 0
        for example in examples:
            rows += make_rows(example, spans, self.share_prefixes)
            spans += len(example.spans)
        return examples, rows

    def score(
        self, task: Task, examples: list[Example], rows: list[Row], progress: Callable[[float], None]
    ) -> list[Outcome]:
        """The outcome of every example; `progress` receives the fraction done."""
        if not examples:  # a rank without any
            return []
        total = sum(map(len, rows))
        batches = make_batches(rows, self.token_budget, self.mask_budget)
        spans = sum(len(example.spans) for example in examples)
        answers = self.scorer.score(batches, spans, lambda done: progress(done / total))
        outcomes: list[Outcome] = []
        first = 0
        for example in examples:
            means = [answers.mean(first + candidate) for candidate in range(len(example.sequences))]
            whole = example.answer_start is not None  # its span follows those of the candidates
            own = first + (len(means) if whole else example.gold)  # the right answer's
            nll, size = answers.mean(own) if whole else None, example.answer_bytes
            bits = float(answers.loss[own]) / math.log(2) / size if size else None
            outcomes.append(make_outcome(task.kind, example, means, bool(answers.exact[first]), nll, bits))
            first += len(example.spans)
        return outcomes


def settings_key(settings: dict[str, Any]) -> str:
    """Twelve hex digits of the hash of all settings that decide a score; names a folder of outcomes."""
    text = json.dumps({"protocol": PROTOCOL, **settings}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _jobs(bundle: Bundle, options: CoreOptions) -> Iterator[_Job]:
    labels = options.tasks or tuple(task.label for task in bundle.tasks)
    # Seeds of one task after another: its encoded segments are reused for all of them.
    for label in labels:
        task = bundle.task(label)
        # Without demonstrations every seed gives the same prompts: one is enough.
        for seed in options.chosen_seeds if task.shots else options.chosen_seeds[:1]:
            yield _Job(task, seed, min(len(task.items), options.examples or len(task.items)))


def _line(outcome: Outcome) -> str:
    """An outcome as a line of JSON, with a checksum of its other fields as the last one."""
    text = json.dumps(vars(outcome))
    return f'{text[:-1]}, "checksum": "{hashlib.sha256(text.encode()).hexdigest()[:16]}"}}\n'


def _saved_jobs(folder: Path | None, jobs: list[_Job], world: World) -> dict[str, list[Outcome]]:
    """The outcomes of finished jobs by name, as rank 0 reads them: ranks must agree on what is left."""
    own = {job.name: _saved(folder, job) for job in jobs}
    values = world.broadcast_object({name: one and list(map(vars, one)) for name, one in own.items()})
    return {name: list(map(_outcome, found)) for name, found in values.items() if found is not None}


def _saved(folder: Path | None, job: _Job) -> list[Outcome] | None:
    """The saved outcomes of a finished job; None if there are none, or not all, or if one was altered."""
    if folder is None or not (folder / job.name).is_file():
        return None
    outcomes: list[Outcome] = []
    try:
        with open(folder / job.name, encoding="utf-8", opener=open_regular) as file:
            for line in file:
                value = parse_json(line)
                del value["checksum"]
                outcomes.append(_outcome(value))
                if line != _line(outcomes[-1]):
                    return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
    return outcomes if [outcome.index for outcome in outcomes] == list(range(job.examples)) else None
