"""Results: typed rows, and every way to show them: text, JSON, CSV, LaTeX, frame, HTML and figure."""
