"""Run spec → checkpoints and record: trainer, train step, schedule, checkpoints, metrics, trackers."""
