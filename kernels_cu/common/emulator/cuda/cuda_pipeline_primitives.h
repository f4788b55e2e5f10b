// Replaces CUDA's header; its functions are in cuda_pipeline.h.
#pragma once
#include <cuda_pipeline.h>
