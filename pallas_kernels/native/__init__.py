"""Kernels in C++ for the CPU: how they are built, and what their sources share."""
