"""Checkpoint to scores: CORE and answer NLL, KL effective depth, passes at test time, validation loss."""
