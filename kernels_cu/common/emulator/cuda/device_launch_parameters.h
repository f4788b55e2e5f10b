// Stands in for CUDA's header: common/emulator/language.h, in front of every foreign source, has it.
#pragma once
#include "common/emulator/language.h"
