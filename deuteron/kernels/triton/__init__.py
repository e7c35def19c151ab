"""Kernels by hand in Triton: where generated code does not reach what the memory allows.

Nothing here is imported before a kernel is wanted, so that a machine without Triton loses nothing.
"""
