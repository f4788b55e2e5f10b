"""Reference implementations of all ops in plain array code: the CPU fallback and the test oracle.

They work on NumPy and CuPy arrays. Unless a docstring says otherwise, they compute in float64 for
float64 inputs, else in float32, and return the dtype of their inputs.
"""
