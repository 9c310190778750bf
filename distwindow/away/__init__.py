"""Answers while the store is away: who knows that it is, and what calls get meanwhile."""
