"""Makes Ctrl-C end the `cukit` command with a one-line message while modules are being imported.

Must be imported first, since the other imports take half a second. Does nothing in other programs.
"""

from cukit.core.interrupts import end_on_interrupt_while_starting

end_on_interrupt_while_starting()
