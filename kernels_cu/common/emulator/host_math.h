// <cmath> without the special functions of C++17 (beta, Bessel, zeta), which no kernel uses: they
// make up a quarter of the precompiled headers and take 30 ms of every kernel's compilation.
// Include this header before any standard header that includes <cmath>.
#pragma once

#include <cstddef>  // has libstdc++'s configuration

#ifdef __GLIBCXX__
#undef _GLIBCXX_USE_STD_SPEC_FUNCS
#define _GLIBCXX_USE_STD_SPEC_FUNCS 0
#endif

#include <cmath>
