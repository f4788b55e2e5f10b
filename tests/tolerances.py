"""All shared tolerances of the tests, with their rationale.

A result is compared with the float64 reference on the same (already rounded) inputs. Its error may
be at most FACTOR times the error of the plain computation in the same low precision (the reference
on the low-precision arrays) plus ATOL of the dtype, because the plain result may be exact by
chance.
"""

from __future__ import annotations

FACTOR = 2.0

# A few units in the last place of values around 1: eps is 1.2e-7, 9.8e-4 and 7.8e-3.
ATOL = {"float64": 1e-12, "float32": 2e-6, "float16": 1e-3, "bfloat16": 8e-3}

# Central differences in float64 with step 1e-6: for values of order 10 the cancellation error is
# about 1e-9; for third derivatives up to 5000 the truncation error is below 1e-9.
FINITE_DIFFERENCE = 1e-6
