"""Hand-written kernels, in files named as in ops/. Each file opens with its equation and its memory
traffic in bytes."""
