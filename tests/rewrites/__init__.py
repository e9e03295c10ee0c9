"""Rewrites: the one contract and what is special about each."""
