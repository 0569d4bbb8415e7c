"""The names of the studies with a line each: light enough for a command line's help."""

from __future__ import annotations

ASKS = {
    "ladder": "Which arms scale better, and is it exponent or constant?",
    "fit-recipe": "The four stages in order for one arm; writes a recipe file the ladder uses.",
    "chain-tuning": "Stage 1: the best hyperparameters at the base size.",
    "tpp": "Stage 2: the best tokens per parameter, and whether they drift with scale.",
    "growth-fraction": "Stage 3: the share of tokens after growth.",
    "lr-rule": "Stage 4: how the learning rate must change with size. Parts: drift, screen.",
    "allocation": "Which share of the blocks belongs in the core?",
    "passes": "How many core passes? Parts: tokens, anchor.",
    "growth-target": "To how many passes should a network grow?",
    "growth-timing": "When should it grow, and which law does that follow?",
    "transfer": "What does another arm's recipe cost? Parts: probe, ladder.",
    "ablations": "Which choices carry the gains? Parts: operator, allocation, shape, width-only, "
    "width-and-depth, optimizer, random, constant.",
    "extrapolate": "Does the fitted law predict a held-out rung?",
    "data-constrained": "Parameters or passes, when data are repeated? Parts: grid, regimes, controls.",
}
