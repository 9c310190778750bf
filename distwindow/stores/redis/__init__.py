"""The stores that are reached with redis-py, and whose replies hiredis parses."""

try:
    import hiredis as _hiredis
except ModuleNotFoundError as exc:
    raise ModuleNotFoundError(
        "distwindow reads the replies of Redis with hiredis, which is not installed: "
        "pip install 'redis[hiredis]'",
        name="hiredis",
    ) from exc

del _hiredis
