"""Kernels by hand, in files named as in ops/. Each opens with its equation and its bytes."""
