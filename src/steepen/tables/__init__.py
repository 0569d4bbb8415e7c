"""Tables of runs, from files and trackers: columns by name, cleaned, rows chosen (numpy only)."""
