"""A run spec to a checkpoint and a record: optimizers, schedule, loop, checkpoints."""
