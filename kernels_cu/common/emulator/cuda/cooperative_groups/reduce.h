// Replaces CUDA's header: cooperative_groups.h has it.
#pragma once
#include <cooperative_groups.h>
