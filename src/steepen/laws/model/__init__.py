"""One model of a whole table of ladders: laws, noise and contrasts (`table_fit.fit_tables`)."""
