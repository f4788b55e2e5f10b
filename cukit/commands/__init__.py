"""The commands of `cukit`: their options and output. distill.py has two, other modules one each."""
