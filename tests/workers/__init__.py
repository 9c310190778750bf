"""Applications of dramatiq, RQ, arq and taskiq, whose workers the tests start and kill."""
