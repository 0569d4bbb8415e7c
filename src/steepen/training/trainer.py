"""The trainer: run spec → checkpoints and record. Calling it again resumes an interrupted run."""

from __future__ import annotations

import contextlib
import datetime
import math
import time
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from steepen.data import BatchLoader, Dataset, Prefetcher, ValidationSet
from steepen.data.run_tokenizer import save_run_tokenizer
from steepen.errors import UsageError, is_out_of_memory
from steepen.execution.compile import compile_blocks
from steepen.execution.select import ExecutionMode, choose_execution_mode
from steepen.model.growth import grow
from steepen.model.loss import mean_loss
from steepen.recipe.accounting import flops_per_token
from steepen.runs.record import RunRecord, ValidationScore
from steepen.runs.spec import RunSpec, code_digest
from steepen.runs.store import RunDirectory, RunStore
from steepen.training import checkpoint as checkpoints
from steepen.training import device as device_info
from steepen.training.checkpoint import TrainingState, load_or_init
from steepen.training.divergence import Diverged, diverged
from steepen.training.gpu_sharing import GpuSharing
from steepen.training.gradient_accumulation import GradientAccumulator, OutOfMemory
from steepen.training.metrics import MetricBuffer, MetricsFile, TrainingTimer
from steepen.training.signals import Interrupted, StopSignals
from steepen.training.step_schedule import StepSchedule, build_schedule
from steepen.training.trackers import Trackers
from steepen.training.train_options import TrainOptions
from steepen.training.train_step import TrainStep, warm_up
from steepen.utils.codec import from_builtins, to_builtins
from steepen.utils.json_io import write_json
from steepen.utils.progress import ProgressDisplay


def train(spec: RunSpec, dataset: Dataset, store: RunStore, options: TrainOptions | None = None) -> RunRecord:
    """Train a run to its end, resuming if it was interrupted; returns the existing record if finished."""
    options = options or TrainOptions()
    device = device_info.find_device(options.device)  # refuse a wrong name even if the run is finished
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
    if finished is not None:  # checked before locking: the storage may be read-only
        return finished
    # Refuse what this device or data cannot train before the run directory is created.
    execution_mode(spec, device, options)
    batches, validation = make_loaders(spec, dataset)
    with directory.lock(options.wait):
        finished = directory.record()
        if finished is not None:
            return finished
        if not directory.spec_file.exists():
            write_json(directory.spec_file, spec.to_dict())
        if not directory.tokenizer_file.exists():
            save_run_tokenizer(dataset, directory.tokenizer_file)
        directory.failure_file.unlink(missing_ok=True)
        display = ProgressDisplay(quiet=options.quiet)
        try:
            return Trainer(spec, batches, validation, directory, options, display).run()
        except Exception as error:
            reported = _explain_out_of_memory(error)
            if not isinstance(reported, Interrupted):
                with contextlib.suppress(OSError):  # a full disk must not hide the error
                    write_json(
                        directory.failure_file, {"kind": type(reported).__name__, "message": str(reported)}
                    )
            raise reported from error
        finally:
            display.close()


def execution_mode(spec: RunSpec, device: torch.device, options: TrainOptions) -> ExecutionMode:
    """Return the execution mode of a run; raises UsageError if the device cannot run it."""
    return choose_execution_mode(
        spec.arm.block,
        spec.precision,
        device,
        flops_per_step=spec.batch_tokens * flops_per_token(spec.arm, spec.shape, 1).total,
        fused=options.fused,
        compile=options.compile,
    )


def _explain_out_of_memory(error: Exception) -> Exception:
    """Replace an out-of-memory error outside gradient accumulation by one that names a remedy."""
    if is_out_of_memory(error):
        return OutOfMemory(
            "out of memory outside gradient computation (optimizer step, growth or validation); "
            "use a smaller --micro-batch, or a device with more memory."
        )
    return error


