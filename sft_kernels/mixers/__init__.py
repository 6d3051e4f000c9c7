"""Stateful token mixers, whose state is reset at each document."""
