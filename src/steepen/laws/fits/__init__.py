"""Fits: compute laws, Chinchilla, iso-FLOP sweeps, hyperparameter drift, downstream scores."""
