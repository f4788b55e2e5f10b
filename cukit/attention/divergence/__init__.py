"""KL divergences between the attention of two models, and between attention and its indexer."""
