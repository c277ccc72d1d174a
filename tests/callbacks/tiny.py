"""The beginning of scripts that train: a model of one layer, and its data."""

TINY = """
import torch
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)
    def forward(self, x, labels):
        logits = self.linear(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}
items = [{"x": torch.ones(2) * i, "labels": i % 2} for i in range(8)]
"""
