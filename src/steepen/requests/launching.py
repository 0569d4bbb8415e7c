"""Options of `study`: where its runs are made, how each is executed, and what they may cost."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from steepen.errors import UsageError
from steepen.training.train_options import EXECUTION, DeviceField, ShardField, Steps, TrackField
from steepen.utils.codec import HelpPanel, Range

if TYPE_CHECKING:
    from steepen.launch.base import Launcher
    from steepen.launch.cost_estimate import Budget, GpusPerRun, Speed
    from steepen.runs.store import RunStore

# Panels of --help.
LAUNCHER = HelpPanel("Launching")
COST = HelpPanel("Budget and cost")


@dataclass(frozen=True)
class Launching:
    """How the runs of a study are made, and what they may cost."""

    _: KW_ONLY
    launcher: Any = LAUNCHER(
        "local, slurm, ray, or a custom module:attribute.", "local", python="Also the launcher's class."
    )
    jobs: int | None = LAUNCHER(
        "Max runs at a time. Default: one per GPU, else per CPU core.", limits=Range(1, 10_000), flag="-j"
    )
    launcher_options: tuple[str, ...] = LAUNCHER(
        "Option of the launcher. local: runs_per_gpu, threads. slurm: partition, timeout_min, "
        "gpus_per_node, max_gpus_per_node, runs_per_job, account and any other of submitit. ray: address, "
        "num_cpus, num_gpus, max_gpus_per_node, threads. Repeatable.",
        (),
        flag="--launcher-option",
        metavar="KEY=VALUE",
    )

    runs: Path = LAUNCHER("Directory of all runs.", Path("runs"))
    gpus_per_run: Annotated[int, Range(1, 1024)] | Literal["auto"] = LAUNCHER(
        "GPUs of each run, or auto: the fewest on which the planner expects it to fit in memory and to "
        "finish within a day.",
        1,
    )
    device: DeviceField = "auto"
    shard: ShardField = "optimizer"
    sample_every: Steps | None = EXECUTION(
        "Every run generates sample text every so many steps into samples.jsonl. Default: the preset's, "
        "else none."
    )
    sample_prompt: tuple[str, ...] = EXECUTION(
        "Prompt of the samples. Repeatable. Default: the start of a document.", ()
    )
    track: TrackField = ()
    retry_diverged: bool = LAUNCHER("Retrain runs whose loss diverged.", False)
    budget: str | None = COST("Start only runs that fit: FLOPs (1e15) or time (90s, 30m, 2h, 1d).")
    gpu: str | None = COST(
        "Estimate time for this GPU (a100, h100, …) instead of from finished runs; 8xh100: for eight, which "
        "the runs share."
    )
    mfu: float | None = COST(
        "Estimate time for this fraction of the GPU's peak (0.4).", limits=Range(1e-6, 1)
    )
    dollars_per_hour: float | None = COST("Price of one GPU for an hour.", limits=Range(0, 1e6))

    @property
    def launcher_name(self) -> str:
        """The launcher as other processes find it: a name, or module:attribute."""
        from steepen.utils.imports import object_name

        return object_name(self.launcher, "launcher")

    @property
    def store(self) -> RunStore:
        """The run store."""
        from steepen.runs.store import RunStore

        return RunStore(self.runs)

    @property
    def named_gpus(self) -> tuple[int | None, str | None]:
        """How many GPUs `gpu` names, where it does (8xh100), and which."""
        count, times, model = (self.gpu or "").partition("x")
        return (int(count), model) if times and count.isdecimal() and int(count) else (None, self.gpu)

    @property
    def on_this_machine(self) -> bool:
        """Whether runs are made here: the hardware of a cluster's nodes is not known."""
        return self.launcher_name == "local"

    def check_launching(self) -> None:
        """Reject what would fail when the first run starts, but for the device (`check_device`)."""
        if self.track:
            from steepen.training.trackers import require_installed

            require_installed(self.track)
        self.limit()
        self.gpus()

    def check_device(self) -> None:
        """Raise UsageError for a GPU that this machine does not have, before any run starts there."""
        if self.on_this_machine and self.device.startswith("cuda"):
            from steepen.training.device import find_device  # imports torch, which no other device needs

            find_device(self.device)

    def limit(self) -> Budget | None:
        """What this command may spend; it counts from now."""
        from steepen.launch.cost_estimate import Budget

        return None if self.budget is None else Budget.parse(self.budget)

    def gpus(self) -> GpusPerRun:
        """GPUs of each run; raises UsageError for an unknown GPU."""
        from steepen.launch.cost_estimate import MAX_GPUS, GpusPerRun
        from steepen.recipe.accelerators import find_accelerator

        count, model = self.named_gpus
        found = None if model is None else find_accelerator(model)
        if count is not None and self.gpus_per_run != "auto" and self.gpus_per_run > count:
            raise UsageError(f"`gpus_per_run` = {self.gpus_per_run} is more than `gpu` {self.gpu} has.")
        return GpusPerRun(self.gpus_per_run, found, self.shard, count or MAX_GPUS)

    def make_launcher(self, data: Path) -> Launcher:
        """The launcher; raises UsageError for an unknown name or option.

        Every attempt at a run is the request `train` with these fields.
        """
        from steepen.launch.base import LaunchContext, make_launcher

        fields = ("device", "shard", "track", "sample_every", "sample_prompt")
        options = {name: getattr(self, name) for name in fields}
        context = LaunchContext(data, self.store, options, gpus_per_run=self.gpus())
        return make_launcher(self.launcher_name, context, self.jobs, self.launcher_options)

    def speed(self) -> Speed:
        """Speed of runs: as given, else from finished runs on the same hardware, else assumed."""
        import platform

        from steepen.launch.cost_estimate import Speed, local_hardware_name

        hardware = None
        if self.on_this_machine:
            hardware = platform.node() if self.device == "cpu" else local_hardware_name()
        return Speed.from_records(
            () if self._speed_is_given else self.store.records(),
            device=hardware,
            gpu=self.named_gpus[1],
            mfu=self.mfu,
            gpus_per_run=self.gpus(),
        )

    def estimated_on_cpu(self) -> bool:
        """Whether time estimates are for CPUs of this machine."""
        from steepen.launch.local import visible_gpus

        here = not self._speed_is_given and self.on_this_machine
        return here and (self.device == "cpu" or not visible_gpus())

    @property
    def _speed_is_given(self) -> bool:
        return self.gpu is not None or self.mfu is not None
