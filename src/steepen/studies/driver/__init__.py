"""Drive a study: run the specs it yields, send their records back, keep a journal, simulate dry runs."""
