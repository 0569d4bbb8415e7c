"""Training one run, from its spec to its record; whatever interrupts it, the same call takes it up again."""

from __future__ import annotations

import contextlib
import datetime
import math
import time
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from steepen.data import Batches, Dataset, Prefetcher, Validation
from steepen.errors import SteepenError, UsageError
from steepen.model.arms import code_digest
from steepen.model.init import initialise, name_seed, on_meta
from steepen.model.load import copy_weights, with_memory
from steepen.model.measure import mean_loss
from steepen.model.network import Network
from steepen.runs.codec import from_plain, to_plain
from steepen.runs.record import RunRecord, Score
from steepen.runs.spec import RunSpec
from steepen.runs.store import RunDirectory, Store, write_json
from steepen.training import checkpoint as checkpoints
from steepen.training import device as machine
from steepen.training.checkpoint import Checkpoint, CorruptCheckpoint, Position
from steepen.training.clock import Clock, process_seconds
from steepen.training.display import Display
from steepen.training.gradients import Accumulator, OutOfMemory, is_out_of_memory
from steepen.training.losses import Losses
from steepen.training.metrics import Metrics
from steepen.training.optimizer import Optimizer
from steepen.training.options import TrainOptions
from steepen.training.schedule import build_schedule
from steepen.training.step import Stepper
from steepen.training.stopping import Interrupted, Stopping
from steepen.training.trackers import Trackers
from steepen.training.way import check_way, choose_way, compile_blocks, prepare


class Diverged(SteepenError):
    """The loss or a gradient stopped being a number."""


