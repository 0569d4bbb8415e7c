"""Verdicts on arms: evidence, sentences, sensitivity, multipliers and hold-outs."""
