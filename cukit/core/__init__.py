"""Arrays, devices, compilation and kernels: shared by all op families."""
