// Replaces the header of cuRAND's host functions; curand_kernel.h has the device functions.
#pragma once
#include <curand_kernel.h>
