// Replaces cuRAND's header: curand_kernel.h has it.
#pragma once
#include <curand_kernel.h>
