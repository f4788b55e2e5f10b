"""Dense products: cuBLAS, linear layers, products with few rows or columns."""
