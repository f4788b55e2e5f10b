"""Dense products: cuBLAS, linear layers, few rows or columns."""
