"""`matmul`, which chooses kernel and precision, and `tree_matmul`."""
