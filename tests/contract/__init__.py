"""What the outside world relies on, and what the house rules say of the code: read, counted, frozen."""
