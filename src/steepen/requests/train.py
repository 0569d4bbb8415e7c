"""`train`: one run, from its size or from a spec, in this process or in one rank per GPU."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from steepen.errors import RemoteError, UsageError
from steepen.requests.request import Request, fields_of, function, print_notes, print_to_stderr
from steepen.requests.spec import (
    RUN,
    ArmField,
    DataField,
    DepthField,
    SpecFields,
    choose_precision,
    open_data,
)
from steepen.training.train_options import EXECUTION, TrainOptions
from steepen.utils.codec import HelpPanel, Range
from steepen.utils.process import create_cuda_context, import_torch
from steepen.utils.values import Integers

if TYPE_CHECKING:
    from steepen.data import Dataset
    from steepen.distributed.processes import NodeGroup
    from steepen.evaluation.score_options import ScoreOptions
    from steepen.results.runs import Run
    from steepen.runs.record import RunRecord
    from steepen.runs.spec import RunSpec

EVALUATION = HelpPanel("Evaluation of the finished run")
# Measured on one core; the table is in docs/log.md ("bf16 on a CPU").
BF16_ON_CPU = (
    "this run uses bf16, which is about 10 times slower than fp32 on a CPU without bf16 instructions; "
    "`precision` fp32 trains another run (its own hash)."
)
SMALL_RUN_FLOPS = 1e14  # some minutes on one core


@dataclass(frozen=True)
class Train(SpecFields, TrainOptions, Request["Run"]):
    """Train one run, or resume it.

    The same command resumes an interrupted run; for a finished run it prints the result without training.
    """

    examples = (
        "steepen train --arm untied-grow --depth 8 --data data/edu",
        "steepen train --spec spec.json --data data/edu --gpus 8",
    )

    spec: Any = RUN(
        "Spec file (JSON or YAML), instead of `arm` and `depth`.",
        metavar="<path>",
        python="Also a RunSpec or a dict.",
    )
    data: DataField = None
    _: KW_ONLY
    arm: ArmField = None
    depth: DepthField = None
    runs: Path = RUN("Directory of all runs.", Path("runs"))
    write_spec: Path | None = RUN("Write the spec to this file, print its hash and do not train.")
    gpus: int | None = EXECUTION(
        "Train on this many GPUs of this machine (with `device` cpu: processes); torchrun and srun start "
        "ranks on several machines.",
        limits=Range(1, 10_000),
    )
    max_restarts: int = EXECUTION(
        "With `gpus`: how often to restart from the last checkpoint when a rank is lost.", 0, Range(0, 10**6)
    )
    core: Path | None = EVALUATION("CORE evaluation bundle to score the run on.")
    core_examples: int | None = EVALUATION(
        "Maximum number of examples per CORE task.", limits=Range(1, 10**9)
    )
    kl_depth: bool = EVALUATION("Measure KL effective depth.", False)
    passes: Integers | None = EVALUATION("Measure the loss at these core passes: 1-8.")

    def check(self) -> None:
        """Reject fields that a spec decides beside one, prompts of no samples, and missing trackers."""
        if self.spec is not None:
            decided = {"arm", "depth", *(field.name for field in fields(SpecFields))}
            decided -= {"changes", "optimizer", "stop_after"}
            for field in fields_of(type(self)):
                if field.name in decided and getattr(self, field.name) != field.default:
                    raise UsageError(f"`{field.name}` is set by the spec; change the spec, or use `changes`.")
        elif self.arm is None or self.depth is None:
            raise UsageError("nothing to train: give `arm` and `depth`, or `spec`.")
        if self.sample_prompt and self.sample_every is None:
            raise UsageError("`sample_prompt` needs `sample_every`.")
        if self.track:
            from steepen.training.trackers import require_installed

            require_installed(self.track)

    def run(self) -> Run:
        """Train to the end, and return the run; nothing is printed unless `quiet` is False."""
        from steepen.results.runs import open_runs

        dataset = open_data(self.data)
        found, _ = self.find_spec(dataset)
        self._train(dataset, found, quiet=True)
        return open_runs(self.runs)[found.hash]

    def run_in_worker(self) -> dict[str, Any] | None:
        """Train with progress on stderr; returns the record, None on a node that may not see it yet."""
        dataset = open_data(self.data)
        run, _ = self.find_spec(dataset)
        import_torch()
        record = self._train(dataset, run, quiet=False)
        return None if record is None else record.to_dict()

    def run_in_terminal(self, as_json: bool = False) -> None:
        """Train with progress on stderr, then print the loss and the directory of the run, or the record."""
        from steepen.distributed.environment import process_environment

        # Of ranks each has a GPU of its own, and the process that starts them needs none.
        if self.write_spec is None and self.gpus in (None, 1) and process_environment().size == 1:
            create_cuda_context(self.device)
        from steepen.runs.spec import expected_flops
        from steepen.utils.json_io import to_json, write_json

        dataset = open_data(self.data)
        run, notes = self.find_spec(dataset)
        if self.write_spec is not None:
            write_json(self.write_spec, run.to_dict())
            print(run.hash)
            return
        import_torch()
        main = process_environment().is_main
        # Done in a moment: its result comes first. A single step may be far more tokens than were asked for.
        small = expected_flops(run) < SMALL_RUN_FLOPS and run.steps > 1
        if main:
            self._print_notes([*(() if small else notes), *self._speed_notes(run)])
        record = self._train(dataset, run, quiet=False, as_json=as_json)
        if record is None or not main:
            return
        if as_json:
            print(to_json(record.to_dict()))
            return
        print(f"{_result_sentence(run, record)}\n{self.runs / run.hash}")
        self._print_notes([*(notes if small else ()), *record.remarks])

    def _speed_notes(self, run: RunSpec) -> list[str]:
        """That bf16 is slow on this machine, of a run that is not finished and whose spec was not given."""
        from steepen.runs.store import RunStore

        slow = run.precision == "bf16" and choose_precision("auto", self.device) == "fp32"
        return [BF16_ON_CPU] if slow and self.spec is None and RunStore(self.runs).record(run) is None else []

    def find_spec(self, dataset: Dataset) -> tuple[RunSpec, tuple[str, ...]]:
        """The run's spec, and what the planner says about it."""
        from steepen.runs.spec import RunSpec, override, read_spec

        if self.spec is None:
            return self.make_spec(dataset, self.arm, cast("int", self.depth), self.device)
        given = self.spec
        if not isinstance(given, RunSpec):
            given = read_spec(Path(given)) if isinstance(given, str | Path) else RunSpec.from_dict(given)
        return override(given, self.settings()), ()

    def _train(self, dataset: Dataset, run: RunSpec, quiet: bool, as_json: bool = False) -> RunRecord | None:
        """Train here or on ranks, then evaluate if asked to; returns the record."""
        from steepen.distributed.environment import process_environment
        from steepen.distributed.processes import NodeGroup
        from steepen.launch.worker import NODES_VARIABLE
        from steepen.runs.store import RunStore
        from steepen.training.run import train as train_run

        store, place, wanted = RunStore(self.runs), process_environment(), self._scores()
        if self.gpus is not None and place.size > 1:
            raise UsageError("`gpus` starts the processes itself: leave it out under torchrun or srun.")
        # The nodes of this run, as a launcher has set them for this process; None: this one only.
        listed = os.environ.get(NODES_VARIABLE) if place.size == 1 else None
        nodes = None if listed is None else NodeGroup.parse(listed)
        if ((self.gpus or 1) > 1 or nodes is not None) and store.record(run) is None:
            self._train_on_ranks(dataset, run, nodes)
            if nodes is not None:  # the record may not be visible here yet
                return None
        options = replace(self, quiet=quiet if self.quiet is None else self.quiet)
        record = train_run(run, dataset, store, options)
        if wanted is None or not place.is_main:
            return record
        return self._evaluate(dataset, run, wanted, show=not (quiet or as_json)) or record

    def _scores(self) -> ScoreOptions | None:
        """What to score after training; a wrong bundle is rejected before it."""
        if self.core is None and not self.kl_depth and self.passes is None:
            return None
        from steepen.evaluation.score_options import ScoreOptions

        found = ScoreOptions(
            core=self.core, kl_depth=self.kl_depth, passes=self.passes, core_examples=self.core_examples
        )
        found.check_scores()
        return found

    def _evaluate(self, dataset: Dataset, run: RunSpec, wanted: ScoreOptions, show: bool) -> RunRecord | None:
        from steepen.evaluation.evaluate_run import evaluate
        from steepen.results.evaluate import score_blocks
        from steepen.results.text import print_blocks
        from steepen.runs.store import RunStore

        found = evaluate(
            self.runs / run.hash, dataset, wanted, update_record=True, device=self.device, quiet=not show
        )
        if show:
            print_blocks(lambda _: score_blocks(found.scores))
        self._print_notes(found.notes)
        return RunStore(self.runs).record(run)

    def _train_on_ranks(self, dataset: Dataset, run: RunSpec, nodes: NodeGroup | None) -> None:
        """Train in one process per GPU of this machine (and of others); raises what stopped them."""
        from steepen.distributed.processes import start_processes
        from steepen.launch.worker import PARENT_PID_VARIABLE, PROGRAM, python_path
        from steepen.runs.spec import code_digest

        gpus = self.gpus or 1
        _check_gpus(gpus, 1 if nodes is None else nodes.count, self.device, run.batch_sequences)
        if run.code is not None:
            code_digest(run.arm, run.optimizer)  # rejects code that is not trusted
        execution = {field.name: getattr(self, field.name) for field in fields(TrainOptions)}
        rank = Train(run, str(dataset.directory), runs=self.runs, **execution)
        failure = start_processes(
            gpus,
            PROGRAM,
            {"request": rank.to_dict(), "trust": run.code is not None},
            max_restarts=self.max_restarts,
            print_message=lambda sentence: print_to_stderr(f"steepen: {sentence}"),
            environment={
                PARENT_PID_VARIABLE: str(os.getpid()),
                "PYTHONPATH": python_path(),
                "PYTHONSAFEPATH": "1",
            },
            nodes=nodes,
        )
        if failure is not None:
            raise RemoteError(failure)

    def _print_notes(self, notes: Sequence[str]) -> None:
        sys.stdout.flush()
        print_notes(type(self), notes)


