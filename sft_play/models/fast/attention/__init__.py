"""Attention without masks, of whole rows and of packed documents."""
