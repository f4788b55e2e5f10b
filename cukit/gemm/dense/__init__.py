"""Dense products: cuBLAS, linear layers, few rows or columns, pairwise summation along k."""
