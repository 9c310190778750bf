"""Runs the command line as `python -m distwindow`."""

from .cli import main

if __name__ == "__main__":
    main()
