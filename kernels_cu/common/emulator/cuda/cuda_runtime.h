// Replaces CUDA's header: its declarations are in common/emulator/language.h, which is prepended to
// every third-party source.
#pragma once
#include "common/emulator/language.h"
