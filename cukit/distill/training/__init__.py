"""Data, objectives, the training loop, evaluation and recorded teachers."""
