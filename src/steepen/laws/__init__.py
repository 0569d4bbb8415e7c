"""Laws of tables of runs, and verdicts on arms (numpy and scipy only).

A table of ladders goes through `analysis.analyse`: `ladder` (runs → rungs), `model` (rungs → laws, and the
noise models that every contrast of them is averaged over), `verdict` (contrasts → p-values → answers,
evidence and sentences). `keep`, `next_runs`, `stopping` and `power` ask the same model;
`registered_forecasts` are its forecasts, kept in a file.

Tables of sizes and tokens, of sweeps and of accuracies have laws of their own: `chinchilla_table`,
`isoflop_table` and `downstream_table`, each with its fits in `fits`, where the paper's method is too.
"""
