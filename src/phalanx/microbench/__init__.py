"""Micro-benchmarks: programs that drive one room of the package in process."""
