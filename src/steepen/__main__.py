"""`python -m steepen`: the command line without the installed script."""

from steepen.requests.app import run

if __name__ == "__main__":
    run()
