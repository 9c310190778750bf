"""The README and `docs/`: their code runs, and their generated parts are up to date."""
