"""`matmul`, which chooses kernel and precision."""
