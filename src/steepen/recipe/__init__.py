"""Arm and size → hyperparameters and tokens: the paper's tables, scaling rules, FLOPs, memory, planner."""