class Trainer:
    """Trains one run in this process, from its newest checkpoint to its record."""

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
        self.device = device_info.find_device(options.device)
        on_gpu = self.device.type == "cuda"
        self.mode = execution_mode(spec, self.device, options)
        # Reading losses synchronizes the device, so short steps are read less often.
        self.log_every = options.log_every or (50 if self.mode.cuda_graphs else 10 if on_gpu else 1)
        self.checkpoint_every = options.checkpoint_every or max(1, spec.steps // 10)
        self.schedule = build_schedule(spec)
        self.peak = device_info.peak_flops(self.device)
        self.scores: list[ValidationScore] = []
        self.stop_signals = StopSignals()
        self.step = 0  # steps completed
        self.save_seconds = 0.0  # duration of the last save

    def run(self) -> RunRecord:
        """Resume or start, train to the last step, validate and write the record."""
        started = time.monotonic()
        spec, options, say = self.spec, self.options, self.display.print
        folder = self.directory.checkpoints
        with contextlib.ExitStack() as stack:
            stack.enter_context(device_info.configure_backends(self.device))
            stack.enter_context(self.stop_signals.listening())
            sharing = GpuSharing(spec, self.device, lambda: self.stop_signals.signal is not None)
            stack.enter_context(sharing.memory())
            if self.stop_signals.signal is not None:
                raise Interrupted(self.stop_signals.signal, None)
            self.network, self.optimizer, saved = load_or_init(spec, folder, self.device, self.mode, say)
            self.step, self.resumed = saved.step, saved.resumed
            self.timer = TrainingTimer(self.device, saved.seconds_training)
            self.total_before = saved.seconds_total - started
            self.scores = [from_builtins(ValidationScore, score) for score in saved.scores]
            self.saved_at = time.monotonic()
            self.accumulator = GradientAccumulator(
                self.network, spec.batch_sequences, options.micro_batch, say
            )
            self.train_step = TrainStep(
                self.network,
                self.optimizer,
                self.accumulator,
                cuda_graphs=self.mode.cuda_graphs and self.optimizer.capturable,
                say=say,
            )
            self.trackers = Trackers(options.trackers, spec, self.directory.path, say)
            self.metrics = MetricsFile(self.directory.metrics_file, self.step)
            sinks = (self.metrics, self.trackers, self.display)
            self.buffer = MetricBuffer(spec, self.schedule, self.peak, self.timer, sinks, folder)
            try:
                if (self.mode.compiled or self.device.type == "cuda") and self.step < spec.steps:
                    warm_up(self.train_step, spec, int(self.schedule.passes[self.step]), say)
                with sharing.turn():
                    self._loop()
                record = self._finish()
            finally:
                self.metrics.close()
                self.trackers.close()
        return record

    def _loop(self) -> None:
        spec, schedule = self.spec, self.schedule
        every, last = self.options.validate_every, self.scores[-1].step if self.scores else 0
        if every and 0 < self.step < spec.steps and self.step % every == 0 and last != self.step:
            self._validate()  # a signal had interrupted this validation
        with Prefetcher(self.batches, self.step, self.device, stop_step=spec.steps) as batches:
            requested = time.perf_counter()
            for step, inputs, targets in batches:
                self.buffer.data_seconds += time.perf_counter() - requested
                if schedule.grown_passes[step] > self.network.passes:
                    self._grow(int(schedule.grown_passes[step]))
                self.timer.start()
                loss, norm = self.train_step(
                    inputs, targets, int(schedule.passes[step]), float(schedule.lr_factor[step]), step
                )
                self.step = step + 1
                self.buffer.add(step, loss, norm)
                if self.step % self.log_every == 0 or self.step == spec.steps:
                    self.buffer.drain()
                self._between_steps()
                requested = time.perf_counter()

    def _between_steps(self) -> None:
        """Validate, save a checkpoint or stop, if due."""
        spec, options, step = self.spec, self.options, self.step
        ended = step == spec.steps
        if options.validate_every and step % options.validate_every == 0 and not ended:
            self._validate()
        growing = not ended and self.schedule.grown_passes[step] > self.network.passes
        since = time.monotonic() - self.saved_at
        overdue = since > 60 * options.checkpoint_minutes
        # Saving may take at most a twentieth of the time, which matters in short runs of large networks.
        affordable = options.checkpoint_every is not None or since > 20 * self.save_seconds
        due = affordable and step % self.checkpoint_every == 0
        if ended or growing or overdue or due or self.stop_signals.signal:
            self._save("final" if ended else "growth" if growing else "regular")
        if self.stop_signals.signal and not ended:
            raise Interrupted(self.stop_signals.signal, step)

    def _grow(self, passes: int) -> None:
        self.timer.pause()
        before = self.network.passes
        sources = grow(self.network, passes)
        self.optimizer.grow(self.network.named_parameters(), sources)
        self.train_step.reset()
        if self.mode.compiled:
            compile_blocks(self.network)
        self.display.print(f"step {self.step:,}: grown from {before} to {passes} core passes.")

    def _validate(self) -> None:
        self.buffer.drain()
        self.timer.pause()
        passes = int(self.schedule.eval_passes[max(0, self.step - 1)])
        loss = mean_loss(self.network, self._validation_batches(), passes)
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

    def _validation_batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Validation batches; a stop signal is obeyed between them."""
        for inputs, targets in self.validation.batches(self.accumulator.micro_batch):
            if self.stop_signals.signal:
                if self.step < self.spec.steps:  # after the last step the final checkpoint exists
                    self._save("regular")
                raise Interrupted(self.stop_signals.signal, self.step)
            yield torch.from_numpy(inputs), torch.from_numpy(targets)

    def _save(self, kind: str) -> None:
        self.buffer.drain()
        self.timer.pause()
        started, folder = time.monotonic(), self.directory.checkpoints
        norm = nn.utils.get_total_norm([p.detach() for p in self.network.parameters()]).item()
        if not math.isfinite(norm):
            raise diverged(self.spec, folder, self.step - 1, f"the norm of the weights is {norm}")
        self.metrics.sync()
        checkpoints.save(folder, self._training_state(kind), self.network, self.optimizer)
        checkpoints.prune(folder, self.options.keep_last, self.options.keep_every)
        self.saved_at = time.monotonic()
        self.save_seconds = self.saved_at - started

    def _training_state(self, kind: str) -> TrainingState:
        """The current progress, as a checkpoint stores it."""
        return TrainingState(
            run=self.spec.hash,
            step=self.step,
            passes=self.network.passes,
            seconds_training=self.timer.seconds,
            seconds_total=self.total_before + time.monotonic(),
            resumed=self.resumed,
            kind=kind,
            scores=[to_builtins(score) for score in self.scores],
        )

    def _finish(self) -> RunRecord:
        if not self.scores or self.scores[-1].step != self.step:
            self._validate()
        record = make_record(
            self.spec,
            self.schedule,
            self._training_state("final"),
            scores=self.scores,
            losses=self.metrics.losses,
            validation_identity=self.validation.identity,
            device=self.device,
        )
        self.metrics.sync()
        write_json(self.directory.record_file, record.to_dict())
        checkpoints.prune(self.directory.checkpoints, 1, self.options.keep_every)
        return record


def make_loaders(spec: RunSpec, dataset: Dataset) -> tuple[BatchLoader, ValidationSet]:
    """Build the training and validation loaders; raises UsageError if the data does not fit."""
    shape, data = spec.shape, spec.data
    if dataset.vocabulary > shape.vocabulary:
        raise UsageError(
            f"the data has {dataset.vocabulary:,} token ids, the network only {shape.vocabulary:,}: "
            f"use a vocabulary of {dataset.padded_vocabulary:,}."
        )
    batches = BatchLoader(
        dataset,
        shape.context,
        spec.batch_tokens,
        spec.seed,
        pool_tokens=data.pool_tokens,
        epochs=data.epochs,
    )
    batches.require_steps(spec.steps)
    return batches, ValidationSet(dataset, shape.context, spec.validation_tokens)


def make_record(
    spec: RunSpec,
    schedule: StepSchedule,
    training_state: TrainingState,
    *,
    scores: Sequence[ValidationScore],
    losses: Sequence[float],
    validation_identity: str,
    device: torch.device,
) -> RunRecord:
    """Build the record of a finished run; `losses` are its training losses, step by step."""
    arm, shape = spec.arm, spec.shape
    last = scores[-1]
    flops = schedule.flops(arm, shape, spec.batch_tokens)
    seconds, peak = training_state.seconds_training, device_info.peak_flops(device)
    tail = losses[-max(10, spec.steps // 100) :]
    return RunRecord(
        spec=spec,
        run=spec.hash,
        validation_loss=last.loss,
        validation_bits_per_byte=last.bits_per_byte,
        validation_identity=validation_identity,
        validation_scores=tuple(scores),
        train_loss=sum(tail) / len(tail) if tail else last.loss,  # metrics.jsonl was deleted
        tokens=spec.tokens,
        flops=flops.total,
        flops_by_term=flops.to_dict(),
        parameters=schedule.parameters(arm, shape),
        seconds_training=seconds,
        seconds_total=training_state.seconds_total,
        tokens_per_second=spec.tokens / max(seconds, 1e-9),
        mfu=flops.total / seconds / peak if peak and seconds > 0 else None,
        peak_memory_bytes=torch.cuda.max_memory_allocated() if device.type == "cuda" else None,
        hardware=device_info.hardware(device),
        versions=device_info.versions(),
        git=device_info.git_state(),
        finished=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        resumed=training_state.resumed,
    )
