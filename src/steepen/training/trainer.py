"""Training one run, from its spec to its record; whatever interrupts it, the same call takes it up again."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from steepen.data import BatchLoader, Dataset, Prefetcher, ValidationSet
from steepen.errors import UsageError, is_out_of_memory
from steepen.execution.compile import compile_blocks
from steepen.execution.select import ExecutionMode, choose_execution_mode
from steepen.model.growth import grow
from steepen.model.mean_loss import mean_loss
from steepen.recipe.accounting import flops_per_token
from steepen.runs.record import RunRecord, ValidationScore
from steepen.runs.spec import RunSpec, code_digest
from steepen.runs.store import RunDirectory, RunStore
from steepen.training import checkpoint as checkpoints
from steepen.training import device as machine
from steepen.training.checkpoint import TrainingState
from steepen.training.data_loaders import make_loaders
from steepen.training.divergence import Diverged, diverged
from steepen.training.finished_record import make_record
from steepen.training.gradient_accumulation import GradientAccumulator, OutOfMemory
from steepen.training.metric_buffer import MetricBuffer
from steepen.training.metrics import Metrics
from steepen.training.resume import load_or_init, save
from steepen.training.signals import Interrupted, StopSignals
from steepen.training.step_schedule import build_schedule
from steepen.training.timer import TrainingTimer
from steepen.training.trackers import Trackers
from steepen.training.train_options import TrainOptions
from steepen.training.train_step import TrainStep
from steepen.training.warmup import warm_up
from steepen.utils.codec import from_builtins, to_builtins
from steepen.utils.json_io import write_json
from steepen.utils.progress import ProgressDisplay


def train(spec: RunSpec, dataset: Dataset, store: RunStore, options: TrainOptions | None = None) -> RunRecord:
    """Train a run to its end, or return the record it already has."""
    options = options or TrainOptions()
    device = machine.find_device(options.device)  # a wrong name is refused whether or not there is work to do
    if spec.code != code_digest(spec.arm, spec.optimizer):
        raise UsageError(
            f"the custom code of arm {spec.arm.name!r} or of its optimizer has changed since the spec; "
            "make the spec again (a new run), or restore the old code."
        )
    if dataset.identity != spec.data.identity:
        raise UsageError(
            f"the spec asks for data {spec.data.identity[:16]}, but {dataset.directory} is "
            f"{dataset.identity[:16]}; give the data set the spec was made for."
        )
    directory = store.run(spec)
    finished = directory.record()
    if finished is not None:  # looked for before the lock, which could not be written on read-only storage
        return finished
    # What cannot be trained here, or on this data, leaves nothing behind.
    execution_mode(spec, device, options)
    batches, validation = make_loaders(spec, dataset)
    with directory.lock(options.wait):
        finished = directory.record()
        if finished is not None:
            return finished
        if not directory.spec_file.exists():
            write_json(directory.spec_file, spec.to_dict())
        directory.failure_file.unlink(missing_ok=True)
        display = ProgressDisplay(quiet=options.quiet)
        try:
            return _Run(spec, batches, validation, directory, options, display).go()
        except Exception as error:
            told = _told(error)
            if not isinstance(told, Interrupted):
                with contextlib.suppress(OSError):  # a full disk must not hide what went wrong
                    write_json(directory.failure_file, {"kind": type(told).__name__, "message": str(told)})
            raise told from error
        finally:
            display.close()


def execution_mode(spec: RunSpec, device: torch.device, options: TrainOptions) -> ExecutionMode:
    """Return the execution mode of a run; raises UsageError where the device cannot run it."""
    return choose_execution_mode(
        spec.arm.block,
        spec.precision,
        device,
        flops_per_step=spec.batch_tokens * flops_per_token(spec.arm, spec.shape, 1).total,
        fused=options.fused,
        compile=options.compile,
    )


def _told(error: Exception) -> Exception:
    """An error as the user should read it: the gradients' own memory search has spoken, others have not."""
    if is_out_of_memory(error):
        return OutOfMemory(
            "out of memory outside of the gradients (optimizer step, growth or validation); "
            "use a smaller --micro-batch, or a device with more memory."
        )
    return error


