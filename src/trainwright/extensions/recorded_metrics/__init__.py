"""Recorded metrics: numbers that `Trainer.record` collects for the next log."""
