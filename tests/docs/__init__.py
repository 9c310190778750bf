"""What the README and `docs/` say is true: their code runs, their pages are fresh."""
