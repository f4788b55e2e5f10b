"""Imported before everything else, which takes half a second: Ctrl-C of the `cukit` command ends in
one line from here on. Does nothing in other programs."""

from cukit.core.interrupts import end_on_interrupt_while_starting

end_on_interrupt_while_starting()
