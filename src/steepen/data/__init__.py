"""Text to token shards to batches. numpy only; torch is imported where tensors are made."""

from __future__ import annotations

from steepen.data.dataset import Dataset, Manifest
from steepen.data.loader import BatchLoader, Prefetcher
from steepen.data.tokenizer import Tokenizer
from steepen.data.validation_set import ValidationSet

__all__ = ["BatchLoader", "Dataset", "Manifest", "Prefetcher", "Tokenizer", "ValidationSet"]
