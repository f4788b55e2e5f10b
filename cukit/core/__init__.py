"""Arrays, devices, sources and kernels: the ground floor that every op stands on."""