def train(spec: RunSpec, dataset: Dataset, store: Store, options: TrainOptions | None = None) -> RunRecord:
    """Train a run to its end, or return the record it already has."""
    options = options or TrainOptions()
    device = machine.find_device(options.device)  # a wrong name is refused whether or not there is work to do
    if spec.code != code_digest(spec.arm):
        raise UsageError(
            f"the code behind arm {spec.arm.name!r} is not what it was when this spec was made; "
            "make the spec again (a new run), or bring the old code back."
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
    check_way(spec, device, fast=options.fast, compile=options.compile)
    batches, validation = _text(spec, dataset)
    with directory.lock(options.wait):
        finished = directory.record()
        if finished is not None:
            return finished
        if not directory.spec_file.exists():
            write_json(directory.spec_file, spec.to_dict())
        failure = directory.path / "failure.json"
        failure.unlink(missing_ok=True)
        display = Display(spec, options.quiet)
        try:
            return _Run(spec, batches, validation, directory, options, display).go()
        except Exception as error:
            told = _told(error)
            if not isinstance(told, Interrupted):
                with contextlib.suppress(OSError):  # a full disk must not hide what went wrong
                    write_json(failure, {"kind": type(told).__name__, "message": str(told)})
            raise told from error
        finally:
            display.close()


def _text(spec: RunSpec, dataset: Dataset) -> tuple[Batches, Validation]:
    """What a run trains on and what it is scored on; refuses what the data cannot give."""
    shape, data = spec.shape, spec.data
    if dataset.vocabulary > shape.vocabulary:
        raise UsageError(
            f"the data has {dataset.vocabulary:,} token ids, the network only {shape.vocabulary:,}: "
            f"use a vocabulary of {dataset.padded_vocabulary:,}."
        )
    batches = Batches(
        dataset,
        shape.context,
        spec.batch_tokens,
        spec.seed,
        pool_tokens=data.pool_tokens,
        epochs=data.epochs,
    )
    batches.require(spec.steps)
    return batches, Validation(dataset, shape.context, spec.validation_tokens)


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
        batches: Batches,
        validation: Validation,
        directory: RunDirectory,
        options: TrainOptions,
        display: Display,
    ) -> None:
        self.spec, self.batches, self.validation = spec, batches, validation
        self.directory, self.options, self.display = directory, options, display
        self.device = machine.find_device(options.device)
        on_gpu = self.device.type == "cuda"
        self.way = choose_way(spec, self.device, fast=options.fast, compile=options.compile)
        # A look at the losses makes the device wait, so short steps are looked at less often.
        self.log_every = options.log_every or (50 if self.way.graphs else 10 if on_gpu else 1)
        self.checkpoint_every = options.checkpoint_every or max(1, spec.steps // 10)
        self.schedule = build_schedule(spec)
        self.peak = machine.peak_flops(self.device)
        self.scores: list[Score] = []
        self.stopping = Stopping()
        self.step = 0  # steps done
        self.save_seconds = 0.0  # that the last checkpoint took

    def go(self) -> RunRecord:
        """Take the run from where it stands to its end."""
        begun = time.monotonic()
        with machine.fast_kernels(self.device), self.stopping.listening():
            position = self._restore()
            self.step, self.resumed = position.step, position.resumed
            self.clock = Clock(self.device, position.seconds_training)
            self.total_before = position.seconds_total - begun
            self.scores = [from_plain(Score, score) for score in position.scores]
            self.saved_at = time.monotonic()
            self.accumulator = Accumulator(
                self.network, self.spec.rows, self.options.micro_batch, self.display.say
            )
            self.stepper = Stepper(
                self.network, self.optimizer, self.accumulator, graphs=self.way.graphs, say=self.display.say
            )
            self.trackers = Trackers(self.options.trackers, self.spec, self.directory.path, self.display.say)
            self.metrics = Metrics(self.directory.metrics_file, self.step)
            listeners = (self.metrics, self.trackers, self.display)
            self.losses = Losses(self.spec, self.schedule, self.peak, self.clock, listeners, self._diverged)
            try:
                if self.way.compiled or self.device.type == "cuda":
                    self._warm_up()
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
                if schedule.grown[step] > self.network.passes:
                    self._grow(int(schedule.grown[step]))
                self.clock.start()
                loss, norm = self.stepper(
                    inputs, targets, int(schedule.passes[step]), float(schedule.factor[step])
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
        growing = not ended and self.schedule.grown[step] > self.network.passes
        since = time.monotonic() - self.saved_at
        overdue = since > 60 * options.checkpoint_minutes
        # A tenth of a large network's short run passes in less time than it takes to save it.
        often = options.checkpoint_every is not None or since > 20 * self.save_seconds
        due = often and step % self.checkpoint_every == 0
        if ended or growing or overdue or due or self.stopping.signal:
            self._save("final" if ended else "growth" if growing else "regular")
        if self.stopping.signal and not ended:
            raise Interrupted(self.stopping.signal, step)

    def _diverged(self, step: int, what: str) -> Diverged:
        good = [c for c in checkpoints.list_checkpoints(self.directory.checkpoints) if c.step <= step]
        where = (
            f"the last good checkpoint is {good[-1].path}" if good else "no checkpoint was saved before it"
        )
        first = step * self.spec.rows
        return Diverged(
            f"{what} at step {step + 1:,} (sequences {first:,} to {first + self.spec.rows - 1:,} of the "
            f"data's order); {where}. Lower the learning rate (--set optimizer.glr=…) or look at the data."
        )

    # --- growth, validation, checkpoints ------------------------------------------------------------------

    def _grow(self, passes: int) -> None:
        self.clock.pause()
        before = self.network.passes
        self.optimizer.grow(passes)
        self.stepper.reset()
        if self.way.compiled:
            compile_blocks(self.network)
        self.display.say(f"step {self.step:,}: grown from {before} to {passes} core passes.")

    def _validate(self) -> Score:
        self.losses.drain()
        self.clock.pause()
        passes = int(self.schedule.evaluated[max(0, self.step - 1)])
        loss = mean_loss(self.network, self._validation_pairs(), passes)
        if not math.isfinite(loss):
            raise Diverged(
                f"the validation loss is {loss} after step {self.step:,}; lower the learning rate."
            )
        score = Score(self.step, loss, self.validation.bits_per_byte(loss), passes)
        self.scores.append(score)
        values = {"validation_loss": loss, "bits_per_byte": score.bits_per_byte}
        self.metrics.write(step=self.step, **values)
        self.trackers.log(self.step, {"validation_loss": loss})
        self.display.say(
            f"step {self.step:,}: validation loss {loss:.4f}, {score.bits_per_byte:.4f} bits per byte."
        )
        return score

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
        started = time.monotonic()
        size = nn.utils.get_total_norm([p.detach() for p in self.network.parameters()]).item()
        if not math.isfinite(size):
            raise self._diverged(self.step - 1, f"the weights' norm is {size}")
        self.metrics.sync()
        position = Position(
            run=self.spec.hash,
            step=self.step,
            passes=self.network.passes,
            seconds_training=self.clock.seconds,
            seconds_total=self.total_before + time.monotonic(),
            resumed=self.resumed,
            kind=kind,
            scores=[to_plain(score) for score in self.scores],
        )
        folder = self.directory.checkpoints
        weights = {name: p.data for name, p in self.network.named_parameters()}
        random = {"cpu": torch.get_rng_state()}
        if self.device.type == "cuda":
            random["cuda"] = torch.cuda.get_rng_state(self.device)
        checkpoints.save(folder, position, weights, self.optimizer.state(), random)
        checkpoints.prune(folder, self.options.keep_last, self.options.keep_every)
        self.saved_at = time.monotonic()
        self.save_seconds = self.saved_at - started

    def _restore(self) -> Position:
        """The newest checkpoint that is whole, or a beginning."""
        folder = self.directory.checkpoints
        checkpoints.remove_partial(folder)
        left = checkpoints.list_checkpoints(folder)
        while left:
            saved = left.pop()
            try:
                return self._load(saved)
            except CorruptCheckpoint as error:
                then = "Trying the one before it." if left else "None is left: the run begins anew."
                self.display.say(f"{error} {then}")
                checkpoints.set_aside(saved)
        self._build(self.spec.schedule.initial)
        hyper = self.spec.hyperparameters
        # For blocks of a user's own that draw numbers: the run's seed decides them too.
        torch.manual_seed(name_seed(self.spec.seed, "run"))
        initialise(self.network, embedding_std=hyper.wte, input_scale=hyper.uis, seed=self.spec.seed)
        return Position(run=self.spec.hash, step=0, passes=self.network.passes)

    def _load(self, saved: Checkpoint) -> Position:
        position = saved.position()
        weights, state, random = saved.load(self.device)
        if position.run != self.spec.hash:
            raise CorruptCheckpoint(f"checkpoint {saved.path} belongs to another run ({position.run}).")
        self._build(position.passes)
        copy_weights(self.network, weights)
        self.optimizer.load_state(state)
        torch.set_rng_state(random["cpu"].cpu())
        if "cuda" in random and self.device.type == "cuda":
            torch.cuda.set_rng_state(random["cuda"].cpu(), self.device)
        self.display.say(f"going on from step {position.step:,} of {self.spec.steps:,}.")
        return replace(position, resumed=position.resumed + 1)

    def _build(self, passes: int) -> None:
        spec = self.spec
        bare = on_meta(spec.shape, spec.arm, spec.hyperparameters.multipliers, spec.options, passes=passes)
        self.network: Network = with_memory(bare, self.device)
        prepare(self.network, spec.precision, fast=self.way.fast, compiled=self.way.compiled)
        self.optimizer = Optimizer(self.network, spec.hyperparameters, spec.optimizer)

    def _warm_up(self) -> None:
        """Compile before the clock starts: a micro-batch there and back, a step, and validation."""
        if self.step == self.spec.steps:
            return
        started = time.monotonic()
        tokens = torch.zeros(self.spec.rows, self.spec.shape.context, dtype=torch.long, device=self.device)
        size = self.accumulator.micro_batch
        devices = [self.device] if self.device.type == "cuda" else []
        # At a checkpoint from just before growth the network has yet to grow.
        passes = min(int(self.schedule.passes[self.step]), self.network.passes)
        with torch.random.fork_rng(devices):  # a block that draws numbers must not notice
            self.accumulator(tokens[:size], tokens[:size], passes)
            self.optimizer.zero_grad()
            self.optimizer.warm_up()
            self.stepper.rehearse(tokens, tokens, passes)
        size = self.accumulator.micro_batch
        mean_loss(self.network, [(tokens[:size], tokens[:size])])
        machine.synchronise(self.device)
        age = process_seconds()
        since = "" if age is None else f", {age:.1f} s after the start"
        self.display.say(f"kernels ready in {time.monotonic() - started:.1f} s{since}.")

    # --- the end ------------------------------------------------------------------------------------------

    def _finish(self) -> RunRecord:
        last = self.scores[-1] if self.scores and self.scores[-1].step == self.step else self._validate()
        spec, arm, shape, schedule = self.spec, self.spec.arm, self.spec.shape, self.schedule
        flops = schedule.flops(arm, shape, spec.batch_tokens)
        seconds = self.clock.seconds
        tail = self.metrics.losses[-max(10, spec.steps // 100) :]
        record = RunRecord(
            spec=spec,
            run=spec.hash,
            validation_loss=last.loss,
            validation_bits_per_byte=last.bits_per_byte,
            validation_identity=self.validation.identity,
            scores=tuple(self.scores),
            train_loss=sum(tail) / len(tail) if tail else last.loss,  # where someone removed the log
            tokens=spec.tokens,
            flops=flops.total,
            flops_by_term=flops.to_dict(),
            parameters=schedule.parameters(arm, shape),
            seconds_training=seconds,
            seconds_total=self.total_before + time.monotonic(),
            tokens_per_second=spec.tokens / max(seconds, 1e-9),
            mfu=flops.total / seconds / self.peak if self.peak and seconds > 0 else None,
            peak_memory_bytes=torch.cuda.max_memory_allocated() if self.device.type == "cuda" else None,
            hardware=machine.hardware(self.device),
            versions=machine.versions(),
            git=machine.git_state(),
            finished=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            resumed=self.resumed,
        )
        self.metrics.sync()
        write_json(self.directory.record_file, record.to_dict())
        checkpoints.prune(self.directory.checkpoints, 1, self.options.keep_every)
        return record
