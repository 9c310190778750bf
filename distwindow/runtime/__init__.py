"""Runtime of the engine for threads and tasks: operations, their drivers, and the worker."""
