"""One model of a whole table of ladders: laws, noise and contrasts (`fit_tables.fit_tables`)."""
