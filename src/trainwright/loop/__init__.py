"""The two loops: training and evaluation. They ask hooks and engines, and know neither models nor files."""
