"""The commands of `cukit`, one module each: their options and output."""
