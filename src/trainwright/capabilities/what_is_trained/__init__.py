"""Shows before step 1 what a run trains: which tokens count for the loss, and which parameters are updated."""
