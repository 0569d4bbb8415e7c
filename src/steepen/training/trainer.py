"""The trainer takes a run, in one process or rank, from its newest checkpoint to its last step and record.

The flow: `Trainer.run` loads the newest checkpoint or initialises (`run_state`), chooses micro-batch and
kernels (`_prepare_steps`), takes batches from a prefetching loader (`_loop`), and after each step validates,
saves and stops where due (`_between_steps`); `_finish` validates and writes the record.

A run's result depends on its spec alone. Batch `step` is a function of seed and step, so a resumed run
continues with the batch that comes next; the schedule is a table indexed by step; the random state is in the
checkpoint. Ranks take rows of the same global batch, and the loss is scaled by the global number of rows
before gradients are summed, so that any number of ranks takes the same step.
"""

from __future__ import annotations

import contextlib
import datetime
import gc
import math
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from steepen.data import BatchLoader, Prefetcher, ValidationSet
from steepen.distributed.sharded_optimizer import DistributedOptimizer, ShardedOptimizer
from steepen.distributed.world import FlagExchange, World
from steepen.model.loss import MeanLoss, combined, mean_loss
from steepen.runs.record import RunRecord, ValidationScore
from steepen.runs.spec import RunSpec
from steepen.runs.store import RunDirectory
from steepen.runs.trunk import branch_points_within, finished_trunk, shared_checkpoints
from steepen.training import checkpoint as checkpoints
from steepen.training import device as device_info
from steepen.training.checkpoint import Checkpoint, TrainingProgress
from steepen.training.device import GpuSharing
from steepen.training.metrics import MetricsFile, RunLog, TrainingTimer, watch_stream
from steepen.training.run_state import StateLoader, execution_mode
from steepen.training.step_schedule import build_schedule
from steepen.training.stopping import Diverged, Interrupted, StopSignals, diverged
from steepen.training.train_options import TrainOptions
from steepen.training.train_step import GradientAccumulator, TrainStep, warm_up
from steepen.utils.codec import from_builtins, to_builtins
from steepen.utils.json_io import write_json
from steepen.utils.progress import ProgressDisplay

if TYPE_CHECKING:
    from steepen.training.samples import SampleWriter

GROWTH_WINDOWS = 8  # windows of validation text whose loss is logged before and after growth


