"""`generate`, `export` and `import`: text of a trained network, models out and in."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import KW_ONLY, dataclass
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from steepen.requests.evaluate import DeviceField, PrecisionField
from steepen.requests.request import Argument, Option, Request, function
from steepen.requests.runs import RunsField
from steepen.results.files import Written
from steepen.results.result import Result
from steepen.results.runs import run_path
from steepen.results.table import Column
from steepen.results.text import Block, Lines
from steepen.utils.codec import Range, option
from steepen.utils.formatting import counted, unwrapped
from steepen.utils.values import Seed, Several

RunField: TypeAlias = Annotated[
    Any,
    Argument(
        "A run (its newest checkpoint): its directory, its hash or the beginning of it; or a checkpoint "
        "directory.",
        metavar="RUN",
        python="Also what evaluation.load.load returns.",
    ),
]


def _opened(checkpoint: Any, runs: Path) -> Any:
    """A path, or the network in memory that was given."""
    return run_path(checkpoint, runs) if isinstance(checkpoint, str | Path) else checkpoint


@dataclass(frozen=True, eq=False, repr=False)
class GeneratedTexts(Result):
    """Generated texts without their prompts: `found[0]`, `len(found)`, `for text in found`."""

    row_columns: ClassVar = {"prompt": Column(value=itemgetter(0)), "text": Column(value=itemgetter(1))}

    run: str
    passes: int | None  # None: as many as the run is evaluated at
    seed: int
    prompts: tuple[str, ...]
    texts: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, place: int) -> str:
        return self.texts[place]

    def __iter__(self) -> Iterator[str]:
        return iter(self.texts)

    @property
    def rows(self) -> list[tuple[str, str]]:
        """Every prompt with its text."""
        return list(zip(self.prompts, self.texts, strict=True))

    def headline(self) -> str:
        """How many texts there are, and of which run."""
        return f"{counted(len(self.texts), 'text')} of {self.run}"

    def to_dict(self) -> dict[str, Any]:
        """Run, passes, seed, and prompts with their texts."""
        return {"run": self.run, "passes": self.passes, "seed": self.seed, "texts": self.to_rows()}

    def blocks(self, width: int) -> Iterable[Block]:
        """Every prompt with its text."""
        return [Lines(f"{prompt}{text}\n") for prompt, text in self.rows]


@dataclass(frozen=True)
class Generate(Request[GeneratedTexts]):
    """Continue a prompt with a trained network.

    The text of one prompt is printed while it is generated. It begins a document: <|endoftext|> is put before
    the prompt, as in training.
    """

    examples = ('steepen generate runs/HASH --prompt "The law of" --passes 4',)
    tables = True

    checkpoint: RunField
    prompt: Annotated[Several, Option("Text to continue; repeat the option for a batch of prompts.")]
    _: KW_ONLY
    passes: int | None = option(
        "Core passes; default: the number the run is evaluated at.", limits=Range(1, 10_000)
    )
    temperature: float = option("Of the softmax; 0 is greedy decoding.", 0.8, Range(0, 1e6))
    top_p: float = option(
        "Sample from the most probable tokens that have this mass together.", 0.95, Range(1e-9, 1)
    )
    seed: Seed = option("Seed of the sampling.", 0)
    max_tokens: int = option("Maximum of new tokens per prompt.", 64, Range(1, 10**9))
    device: DeviceField = "auto"
    precision: PrecisionField = "auto"
    runs: RunsField = Path("runs")

    def run(self) -> GeneratedTexts:
        """Generate the texts."""
        return self._generate(None)

    def _generate(self, on_text: Any) -> GeneratedTexts:
        from steepen.evaluation.load import LoadedRun, load
        from steepen.inference.decoding import Sampling, continue_text

        found = _opened(self.checkpoint, self.runs)
        if not isinstance(found, LoadedRun):
            found = load(found, device=self.device, precision=self.precision)
        sampling = Sampling(self.temperature, self.top_p, self.seed)
        passes = found.passes if self.passes is None else self.passes
        texts = continue_text(
            found.network, found.tokenizer, self.prompt, self.max_tokens, sampling, passes=passes,
            on_text=on_text,
        )  # fmt: skip
        return GeneratedTexts(str(self.checkpoint), self.passes, self.seed, self.prompt, tuple(texts))

    def run_in_terminal(self, as_json: bool = False) -> Any:
        """Print the text of a single prompt while it is generated."""
        if as_json or len(self.prompt) > 1:
            return self.run()
        # A terminal gets printable text only; a file or pipe gets the text as it is.
        out = sys.stdout if sys.stdout.isatty() else unwrapped(sys.stdout)
        pending = [str(self.prompt[0])]  # printed once the network is loaded

        def show(row: int, text: str) -> None:
            print("".join(pending) + text, end="", file=out, flush=True)
            pending.clear()

        self._generate(show)
        print("".join(pending), file=out)
        return None


@dataclass(frozen=True)
class Export(Request[Written]):
    """Export a trained network, to transformers or to plain safetensors.

    An hf folder has its own modeling code (trust_remote_code=True), tokenizer, generation config and model
    card; it needs no steepen.
    """

    examples = ("steepen export runs/HASH --to hf exported/loop-2",)

    checkpoint: RunField
    out: Annotated[Path, Argument("Folder to write; it must not exist.", metavar="DIR")]
    to: Literal["hf", "safetensors"] = option(
        "hf (a folder that transformers loads) or safetensors (weights and a JSON).", "hf"
    )
    _: KW_ONLY
    data_license: str | None = option("Licence of the training data, for the model card.")
    include_code: bool = option(
        "Copy the source of a custom block and of custom boundaries into an hf folder.", False
    )
    runs: RunsField = Path("runs")

    def run(self) -> Written:
        """Load the network and write the folder."""
        from steepen.inference.export import export as export_run

        checkpoint = _opened(self.checkpoint, self.runs)
        written = export_run(
            checkpoint, self.out, self.to, data_license=self.data_license, include_code=self.include_code
        )
        return Written(written)


@dataclass(frozen=True)
class ImportModel(Request[Written]):
    """Import an exported model as a run, to evaluate, generate with or export."""

    examples = ("steepen import exported/loop-2",)

    path: Annotated[Path, Argument("A folder that `steepen export` wrote.", metavar="DIR")]
    runs: Path = option("Run store; the run is a directory named by its hash.", Path("runs"))
    out: Path | None = option("Run directory to write instead.")

    def run(self) -> Written:
        """Read the model and write the run directory."""
        from steepen.inference.import_model import import_model as import_run

        found = import_run(self.path, self.runs, self.out)
        return Written(found.path, found.notes, {"run": found.spec.hash})


generate = function(Generate)
export = function(Export)
import_model = function(ImportModel)
