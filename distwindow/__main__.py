"""`python -m distwindow`: the same as the command `distwindow`."""

from .cli import main

if __name__ == "__main__":
    main()
