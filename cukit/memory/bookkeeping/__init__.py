"""The records of a pool: blocks, streams and plans. No memory is mapped or copied here."""
