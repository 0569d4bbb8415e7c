"""Text to token shards to batches."""
