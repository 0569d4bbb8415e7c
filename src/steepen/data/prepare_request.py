"""Options of a preparation (`PrepareRequest`), and its progress reports."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any

from steepen.data.shards import choose_dtype
from steepen.data.sources.hub import paper_corpus
from steepen.data.sources.mixture import MixedSource, parse_mixture
from steepen.data.sources.readers import ReadOptions
from steepen.data.sources.source import SourceFunction
from steepen.data.sources.tokenizers import parse_tokenizer
from steepen.data.tokenizer import GPT2_SIZE
from steepen.errors import UsageError
from steepen.utils.progress import StageProgressCallback


@dataclass(frozen=True)
class PrepareRequest:
    """A source and the options that decide its shards.

    Equal requests on equal sources give equal bytes, whatever the number of threads. The paper's corpora
    (fineweb:paper, fineweb-edu:paper) bring their own validation source, sizes and de-duplication, where the
    request names none.
    """

    source: tuple[str | SourceFunction, ...] = ()  # names, or one function that returns documents
    val_source: tuple[str | SourceFunction, ...] = ()  # validation documents; () splits them off the source
    tokenizer: str = "gpt2"
    val_tokens: int | None = None
    max_tokens: int | None = None
    # Leave out training documents whose first so many tokens are those of a validation document; None: whose
    # text is; 0: none.
    dedup_tokens: int | None = None
    clip_validation: bool = False  # cut the last document of `val_source` at `val_tokens`, as the authors do
    read_options: ReadOptions = field(default_factory=ReadOptions)
    dtype: str = "auto"
    shard_tokens: int = 100_000_000
    hub: str | None = None  # another Hub than huggingface.co: a URL or a directory
    mix: str | None = None  # instead of `source`: a mixture (`data/sources/mixture.py`)

    def __post_init__(self) -> None:
        for name in ("source", "val_source"):
            if isinstance(getattr(self, name), str) or callable(getattr(self, name)):
                object.__setattr__(self, name, (getattr(self, name),))
        self._complete()
        # Of other tokenizers the size is known only when they are loaded.
        known = GPT2_SIZE if self.tokenizer == "gpt2" else 1
        choose_dtype(parse_tokenizer(self.tokenizer) or known, self.dtype)
        # The command has checked these already; a request can also be made by itself (docs/data.md).
        if not self.source and self.mix is None:
            raise UsageError(
                "no source given; name files, a glob, builtin, hf:OWNER/NAME, fineweb or a function."
            )
        for name, minimum in (
            ("val_tokens", 0),
            ("max_tokens", 1),
            ("shard_tokens", 256),
            ("dedup_tokens", 0),
        ):
            value = getattr(self, name)
            if value is not None and value < minimum:
                raise UsageError(f"{name} is {value}; it must be {minimum} or more.")
        if self.dedup_tokens is not None and not self.val_source:
            raise UsageError("dedup_tokens compares with the documents of a val_source; name one.")
        if self.mix is not None and (self.source or self.val_source):
            raise UsageError(
                "`mix` names all sources and takes validation from each; leave out `source` and `val_source`."
            )

    def _complete(self) -> None:
        """Take what the request does not say from the paper's corpus, if that is the source."""
        corpus = paper_corpus(self.source[0]) if self.source else None
        if corpus is None:
            return
        for name, value in (
            ("val_source", (f"{self.source[0]}-validation",)),
            ("val_tokens", corpus.validation_tokens),
            ("max_tokens", corpus.train_tokens),
            ("dedup_tokens", corpus.dedup_tokens),
            ("clip_validation", corpus.clip_validation),
        ):
            if getattr(self, name) in (None, (), False):
                object.__setattr__(self, name, value)

    def mixture(self) -> dict[str, MixedSource]:
        """The sources of a mixture by their names, with weights that add up to 1; none without `mix`."""
        return {} if self.mix is None else parse_mixture(self.mix, self.read_options)

    def options(self) -> dict[str, Any]:
        """The fields that decide the result beside the source, as the manifest stores them."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        # A field added later is left out at its default: preparations of before are still recognized.
        for name in ("source", "val_source", "hub", *(() if self.clip_validation else ("clip_validation",))):
            del values[name]
        del values["mix"]  # the description of the source has it whole, also where a file was edited
        return {**values, "read_options": asdict(self.read_options)}


class ProgressReporter:
    """Reports to the user's display, and lets a source report a stage of its own such as a download.

    Of a stage are known the characters read, an estimate of those of the whole source, and tokens.
    """

    def __init__(self, display: StageProgressCallback | None) -> None:
        self._display = display
        self._latest = 0, 0, 0

    def __call__(self, stage: str, characters: int, total: int, tokens: int = 0) -> None:
        """Report progress."""
        self._latest = characters, total, tokens
        if self._display is not None:
            self._display(stage, characters, total, tokens=tokens)

    def stage(self, stage: str) -> None:
        """Report another stage with unchanged counts."""
        self(stage, *self._latest)
