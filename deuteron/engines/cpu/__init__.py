"""Engines of the CPU: generated code, and recipes for kernels written by hand."""
