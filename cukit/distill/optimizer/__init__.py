"""AdamW, moving averages and gradient norms of many tensors per launch."""
