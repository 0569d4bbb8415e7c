"""`data prepare`, `data show` and `data verify`: tokenized text for training."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import KW_ONLY, asdict, dataclass
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from steepen.errors import UsageError, is_whole
from steepen.requests.request import Argument, Request, function
from steepen.results.result import Result
from steepen.results.table import Column, table_of
from steepen.results.text import Block, Facts, Lines
from steepen.utils.codec import HelpPanel, Range, option
from steepen.utils.values import Tokens

if TYPE_CHECKING:
    from steepen.data import Dataset
    from steepen.utils.progress import StageProgressCallback

    Sources = Any  # one or several
else:
    Sources = tuple[Any, ...]

# Panels of --help.
SPLIT = HelpPanel("Split")
READING = HelpPanel("Reading")
WRITING = HelpPanel("Writing")
Directory = Annotated[Path, Argument("A prepared directory.")]


@dataclass(frozen=True)
class SplitRow:
    """Training or validation documents."""

    split: str
    documents: int
    tokens: int
    shards: int


@dataclass(frozen=True, eq=False, repr=False)
class DataResult(Result):
    """What a prepared directory holds."""

    dataset: Dataset

    @property
    def rows(self) -> list[SplitRow]:
        """The splits."""
        manifest = self.dataset.manifest
        return [
            SplitRow(name, split.documents, split.tokens, sum(one.split == name for one in manifest.shards))
            for name, split in manifest.splits.items()
        ]

    def headline(self) -> str:
        """The directory."""
        return str(self.dataset.directory)

    def to_dict(self) -> dict[str, Any]:
        """The manifest, the directory and the sizes of the vocabulary."""
        found = self.dataset
        return {
            "directory": str(found.directory),
            "identity": found.identity,
            "vocabulary": found.vocabulary,
            "padded_vocabulary": found.padded_vocabulary,
            **asdict(found.manifest),
        }

    def blocks(self, width: int) -> Iterable[Block]:
        """The splits, the source, the tokenizer and the identity."""
        yield self.table()
        found, manifest, tokenizer = self.dataset, self.dataset.manifest, self.dataset.tokenizer()
        if manifest.sources:
            total = max(1, manifest.splits["train"].tokens)
            columns = [
                Column("source", value=lambda one: one.name),
                Column("weight", ".4f", value=lambda one: one.weight),
                Column("of training", ".4f", value=lambda one: one.tokens["train"] / total),
                Column("train tokens", value=lambda one: one.tokens["train"]),
                Column("val tokens", value=lambda one: one.tokens["val"]),
            ]
            yield table_of(manifest.sources, columns)
        padded = f"{found.vocabulary:,} ids, {found.padded_vocabulary:,} padded"
        facts = [
            ("source", str(manifest.source.get("name", "?"))),
            ("tokenizer", f"{manifest.tokenizer.name} ({padded}), {manifest.dtype}"),
            ("separator", f"{tokenizer.end_text} (id {tokenizer.end_of_text:,}), before every document"),
            ("identity", found.identity),
        ]
        requested, there = manifest.notes.get("validation_tokens_requested"), manifest.splits["val"].tokens
        if is_whole(requested) and there < requested:
            note = f"the source has {there:,} of the {requested:,} validation tokens requested"
            facts.append(("note", note))
        if ran_out := manifest.notes.get("ran_out"):
            facts.append(("note", f"the mixture ends where {ran_out} ran out"))
        yield Facts(facts)


@dataclass(frozen=True, eq=False, repr=False)
class VerifiedData(Result):
    """A prepared directory whose every byte is as it was written."""

    row_columns: ClassVar = {"file": Column(value=itemgetter(0)), "bytes": Column(value=itemgetter(1))}

    dataset: Dataset
    sizes: Mapping[str, int]

    @property
    def rows(self) -> list[tuple[str, int]]:
        """The shards, each with its bytes."""
        return list(self.sizes.items())

    def headline(self) -> str:
        """That it is valid."""
        found = self.dataset
        shards = f"{len(found.manifest.shards)} shards and the tokenizer"
        return f"{found.directory} is valid: {shards} match identity {found.identity}."

    def to_dict(self) -> dict[str, Any]:
        """Directory and identity."""
        found = self.dataset
        return {"directory": str(found.directory), "identity": found.identity, "valid": True}

    def blocks(self, width: int) -> Iterable[Block]:
        """One sentence."""
        yield Lines(self.headline())


@dataclass(frozen=True)
class Prepare(Request["Dataset"]):
    """Tokenize a source into shards, split into training and validation by document.

    An interrupted preparation resumes when the same command is run again. In Python it returns the data,
    which is only opened if it is there already.
    """

    examples = (
        "steepen data prepare builtin --out data/builtin --tokenizer bpe:4096",
        "steepen data prepare 'corpus/*.parquet' --out data/corpus --val-tokens 1e6",
        "steepen data prepare fineweb-edu:sample-10BT --out data/edu --max-tokens 2B",
        "steepen data prepare fineweb:paper --out data/fineweb",
        "steepen data prepare --mix fineweb=0.7,corpus/code=0.2,hf:owner/wiki=0.1 --out data/mix",
    )

    source: Annotated[
        Sources,
        Argument(
            "Files, quoted globs or directories of text, JSON lines or Parquet (also .gz and .zst); builtin, "
            "the corpus that comes with steepen; any data set of the Hugging Face Hub as "
            "hf:OWNER/NAME:CONFIG:SPLIT@REVISION, of which all after NAME may be left out; fineweb or "
            "fineweb-edu, with a config and revision as in fineweb-edu:sample-10BT@main, or the paper's data "
            "as fineweb:paper and fineweb-edu:paper; or module:attribute, a Python function that returns "
            "documents.",
            python="Also the function.",
        ),
    ] = ()
    out: Path | None = WRITING("Output directory; written as DIR.partial until it is complete.")
    _: KW_ONLY
    mix: str | None = option(
        "Several sources by their shares of the tokens, as web/*.jsonl=0.7,hf:owner/code=0.3, or a YAML "
        "file that also says how each is read and how often at most (docs/data.md). The mixture ends where "
        "a source runs out."
    )
    tokenizer: str = WRITING(
        "gpt2; bpe:SIZE, trained on the source; cl100k_base, o200k_base and others of tiktoken; a "
        "tokenizer.json, a folder of transformers, a SentencePiece .model, or hf:OWNER/NAME@REVISION.",
        "gpt2",
    )
    val_tokens: int | None = SPLIT(
        "Validation tokens to split off, by document. Default: 1/50, at most 10,485,760.",
        limits=Range(0, 10**15),
    )
    val_source: tuple[Any, ...] = SPLIT("Take validation from this source instead. Repeatable.", ())
    max_tokens: Tokens | None = SPLIT("Stop after the document that reaches this many training tokens.")
    dedup_tokens: int | None = SPLIT(
        "Drop training documents whose first so many tokens equal those of a validation document (needs "
        "`val_source`); 0: drop none. Default: whole documents are compared.",
        limits=Range(0, 10**9),
    )
    field: str = READING("Field of JSON lines or Parquet that holds the text.", "text")
    format: Literal["auto", "text", "jsonl", "parquet"] = READING("auto, text, jsonl or parquet.", "auto")
    separator: str = READING(
        "Separator between documents in text files; \\n is a line break.", "<|endoftext|>"
    )
    replace_invalid: bool = READING("Read invalid UTF-8 as U+FFFD.", False)
    hub: str | None = READING("Another Hugging Face Hub: its URL, or a directory with its layout.")
    dtype: Literal["auto", "uint16", "uint32"] = WRITING("auto, uint16 or uint32.", "auto")
    shard_tokens: int = WRITING("Tokens per shard file.", 100_000_000, Range(256, 10**12))
    threads: int | None = WRITING(
        "Tokenizer threads; they do not change the result. Default: all cores.", limits=Range(1, 10_000)
    )
    restart: bool = WRITING("Delete an unfinished preparation first.", False)

    def check(self) -> None:
        """A directory is needed, and either sources or a mixture."""
        if self.out is None:
            raise UsageError("name the directory to write to with `out`.")
        if not self.source and self.mix is None:
            raise UsageError(
                "no source given; name files, a glob, builtin, hf:OWNER/NAME, fineweb or a function, or a "
                "mixture with `mix`."
            )

    def run(self, report: StageProgressCallback | None = None) -> Dataset:
        """Prepare the data, and open it."""
        from steepen.data.prepare import prepare as prepare_data
        from steepen.data.prepare_request import PrepareRequest
        from steepen.data.sources.readers import ReadOptions

        def named(sources: tuple[Any, ...]) -> tuple[Any, ...]:
            return tuple(str(one) if isinstance(one, Path) else one for one in sources)

        separator = self.separator.replace("\\n", "\n")
        request = PrepareRequest(
            source=named(self.source), val_source=named(self.val_source), tokenizer=self.tokenizer,
            val_tokens=self.val_tokens, max_tokens=self.max_tokens, dedup_tokens=self.dedup_tokens,
            read_options=ReadOptions(self.format, self.field, separator, self.replace_invalid),
            dtype=self.dtype, shard_tokens=self.shard_tokens, hub=self.hub, mix=self.mix,
        )  # fmt: skip
        assert self.out is not None
        return prepare_data(request, self.out, report, self.threads, self.restart)

    def run_in_worker(self) -> Any:
        """What `data show` has as JSON."""
        return DataResult(self.run()).to_dict()

    def run_in_terminal(self, as_json: bool = False) -> DataResult:
        """Prepare with progress on stderr."""
        from steepen.utils.progress import stage_progress

        try:
            with stage_progress(quiet=as_json) as show:
                return DataResult(self.run(show))
        except KeyboardInterrupt:
            print("Interrupted. Run the same command again to resume.", file=sys.stderr)
            raise


@dataclass(frozen=True)
class ShowData(Request[DataResult]):
    """Show a prepared directory: source, tokenizer, documents and tokens per split, identity."""

    examples = ("steepen data show data/builtin",)
    tables = True

    directory: Directory

    def run(self) -> DataResult:
        """Open the data."""
        from steepen.data import Dataset

        return DataResult(Dataset.open(self.directory))


@dataclass(frozen=True)
class VerifyData(Request[VerifiedData]):
    """Verify every byte of the shards (SHA-256), the token ids and the document counts."""

    examples = ("steepen data verify data/builtin",)

    directory: Directory

    def run(self, show: bool = False) -> VerifiedData:
        """Read every shard; raises an error that names the one that was altered."""
        from steepen.data import Dataset

        dataset, sizes = Dataset.open(self.directory), dict[str, int]()

        def note(file: str, size: int) -> None:
            sizes[file] = size
            if show:
                print(f"{file}: {size:,} bytes, verified", file=sys.stderr)

        dataset.verify(note)
        return VerifiedData(dataset, sizes)

    def run_in_terminal(self, as_json: bool = False) -> VerifiedData:
        """Verify, with a line on stderr for each shard where that is a terminal."""
        return self.run(show=sys.stderr.isatty() and not as_json)


prepare = function(Prepare)
