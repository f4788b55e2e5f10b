"""What every op means, in plain array code: the fallback without a GPU and the oracle of the tests.

Works on NumPy and on CuPy arrays. Computes in float64 for float64 inputs, else in float32, and
returns the dtype of its inputs.
"""
