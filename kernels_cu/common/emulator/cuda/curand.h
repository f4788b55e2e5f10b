// Stands in for the header of cuRAND's host functions: curand_kernel.h has those of kernels.
#pragma once
#include <curand_kernel.h>
