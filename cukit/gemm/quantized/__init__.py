"""Products of int8, FP8 and int4 operands."""
