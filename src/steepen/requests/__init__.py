"""One file per verb: what can be asked, in Python, on the command line and as JSON (see `request.py`)."""
