"""Recorded metrics: numbers collected by `Trainer.record` for the next log."""
