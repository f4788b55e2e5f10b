"""The run of `cukit distill`: settings, phases, folder, memory and report."""
