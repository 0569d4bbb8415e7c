"""Checkpoint to scores: CORE and answer NLL, depth used, passes at test time, validation."""
