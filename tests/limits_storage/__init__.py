"""The storage for the library `limits`, and what stands on it: Flask-Limiter and slowapi."""
