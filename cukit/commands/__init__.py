"""The commands of `cukit`, one module each. They print; what they print is computed elsewhere."""
