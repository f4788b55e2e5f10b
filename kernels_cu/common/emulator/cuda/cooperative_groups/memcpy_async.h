// Replaces CUDA's header; its functions are in cooperative_groups.h.
#pragma once
#include <cooperative_groups.h>
