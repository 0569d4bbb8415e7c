"""Verdicts on arms: multipliers, sensitivity, hold-outs, and the sentences that state them."""
