"""Attention that measures, remembers and runs the fastest correct way to compute PyTorch's SDPA."""
