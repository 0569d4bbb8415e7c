"""Arm and size → hyperparameters and tokens: the paper's tables, scaling rules, accounting, planner."""
