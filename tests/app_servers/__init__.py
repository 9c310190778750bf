"""One limit, shared by the workers of real application servers.

    python -m tests.app_servers                  # everything whose packages are installed
    python -m tests.app_servers --only gunicorn  # those that have this in their name
    python -m tests.app_servers --list

Each run starts a server with several workers, sends it 1,000 calls against a limit of 250, ends it
with SIGTERM, and compares the answers that the calls got with the counts in Redis.
"""
