"""Reservations: permits that are taken by an estimate, and settled by what was used."""
