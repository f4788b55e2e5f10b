// Replaces CUDA's header: common/emulator/language.h, prepended to every third-party source, has
// its contents.
#pragma once
#include "common/emulator/language.h"
