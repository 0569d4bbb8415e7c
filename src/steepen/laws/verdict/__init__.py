"""Verdicts on arms: questions, evidence, multipliers and hold-outs."""
