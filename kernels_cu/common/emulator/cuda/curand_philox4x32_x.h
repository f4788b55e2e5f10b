// Replaces cuRAND's header; its declarations are in curand_kernel.h.
#pragma once
#include <curand_kernel.h>
