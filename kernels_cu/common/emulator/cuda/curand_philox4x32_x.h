// Stands in for the cuRAND header of this name; curand_kernel.h has its contents.
#pragma once
#include <curand_kernel.h>
