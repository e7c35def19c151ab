"""Hand-written Triton kernels, for operators where generated code is slower than memory allows.

A module that needs Triton is imported only when one of its kernels is built, so that Deuteron works
on machines without Triton.
"""
