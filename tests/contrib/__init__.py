"""Workers of dramatiq, RQ, arq and taskiq, and applications that tests start and kill."""
