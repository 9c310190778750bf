"""One limit shared by the workers of real application servers, and what came of it.

    python -m tests.app_servers                  # everything whose packages are installed
    python -m tests.app_servers --only gunicorn  # what has this in its name
    python -m tests.app_servers --list

Each run starts a server with several workers, sends it 2,000 calls against a limit of 500, ends it
with SIGTERM, and compares what the calls were answered with what Redis knows then.
"""