class _Run:
    """One process's work on one run."""

    def __init__(
        self,
        spec: RunSpec,
        batches: BatchLoader,
        validation: ValidationSet,
        directory: RunDirectory,
        options: TrainOptions,
        display: ProgressDisplay,
    ) -> None:
        self.spec, self.batches, self.validation = spec, batches, validation
        self.directory, self.options, self.display = directory, options, display
        self.device = machine.find_device(options.device)
        on_gpu = self.device.type == "cuda"
        self.way = execution_mode(spec, self.device, options)
        # A look at the losses makes the device wait, so short steps are looked at less often.
        self.log_every = options.log_every or (50 if self.way.cuda_graphs else 10 if on_gpu else 1)
        self.checkpoint_every = options.checkpoint_every or max(1, spec.steps // 10)
        self.schedule = build_schedule(spec)
        self.peak = machine.peak_flops(self.device)
        self.scores: list[ValidationScore] = []
        self.stopping = StopSignals()
        self.step = 0  # steps done
        self.save_seconds = 0.0  # that the last checkpoint took

    def go(self) -> RunRecord:
        """Take the run from where it stands to its end."""
        begun = time.monotonic()
        spec, options, say = self.spec, self.options, self.display.print
        folder = self.directory.checkpoints
        with machine.fast_kernels(self.device), self.stopping.listening():
            self.network, self.optimizer, position = load_or_init(spec, folder, self.device, self.way, say)
            self.step, self.resumed = position.step, position.resumed
            self.clock = TrainingTimer(self.device, position.seconds_training)
            self.total_before = position.seconds_total - begun
            self.scores = [from_builtins(ValidationScore, score) for score in position.scores]
            self.saved_at = time.monotonic()
            self.accumulator = GradientAccumulator(
                self.network, spec.batch_sequences, options.micro_batch, say
            )
            self.stepper = TrainStep(
                self.network,
                self.optimizer,
                self.accumulator,
                cuda_graphs=self.way.cuda_graphs and self.optimizer.capturable,
                say=say,
            )
            self.trackers = Trackers(options.trackers, spec, self.directory.path, say)
            self.metrics = Metrics(self.directory.metrics_file, self.step)
            listeners = (self.metrics, self.trackers, self.display)
            self.losses = MetricBuffer(spec, self.schedule, self.peak, self.clock, listeners, folder)
            try:
                if (self.way.compiled or self.device.type == "cuda") and self.step < spec.steps:
                    warm_up(self.stepper, spec, int(self.schedule.passes[self.step]), say)
                self._loop()
                record = self._finish()
            finally:
                self.metrics.close()
                self.trackers.close()
        return record

    # --- the loop ---------------------------------------------------------------------------------------

    def _loop(self) -> None:
        spec, schedule = self.spec, self.schedule
        every, last = self.options.validate_every, self.scores[-1].step if self.scores else 0
        if every and 0 < self.step < spec.steps and self.step % every == 0 and last != self.step:
            self._validate()  # it was cut short when the run was stopped
        with Prefetcher(self.batches, self.step, self.device, stop_step=spec.steps) as feed:
            asked = time.perf_counter()
            for step, inputs, targets in feed:
                self.losses.waited += time.perf_counter() - asked
                if schedule.grown_passes[step] > self.network.passes:
                    self._grow(int(schedule.grown_passes[step]))
                self.clock.start()
                loss, norm = self.stepper(
                    inputs, targets, int(schedule.passes[step]), float(schedule.lr_factor[step])
                )
                self.step = step + 1
                self.losses.add(step, loss, norm)
                if self.step % self.log_every == 0 or self.step == spec.steps:
                    self.losses.drain()
                self._attend()
                asked = time.perf_counter()

    def _attend(self) -> None:
        """What may be due between two steps: validation, a checkpoint, a stop."""
        spec, options, step = self.spec, self.options, self.step
        ended = step == spec.steps
        if options.validate_every and step % options.validate_every == 0 and not ended:
            self._validate()
        growing = not ended and self.schedule.grown_passes[step] > self.network.passes
        since = time.monotonic() - self.saved_at
        overdue = since > 60 * options.checkpoint_minutes
        # A tenth of a large network's short run passes in less time than it takes to save it.
        often = options.checkpoint_every is not None or since > 20 * self.save_seconds
        due = often and step % self.checkpoint_every == 0
        if ended or growing or overdue or due or self.stopping.signal:
            self._save("final" if ended else "growth" if growing else "regular")
        if self.stopping.signal and not ended:
            raise Interrupted(self.stopping.signal, step)

    # --- growth, validation, checkpoints ------------------------------------------------------------------

    def _grow(self, passes: int) -> None:
        self.clock.pause()
        before = self.network.passes
        sources = grow(self.network, passes)
        self.optimizer.grow(self.network.named_parameters(), sources)
        self.stepper.reset()
        if self.way.compiled:
            compile_blocks(self.network)
        self.display.print(f"step {self.step:,}: grown from {before} to {passes} core passes.")

    def _validate(self) -> None:
        self.losses.drain()
        self.clock.pause()
        passes = int(self.schedule.eval_passes[max(0, self.step - 1)])
        loss = mean_loss(self.network, self._validation_pairs(), passes)
        if not math.isfinite(loss):
            raise Diverged(
                f"the validation loss is {loss} after step {self.step:,}; lower the learning rate."
            )
        score = ValidationScore(self.step, loss, self.validation.bits_per_byte(loss), passes)
        self.scores.append(score)
        values = {"validation_loss": loss, "bits_per_byte": score.bits_per_byte}
        self.metrics.write(step=self.step, **values)
        self.trackers.log(self.step, {"validation_loss": loss})
        self.display.print(
            f"step {self.step:,}: validation loss {loss:.4f}, {score.bits_per_byte:.4f} bits per byte."
        )

    def _validation_pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The validation set; a signal does not have to wait for its end."""
        for inputs, targets in self.validation.batches(self.accumulator.micro_batch):
            if self.stopping.signal:
                if self.step < self.spec.steps:  # at the end the final checkpoint is there already
                    self._save("regular")
                raise Interrupted(self.stopping.signal, self.step)
            yield torch.from_numpy(inputs), torch.from_numpy(targets)

    def _save(self, kind: str) -> None:
        self.losses.drain()
        self.clock.pause()
        started, folder = time.monotonic(), self.directory.checkpoints
        size = nn.utils.get_total_norm([p.detach() for p in self.network.parameters()]).item()
        if not math.isfinite(size):
            raise diverged(self.spec, folder, self.step - 1, f"the weights' norm is {size}")
        self.metrics.sync()
        save(folder, self._position(kind), self.network, self.optimizer)
        checkpoints.prune(folder, self.options.keep_last, self.options.keep_every)
        self.saved_at = time.monotonic()
        self.save_seconds = self.saved_at - started

    def _position(self, kind: str) -> TrainingState:
        """Where the run stands now."""
        return TrainingState(
            run=self.spec.hash,
            step=self.step,
            passes=self.network.passes,
            seconds_training=self.clock.seconds,
            seconds_total=self.total_before + time.monotonic(),
            resumed=self.resumed,
            kind=kind,
            scores=[to_builtins(score) for score in self.scores],
        )

    # --- the end ------------------------------------------------------------------------------------------

    def _finish(self) -> RunRecord:
        if not self.scores or self.scores[-1].step != self.step:
            self._validate()
        record = make_record(
            self.spec,
            self.schedule,
            self._position("final"),
            scores=self.scores,
            losses=self.metrics.losses,
            validation_identity=self.validation.identity,
            device=self.device,
        )
        self.metrics.sync()
        write_json(self.directory.record_file, record.to_dict())
        checkpoints.prune(self.directory.checkpoints, 1, self.options.keep_every)
        return record
