"""The pool itself: paging, allocation, defragmentation, buffers, and the allocator of CuPy."""
