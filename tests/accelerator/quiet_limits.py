"""Steps between which waits and launches are counted; the only log comes later."""

FIRST = 3
LAST = 7
