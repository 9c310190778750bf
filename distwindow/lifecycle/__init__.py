"""How a limiter gets its store and strategy, and how it ends."""
