"""Scores of ladders: downstream metrics, effective depth and passes at test time, as an answer."""
