"""Memory providers behind one protocol: CUDA virtual memory, cudaMalloc, and host memory."""
