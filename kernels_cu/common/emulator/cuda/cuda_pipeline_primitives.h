// Replaces CUDA's header: cuda_pipeline.h has it.
#pragma once
#include <cuda_pipeline.h>
