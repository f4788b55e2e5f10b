"""The commands of `cukit`, one module each: options and output; other packages do the work."""
