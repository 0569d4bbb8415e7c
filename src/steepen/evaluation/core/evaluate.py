"""The suite from end to end: tasks and seeds in turn, each saved when done, so that none is done twice."""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from steepen.data import Tokenizer
from steepen.errors import UsageError
from steepen.evaluation.core.bundle import Bundle, Task
from steepen.evaluation.core.prefix_tree import Row, make_batches, make_rows
from steepen.evaluation.core.prompt_encoding import Example, TaskEncoder
from steepen.evaluation.core.results import Outcome, SuiteScores, TaskScore, judge
from steepen.evaluation.core.scorer import Scorer, can_branch
from steepen.model.network import Network
from steepen.utils.files import write_atomically

AHEAD = 3  # tasks whose prompts are made before they are scored
PROTOCOL = 1  # raised whenever the same settings would give other scores


@dataclass(frozen=True)
class CoreOptions:
    """What is asked of the suite, and how much at a time."""

    seeds: tuple[int, ...] = (0, 1, 2)  # draws of demonstrations; the paper's
    examples: int | None = None  # at most so many per task, always the same ones; None: all
    tasks: tuple[str, ...] | None = None  # by label; None: all of the bundle
    token_budget: int | None = None  # padded tokens in a batch; None: by device
    share_prefixes: bool = True

    def __post_init__(self) -> None:
        if not self.seeds or len(set(self.seeds)) < len(self.seeds) or min(self.seeds) < 0:
            raise UsageError(f"seeds {self.seeds} are not valid: give one or more different counts from 0.")
        for name in ("examples", "token_budget"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"--{name.replace('_', '-')} {value} is not valid: it must be at least 1.")
        if self.tasks is not None and not self.tasks:
            raise UsageError("no task is asked for; name one or more.")


@dataclass(frozen=True)
class Progress:
    """How far a long evaluation is, in shares of its work."""

    what: str
    done: float
    total: float


