"""Evaluate CORE: every task and seed, each saved when finished, so that an evaluation can be resumed."""

from __future__ import annotations

import hashlib
import json
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from steepen.distributed.world import World
from steepen.errors import UsageError
from steepen.evaluation.core.bundle import Bundle, Task
from steepen.evaluation.core.prefix_tree import Row, make_batches, make_rows
from steepen.evaluation.core.prompt_encoding import Example, TaskEncoder, TextEncoder
from steepen.evaluation.core.results import Outcome, SuiteScores, TaskScore, make_outcome
from steepen.evaluation.core.scorer import ScoredModel, Scorer, supports_attention_mask
from steepen.evaluation.core.suite import AUTHORS, find_convention
from steepen.utils.files import open_regular, write_atomically
from steepen.utils.json_io import parse_json

PREFETCHED_JOBS = 3  # whose prompts are encoded before they are scored
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
        for name in ("examples", "token_budget"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"`{name}` = {value} is not valid: it must be at least 1.")
        if self.tasks is not None and not self.tasks:
            raise UsageError("no task is given; name one or more.")

    @property
    def chosen_seeds(self) -> tuple[int, ...]:
        """The seeds given, or the convention's."""
        return find_convention(self.convention).seeds if self.seeds is None else self.seeds


@dataclass(frozen=True)
class CoreProgress:
    """Progress of an evaluation, in estimated tokens."""

    job: str  # task and seed
    done: float
    total: float


