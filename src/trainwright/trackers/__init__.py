"""Services that show runs, each through its own client. None of them can stop or slow a training."""
