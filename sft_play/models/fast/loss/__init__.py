"""The output head and the cross-entropy in one function, without all logits."""
