"""Engines of GPUs: generated Triton code, and recipes for kernels written by hand."""
