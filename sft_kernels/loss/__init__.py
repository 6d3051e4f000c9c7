"""The output head and the cross-entropy as one function that never stores all logits."""
