"""docs/coming-from.md: each row of its tables is run, theirs beside ours, and so is what differs,
as far as that needs no stopwatch; examples/coming_from has applications before and after. Where the
libraries are not installed, only the checks of the page itself are run: see scripts/test-peers.
"""
