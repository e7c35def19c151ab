"""Benchmarks: each module measures one claim against peers in the same run and records it."""
