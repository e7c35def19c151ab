"""Fused calls of the vendors' libraries: oneDNN, cuDNN, cuBLASLt."""
