"""Attention without masks, over full rows or packed documents."""
