"""Text to token shards to batches. numpy only; torch is imported where tensors are made.

The flow: `prepare` resolves the names of sources (`sources/`) and runs a job (`tokenize_source`) that splits
their documents (`validation_split`), tokenizes them (`tokenizer`) and writes them (`shard_writer`). A
`Dataset` opens the result; `BatchLoader` reads batches from it in an order (`windows`) that the seed decides.
"""

from __future__ import annotations

from steepen.data.dataset import Dataset, Manifest
from steepen.data.loader import BatchLoader, Prefetcher
from steepen.data.tokenizer import Tokenizer
from steepen.data.validation_set import ValidationSet

__all__ = ["BatchLoader", "Dataset", "Manifest", "Prefetcher", "Tokenizer", "ValidationSet"]
