"""Fits: compute laws by the paper's method, laws in size and tokens, iso-FLOP sweeps, downstream scores."""
