"""Every tolerance of the suite, in one place, with its reason.

A result is judged against the float64 reference on the same (already rounded) inputs. Its error
may be at most FACTOR times that of the plain computation in the same low precision (the reference
run on the low-precision arrays), plus ATOL of the dtype: the plain one is sometimes exact by luck.
"""

from __future__ import annotations

FACTOR = 2.0

# A few units in the last place of values around 1: eps is 1.2e-7, 9.8e-4 and 7.8e-3.
ATOL = {"float64": 1e-12, "float32": 2e-6, "float16": 1e-3, "bfloat16": 8e-3}

# Central differences in float64 with step 1e-6: truncation and cancellation meet near 1e-9; the
# functions tested have third derivatives of order 1..100.
FINITE_DIFFERENCE = 1e-6