Report = Callable[[Progress], None]


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
    def work(self) -> float:
        """A guess at its tokens, for the time left: characters of prompts, shared parts counted once."""
        sample = self.task.items[:: max(1, len(self.task.items) // 50)]
        solved = sum(sum(map(len, item.candidate(item.gold))) for item in sample) / len(sample)
        asked = sum(sum(map(len, item.contexts)) + sum(map(len, item.answers)) for item in sample) / len(
            sample
        )
        return self.examples * (self.task.shots * solved + asked)


@dataclass(frozen=True)
class _Prepared:
    """A job's examples as rows; example i's candidates have consecutive slots."""

    examples: list[Example]
    rows: list[Row]
    slots: int


def evaluate_core(
    network: Network,
    tokenizer: Tokenizer,
    bundle: Bundle,
    options: CoreOptions | None = None,
    *,
    passes: int | None = None,
    folder: Path | None = None,
    report: Report | None = None,
) -> SuiteScores:
    """Score a network on a bundle.

    With `folder`, every task's outcomes are saved there as JSON lines when it is done, and tasks already
    saved are not scored again: the folder must belong to these very settings (see `settings_key`).
    """
    options = options or CoreOptions()
    jobs = list(_jobs(bundle, options))
    found = {job.name: outcomes for job in jobs if (outcomes := _saved(folder, job)) is not None}
    left = [job for job in jobs if job.name not in found]
    total, done = sum(job.work for job in jobs), sum(job.work for job in jobs if job.name in found)
    examiner = _Examiner(network, tokenizer, options, passes)
    waiting: deque[Future[_Prepared]] = deque()
    # Prompts of the next few tasks are encoded while one is scored; no more than that waits in memory.
    with ThreadPoolExecutor(1, thread_name_prefix="steepen-prompts") as ahead:
        try:
            for number, job in enumerate(left):
                soon = left[number + len(waiting) : number + AHEAD]
                waiting.extend(ahead.submit(examiner.prepare, later) for later in soon)

                def progress(share: float, job: _Job = job, before: float = done) -> None:
                    if report:
                        what = f"{job.task.label}, seed {job.seed}"
                        report(Progress(what, before + job.work * share, total))

                outcomes = examiner.score(job.task, waiting.popleft().result(), progress)
                _save(folder, job, outcomes)
                found[job.name] = outcomes
                done += job.work
        finally:
            for future in waiting:
                future.cancel()
    return _collect(jobs, found, options)


class _Examiner:
    """One network, ready to be asked any job."""

    def __init__(
        self, network: Network, tokenizer: Tokenizer, options: CoreOptions, passes: int | None
    ) -> None:
        self.tokenizer, self.context = tokenizer, network.shape.context
        self.scorer = Scorer(network, passes)
        self.share = options.share_prefixes and can_branch(network)
        on_gpu = self.scorer.device.type == "cuda"
        self.token_budget = options.token_budget or (131_072 if on_gpu else 4096)
        self.mask_budget = 1 << (26 if on_gpu else 22)
        self.encoder: TaskEncoder | None = None

    def prepare(self, job: _Job) -> _Prepared:
        """A job's prompts as rows. A task's texts are encoded once for all its seeds, then forgotten."""
        if self.encoder is None or self.encoder.task is not job.task:
            self.encoder = TaskEncoder(job.task, self.tokenizer, self.context)
            if job.examples == len(job.task.items):
                self.encoder.cut_all()
        examples = [self.encoder.example(index, job.seed) for index in range(job.examples)]
        rows: list[Row] = []
        slots = 0
        for example in examples:
            rows += make_rows(example, slots, self.share)
            slots += len(example.sequences)
        return _Prepared(examples, rows, slots)

    def score(self, task: Task, prepared: _Prepared, progress: Callable[[float], None]) -> list[Outcome]:
        """The outcome of every example. `progress` is told the share done."""
        total, seen = sum(len(row) for row in prepared.rows), 0

        def count(tokens: int) -> None:
            nonlocal seen
            seen += tokens
            progress(min(1.0, seen / total))

        batches = make_batches(prepared.rows, self.token_budget, self.mask_budget)
        answers = self.scorer.answers(batches, prepared.slots, count)
        outcomes: list[Outcome] = []
        slot = 0
        for example in prepared.examples:
            means = [answers.mean(slot + place) for place in range(len(example.sequences))]
            exact = bool(answers.exact[slot])
            outcomes.append(judge(task.kind, example.index, example.line, example.gold, means, exact))
            slot += len(means)
        return outcomes


def settings_key(settings: dict[str, Any]) -> str:
    """Twelve digits that name a folder of results by everything that decides them."""
    text = json.dumps({"protocol": PROTOCOL, **settings}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _jobs(bundle: Bundle, options: CoreOptions) -> Iterator[_Job]:
    labels = options.tasks or tuple(task.label for task in bundle.tasks)
    for label in labels:
        task = bundle.task(label)
        # Without demonstrations there is nothing to draw: one seed stands for all.
        for seed in options.seeds if task.shots else options.seeds[:1]:
            yield _Job(task, seed, min(len(task.items), options.examples or len(task.items)))


def _collect(jobs: Sequence[_Job], found: dict[str, list[Outcome]], options: CoreOptions) -> SuiteScores:
    by_task: dict[str, dict[int, Sequence[Outcome]]] = {}
    tasks: dict[str, Task] = {}
    for job in jobs:
        tasks[job.task.label] = job.task
        by_task.setdefault(job.task.label, {})[job.seed] = found[job.name]
    scores = tuple(TaskScore.of(tasks[label], outcomes) for label, outcomes in by_task.items())
    return SuiteScores(scores, options.seeds)


def _save(folder: Path | None, job: _Job, outcomes: list[Outcome]) -> None:
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        lines = "".join(json.dumps(asdict(outcome)) + "\n" for outcome in outcomes)
        write_atomically(folder / job.name, lines.encode())


def _saved(folder: Path | None, job: _Job) -> list[Outcome] | None:
    """The outcomes of a job that was finished before; None where there are none, or not all."""
    if folder is None or not (folder / job.name).is_file():
        return None
    try:
        with (folder / job.name).open(encoding="utf-8") as file:
            lines: list[dict[str, Any]] = [json.loads(line) for line in file]
        outcomes = [replace(Outcome(**line), losses=tuple(line["losses"])) for line in lines]
    except (ValueError, TypeError, KeyError):
        return None
    return outcomes if [outcome.index for outcome in outcomes] == list(range(job.examples)) else None
