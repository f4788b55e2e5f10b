"""Memory providers with one protocol: CUDA virtual memory, cudaMalloc, and host memory."""
