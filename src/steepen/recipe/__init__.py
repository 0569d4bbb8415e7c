"""Arm and depth to hyperparameters and tokens: the paper's tables, its scaling rules, and the accounting."""