class Trainer:
    """Trains one run in this process, or one rank of it, from its newest checkpoint to its record."""

    def __init__(
        self,
        spec: RunSpec,
        batches: BatchLoader,
        validation: ValidationSet,
        directory: RunDirectory,
        options: TrainOptions,
        display: ProgressDisplay,
        world: World,
    ) -> None:
        self.spec, self.batches, self.validation = spec, batches, validation
        self.directory, self.options, self.display = directory, options, display
        self.world, self.device = world, world.device
        on_gpu = self.device.type == "cuda"
        self.mode = execution_mode(spec, options, world)
        self.states = StateLoader(spec, self.mode, world, options.shard, display.print)
        # Reading losses synchronizes the device, so short steps are read less often.
        graphs = self.mode.cuda_graphs and world.size == 1
        self.log_every = options.log_every or (50 if graphs else 10 if on_gpu else 1)
        self.checkpoint_every = options.checkpoint_every or max(1, spec.steps // 10)
        self.schedule = build_schedule(spec)
        peak = device_info.peak_flops(self.device)
        self.peak = None if peak is None else peak * world.size
        self.scores: list[ValidationScore] = []
        self.stop_signals = StopSignals()
        # Stop and checkpoint flags of all ranks, exchanged one step late.
        self.flags: FlagExchange | None = None
        self.writer = checkpoints.CheckpointWriter(
            directory.checkpoints, world, keep_last=options.keep_last, keep_every=options.keep_every
        )
        self.step = 0  # steps completed

    def run(self) -> RunRecord:
        """Resume or start, train to the last step, validate and write the record."""
        started = time.monotonic()
        spec, world = self.spec, self.world
        if world.is_main:  # for the record, which is written last
            threading.Thread(target=device_info.git_state, daemon=True).start()
        with contextlib.ExitStack() as stack:
            stack.enter_context(device_info.configure_backends(self.device))
            # Before the network is loaded, which takes minutes for a large one: a signal from now on ends the
            # run in order.
            stack.enter_context(self.stop_signals.listening())
            sharing = GpuSharing(spec, self.device, lambda: self.stop_signals.signal is not None)
            self.runs_per_gpu = sharing.runs_per_gpu
            stack.enter_context(sharing.memory())
            if self.stop_signals.signal is not None and world.size == 1:
                raise Interrupted(self.stop_signals.signal, None)
            shared = shared_checkpoints(spec, self.directory) if world.is_main else ()
            self.network, self.optimizer, saved = self.states.load_or_init(self.directory, shared)
            self.step, self.begun = saved.step, saved
            self.stage = spec.network_after(saved.step)  # which of the run's networks this is
            self.branch_points: list[int] = world.broadcast_object(
                sorted(branch_points_within(spec, self.directory)) if world.is_main else None
            )
            world.progress(self.step, "starting")
            self.total_before = saved.seconds_total - started - sharing.seconds_waited
            self.scores = [from_builtins(ValidationScore, score) for score in saved.scores]
            self.saved_at = time.monotonic()
            self.timer = TrainingTimer(self.device, saved.seconds_training)
            self.samples = self._open_samples(stack)
            self.log = self._open_log(stack)
            if world.size == 1:  # other ranks may be gone; alone, nothing is written after the lock is free
                stack.callback(self.writer.join)
            self._prepare_steps()
            waited = sharing.seconds_waited
            with sharing.turn():
                self.total_before -= sharing.seconds_waited - waited
                self._loop()
            return self._finish()

    def _open_log(self, stack: contextlib.ExitStack) -> RunLog:
        """Open metrics.jsonl and the trackers, on rank 0; they are closed with the stack."""
        main, print_message, trackers = self.world.is_main, self.display.print, None
        if main and self.options.track:
            from steepen.training.trackers import Trackers

            trackers = Trackers(self.options.track, self.spec, self.directory.path, print_message)
            stack.callback(trackers.close)
        # Lines after the checkpoint belong to steps that are trained again: they are cut off.
        path, scored = self.directory.metrics_file, {score.step for score in self.scores}
        metrics = MetricsFile(path if main else None, self.step, scored, print_message)
        stack.callback(metrics.close)
        return RunLog(
            self.spec, self.schedule, self.timer, metrics, trackers, self.display, self.writer, self.peak
        )

    def _open_samples(self, stack: contextlib.ExitStack) -> SampleWriter | None:
        """The writer of samples, on every rank that takes part in them; it is closed with the stack."""
        options, world = self.options, self.world
        if options.sample_every is None or not (world.is_main or self.optimizer.collective_forward):
            return None
        from steepen.training.samples import SampleWriter  # with all of generation, which few runs need

        samples = SampleWriter(
            self.directory.samples_file if world.is_main else None,
            self.step,
            self.batches.dataset,
            options.sample_prompt or ("",),
            self.display.print,
        )
        stack.callback(samples.close)
        return samples

    def _prepare_steps(self) -> None:
        """Choose the micro-batch and compile or capture the kernels, for the network as it is now."""
        spec, options, print_message, world = self.spec, self.options, self.display.print, self.world
        sharded = self.optimizer if isinstance(self.optimizer, DistributedOptimizer) else None
        self.network.recompute = bool(options.recompute)
        self.accumulator = GradientAccumulator(
            self.network,
            spec.batch_tokens // self.network.shape.context // world.size,
            None if options.micro_batch == "auto" else options.micro_batch,
            print_message,
            ranks=world.size,
            sink=sharded,
            grown=self.stage > 0,
            may_recompute=options.recompute is not False,
        )
        self.train_step = TrainStep(
            self.network,
            self.optimizer,
            self.accumulator,
            cuda_graphs=self.mode.cuda_graphs and self.optimizer.capturable,
            print_message=print_message,
        )
        if (self.mode.compiled or self.device.type == "cuda") and self.step < spec.steps:
            sections = [last - first for first, last in self.validation.sections.values()]
            warm_up(self.train_step, spec, int(self.schedule.passes[self.step]), print_message, sections)
        if sharded is not None:  # a rank with less free memory decides for all
            self.accumulator.micro_batch = int(world.minimum(self.accumulator.micro_batch))
            self.network.recompute = bool(world.maximum(self.network.recompute)[0])

    def _loop(self) -> None:
        spec, schedule = self.spec, self.schedule
        last = self.scores[-1].step if self.scores else 0
        if 0 < self.step < spec.steps and self._validation_due() and last != self.step:
            self._validate()  # a signal had interrupted this validation
        world = self.world
        with Prefetcher(
            self.batches, self.step, self.device, stop_step=spec.steps, rank=world.rank, world_size=world.size
        ) as batches:
            requested = time.perf_counter()
            for step, inputs, targets in batches:
                self.log.data_seconds += time.perf_counter() - requested
                # Before the step, not after the last one: the checkpoint saved in between (`growing` in
                # `_between_steps`) holds the network that is still to grow; a resumed run grows it here too.
                if schedule.network[step] > self.stage:
                    self._grow(int(schedule.network[step]))
                self.timer.start()
                world.progress(step, "forward and backward")
                loss, norm = self.train_step(
                    self._rows(inputs), self._rows(targets), int(schedule.passes[step]),
                    float(schedule.lr_factor[step]), step,
                )  # fmt: skip
                # From here on the step counts as done: what is saved below resumes with the next batch.
                self.step = step + 1
                self.log.add(step, loss, norm)
                if self.step % self.log_every == 0 or self.step == spec.steps:
                    self.log.drain()
                self._between_steps()
                requested = time.perf_counter()

    def _between_steps(self) -> None:
        """Validate, save a checkpoint or stop, if due.

        In this order: the checkpoint then holds the validation score of its step, so a resumed run does not
        validate twice, and a stop comes after the save. Validation and samples draw no random numbers that
        training uses.
        """
        spec, options, step = self.spec, self.options, self.step
        ended = step == spec.steps
        if not ended and self._validation_due():
            self._validate()
        if options.sample_every and (ended or step % options.sample_every == 0):
            self._sample()
        # A run grows by loading this checkpoint into the larger network, with new owners.
        growing = not ended and self.schedule.network[step] > self.stage
        branching = step in self.branch_points
        since = time.monotonic() - self.saved_at
        overdue = since > 60 * options.checkpoint_minutes
        # Saving may take at most a twentieth of the time, which matters in short runs of large networks.
        affordable = options.checkpoint_every is not None or since > 20 * self.writer.seconds
        signal, overdue, affordable = self._agree(self.stop_signals.signal or 0, overdue, affordable)
        due = affordable and step % self.checkpoint_every == 0
        kind = "final" if ended else "growth" if growing else "branch" if branching else "regular"
        if kind != "regular" or overdue or due or signal:
            # Written in the background unless something depends on it: growth reads it, and after a signal
            # this process ends. `_finish` waits for the last one, once it has validated.
            self._save(kind, wait=growing or bool(signal))
        if signal and not ended:
            raise Interrupted(signal, step)

    def _agree(self, signal: int, overdue: bool, affordable: bool) -> tuple[int, bool, bool]:
        """What all ranks do after this step: signals of any rank, and the clock of rank 0.

        Several ranks act one step later than one process would, so that none waits for the others here.
        """
        if self.world.size == 1:
            return signal, overdue, affordable
        main, before = self.world.is_main, self.flags
        self.flags = FlagExchange(self.world, (signal, overdue and main, affordable and main))
        if before is None:
            return 0, False, self.options.checkpoint_every is not None
        number, late, cheap = before.result()
        return int(number), bool(late), bool(cheap)

    def _rows(self, tokens: Tensor) -> Tensor:
        return tokens.reshape(-1, self.network.shape.context)

    def _grow(self, stage: int) -> None:
        """Change to another of the run's networks, and log what that does to the loss."""
        self.log.pause()
        (_, before), (_, after) = self.spec.networks[self.stage], self.spec.networks[stage]
        loss_before = self._loss_at_growth(before.passes)
        self._load_grown(stage)
        loss_after = self._loss_at_growth(int(self.schedule.eval_passes[self.step]))
        self.log.write(self.step, {"growth_loss_before": loss_before, "growth_loss_after": loss_after})
        only_passes = after == replace(before, passes=after.passes)
        change = f"from {before.passes} to {after.passes} core passes" if only_passes else f"to {after}"
        self.display.print(f"step {self.step:,}: grown {change}.")

    def _load_grown(self, stage: int) -> None:
        """Load the checkpoint saved just before growth into the grown network, with new owners.

        The old network is freed first. Each rank reads what it owns of the grown network. A resumed run comes
        by here too, from the same file: it then has the same weights, state and random numbers.
        """
        # At step 0 there is none, and where this run left a trunk, another run has saved it.
        if self.step == 0 or (self.begun.trunk and self.step == self.begun.trunk_steps):
            self._save("growth", wait=True)
        self._wait_for_weights()
        del self.network, self.optimizer, self.accumulator, self.train_step
        gc.collect()
        saved = Checkpoint(self.directory.checkpoints / f"{self.step:08d}")
        self.network, self.optimizer = self.states.grow(saved, stage)
        self.stage = stage
        self._prepare_steps()

    def _loss_at_growth(self, passes: int) -> float:
        """The loss of a few validation windows with the network as it is now.

        A stop waits: a checkpoint of this step holds the network before growth.
        """
        section = next(iter(self.validation.sections.values()))
        few = section[0], min(section[1], section[0] + GROWTH_WINDOWS)
        batches = self._validation_batches(few, passes, may_stop=False)
        return mean_loss(self.network, batches, passes, sum_over_ranks=self.world.all_reduce_).loss

    def _eval_passes(self) -> int:
        return int(self.schedule.eval_passes[max(0, self.step - 1)])

    def _wait_for_weights(self) -> None:
        if isinstance(self.optimizer, ShardedOptimizer):
            self.optimizer.wait_for_weights()

    def _validation_due(self) -> bool:
        every = self.options.validate_every
        if every == "epoch":
            return self.batches.epoch_of(self.step) > self.batches.epoch_of(self.step - 1)
        return every is not None and self.step % every == 0

    def _validate(self) -> None:
        self.log.pause()
        passes = self._eval_passes()
        # Source after source, if the data is a mixture: every window has the text of one.
        parts: list[MeanLoss] = []
        with watch_stream(self.network, passes) as residual_rms:
            for section in self.validation.sections.values():
                batches, end = self._validation_batches(section, passes), self.validation.end_of_text
                reduce = self.world.all_reduce_
                parts.append(mean_loss(self.network, batches, passes, apart=end, sum_over_ranks=reduce))
        sections = self.validation.sections
        found = combined(parts, [last - first for first, last in sections.values()])
        by_source = {name: part.loss for name, part in zip(sections, parts, strict=True) if name}
        loss = found.loss
        if not math.isfinite(loss):
            raise Diverged(
                f"the validation loss is {loss} after step {self.step:,}; lower the learning rate."
            )
        since = self.log.metrics.losses[self.scores[-1].step if self.scores else 0 : self.step]
        bits, epoch = self.validation.bits_per_byte(*found), self.batches.epoch_of(max(0, self.step - 1)) + 1
        train_loss = sum(since) / len(since) if since else None
        self.scores.append(
            ValidationScore(self.step, loss, bits, passes, epoch, train_loss, residual_rms, by_source)
        )
        values: dict[str, float] = {"validation_loss": loss, "bits_per_byte": bits, "epoch": epoch}
        values |= {f"residual_rms/{section}": size for section, size in residual_rms.items()}
        values |= {f"validation_loss/{name}": one for name, one in by_source.items()}
        self.log.write(self.step, values)
        parts_text = "".join(f", {name} {one:.4f}" for name, one in by_source.items())
        self.display.print(
            f"step {self.step:,}: validation loss {loss:.4f}{parts_text}, {bits:.4f} bits per byte."
        )

    def _sample(self) -> None:
        self.log.pause()  # on all ranks
        if self.samples is None:
            return
        self.world.progress(self.step, "generating samples")
        self.samples.sample(self.step, self.network, self._eval_passes(), self.optimizer)

    def _validation_batches(
        self, section: tuple[int, int], passes: int, *, may_stop: bool = True
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """This rank's batches of some windows for forwards of so many passes.

        A single process obeys a stop signal between them.
        """
        world, done = self.world, 0
        rows = -(-self.accumulator.micro_batch * self.network.shape.context // self.spec.shape.context)
        for inputs, targets in self.validation.batches(rows, world.rank, world.size, section):
            if may_stop and self.stop_signals.signal and world.size == 1:
                if self.step < self.spec.steps:
                    self._save("regular", wait=True)
                self.writer.wait()  # for the final checkpoint, whose error comes first
                raise Interrupted(self.stop_signals.signal, self.step)
            world.progress(self.step, "validation")
            done += 1
            yield self._rows(torch.from_numpy(inputs)), self._rows(torch.from_numpy(targets))
        # With FSDP2 every forward is collective: a rank with fewer batches takes part in the others', with as
        # many passes, or they would wait for it in the cores that it does not gather.
        if self.optimizer.collective_forward:
            most = math.ceil(math.ceil((section[1] - section[0]) / world.size) / rows)
            ids = [self._rows(torch.from_numpy(x)).to(self.device) for x in self.validation.rows(0, 1)]
            for _ in range(most - done):
                self.network(ids[0], ids[1], passes=passes)

    def _save(self, kind: str, *, wait: bool) -> None:
        self.log.pause()
        self.world.progress(self.step, "saving a checkpoint")
        self.log.metrics.require_directory()
        # Never save weights that are not finite: the run could only be resumed from them.
        norm = self._weight_norm()
        if not math.isfinite(norm):
            what = f"the norm of the weights is {norm}"
            raise diverged(self.spec, self.writer, self.step - 1, what)
        # Metrics first: a checkpoint must not be newer than the losses of its steps.
        self.log.metrics.sync()
        started = time.monotonic()
        self.writer.save(self._training_progress(kind), self.network, self.optimizer, wait=wait)
        self.saved_at = time.monotonic()
        self.log.checkpoint_seconds += self.saved_at - started

    def _weight_norm(self) -> float:
        """The norm of the weights of all ranks, each of which adds what it owns."""
        square = torch.zeros((), dtype=torch.float64, device=self.device)
        for owned in checkpoints.owned_pieces(self.network, self.optimizer):
            square += torch.linalg.vector_norm(owned.weight).double().square()
        return self.world.all_reduce_(square).sqrt().item()

    def _training_progress(self, kind: str) -> TrainingProgress:
        return replace(
            self.begun,
            step=self.step,
            passes=self.network.passes,
            seconds_training=self.timer.seconds,
            seconds_total=self.total_before + time.monotonic(),
            kind=kind,
            scores=[to_builtins(score) for score in self.scores],
        )

    def _finish(self) -> RunRecord:
        # The exchange of the last step is still under way; every rank completes it before another collective.
        if self.flags is not None:
            self.flags.result()
        if not self.scores or self.scores[-1].step != self.step:
            self._validate()
        # The final checkpoint is complete on all ranks before the record says that the run has finished.
        self.writer.wait()
        self._wait_for_weights()
        peak = torch.cuda.max_memory_allocated() if self.device.type == "cuda" else 0
        peak = int(self.world.maximum(peak)[0])
        if not self.world.is_main:
            return RunRecord.from_dict(self.world.broadcast_object(None))
        record = self._record(peak or None)
        self.log.metrics.require_directory()
        self.log.metrics.sync()
        # Before the record: a run with one is not opened again; a kill in between would leave checkpoints.
        checkpoints.prune(self.directory.checkpoints, 1, self.options.keep_every)
        write_json(self.directory.record_file, record.to_dict())
        for run in finished_trunk(self.spec, self.directory):  # none needs what another has kept for it
            with contextlib.suppress(OSError):  # another user's
                checkpoints.prune(run.checkpoints, 1, self.options.keep_every, ("branch",))
        self.world.broadcast_object(record.to_dict())
        return record

    def _record(self, peak_memory: int | None) -> RunRecord:
        spec, last, losses = self.spec, self.scores[-1], self.log.metrics.losses
        progress = self._training_progress("final")
        flops = self.schedule.flops(spec.batch_tokens)
        trunk = self.schedule.flops(spec.batch_tokens, stop=progress.trunk_steps).total
        own_tokens = (spec.steps - progress.trunk_steps) * spec.batch_tokens
        seconds = progress.seconds_training
        tail = losses[-max(10, spec.steps // 100) :]
        return RunRecord(
            spec=spec,
            run=spec.hash,
            validation_loss=last.loss,
            validation_bits_per_byte=last.bits_per_byte,
            validation_identity=self.validation.identity,
            validation_scores=tuple(self.scores),
            train_loss=sum(tail) / len(tail) if tail else last.loss,  # metrics.jsonl was deleted
            tokens=spec.tokens,
            flops=flops.total,
            flops_by_term=flops.to_dict(),
            parameters=self.schedule.parameters(),
            seconds_training=seconds,
            seconds_total=progress.seconds_total,
            tokens_per_second=own_tokens / max(seconds, 1e-9),
            mfu=(flops.total - trunk) / seconds / self.peak if self.peak and seconds > 0 else None,
            peak_memory_bytes=peak_memory,
            hardware=device_info.hardware(self.device, self.world.size, self.runs_per_gpu),
            versions=device_info.versions(),
            git=device_info.git_state(),
            finished=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            resumed=progress.resumed,
            recompute=self.network.recompute,
            trunk=progress.trunk,
            trunk_steps=progress.trunk_steps,
            trunk_flops=trunk,
        )