ProgressCallback = Callable[[CoreProgress], None]


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
        """Estimated cost, for the ETA: characters of the prompts, shared prefixes counted once."""
        sample = self.task.items[:: max(1, len(self.task.items) // 50)]
        demonstration = sum(sum(map(len, item.candidate(item.gold))) for item in sample) / len(sample)
        question = sum(sum(map(len, item.contexts)) + sum(map(len, item.answers)) for item in sample) / len(
            sample
        )
        return self.examples * (self.task.shots * demonstration + question)


@dataclass(frozen=True)
class _EncodedJob:
    """A job's examples as rows; the spans of an example have consecutive numbers."""

    examples: list[Example]
    rows: list[Row]
    spans: int


def evaluate_core(
    network: ScoredModel,
    tokenizer: TextEncoder,
    bundle: Bundle,
    options: CoreOptions | None = None,
    *,
    passes: int | None = None,
    folder: Path | None = None,
    progress: ProgressCallback | None = None,
    world: World | None = None,
) -> SuiteScores:
    """Score a network on a bundle; with `world`, the examples are shared out among its ranks.

    With `folder`, every task's outcomes are saved there as JSON lines when it is done, and tasks already
    saved are not scored again: the folder must belong to exactly these settings (see `settings_key`).
    """
    options = options or CoreOptions()
    world = world or World()
    jobs = list(_jobs(bundle, options))
    found = {job.name: outcomes for job in jobs if (outcomes := _saved(folder, job)) is not None}
    found = _outcomes_of_main(found, world)
    left = [job for job in jobs if job.name not in found]
    total, done = sum(job.work for job in jobs), sum(job.work for job in jobs if job.name in found)
    scorer = _JobScorer(network, tokenizer, options, passes, world)
    pending: deque[Future[_EncodedJob]] = deque()
    # Prompts of the next few jobs are encoded while one is scored.
    with ThreadPoolExecutor(1, thread_name_prefix="steepen-prompts") as encoder:
        try:
            for number, job in enumerate(left):
                upcoming = left[number + len(pending) : number + PREFETCHED_JOBS]
                pending.extend(encoder.submit(scorer.encode, later) for later in upcoming)

                def report(fraction: float, job: _Job = job, before: float = done) -> None:
                    if progress:
                        name = f"{job.task.label}, seed {job.seed}"
                        progress(CoreProgress(name, before + job.work * fraction, total))

                world.progress(number, f"{job.task.label}, seed {job.seed}")
                outcomes = scorer.score(job.task, pending.popleft().result(), report)
                outcomes = _outcomes_of_all(outcomes, world)
                if world.is_main:
                    _save(folder, job, outcomes)
                found[job.name] = outcomes
                done += job.work
        finally:
            for future in pending:
                future.cancel()
    return _collect(jobs, found, options)


def _outcomes_of_all(outcomes: list[Outcome], world: World) -> list[Outcome]:
    """Every rank's outcomes of a job, by example: rank r has examples r, r + ranks, …"""
    if world.size == 1:
        return outcomes
    parts = world.all_gather_objects([asdict(outcome) for outcome in outcomes])
    together = [_outcome(value) for part in parts for value in part]
    return sorted(together, key=lambda outcome: outcome.index)


def _outcomes_of_main(found: dict[str, list[Outcome]], world: World) -> dict[str, list[Outcome]]:
    """The saved outcomes that rank 0 has found, on every rank."""
    if world.size == 1:
        return found
    values = world.broadcast_object({name: [asdict(each) for each in found[name]] for name in found})
    return {name: [_outcome(value) for value in each] for name, each in values.items()}


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

    def encode(self, job: _Job) -> _EncodedJob:
        """Encode a job's prompts as rows; the encoder of a task is reused for all its seeds."""
        if self.encoder is None or self.encoder.task is not job.task:
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
        return _EncodedJob(examples, rows, spans)

    def score(self, task: Task, encoded: _EncodedJob, progress: Callable[[float], None]) -> list[Outcome]:
        """The outcome of every example; `progress` receives the fraction done."""
        if not encoded.examples:  # a rank without any
            return []
        total, seen = sum(len(row) for row in encoded.rows), 0

        def count(tokens: int) -> None:
            nonlocal seen
            seen += tokens
            progress(min(1.0, seen / total))

        batches = make_batches(encoded.rows, self.token_budget, self.mask_budget)
        answers = self.scorer.score(batches, encoded.spans, count)
        outcomes: list[Outcome] = []
        first = 0
        for example in encoded.examples:
            means = [answers.mean(first + candidate) for candidate in range(len(example.sequences))]
            exact = bool(answers.exact[first])
            own = first + (example.gold if example.answer_start is None else len(means))  # the right answer's
            nll = None if example.answer_start is None else answers.mean(own)
            size, gold = example.answer_bytes, example.gold
            bits = float(answers.loss[own]) / math.log(2) / size if size else None
            outcomes.append(
                make_outcome(task.kind, example.index, example.line, gold, means, exact, nll, bits)
            )
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


def _collect(jobs: Sequence[_Job], found: dict[str, list[Outcome]], options: CoreOptions) -> SuiteScores:
    by_task: dict[str, dict[int, Sequence[Outcome]]] = {}
    tasks: dict[str, Task] = {}
    for job in jobs:
        tasks[job.task.label] = job.task
        by_task.setdefault(job.task.label, {})[job.seed] = found[job.name]
    scores = tuple(TaskScore.of(tasks[label], outcomes) for label, outcomes in by_task.items())
    return SuiteScores(scores, options.chosen_seeds, options.convention)


def _save(folder: Path | None, job: _Job, outcomes: list[Outcome]) -> None:
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        lines = "".join(_line(outcome) + "\n" for outcome in outcomes)
        write_atomically(folder / job.name, lines.encode())


_CHECKSUM = ', "checksum": "'


def _line(outcome: Outcome) -> str:
    """An outcome as JSON, with a checksum of its other fields as the last one."""
    text = json.dumps(asdict(outcome))
    return f'{text[:-1]}{_CHECKSUM}{_checksum(text)}"}}'


def _checksum(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _read_line(line: str) -> Outcome:
    """Inverse of `_line`; raises ValueError for a wrong checksum. Earlier versions wrote none."""
    fields, found, checksum = line.rstrip("\n").rpartition(_CHECKSUM)
    text = fields + "}" if found else line
    if found and checksum != f'{_checksum(text)}"}}':
        raise ValueError("the checksum does not match")
    return _outcome(parse_json(text))


def _saved(folder: Path | None, job: _Job) -> list[Outcome] | None:
    """The saved outcomes of a finished job; None if there are none, or not all, or if one was altered."""
    if folder is None or not (folder / job.name).is_file():
        return None
    try:
        with open(folder / job.name, encoding="utf-8", opener=open_regular) as file:
            outcomes = [_read_line(line) for line in file]
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return outcomes if [outcome.index for outcome in outcomes] == list(range(job.examples)) else None
