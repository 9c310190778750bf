"""Runs the command line as `python -m distwindow.cli`."""

from . import main

if __name__ == "__main__":
    main()
