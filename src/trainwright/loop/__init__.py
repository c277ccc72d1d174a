"""The training loop. It calls hooks and engines, and knows neither models nor files."""