def _result_sentence(run: RunSpec, record: RunRecord) -> str:
    """Loss, tokens, FLOPs and speed of a finished run."""
    mfu = "" if record.mfu is None else f", MFU {record.mfu:.1%}"
    per_byte = record.validation_bits_per_byte
    bits = "" if per_byte is None else f" ({per_byte:.4f} bits per byte)"
    return (
        f"{run.arm.title} d{run.shape.depth}: validation loss {record.validation_loss:.4f}{bits} after "
        f"{record.tokens:,} tokens and {record.flops:.3e} FLOPs; {record.seconds_training:.1f} s of "
        f"training, {record.tokens_per_second:,.0f} tokens/s{mfu}."
    )


def _check_gpus(gpus: int, nodes: int, device: str, sequences: int) -> None:
    """Reject ranks that cannot share the batch, or more than GPUs, unless they share one that was named."""
    import torch

    from steepen.training.device import find_device

    if sequences % (gpus * nodes):
        raise UsageError(
            f"`gpus` = {gpus * nodes} is not possible: a batch of {sequences:,} sequences cannot be divided "
            "evenly."
        )
    found = find_device(device)
    if found.type == "cuda" and found.index is None and torch.cuda.device_count() < gpus:
        raise UsageError(
            f"`gpus` = {gpus} is not possible: this machine has {torch.cuda.device_count()} GPUs; start "
            "ranks on several machines with torchrun or srun (docs/distributed.md)."
        )


train = function(Train)
