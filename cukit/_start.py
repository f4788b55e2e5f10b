"""Makes Ctrl-C end the `cukit` command with one line while the rest is still being imported.

Imported first, since the other imports take half a second. Does nothing in other programs.
"""

from cukit.core.interrupts import end_on_interrupt_while_starting

end_on_interrupt_while_starting()
