"""A module that never ends its import; the tests start it in the place of the process that speaks to a store."""

import time

time.sleep(1000)
